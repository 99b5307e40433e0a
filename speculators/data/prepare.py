"""prepare-data: from files of conversations to a data set of rows, with an account of every input record."""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from speculators.data.prompts import Conversation, find_data_files, iterate_records, parse_conversation, to_prompt
from speculators.data.rendering import (
    NothingSupervisedError,
    Rendered,
    on_policy_row,
    render_prompt,
    render_rows,
)
from speculators.data.rows import AnswerRecord, DataManifest, Row, RowDataset, SourceRecord
from speculators.data.token_counts import TOKEN_FREQUENCIES, count_tokens, save_token_frequencies
from speculators.data.tokenizers import template_hash, tokenizer_hash
from speculators.errors import ConfigError, DataError
from speculators.files import AppendedRecords, atomic_write, locked_folder, sweep_temporaries

__all__ = ["OUTCOMES", "Answerer", "PrepareConfig", "PrepareReport", "prepare_data"]

#: First word of the random stream that orders input records.
RECORD_STREAM = 0xDA7A

#: File that names every record that was not kept, and why.
REJECTED = "rejected.jsonl"

#: What can become of an input record, and how it is said; every record has exactly one outcome.
OUTCOMES = {
    "kept": "kept",
    "kept_cut": "kept, cut at --seq-length",
    "not_json": "not JSON",
    "not_a_conversation": "not a conversation",
    "no_assistant_turn": "without an assistant turn",
    "template_refused": "refused by the chat template",
    "nothing_supervised": "without a supervised token within --seq-length",
    "too_few_supervised": "with fewer supervised tokens than --minimum-valid-tokens",
    "prompt_too_long": "with a prompt that leaves no room for an answer",
    "empty_answer": "answered with nothing",
    "not_needed": "not needed for --max-samples",
}

#: Answers prompts (token ids): yields (index of the prompt, generated ids with the end-of-turn token) in any order. The second
#: argument has a number for every prompt, the same in every continuation of a run, to seed its draws.
Answerer = Callable[[list[list[int]], list[int]], Iterable[tuple[int, Sequence[int]]]]


class PrepareConfig(BaseModel):
    """Settings of ``prepare-data``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    data: list[Path]  #: JSON or JSON Lines files, or folders of them
    output: Path = Path("output")
    seq_length: int = Field(default=8192, ge=2)  #: longest row, in tokens
    max_samples: int | None = Field(default=None, ge=1)  #: most rows
    seed: int = Field(default=0, ge=0)  #: of the order in which records are taken
    minimum_valid_tokens: int = Field(default=1, ge=1)  #: fewest supervised tokens of a row
    overwrite: bool = False
    verifier: str = ""  #: recorded in the manifest


@dataclass(frozen=True, slots=True)
class PrepareReport:
    """What prepare-data did. The outcomes add up to the number of input records."""

    dataset: RowDataset
    outcomes: dict[str, int]  #: key of :data:`OUTCOMES` -> records
    reused: bool  #: whether an earlier run had written exactly these rows already

    @property
    def records(self) -> int:
        return sum(self.outcomes.values())

    def lines(self) -> list[str]:
        """The account, one line an outcome."""
        tokens = f"{int(self.dataset.lengths.sum())} tokens, {self.dataset.supervised_tokens} of them supervised"
        lines = [f"{self.records} records -> {len(self.dataset)} rows, {tokens}"]
        return lines + [f"  {count:>8} {OUTCOMES.get(key, key)}" for key, count in self.outcomes.items() if count]


def prepare_data(
    config: PrepareConfig,
    tokenizer: Any,
    *,
    answer: Answerer | None = None,
    answers: AnswerRecord | None = None,
    eos_ids: Collection[int] = (),
    settings: str = "",
) -> PrepareReport:
    """Render conversations into a data set under ``config.output``, with ``token_freq.pt`` and ``rejected.jsonl`` beside it.

    Records are taken in an order that the seed decides until ``max_samples`` rows are there. Without ``answer`` the
    assistant turns in the data are supervised; with it, each record's last user turn is answered and its rows are prompt
    and answer. Rows given as ``input_ids`` and ``loss_mask`` are taken as they are. A run that an earlier one has
    already done with the same settings, files and tokenizer changes nothing; one that was cut goes on behind its last answer.

    :param answers: how ``answer`` generates, for the manifest.
    :param eos_ids: end-of-turn ids besides the tokenizer's own.
    :param settings: anything else the answers depend on, to tell runs apart.
    :raises DataError: for missing or empty files, when no row is left, or when ``output`` holds other rows and
        ``overwrite`` is off; whatever the folder held is then still there.
    :raises SpeculatorsError: when another process is making a data set there.
    """
    files = find_data_files(config.data)
    identity = _settings_hash(config, files, tokenizer, answers, eos_ids, settings)
    with locked_folder(config.output, "--output", ".prepare.lock"):
        sweep_temporaries(config.output)
        sweep_temporaries(config.output.resolve().parent, of=config.output)
        return _prepare(config, files, identity, tokenizer, answer, answers, eos_ids)


def _prepare(
    config: PrepareConfig,
    files: Sequence[Path],
    identity: str,
    tokenizer: Any,
    answer: Answerer | None,
    answers: AnswerRecord | None,
    eos_ids: Collection[int],
) -> PrepareReport:
    """:func:`prepare_data` in a folder that no other process writes to."""
    known = _known_dataset(config, identity)
    if known is not None:
        _finish(config.output, identity, known, tokenizer)
        return PrepareReport(known, known.manifest.counts, reused=True)

    account = _Account(config)
    records = [(file.name, index, record) for file in files for index, record in iterate_records(file)]
    if not records:
        raise DataError(f"there are no records in {', '.join(map(str, config.data))}; give one JSON object a line")
    order = np.random.default_rng([RECORD_STREAM, config.seed]).permutation(len(records))
    shuffled = [records[index] for index in order]
    if answer is None:
        for source, index, record in shuffled:
            account.take(source, index, partial(_render, tokenizer, record, source, index, eos_ids))
    else:
        _answer_all(account, shuffled, tokenizer, answer, config.output / _answers(identity))

    manifest = DataManifest(
        verifier=config.verifier,
        tokenizer_hash=tokenizer_hash(tokenizer),
        template_hash=template_hash(tokenizer),
        answers=answers or AnswerRecord(on_policy=False),
        sources=[SourceRecord(name=str(file)) for file in files],
        seed=config.seed,
        counts=account.counts(),
        settings_hash=identity,
    )
    if not account.rows:
        said = ", ".join(f"{count} {OUTCOMES[key]}" for key, count in account.counts().items() if count)
        unanswered = account.counts()["no_assistant_turn"] == len(records)
        hint = "answer them with --generate" if unanswered else "check the data and the length limits"
        raise DataError(f"no row is left of {len(records)} records ({said}); {hint}")
    # Written before the rows and named after them: a kill in between leaves either the old rows with the old list, or the
    # new rows and a list that the next run puts in place.
    rejected = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in account.rejected)
    atomic_write(config.output / _waiting_list(identity), lambda path: path.write_text(rejected, encoding="utf-8"))
    dataset = RowDataset.save(config.output, account.rows, manifest, overwrite=config.overwrite)
    _finish(config.output, identity, dataset, tokenizer)
    for pattern in (_answers("*"), _waiting_list("*")):  # of runs with other settings that were killed
        for leftover in config.output.glob(pattern):
            leftover.unlink()
    return PrepareReport(dataset, account.counts(), reused=False)


def _answers(identity: str) -> str:
    """Name of the file of answers while not all are there."""
    return f".answers-{identity}.jsonl"


def _waiting_list(identity: str) -> str:
    """Name of the list of rejected records while the rows it belongs to are not in place."""
    return f".rejected-{identity}.jsonl"


def _finish(folder: Path, identity: str, dataset: RowDataset, tokenizer: Any) -> None:
    """Put in place what stands beside the rows; they are there, and a kill may have come at any point behind them."""
    waiting = folder / _waiting_list(identity)
    if waiting.exists():
        os.replace(waiting, folder / REJECTED)
    _save_frequencies(folder, dataset, tokenizer)
    (folder / _answers(identity)).unlink(missing_ok=True)


class _Refused(Exception):
    """A record that gives no row: its outcome and the reason."""

    def __init__(self, outcome: str, reason: str = "") -> None:
        super().__init__(reason)
        self.outcome = outcome


class _Account:
    """The rows kept so far and one outcome for every record."""

    def __init__(self, config: PrepareConfig) -> None:
        self.config = config
        self.rows: list[Row] = []
        self.rejected: list[dict[str, Any]] = []
        self._outcomes: Counter[str] = Counter()

    @property
    def full(self) -> bool:
        return self.config.max_samples is not None and len(self.rows) >= self.config.max_samples

    def counts(self) -> dict[str, int]:
        return {key: self._outcomes[key] for key in OUTCOMES}

    def refuse(self, source: str, index: int, refusal: _Refused) -> None:
        self._outcomes[refusal.outcome] += 1
        if refusal.outcome != "not_needed":
            line = {"source": source, "index": index, "outcome": refusal.outcome, "reason": str(refusal)}
            self.rejected.append(line)

    def take(self, source: str, index: int, render: Callable[[], list[Rendered]]) -> None:
        """Keep what a record renders to, as far as lengths allow."""
        if self.full:
            self._outcomes["not_needed"] += 1
            return
        try:
            outcome = self._keep(render())
        except _Refused as refusal:
            self.refuse(source, index, refusal)
        else:
            self._outcomes[outcome] += 1

    def _keep(self, rendered: list[Rendered]) -> str:
        longest, fewest = self.config.seq_length, self.config.minimum_valid_tokens
        rows = [each.row(len(self.rows), longest) for each in rendered]
        supervised = [int(row.loss_mask.sum()) for row in rows]
        if not any(supervised):
            raise _Refused("nothing_supervised")
        fitting = [row for row, tokens in zip(rows, supervised, strict=True) if tokens >= fewest]
        if not fitting:
            raise _Refused("too_few_supervised", f"{max(supervised)} supervised tokens")
        if self.config.max_samples is not None:
            fitting = fitting[: self.config.max_samples - len(self.rows)]
        self.rows += fitting
        return "kept_cut" if any(len(each.input_ids) > longest for each in rendered) else "kept"


def _parse(record: Any, source: str, index: int) -> Conversation:
    if isinstance(record, DataError):
        raise _Refused("not_json", str(record))
    try:
        return parse_conversation(record, source, index)
    except DataError as error:
        raise _Refused("not_a_conversation", str(error)) from None


def _render(tokenizer: Any, record: Any, source: str, index: int, eos_ids: Collection[int]) -> list[Rendered]:
    if isinstance(record, dict) and "input_ids" in record:
        return [_pretokenised(record)]
    conversation = _parse(record, source, index)
    if not any(message["role"] == "assistant" for message in conversation.messages):
        raise _Refused("no_assistant_turn")
    try:
        return render_rows(tokenizer, conversation.messages, conversation.tools, eos_ids=eos_ids)
    except NothingSupervisedError as error:
        raise _Refused("nothing_supervised", str(error)) from None
    except DataError as error:
        if not getattr(tokenizer, "chat_template", None):
            raise
        raise _Refused("template_refused", str(error)) from None


def _pretokenised(record: dict[str, Any]) -> Rendered:
    try:
        ids = np.asarray(record["input_ids"], dtype=np.int64)
        mask = np.asarray(record["loss_mask"], dtype=np.int64)
    except (KeyError, TypeError, ValueError, OverflowError):
        raise _Refused("not_a_conversation", "input_ids and loss_mask are no lists of whole numbers") from None
    if ids.ndim != 1 or ids.shape != mask.shape or not np.isin(mask, (0, 1)).all():
        raise _Refused("not_a_conversation", "input_ids and loss_mask do not have the same length, or the mask is not 0 and 1")
    return Rendered(ids, mask.astype(bool), 1)


def _answer_all(
    account: _Account,
    records: Sequence[tuple[str, int, Any]],
    tokenizer: Any,
    answer: Answerer,
    kept: Path,
) -> None:
    """Let the verifier answer as many records as there are rows to fill, in order, and account for all of them.

    :param kept: file that keeps every answer as soon as it is done, for the run that goes on after a kill.
    """
    config = account.config
    prompts: list[tuple[str, int, list[int]]] = []
    for source, index, record in records:
        if config.max_samples is not None and len(prompts) >= config.max_samples:
            account.refuse(source, index, _Refused("not_needed"))
            continue
        try:
            prompts.append((source, index, _prompt_ids(tokenizer, record, source, index, config.seq_length)))
        except _Refused as refusal:
            account.refuse(source, index, refusal)
    with AppendedRecords(kept) as log:
        answered: dict[int, Sequence[int]] = {record["number"]: record["ids"] for record in log.records}
        waiting = [number for number in range(len(prompts)) if number not in answered]
        for place, found in answer([prompts[number][2] for number in waiting], waiting) if waiting else ():
            answered[waiting[place]] = found
            log.append({"number": waiting[place], "ids": [int(token) for token in found]})
    for number, (source, index, ids) in enumerate(prompts):
        generated = list(answered.get(number, ()))

        def render(ids: list[int] = ids, generated: list[int] = generated) -> list[Rendered]:
            if not generated:
                raise _Refused("empty_answer")
            row = on_policy_row(0, ids, generated)
            return [Rendered(row.input_ids, row.loss_mask, 1)]

        account.take(source, index, render)


def _prompt_ids(tokenizer: Any, record: Any, source: str, index: int, seq_length: int) -> list[int]:
    conversation = _parse(record, source, index)
    try:
        prompt = to_prompt(conversation)
    except DataError as error:
        raise _Refused("not_a_conversation", str(error)) from None
    try:
        ids = render_prompt(tokenizer, prompt.messages, prompt.tools)
    except DataError as error:
        if not getattr(tokenizer, "chat_template", None):
            raise
        raise _Refused("template_refused", str(error)) from None
    if len(ids) >= seq_length:
        raise _Refused("prompt_too_long", f"{len(ids)} tokens")
    return ids


def _settings_hash(
    config: PrepareConfig,
    files: Sequence[Path],
    tokenizer: Any,
    answers: AnswerRecord | None,
    eos_ids: Collection[int],
    settings: str,
) -> str:
    """Hash of all that the rows are a function of."""
    digest = hashlib.sha256()
    facts = config.model_dump(mode="json", exclude={"output", "overwrite", "data", "verifier"})
    if answers is not None:  # nobody hashes weights, so an answering verifier is known by its place
        place = Path(config.verifier)
        facts["verifier"] = str(place.resolve()) if place.is_dir() else config.verifier
    facts |= {"tokenizer": tokenizer_hash(tokenizer), "template": template_hash(tokenizer), "settings": settings}
    facts["eos_ids"] = sorted(eos_ids)
    facts["answers"] = None if answers is None else answers.model_dump()
    digest.update(json.dumps(facts, sort_keys=True).encode())
    for file in files:
        with file.open("rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()[:16]


def _known_dataset(config: PrepareConfig, identity: str) -> RowDataset | None:
    """The data set of an earlier run with the same settings; None when there is none or it is to be replaced."""
    if config.overwrite or not (config.output / "state.json").is_file():
        return None
    known = RowDataset.load(config.output)
    if known.manifest.settings_hash != identity:
        raise ConfigError(f"{config.output} holds rows of other data or settings; choose another --output or pass --overwrite")
    return known


def _save_frequencies(folder: Path, dataset: RowDataset, tokenizer: Any) -> None:
    largest = max((int(row.input_ids.max(initial=0)) for row in dataset), default=0)
    counts = count_tokens(dataset, max(len(tokenizer), largest + 1))
    save_token_frequencies(folder / TOKEN_FREQUENCIES, counts)
