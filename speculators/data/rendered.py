"""Rows of a conversation from its renderings, whoever renders; the reasons why a conversation gives none."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np

from speculators.data.encoding import Encoded
from speculators.data.role_order import role_order_fault
from speculators.data.rows import Row
from speculators.data.turns import DroppedCallsError, Messages, Render, Turn, TurnFinder, UnstableHistoryError
from speculators.errors import DataError

__all__ = [
    "FoundRow",
    "FoundTurns",
    "History",
    "NothingSupervisedError",
    "RenderError",
    "Rendered",
    "Renderer",
    "find_rows",
    "find_turns",
]

#: One row per conversation, one per assistant turn, or the first where the template keeps its history as generated.
History = Literal["auto", "conversation", "turn"]


class RenderError(DataError):
    """A conversation that gives no rows.

    :param outcome: what became of it, a key of :data:`speculators.data.accounting.OUTCOMES`.
    """

    def __init__(self, outcome: str, reason: str) -> None:
        super().__init__(reason)
        self.outcome = outcome

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.outcome, str(self))


class NothingSupervisedError(RenderError):
    """A rendering whose mask would be all zero: it can teach nothing."""

    def __init__(self, reason: str) -> None:
        super().__init__("nothing_supervised", reason)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self),)


@dataclass(slots=True, eq=False)
class Rendered:
    """Ids and mask of a conversation, T tokens."""

    input_ids: np.ndarray  #: int64 ``[T]``
    loss_mask: np.ndarray  #: bool ``[T]``
    supervised_turns: int
    turn: int = -1  #: index of the only supervised assistant message, -1 for several

    def row(self, row_id: int, max_length: int | None = None) -> Row:
        """The row of it, cut to ``max_length`` tokens."""
        return Row(row_id, self.input_ids[:max_length], self.loss_mask[:max_length])


class Renderer(Protocol):
    """What turns conversations into rows; picklable, for worker processes."""

    def prompt(self, messages: Messages, tools: list[Any] | None = None, options: Mapping[str, Any] | None = None) -> list[int]:
        """Ids after which the assistant is to speak."""

    def rows(
        self, messages: Messages, tools: list[Any] | None = None, options: Mapping[str, Any] | None = None
    ) -> list[Rendered]:
        """The rows of a conversation, at least one.

        :raises RenderError: for a conversation that gives none.
        """


@dataclass(frozen=True, slots=True, eq=False)
class FoundRow:
    """A row before it becomes arrays."""

    messages: Messages  #: that it is the rendering of
    ids: Encoded
    turns: list[Turn]  #: the supervised ones

    def rendered(self) -> Rendered:
        ids = np.array(self.ids.ids(), dtype=np.int64)
        mask = np.zeros(len(ids), dtype=bool)
        for turn in self.turns:
            mask[turn.start : turn.stop] = True
        return Rendered(ids, mask, len(self.turns), self.turns[0].index if len(self.turns) == 1 else -1)


@dataclass(frozen=True, slots=True, eq=False)
class FoundTurns:
    """The assistant turns of a conversation that answer something."""

    messages: Messages  #: up to and with the last assistant turn; what follows it nobody answers
    whole: Encoded  #: their rendering
    turns: list[Turn]

    def changed(self) -> Turn | None:
        """The first turn that does not stand in the whole as it was generated."""
        return next((turn for turn in self.turns if self.whole.common(turn.upto) < turn.stop), None)


#: (rendering, rendering) -> words that show where they part
Difference = Callable[[Encoded, Encoded], str]


def find_turns(
    render: Render, messages: Messages, finder: TurnFinder, difference: Difference, last_turn_only: bool = False
) -> FoundTurns:
    """The turns of a conversation, from its renderings.

    :raises RenderError: without such turns, when the template refuses the messages, or rewrites them with every turn.
    """
    assistants = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    if not assistants:
        reason = "the conversation has no assistant turn; answer it first (prepare-data --generate)"
        raise RenderError("no_assistant_turn", reason)
    answers = [index for index in assistants if index > 0][-1 if last_turn_only else 0 :]
    if not answers:
        raise NothingSupervisedError("nothing stands before the only assistant turn, so there is nothing that it answers")
    last = messages[: assistants[-1] + 1]
    turns: list[Turn] = []
    index = answers[0]
    try:
        whole = render(last, False)  # first, so that the others can share its pieces
        for index in answers:
            turns.append(finder.find(render, last, index, whole if index == len(last) - 1 else None))
    except UnstableHistoryError as error:
        reason = (
            f"the template renders what stands before assistant turn {assistants.index(index) + 1} otherwise when it follows"
        )
        reason += f" ({difference(error.before, error.after)}), so the turn answers something that the verifier is never given"
        raise RenderError("unstable_template", f"{reason}; use another chat template") from None
    except DroppedCallsError:
        reason = f"the chat template leaves out the tool calls of message {index}; use a template that renders them"
        raise RenderError("template_refused", f"{reason}, or leave the conversation out") from None
    except RenderError as error:
        fault = role_order_fault([dict(message) for message in messages]) if error.outcome == "template_refused" else None
        if fault is None:
            raise
        raise RenderError("role_order", f"{fault} ({error})") from error
    return FoundTurns(last, whole, turns)


def find_rows(
    render: Render,
    messages: Messages,
    finder: TurnFinder,
    history: History,
    last_turn_only: bool,
    difference: Difference,
) -> list[FoundRow]:
    """The rows of a conversation, from its renderings.

    :raises RenderError: for a conversation that gives none.
    """
    found = find_turns(render, messages, finder, difference, last_turn_only)
    changed = found.changed()
    if history == "conversation" and changed is not None:
        ordinal = sum(message["role"] == "assistant" for message in messages[: changed.index + 1])
        reason = f"the template renders assistant turn {ordinal} otherwise once others follow "
        reason += f"({difference(changed.upto, found.whole)}); use one row per turn"
        raise RenderError("unstable_template", reason)
    supervised = [turn for turn in found.turns if turn.stop > turn.start]
    if not supervised:
        raise NothingSupervisedError(_why_nothing(messages, found.turns))
    if history == "turn" or changed is not None:
        return [FoundRow(messages[: turn.index + 1], turn.upto, [turn]) for turn in supervised]
    return [FoundRow(found.messages, found.whole, [finder.ended(turn, found.whole) for turn in supervised])]


def _why_nothing(messages: Messages, turns: Sequence[Turn]) -> str:
    """Why no token of any turn is supervised."""
    empty = [turn for turn in turns if not any(messages[turn.index].get(key) for key in ("content", "tool_calls"))]
    if len(empty) == len(turns):
        return "nothing in the conversation is supervised, because its answers are empty"
    return "nothing in the conversation is supervised, because the template drops its answers; use a template that renders them"
