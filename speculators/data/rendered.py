"""Rows of a conversation from its renderings, whoever renders; the reasons why a conversation gives none."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np

from speculators.data.encoding import Encoded
from speculators.data.rows import Row
from speculators.data.turns import Messages, Render, Turn, TurnFinder, UnstableHistoryError
from speculators.errors import DataError

__all__ = ["FoundRow", "History", "NothingSupervisedError", "RenderError", "Rendered", "Renderer", "find_rows"]

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


def find_rows(
    render: Render,
    messages: Messages,
    finder: TurnFinder,
    history: History,
    last_turn_only: bool,
    difference: Callable[[Encoded, Encoded], str],
) -> list[FoundRow]:
    """The rows of a conversation, from its renderings.

    :param difference: (rendering, rendering) -> words that show where they part.
    :raises RenderError: for a conversation that gives none.
    """
    assistants = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    if not assistants:
        reason = "the conversation has no assistant turn; answer it first (prepare-data --generate)"
        raise RenderError("no_assistant_turn", reason)
    answers = [index for index in assistants if index > 0][-1 if last_turn_only else 0 :]
    if not answers:
        raise NothingSupervisedError("nothing stands before the only assistant turn, so there is nothing that it answers")
    last = messages[: assistants[-1] + 1]
    whole = render(last, False)  # first, so that the others can share its pieces
    turns = []
    for index in answers:
        try:
            turns.append(finder.find(render, last, index, whole if index == len(last) - 1 else None))
        except UnstableHistoryError as error:
            reason = f"the template renders the messages before assistant turn {assistants.index(index) + 1} otherwise once it "
            reason += f"stands behind them ({difference(error.before, error.after)}), so no row of it is what it was generated"
            reason += " from; use a template that keeps its history"
            raise RenderError("unstable_template", reason) from None
    changed = next((turn for turn in turns if whole.common(turn.upto) < turn.stop), None)
    if history == "conversation" and changed is not None:
        reason = f"the template renders assistant turn {assistants.index(changed.index) + 1} otherwise once others follow "
        reason += f"({difference(changed.upto, whole)}); use one row per turn"
        raise RenderError("unstable_template", reason)
    if history == "turn" or changed is not None:
        rows = [FoundRow(messages[: turn.index + 1], turn.upto, [turn]) for turn in turns if turn.stop > turn.start]
    else:
        rows = [FoundRow(last, whole, [turn for turn in turns if turn.stop > turn.start])]
    if not any(row.turns for row in rows):
        raise NothingSupervisedError(_why_nothing(messages, turns))
    return rows


def _why_nothing(messages: Messages, turns: Sequence[Turn]) -> str:
    """Why no token of any turn is supervised."""
    empty = [turn for turn in turns if not any(messages[turn.index].get(key) for key in ("content", "tool_calls"))]
    if len(empty) == len(turns):
        return "nothing in the conversation is supervised, because its answers are empty"
    return "nothing in the conversation is supervised, because the template drops its answers; use a template that renders them"
