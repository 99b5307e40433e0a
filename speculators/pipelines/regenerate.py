"""All assistant turns of conversations answered again by the verifier, turn by turn, as rows to train on.

The k-th prompt is rendered from the messages so far, whose assistant turns are the new answers, taken apart as a serving
engine would (:mod:`speculators.data.answer_text`). A row is a prompt and its answer exactly as they were generated.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from speculators.data.answer_text import call_names, message_of_answer
from speculators.data.prompts import parse_conversation
from speculators.data.rendering import render_prompt
from speculators.errors import ConfigError, DataError
from speculators.files import locked_place
from speculators.pipelines.answer_files import AnswerFiles, check_settings
from speculators.pipelines.dialogue import Dialogue
from speculators.pipelines.regenerate_report import ENDS, QUIET_ENDS, RegenerationReport
from speculators.pipelines.regenerate_settings import RegenerateSettings, seed_of, uniform_of
from speculators.progress import Bar, bar
from speculators.verifiers.answering import Answer, AnswerEngine, Chat, Failure, Question

__all__ = ["Records", "Regeneration", "regenerate"]

#: Keys under which records name themselves.
_ID_KEYS = ("primary_id", "conversation_id", "id", "uuid")


@dataclass(frozen=True, slots=True)
class Records:
    """The input: (name of the source, index in it, record or the error that stands in its place)."""

    records: Iterable[tuple[str, int, Any]]
    sources: Mapping[str, str]  #: name -> hash
    total: int  #: records, for the progress bar


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
    with locked_place(outfile, "--outfile"):
        fixed = {**engine.describe(), **(hashes or {})}
        check_settings(outfile, fixed, {**settings.record(), "sources": dict(inputs.sources)}, resume=resume)
        with AnswerFiles(outfile) as files, bar("conversations", inputs.total, shown=progress) as shown:
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


@dataclass(slots=True, eq=False)
class _Open:
    """A conversation whose next answer is with the engine."""

    primary_id: str
    source: str
    index: int
    dialogue: Dialogue
    tools: list[Any] | None
    question: Question | None = None
    said: dict[str, Any] = field(default_factory=dict)  # sampling parameters of the question, for the row


class Regeneration:
    """One run: conversations begun, their questions asked, rows written."""

    def __init__(
        self, engine: AnswerEngine, tokenizer: Any, files: AnswerFiles, settings: RegenerateSettings, eos_ids: Sequence[int]
    ) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self.files = files
        self.settings = settings
        self._template = _template(tokenizer)
        self._eos_ids = frozenset(eos_ids)
        self._ends: Counter[str] = Counter()
        self._lost: Counter[str] = Counter()  # answers without a row: dropped, error
        self._contents: dict[str, bytes] = {}  # primary id -> digest of the record it was first seen on
        self._open: dict[int, _Open] = {}
        self._begun = 0

    def run(self, records: Iterable[tuple[str, int, Any]], shown: Bar) -> RegenerationReport:
        """Answer everything."""
        began = time.monotonic()
        waiting = self._conversations(records)
        while True:
            while len(self._open) < self.engine.window and (conversation := next(waiting, None)) is not None:
                self._begin(conversation)
            if not self._open:
                break
            for key, outcome in self.engine.finished():
                conversation = self._open.pop(int(str(key)))
                if isinstance(outcome, Failure):
                    self._lost["error"] += 1
                    self._end(conversation, "failed", outcome.reason)
                else:
                    self._take(conversation, outcome)
            self.files.flush()
            seconds = time.monotonic() - began
            shown.update(sum(self._ends.values()), f"{self.engine.tokens / seconds:.0f} tokens/s")
        shown.update(sum(self._ends.values()))
        reasons = {**self.files.finish_reasons, **self._lost}
        seconds = time.monotonic() - began
        ends = {end: self._ends[end] for end in ENDS}
        return RegenerationReport(ends, reasons, self.files.tokens, seconds, self.engine.tokens)

    def _conversations(self, records: Iterable[tuple[str, int, Any]]) -> Iterator[_Open]:
        """Conversations to answer; accounts for the records that are none, and for those an earlier run was done with."""
        taken = 0
        for source, index, record in records:
            if taken == self.settings.limit:
                return
            if isinstance(record, DataError):
                self._refuse(source, index, None, "unreadable", str(record))
                continue
            primary_id = self._primary_id(record)
            if primary_id is None:
                self._ends["duplicate"] += 1
                continue
            if self.settings.language is not None and not _speaks(record, self.settings.language):
                self._ends["other_language"] += 1
                continue
            try:
                conversation = parse_conversation(record, source, index)
            except DataError as error:
                self._refuse(source, index, primary_id, "not_a_conversation", str(error))
                continue
            dialogue = Dialogue(conversation.messages, conversation.later_turns)
            if not dialogue.turns:
                self._refuse(source, index, primary_id, "nothing_to_answer", "nobody speaks before the assistant")
                continue
            taken += 1
            if primary_id in self.files.ended:
                self._ends[self.files.ended[primary_id]] += 1
            else:
                yield _Open(primary_id, source, index, dialogue, conversation.tools)

    def _primary_id(self, record: Any) -> str | None:
        """The record's own id, else the hash of its content; None for a record that came before.

        Ids that start anew in every file are told apart by their content.
        """
        content = hashlib.sha256(json.dumps(record, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
        own = next((record[key] for key in _ID_KEYS if record.get(key) not in (None, "")), None) if _is_object(record) else None
        primary_id = content if not isinstance(own, (str, int)) else str(own)
        digest = bytes.fromhex(content)[:16]
        if self._contents.get(primary_id, digest) != digest:
            primary_id = f"{primary_id}-{content[:16]}"
        if primary_id in self._contents:
            return None
        self._contents[primary_id] = digest
        return primary_id

    def _begin(self, conversation: _Open) -> None:
        """Go through the answers that an earlier run gave, and ask for the next."""
        for row in self.files.begun(conversation.primary_id):
            message = row["metadata"].get("message") or message_of_answer(row["text"], self._template)
            end = conversation.dialogue.take(message)
            if end is not None:
                self._end(conversation, end, "after the answers of an earlier run")
                return
        self._ask_or_end(conversation)

    def _ask_or_end(self, conversation: _Open) -> None:
        refusal = self._prepare(conversation)
        if refusal is None:
            self._ask(conversation)
        else:
            self._end(conversation, *refusal)

    def _ask(self, conversation: _Open) -> None:
        assert conversation.question is not None
        self._open[int(str(conversation.question.key))] = conversation
        self.engine.ask(conversation.question)

    def _prepare(self, conversation: _Open) -> tuple[str, str] | None:
        """Make the question for the next turn; None, or why there is none: the end of the conversation and the reason."""
        settings, dialogue = self.settings, conversation.dialogue
        draw = (settings.seed, conversation.primary_id, dialogue.turn)
        sampling, options = settings.sampling, {}
        if settings.temperature is not None:
            sampling = sampling.model_copy(update={"temperature": settings.temperature.draw(uniform_of("temperature", *draw))})
        if settings.reasoning_effort is not None:
            options["reasoning_effort"] = settings.reasoning_effort.draw(uniform_of("reasoning_effort", *draw))
        try:
            prompt = render_prompt(self.tokenizer, dialogue.history, conversation.tools, options)
        except DataError as error:
            return "template_refused", str(error)
        context = self.engine.context_length
        room = settings.max_tokens if context is None else min(settings.max_tokens, context - len(prompt))
        if room < 1:
            return "prompt_too_long", f"the prompt of turn {dialogue.turn} has {len(prompt)} tokens"
        said = {
            **sampling.model_dump(),
            "max_tokens": settings.max_tokens,
            "seed": seed_of(*draw),
            **settings.further,
            **options,
        }
        chat = Chat(tuple(dialogue.history), conversation.tools, options)
        conversation.question = Question(self._begun, prompt, room, sampling, said["seed"], settings.further, chat)
        conversation.said = said
        self._begun += 1
        return None

    def _take(self, conversation: _Open, answer: Answer) -> None:
        """Write the row of an answer, and ask for the next one."""
        dialogue, question = conversation.dialogue, conversation.question
        assert question is not None
        if answer.finish_reason == "length" and self.settings.drop_cut:
            self._lost["dropped"] += 1
            self._end(
                conversation, "dropped", f"the answer of turn {dialogue.turn} was cut after {answer.answer_tokens} tokens"
            )
            return
        turn, ids = dialogue.turn, answer.ids
        text = self.tokenizer.decode(ids[:-1] if ids[-1] in self._eos_ids else ids, skip_special_tokens=False)
        message = message_of_answer(text, self._template)
        refusal: tuple[str, str] | None = None
        if answer.finish_reason == "length":
            refusal = "cut", ""
        else:
            end = dialogue.take(message)
            refusal = self._prepare(conversation) if end is None else (end, f"after the answer of turn {turn}")
        is_tool_call = bool(call_names(message))
        reason = "tool_calls" if is_tool_call and answer.finish_reason == "stop" else answer.finish_reason
        usage = {"prompt_tokens": answer.prompt_tokens, "completion_tokens": answer.answer_tokens}
        metadata = {
            "idx": conversation.index,
            "source": conversation.source,
            "turn": turn,
            "finish_reason": reason,
            "is_tool_call": is_tool_call,
            "usage": {**usage, "total_tokens": answer.prompt_tokens + answer.answer_tokens},
            **self.engine.origin,
            "sampling_params": conversation.said,
            "ended": refusal and refusal[0],
        }
        row = {
            "id": f"{conversation.primary_id}_gen{turn}",
            "primary_id": conversation.primary_id,
            "input_ids": [*question.prompt, *ids],
            "loss_mask": [0] * len(question.prompt) + [1] * len(ids),
            "text": text,
            "metadata": metadata,
        }
        self.files.append(row)
        if refusal is None:
            self._ask(conversation)
        else:
            self._end(conversation, *refusal)

    def _end(self, conversation: _Open, end: str, reason: str) -> None:
        self._refuse(conversation.source, conversation.index, conversation.primary_id, end, reason, conversation.dialogue.turn)

    def _refuse(self, source: str, index: int, primary_id: str | None, end: str, reason: str, turn: int | None = None) -> None:
        self._ends[end] += 1
        if end not in QUIET_ENDS:
            error = {"primary_id": primary_id, "idx": index, "source": source, "turn": turn, "outcome": end, "reason": reason}
            self.files.append_error(error)


def _is_object(record: Any) -> bool:
    return isinstance(record, dict)


def _speaks(record: Any, language: str) -> bool:
    spoken = record.get("language", record.get("lang")) if _is_object(record) else None
    return isinstance(spoken, str) and spoken.casefold() == language.casefold()
