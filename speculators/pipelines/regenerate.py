"""All assistant turns of conversations answered again by the verifier, turn by turn, as rows to train on.

The k-th prompt is rendered from the messages so far, whose assistant turns are the new answers, taken apart as a serving
engine would (:mod:`speculators.data.answer_text`). A row is a prompt and its answer exactly as they were generated.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from speculators.data.answer_text import call_names
from speculators.data.conversations import Conversation, parse_conversation, record_id
from speculators.data.rendering import render_prompt
from speculators.errors import ConfigError, DataError
from speculators.files import locked_place
from speculators.pipelines.answer_files import AnswerFiles, check_settings
from speculators.pipelines.answer_rows import GivenAnswer, RowMaker
from speculators.pipelines.dialogue import Dialogue
from speculators.pipelines.regenerate_report import ENDS, QUIET_ENDS, RegenerationReport
from speculators.pipelines.regenerate_settings import RegenerateSettings, seed_of, uniform_of
from speculators.progress import Bar, bar
from speculators.verifiers.answering import Answer, AnswerEngine, Chat, Failure, Question

__all__ = ["Records", "Regeneration", "regenerate"]


@dataclass(frozen=True, slots=True)
class Records:
    """The input: (name of the source, index in it, record or the error that stands in its place)."""

    records: Iterable[tuple[str, int, Any]]
    sources: Mapping[str, str]  #: name -> hash
    total: int | None  #: records, for the progress bar; None when it is not known


def regenerate(
    inputs: Records,
    engine: AnswerEngine,
    tokenizer: Any,
    outfile: Path,
    settings: RegenerateSettings,
    *,
    eos_ids: Sequence[int] = (),
    hashes: Mapping[str, str] | None = None,
    resume: bool = False,
    progress: bool = True,
) -> RegenerationReport:
    """Answer all conversations into ``outfile``, one JSON line an answer; a rerun goes on behind what is there.

    :param tokenizer: with the chat template that renders the prompts.
    :param eos_ids: ids that end an answer.
    :param hashes: of tokenizer and template, which may not differ between runs on one file.
    :param resume: go on behind rows that other settings made.
    :raises ConfigError: when ``outfile`` holds something else; nothing is touched.
    :raises VerifierError: when the engine is lost; what is done is kept.
    """
    _check_template(tokenizer, settings)
    if (outfile.is_symlink() or outfile.exists()) and not outfile.is_file():
        raise ConfigError(f"--outfile {outfile} is there and no ordinary file; name a file, such as answers.jsonl")
    with locked_place(outfile, "--outfile"):
        fixed = {**engine.describe(), **(hashes or {})}
        check_settings(outfile, fixed, settings.record(), inputs.sources, resume=resume)
        with AnswerFiles(outfile) as files, bar("records", inputs.total, shown=progress) as shown:
            job = Regeneration(engine, tokenizer, files, settings, eos_ids)
            report = job.run(inputs.records, shown)
    if not report.records:
        raise DataError(f"there are no records in {', '.join(inputs.sources)}; give one JSON object a line")
    if report.ends["other_language"] == report.records:
        raise DataError(
            f"none of {report.records} records says that its language is {settings.language}; correct --language-filter, or "
            "leave it out"
        )
    return report


def _check_template(tokenizer: Any, settings: RegenerateSettings) -> None:
    template = _template(tokenizer)
    if not template:
        raise DataError("the tokenizer has no chat template; add chat_template to its tokenizer_config.json")
    if settings.reasoning_effort is not None and "reasoning_effort" not in template:
        raise ConfigError("the chat template knows no reasoning_effort; leave --reasoning-effort out")


def _template(tokenizer: Any) -> str:
    template = getattr(tokenizer, "chat_template", None) or ""
    return template if isinstance(template, str) else json.dumps(template)


@dataclass(frozen=True, slots=True, eq=False)
class _Talk:
    """A conversation that is being answered."""

    primary_id: str
    record: Conversation
    dialogue: Dialogue


@dataclass(frozen=True, slots=True, eq=False)
class _Asked:
    """A question of a conversation."""

    talk: _Talk
    question: Question
    said: Mapping[str, Any]  #: its sampling parameters, for the row


@dataclass(frozen=True, slots=True)
class _End:
    """How a conversation ended."""

    outcome: str  #: key of :data:`ENDS`
    reason: str = ""


class Regeneration:
    """One run: conversations begun, their questions asked, rows written."""

    def __init__(
        self, engine: AnswerEngine, tokenizer: Any, files: AnswerFiles, settings: RegenerateSettings, eos_ids: Sequence[int]
    ) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self.files = files
        self.settings = settings
        self._rows = RowMaker(tokenizer, eos_ids, _template(tokenizer))
        self._ends: Counter[str] = Counter()
        self._lost: Counter[str] = Counter()  # answers without a row: dropped, error
        self._contents: dict[str, bytes] = {}  # primary id -> digest of the record it was first seen on
        self._open: dict[Hashable, _Asked] = {}
        self._numbers = count()

    def run(self, records: Iterable[tuple[str, int, Any]], shown: Bar) -> RegenerationReport:
        """Answer everything."""
        began = time.monotonic()
        waiting = self._talks(records)
        while True:
            while len(self._open) < self.engine.window and (talk := next(waiting, None)) is not None:
                self._begin(talk)
            if not self._open:
                break
            for key, outcome in self.engine.finished():
                asked = self._open.pop(key)
                if isinstance(outcome, Failure):
                    self._lost["error"] += 1
                    self._end(asked.talk, _End("failed", outcome.reason))
                else:
                    self._take(asked, outcome)
            self.files.flush()
            seconds = max(time.monotonic() - began, 1e-9)
            shown.update(self._ends.total(), f"{self.engine.tokens / seconds:.0f} tokens/s")
        shown.update(self._ends.total())
        return RegenerationReport(
            ends={end: self._ends[end] for end in ENDS},
            finish_reasons={**self.files.finish_reasons, **self._lost},
            tokens=self.files.tokens,
            seconds=time.monotonic() - began,
            new_tokens=self.engine.tokens,
        )

    def _talks(self, records: Iterable[tuple[str, int, Any]]) -> Iterator[_Talk]:
        """Conversations to answer; accounts for the records that are none, and for those an earlier run was done with."""
        taken = 0
        for source, index, record in records:
            if taken == self.settings.limit:
                return
            primary_id = None
            try:
                if isinstance(record, DataError):
                    self._refuse(source, index, None, _End("unreadable", str(record)))
                    continue
                primary_id = self._primary_id(record)
                if primary_id is None:
                    self._ends["duplicate"] += 1
                    continue
                if self.settings.language is not None and not _speaks(record, self.settings.language):
                    self._ends["other_language"] += 1
                    continue
                conversation = parse_conversation(record, source, index)
            except DataError as error:
                self._refuse(source, index, primary_id, _End("not_a_conversation", str(error)))
                continue
            dialogue = Dialogue(conversation.messages, conversation.later_turns)
            if not dialogue.turns:
                self._refuse(source, index, primary_id, _End("nothing_to_answer", "nobody speaks before the assistant"))
                continue
            taken += 1
            if primary_id in self.files.ended:
                self._ends[self.files.ended[primary_id]] += 1
            else:
                yield _Talk(primary_id, conversation, dialogue)

    def _primary_id(self, record: Any) -> str | None:
        """The record's own id, else the hash of its content; None for a record that came before.

        Ids that start anew in every file are told apart by their content.
        """
        text = json.dumps(record, sort_keys=True, separators=(",", ":"), default=str)
        content = hashlib.sha256(text.encode()).hexdigest()
        primary_id = (record_id(record) if isinstance(record, dict) else None) or content
        digest = bytes.fromhex(content)[:16]
        if self._contents.get(primary_id, digest) != digest:
            primary_id = f"{primary_id}-{content[:16]}"
        if primary_id in self._contents:
            return None
        self._contents[primary_id] = digest
        return primary_id

    def _begin(self, talk: _Talk) -> None:
        """Go through the answers that an earlier run gave, and ask for the next."""
        for row in self.files.begun(talk.primary_id):
            outcome = talk.dialogue.take(row["metadata"].get("message") or self._rows.message(row["text"]))
            if outcome is not None:
                self._end(talk, _End(outcome, "after the answers of an earlier run"))
                return
        self._go_on(talk, self._next(talk))

    def _go_on(self, talk: _Talk, following: _Asked | _End) -> None:
        if isinstance(following, _End):
            self._end(talk, following)
        else:
            self._open[following.question.key] = following
            self.engine.ask(following.question)

    def _next(self, talk: _Talk) -> _Asked | _End:
        """The question for the next turn, or why there is none."""
        settings, dialogue, tools = self.settings, talk.dialogue, talk.record.tools
        draw = (settings.seed, talk.primary_id, dialogue.turn)
        sampling, options = settings.sampling, dict(talk.record.options or {})
        if settings.temperature is not None:
            sampling = sampling.model_copy(update={"temperature": settings.temperature.draw(uniform_of("temperature", *draw))})
        if settings.reasoning_effort is not None:
            options["reasoning_effort"] = settings.reasoning_effort.draw(uniform_of("reasoning_effort", *draw))
        try:
            prompt = render_prompt(self.tokenizer, dialogue.history, tools, options)
        except DataError as error:
            return _End("template_refused", str(error))
        context = self.engine.context_length
        room = settings.max_tokens if context is None else min(settings.max_tokens, context - len(prompt))
        if room < 1:
            return _End("prompt_too_long", f"the prompt of answer {dialogue.turn} has {len(prompt)} tokens")
        seed = seed_of(*draw)
        said = {**sampling.model_dump(), **settings.further, **options, "max_tokens": settings.max_tokens, "seed": seed}
        chat = Chat(tuple(dialogue.history), tools, options)
        return _Asked(talk, Question(next(self._numbers), prompt, room, sampling, seed, settings.further, chat), said)

    def _take(self, asked: _Asked, answer: Answer) -> None:
        """Write the row of an answer, and ask for the next one."""
        talk, turn = asked.talk, asked.talk.dialogue.turn
        if answer.finish_reason == "length" and self.settings.drop_cut:
            self._lost["dropped"] += 1
            self._end(talk, _End("dropped", f"answer {turn} was cut after {answer.answer_tokens} tokens"))
            return
        try:
            given = self._rows.make(asked.question, answer)
        except DataError as error:
            self._lost["error"] += 1
            self._end(talk, _End("template_refused", str(error)))
            return
        following: _Asked | _End = _End("cut")
        if answer.finish_reason != "length":
            outcome = talk.dialogue.take(given.message)
            following = self._next(talk) if outcome is None else _End(outcome, f"after answer {turn}")
        ended = following.outcome if isinstance(following, _End) else None
        self.files.append(self._row(asked, answer, given, turn, ended))
        self._go_on(talk, following)

    def _row(self, asked: _Asked, answer: Answer, given: GivenAnswer, turn: int, ended: str | None) -> dict[str, Any]:
        primary_id, record = asked.talk.primary_id, asked.talk.record
        called = bool(call_names(given.message))
        usage = {"prompt_tokens": len(given.prompt), "completion_tokens": len(given.ids)}
        return {
            "id": f"{primary_id}_gen{turn}",
            "primary_id": primary_id,
            "input_ids": [*given.prompt, *given.ids],
            "loss_mask": [0] * len(given.prompt) + [1] * len(given.ids),
            "text": given.text,
            "metadata": {
                "idx": record.index,
                "source": record.source,
                "turn": turn,
                "finish_reason": "tool_calls" if called and answer.finish_reason == "stop" else answer.finish_reason,
                "is_tool_call": called,
                "usage": {**usage, "total_tokens": sum(usage.values())},
                **self.engine.origin,
                "sampling_params": asked.said,
                "exact_ids": given.exact,
                **({} if given.exact else {"message": given.message}),
                "ended": ended,
            },
        }

    def _end(self, talk: _Talk, end: _End) -> None:
        self._refuse(talk.record.source, talk.record.index, talk.primary_id, end, talk.dialogue.turn)

    def _refuse(self, source: str, index: int, primary_id: str | None, end: _End, turn: int | None = None) -> None:
        self._ends[end.outcome] += 1
        if end.outcome not in QUIET_ENDS:
            error = {"primary_id": primary_id, "idx": index, "source": source, "turn": turn}
            self.files.append_error({**error, "outcome": end.outcome, "reason": end.reason})


def _speaks(record: Any, language: str) -> bool:
    spoken = record.get("language", record.get("lang")) if isinstance(record, dict) else None
    return isinstance(spoken, str) and spoken.casefold() == language.casefold()
