"""A conversation whose assistant turns are answered again: what stays as it was recorded, and when it cannot go on.

Everything that is not the assistant's is kept. A tool's result belongs to the call it answered, so recorded results follow a
new answer only if it calls the same tools by name, in the same order; else the conversation ends with that answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from speculators.data.answer_text import call_names

__all__ = ["Dialogue"]

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Step:
    """An answer to be given."""

    before: list[Message]  #: what is said since the answer before it
    recorded: list[Message]  #: the assistant's messages in its place; usually one, none at the end


class Dialogue:
    """The history so far, and what is still to be answered.

    Messages of the assistant before anybody else spoke (a greeting) are history as recorded; several in a row are one turn,
    answered once; system messages behind the last turn are left out.
    """

    def __init__(self, messages: Sequence[Message], later_turns: Sequence[str] = ()) -> None:
        self._steps = _steps(messages, later_turns)
        self.history: list[Message] = []
        self.turn = 0  #: number of the answer to be given next, from 0
        if self._steps:
            self.history += self._steps[0].before

    @property
    def turns(self) -> int:
        """Answers that are wanted in all."""
        return len(self._steps)

    def take(self, answer: Mapping[str, Any]) -> str | None:
        """Put the answer to :attr:`history` behind it, and what follows it in the record behind that.

        :param answer: the assistant's message.
        :returns: None when another answer is wanted, else how the conversation ended: ``answered``, or ``tools_differ``.
        """
        step = self._steps[self.turn]
        message = _with_ids(dict(answer), step.recorded)
        self.history.append(message)
        self.turn += 1
        if self.turn == len(self._steps):
            return "answered"
        following = self._steps[self.turn].before
        results = [entry for entry in following if entry["role"] == "tool"]
        calls = call_names(message)
        recorded = [name for entry in step.recorded for name in call_names(entry)]
        if calls != (recorded or [str(result.get("name")) for result in results]) or len(results) > len(calls):
            return "tools_differ"
        self.history += _answering(following, message)
        return None


def _steps(messages: Sequence[Message], later_turns: Sequence[str]) -> list[_Step]:
    steps: list[_Step] = []
    before: list[Message] = []
    spoken = False  # whether anybody but the assistant and the system has spoken
    for message in messages:
        if message["role"] != "assistant":
            spoken = spoken or message["role"] in ("user", "tool")
            before.append(message)
        elif not spoken:
            before.append(message)
        elif steps and not before:
            steps[-1].recorded.append(message)
        else:
            steps.append(_Step(before, [message]))
            before = []
    if any(message["role"] in ("user", "tool") for message in before):
        steps.append(_Step(before, []))
    return steps + [_Step([{"role": "user", "content": turn}], []) for turn in later_turns]


def _with_ids(message: Message, recorded: Sequence[Message]) -> Message:
    """Tool calls without an id get that of the recorded call in their place: some templates want one."""
    ids = [call.get("id") for entry in recorded for call in entry.get("tool_calls") or ()]
    calls = message.get("tool_calls") or ()
    if calls:
        named = zip(calls, [*ids, *[None] * len(calls)], strict=False)
        message["tool_calls"] = [{**call, "id": old} if old and not call.get("id") else call for call, old in named]
    return message


def _answering(following: Sequence[Message], message: Message) -> list[Message]:
    """Recorded messages with the tools' results addressed to the new calls, one after the other."""
    calls = iter(message.get("tool_calls") or ())
    result = []
    for entry in following:
        call = next(calls, None) if entry["role"] == "tool" else None
        if call is not None and call.get("id") and "tool_call_id" in entry:
            entry = {**entry, "tool_call_id": call["id"]}
        result.append(entry)
    return result
