"""Which tokens of an assistant turn the verifier would have had to generate.

Two renderings say it: the messages before the turn with the template's generation prompt - what the verifier is given - and
the messages up to and with the turn. The answer begins where the first ends in the second. It ends with the token that ends
the turn; what the template writes after it is the same whatever the answer says, so it is found by other answers' renderings.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from speculators.data.encoding import Encoded, longest_prefix
from speculators.errors import DataError

__all__ = ["DroppedCallsError", "Messages", "Render", "Turn", "TurnFinder", "UnstableHistoryError"]

Messages = Sequence[Mapping[str, Any]]

#: (messages, whether the generation prompt follows) -> their ids
Render = Callable[[Messages, bool], Encoded]

#: Answers that are put in a turn's place. They end in different characters, so an answer ends as at most one of them does.
PROBES = ("0", "1")
#: Ids of the longest closing text that is remembered.
LONGEST_CLOSING = 32


class UnstableHistoryError(Exception):
    """The messages before a turn are rendered otherwise once the turn stands behind them."""

    def __init__(self, before: Encoded, after: Encoded) -> None:
        super().__init__()
        self.before = before
        self.after = after


class DroppedCallsError(Exception):
    """A turn calls tools, and the template writes nothing of it: what is left of the turn nobody said."""


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """An assistant turn, as the last of its conversation."""

    index: int  #: of its message
    upto: Encoded  #: the messages up to and with it
    start: int  #: of the supervised ids in ``upto``
    stop: int  #: behind the supervised ids
    content: int  #: behind the answer's own ids, before the end-of-turn id if there is one


class TurnFinder:
    """Finds turns in renderings, and remembers how turns close.

    :param eos_ids: ids at which the verifier stops.
    :param special_ids: other ids that can end a turn when no eos id does.
    :param text_of: the text of an id, to see whether an answer's own text holds it; None when it is not known.
    :param answer_start: index of the first id of a rendering (second argument) that holds nothing of the prompt's text (first
        argument), or None when the prompt's text does not begin the rendering's. Without, it is not asked for.
    :param answer_stop: index of the first id of a rendering that holds something of its last characters (second argument: how
        many they are). Without, it is not asked for.
    """

    def __init__(
        self,
        eos_ids: Collection[int],
        special_ids: Collection[int] = (),
        text_of: Callable[[int], str] | None = None,
        answer_start: Callable[[Encoded, Encoded], int | None] | None = None,
        answer_stop: Callable[[Encoded, int], int] | None = None,
    ) -> None:
        self.eos_ids = frozenset(eos_ids)
        self.special_ids = frozenset(special_ids)
        self._text_of = text_of
        self._answer_start = answer_start
        self._answer_stop = answer_stop
        self._ends = dict.fromkeys(self.eos_ids, "")  # ids that ended a turn, or may, and their texts
        if text_of is not None:
            self._ends = {end: text_of(end) for end in self.eos_ids}
        self._closings: set[tuple[int, ...]] = set()  # end-of-turn id and what follows it, as probes showed them

    def find(self, render: Render, messages: Messages, index: int, upto: Encoded | None = None) -> Turn:
        """The turn of message ``index``, which is not the first.

        :param upto: ``render(messages[: index + 1], False)`` where it is there already.
        :raises UnstableHistoryError: when the messages before the turn are not rendered as the verifier was given them.
        :raises DroppedCallsError: when the turn is rendered as if it called no tools.
        """
        upto = upto or render(messages[: index + 1], False)
        if messages[index].get("tool_calls") and _calls_are_dropped(render, messages[: index + 1], upto):
            raise DroppedCallsError
        start = self._start(render, messages[:index], upto)
        content, stop = self._end(render, messages[: index + 1], upto, start)
        return Turn(index, upto, start, start + stop, start + content)

    def ended(self, turn: Turn, whole: Encoded) -> Turn:
        """The turn with the end id behind it, where the template leaves that to the message that follows (GLM's ``<|user|>``).

        :param whole: a rendering that begins with the turn's own.
        """
        length = len(turn.upto)
        if not turn.start < turn.stop == length < len(whole) or whole.ids(length)[0] not in self.eos_ids:
            return turn
        has_end = turn.content < turn.stop and whole.ids(turn.content)[0] in self.eos_ids
        return turn if has_end else replace(turn, stop=length + 1)

    def _start(self, render: Render, before: Messages, upto: Encoded) -> int:
        """Index of the first id of ``upto`` that the verifier, given the prompt, would have generated."""
        prompt = render(before, True)
        common = prompt.common(upto)
        length = len(upto)
        if common == len(prompt) or common == length:
            return common
        # The turn does not go on from the prompt. If its text does, a token holds the prompt's end and the answer's beginning.
        start = self._answer_start(prompt, upto) if self._answer_start else None
        # Else, as long as they part in the generation prompt, the history is the same, and the generation prompt says something
        # (an empty think block) that the turn does not. The verifier was given another id here, so this one it did not choose.
        if start is None and common < render(before, False).common(prompt):
            raise UnstableHistoryError(prompt, upto)
        return min(max(common + 1, start or 0), length)

    def _end(self, render: Render, messages: Messages, upto: Encoded, start: int) -> tuple[int, int]:
        """Indices behind the content and behind the end-of-turn id, counted in the ids of ``upto`` from ``start`` on."""
        answer = upto.ids(start)
        if not answer:
            return 0, 0
        found = [end for end in self._ends if end in answer]
        if len(found) == 1 and answer.count(found[0]) == 1:
            place = answer.index(found[0])
            if tuple(answer[place:]) in self._closings and not _says(messages[-1], self._ends[found[0]]):
                return place, place + 1
        content, stop = _probed_end(render, messages, answer, self.eos_ids, self.special_ids)
        if content == stop and self._answer_stop is not None and not messages[-1].get("tool_calls"):
            # Nothing marks the end, so a token can hold the answer's end and the beginning of what the template writes behind
            # it (line breaks, mostly). Nobody generates that token: what comes next is not known yet.
            closing = _closing_text(render, messages)
            if closing and upto.text.endswith(closing):
                content = stop = max(0, self._answer_stop(upto, len(closing)) - start)
        if self._text_of is not None:
            # An end id in the answer that the message does not say is the template's (between a call and words behind it).
            inner = (at for at in range(1, content) if answer[at] in self.eos_ids)
            end = next((at for at in inner if not _says(messages[-1], self._ends[answer[at]])), None)
            if end is not None:
                return end, end + 1
        if content < stop and len(answer) - content <= LONGEST_CLOSING:
            self._closings.add(tuple(answer[content:]))
            self._ends.setdefault(answer[content], self._text_of(answer[content]) if self._text_of else "")
        return content, stop


def _calls_are_dropped(render: Render, messages: Messages, upto: Encoded) -> bool:
    silent = {key: value for key, value in messages[-1].items() if key != "tool_calls"}
    try:
        return render([*messages[:-1], silent], False).ids() == upto.ids()
    except DataError:  # a template that wants words where there are no calls
        return False


def _says(value: Any, text: str) -> bool:
    """Whether a string in the message holds ``text``."""
    if isinstance(value, str):
        return bool(text) and text in value
    if isinstance(value, Mapping):
        return any(_says(item, text) for item in value.values())
    return isinstance(value, list | tuple) and any(_says(item, text) for item in value)


def _probed_end(
    render: Render, messages: Messages, answer: list[int], eos_ids: Collection[int], special_ids: Collection[int]
) -> tuple[int, int]:
    """What :meth:`TurnFinder._end` gives, from renderings with other answers in the turn's place."""
    *history, turn = messages
    probes = [render([*history, _with_answer(turn, probe)], False).ids() for probe in PROBES]
    closing = min(_common_suffix(answer, probe) for probe in probes)
    ending = answer[len(answer) - closing :]
    eos = [place for place, token in enumerate(ending) if token in eos_ids]
    special = [place for place, token in enumerate(ending) if token in special_ids]
    calls = bool(turn.get("tool_calls"))
    if eos or special:
        # Behind the arguments of a tool call come special tokens that close the call, and then the one that ends the turn.
        place = eos[0] if eos else special[-1 if calls else 0]
        content = len(answer) - closing + place
        return content, content + 1
    if calls:
        # Without an end-of-turn token, the brackets behind the arguments are still the verifier's. What follows an answer
        # in words is not.
        plain = [render([*history, {"role": turn["role"], "content": probe}], False).ids() for probe in PROBES]
        closing = min(_common_suffix(*plain), _common_suffix(answer, plain[0]))
    return len(answer) - closing, len(answer) - closing


def _closing_text(render: Render, messages: Messages) -> str:
    """What the template writes behind an answer; empty where renderings have no text."""
    *history, turn = messages
    one, other = (render([*history, _with_answer(turn, probe)], False).text for probe in PROBES)
    length = next((at for at, pair in enumerate(zip(one[::-1], other[::-1])) if pair[0] != pair[1]), 0)
    return one[len(one) - length :]


def _with_answer(turn: Mapping[str, Any], probe: str) -> dict[str, Any]:
    """The turn with another answer of the same kind."""
    changed = dict(turn)
    calls = turn.get("tool_calls")
    content = turn.get("content")
    if isinstance(content, list):
        changed["content"] = [{"type": "text", "text": probe}]
    elif content or not calls:
        changed["content"] = probe
    if calls:
        changed["tool_calls"] = [*calls[:-1], _with_arguments(calls[-1], probe)]
    return changed


def _with_arguments(call: Any, probe: str) -> Any:
    if not isinstance(call, Mapping):
        return call
    if isinstance(call.get("function"), Mapping):
        return {**call, "function": _with_arguments(call["function"], probe)}
    arguments: Any = {"0": probe}
    return {**call, "arguments": f'{{"0": "{probe}"}}' if isinstance(call.get("arguments"), str) else arguments}


def _common_suffix(left: Sequence[int], right: Sequence[int]) -> int:
    length = min(len(left), len(right))
    return longest_prefix(left[len(left) - length :][::-1], right[len(right) - length :][::-1])
