"""prepare-data: from files of conversations to a data set of rows, with an account of every input record.

One process reads and splits the sources into blocks, others parse and render them and leave one file of rows a block; when
all are there, the rows are put in order and written as a stream. Whatever the size of the data, in memory are a few blocks and
a few numbers a record. A run that was killed finds the blocks it had finished.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from speculators.data.accounting import Account
from speculators.data.assembly import Assembly
from speculators.data.encoding import PieceMismatchError
from speculators.data.manifest import AnswerRecord, DataManifest, SourceRecord
from speculators.data.prepare_config import OUTSIDE, PrepareConfig, renderer_maker
from speculators.data.render_blocks import RenderRules
from speculators.data.rounds import Rounds
from speculators.data.row_files import holds_rows
from speculators.data.rows import RowDataset, write_rows
from speculators.data.sources import Source, find_sources, source_hash
from speculators.data.token_counts import TOKEN_FREQUENCIES, StaleCountsError, count_dataset, load_counts, save_counts
from speculators.data.tokenizers import LoadedTokenizer, largest_vocabulary, vocabulary_size
from speculators.errors import ConfigError, DataError
from speculators.files import atomic_write, locked_folder, sweep_temporaries

__all__ = ["PrepareConfig", "PrepareReport", "check_output", "prepare_data"]

#: File that names every record that was not kept, and why.
REJECTED = "rejected.jsonl"


@dataclass(frozen=True, slots=True)
class PrepareReport:
    """What prepare-data did."""

    dataset: RowDataset | None  #: None when there was no row, and that was allowed
    account: Account
    reused: bool = False  #: whether an earlier run had written exactly these rows already
    whole: bool = False  #: whether texts had to be encoded whole, because this tokenizer does not allow pieces

    def summary(self) -> str:
        """Records, rows and tokens in one line."""
        if self.dataset is None:
            return f"{self.account.records} records -> no rows"
        tokens = f"{int(self.dataset.lengths.sum())} tokens, {self.dataset.supervised_tokens} of them supervised"
        return f"{self.account.records} records -> {len(self.dataset)} rows, {tokens}"


def prepare_data(
    config: PrepareConfig,
    loaded: LoadedTokenizer,
    *,
    answers: AnswerRecord | None = None,
    asked: Mapping[str, Any] | None = None,
    progress: bool = False,
) -> PrepareReport:
    """Render conversations into a data set under ``config.output``, with ``token_freq.pt`` and ``rejected.jsonl`` beside it.

    Conversations stand in an order that the seed decides, whatever the number of processes, and the rows of one stand
    together. Rows given as ``input_ids`` and ``loss_mask`` are taken as they are. A run that an earlier one has already done
    with the same settings, sources and tokenizer changes nothing; one that was cut goes on with the blocks it had not done.

    :param answers: how the answers in the data came about, for the manifest; by default nobody knows but who made them.
    :param asked: what the answers in the data are a function of, where they were generated for this; for the manifest.
    :param progress: whether to show how far it is.
    :raises DataError: for missing or unreadable sources, when no row is left, or when the rows cannot be written; whatever
        the folder held is then still there.
    :raises ConfigError: when ``output`` holds other rows and ``overwrite`` is off, or is what is to be read.
    :raises SpeculatorsError: when another process is making a data set there, or worker processes die.
    """
    _check_places(config)
    sources = find_sources(config.data, beside=config.output)
    hashes = tuple(source_hash(source) for source in sources)
    run = _Run(config, loaded, sources, hashes, answers or AnswerRecord(on_policy=False), asked, progress)
    with locked_folder(config.output, "--output", ".prepare.lock"):
        sweep_temporaries(config.output)
        sweep_temporaries(config.output.resolve().parent, of=config.output)
        try:
            return run.make()
        except PieceMismatchError:
            # What was rendered before the first mismatch may be wrong as well.
            shutil.rmtree(run.work, ignore_errors=True)
            run.pieces = False
            return run.make()


class _Run:
    """One call of :func:`prepare_data`, in a folder that no other process writes to."""

    def __init__(
        self,
        config: PrepareConfig,
        loaded: LoadedTokenizer,
        sources: Sequence[Source],
        hashes: tuple[str, ...],
        answers: AnswerRecord,
        asked: Mapping[str, Any] | None,
        progress: bool,
    ) -> None:
        self.config = config
        self.loaded = loaded
        self.sources = sources
        self.hashes = hashes
        self.answers = answers
        self.options = _options(config, asked)
        self.progress = progress
        self.pieces = True
        self.names = [source.name for source in sources]
        self.identity = _identity(self.options, loaded, hashes, answers, config.seed)
        self.work = config.output / f".prepare-{self.identity}"

    def make(self) -> PrepareReport:
        known = self._known()
        if known is not None:
            self._finish(known)
            return PrepareReport(known, _account_of(known.manifest), reused=True)
        assembly = self._render()
        account = assembly.account(self.names)
        if not account.records:
            raise DataError(f"there are no records in {', '.join(self.config.data)}; give one JSON object a line")
        self._list_rejected(assembly)
        dataset = None
        if not len(assembly.order):
            self._check_empty(account, next((line["reason"] for line in assembly.rejected(self.names) if line["reason"]), ""))
        else:
            manifest = self._manifest(account)
            dataset = write_rows(self.config.output, assembly.batches(), manifest, overwrite=self.config.overwrite)
        self._finish(dataset)
        for leftover in self.config.output.glob(".prepare-*"):  # of runs with other settings that were killed, too
            shutil.rmtree(leftover, ignore_errors=True)
        for leftover in self.config.output.glob(_waiting_list("*")):
            leftover.unlink()
        return PrepareReport(dataset, account, whole=not self.pieces)

    def _known(self) -> RowDataset | None:
        """The data set of an earlier run with the same settings; None when there is none or it is to be replaced."""
        if self.config.overwrite or not holds_rows(self.config.output):
            return None
        known = RowDataset.load(self.config.output)
        if known.manifest.settings_hash != self.identity:
            raise _other_rows(self.config)
        return known

    def _render(self) -> Assembly:
        config, loaded = self.config, self.loaded
        rules = RenderRules(
            seed=config.seed,
            seq_length=config.seq_length,
            minimum_valid_tokens=config.minimum_valid_tokens,
            role_order=config.role_order,
            source_names=tuple(self.names),
            source_hashes=self.hashes,
            bos_id=getattr(loaded.tokenizer, "bos_token_id", None),
            eos_ids=frozenset(loaded.eos_ids),
            vocab_size=largest_vocabulary(loaded),
        )
        rounds = Rounds(
            self.sources,
            self.work,
            renderer_maker(config, loaded, self.pieces),
            rules,
            most=config.max_samples,
            keep_duplicates=config.keep_duplicates,
            workers=config.num_preprocessing_workers,
            shown=self.progress,
        )
        return rounds.enough()

    def _list_rejected(self, assembly: Assembly) -> None:
        """Write the list before the rows and name it after them: a kill in between leaves either the old rows with the old
        list, or the new rows and a list that the next run puts in place."""

        def write(path: Path) -> None:
            with open(path, "w", encoding="utf-8") as file:
                for line in assembly.rejected(self.names):
                    file.write(json.dumps(line, ensure_ascii=False) + "\n")

        atomic_write(self.config.output / _waiting_list(self.identity), write)

    def _check_empty(self, account: Account, reason: str) -> None:
        """:raises DataError: that there is no row, unless that is allowed; with the first record's reason."""
        if self.config.allow_empty_output:
            return
        unanswered = account.totals()["no_assistant_turn"] == account.records
        hint = "answer them with --generate" if unanswered else "check the data and the length limits"
        hint = "; ".join(account.broken.values()) or hint
        (self.config.output / _waiting_list(self.identity)).unlink()
        shutil.rmtree(self.work, ignore_errors=True)
        first = f"; the first: {reason}" if reason and not account.broken else ""
        raise DataError(f"no row is left of {account.records} records ({account.sentence()}){first}; {hint}")

    def _manifest(self, account: Account) -> DataManifest:
        records = account.counts.sum(axis=1).tolist()
        return DataManifest(
            verifier=self.config.verifier,
            tokenizer_hash=self.loaded.hash,
            template_hash=self.loaded.template_hash,
            answers=self.answers,
            sources=[
                SourceRecord(name=name, hash=self.hashes[place], records=records[place], broken=account.broken.get(place))
                for place, name in enumerate(self.names)
            ],
            options=self.options,
            seed=self.config.seed,
            counts=account.totals(),
            settings_hash=self.identity,
        )

    def _finish(self, dataset: RowDataset | None) -> None:
        """Put in place what stands beside the rows; they are there, and a kill may have come at any point behind them."""
        waiting = self.config.output / _waiting_list(self.identity)
        if waiting.exists():
            os.replace(waiting, self.config.output / REJECTED)
        if dataset is not None and not self.config.skip_token_freq:
            self._count_tokens(dataset)
        shutil.rmtree(self.work, ignore_errors=True)

    def _count_tokens(self, dataset: RowDataset) -> None:
        path = self.config.token_freq_path or self.config.output / TOKEN_FREQUENCIES
        try:
            load_counts(path, expect=dataset.fingerprint)
        except (DataError, StaleCountsError):
            # A verifier may have more ids than its tokenizer, and rows given as ids may use them.
            largest = max(int(batch.input_ids.max(initial=0)) for batch in dataset.batches())
            size = max(vocabulary_size(self.loaded.tokenizer), largest + 1)
            save_counts(path, count_dataset(dataset, size, shown=self.progress))


def _check_places(config: PrepareConfig) -> None:
    """:raises ConfigError: for an output that would be read as data by the next run, or no file for the counts."""
    for place in map(Path, config.data):
        if place.is_dir() and config.output.is_dir() and place.samefile(config.output):
            raise ConfigError(f"--output {config.output} is the folder of --data; choose another --output")
    if config.render_endpoint:
        from speculators.data.render_endpoint import refuse_credentials

        refuse_credentials(config.render_endpoint, "--render-endpoint")
    counts = config.token_freq_path
    if counts is not None and (not counts.name or counts.is_dir()):
        raise ConfigError(f"--token-freq-path {counts} is a folder; name a file")


def _waiting_list(identity: str) -> str:
    """Name of the list of rejected records while the rows it belongs to are not in place."""
    return f".rejected-{identity}.jsonl"


def _account_of(manifest: DataManifest) -> Account:
    """What is left to say of the account of an earlier run."""
    broken = {place: source.broken for place, source in enumerate(manifest.sources) if source.broken}
    return Account.of_counts(manifest.counts, broken)


def _other_rows(config: PrepareConfig) -> ConfigError:
    return ConfigError(f"{config.output} holds rows of other data or settings; choose another --output or pass --overwrite")


def check_output(config: PrepareConfig, loaded: LoadedTokenizer, asked: Mapping[str, Any]) -> None:
    """Before the answers are generated: whether :func:`prepare_data` is going to take them.

    :raises ConfigError: when ``output`` holds rows of other questions or settings and ``overwrite`` is off.
    """
    if config.overwrite or not holds_rows(config.output):
        return
    manifest = RowDataset.load(config.output).manifest
    known = (manifest.tokenizer_hash, manifest.template_hash, manifest.options, manifest.seed)
    if known != (loaded.hash, loaded.template_hash, _options(config, asked), config.seed):
        raise _other_rows(config)


def _options(config: PrepareConfig, asked: Mapping[str, Any] | None) -> dict[str, Any]:
    """The settings that rows depend on, as the manifest has them."""
    options = config.model_dump(mode="json", exclude={*OUTSIDE, "seed"})
    if asked is not None:
        options["asked"] = json.loads(json.dumps(asked))
    return options


def _identity(
    options: Mapping[str, Any], loaded: LoadedTokenizer, hashes: Sequence[str], answers: AnswerRecord, seed: int
) -> str:
    """Hash of all that the rows are a function of."""
    facts: dict[str, Any] = {"options": options, "seed": seed, "answers": answers.model_dump(), "sources": hashes}
    facts |= {"tokenizer": [loaded.hash, loaded.template_hash, sorted(loaded.eos_ids)], "version": 2}
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
