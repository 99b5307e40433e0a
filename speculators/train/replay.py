"""Using a captured row for several optimiser steps: in which order, and the states that are kept for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from speculators.data import PackedRow
from speculators.verifiers.flow import answer_bytes
from speculators.verifiers.source import HiddenStates

__all__ = ["ReplayBuffer", "held_steps", "use_order"]


def use_order(steps: int, uses: int, window: int) -> list[tuple[int, int]]:
    """The order in which an epoch's optimiser steps are run: windows of ``window`` steps, each ``uses`` times over.

    :param steps: different steps of the epoch.
    :returns: for every step that is run, which one it is, from 0 on, and the how-manieth use of it, from 0 on.
    """
    return [
        (index, use)
        for start in range(0, steps, window)
        for use in range(uses)
        for index in range(start, min(start + window, steps))
    ]


def held_steps(order: Sequence[tuple[int, int]], done: int) -> list[int]:
    """Which steps were used within the first ``done`` of ``order`` and will be used again: those whose states are kept."""
    return sorted({index for index, _ in order[:done]} & {index for index, _ in order[done:]})


class ReplayBuffer:
    """States of packed rows from their first use to their last. It holds as much as a window of steps does, never more.

    What it holds at a step follows from the plan alone. So a resumed run, which plans what is left, asks again for the
    packed rows that it will meet again, each in a request of its own as at first, and gets the same bits.
    """

    def __init__(self) -> None:
        self._held: dict[PackedRow, list[HiddenStates]] = {}
        self.nbytes = 0  #: of the states that are held

    @staticmethod
    def requests(plan: Sequence[PackedRow]) -> list[PackedRow]:
        """What a source has to be asked for: every packed row of ``plan`` where it stands first."""
        return list(dict.fromkeys(plan))

    def answers(self, plan: Sequence[PackedRow], fetched: Iterator[list[HiddenStates]]) -> Iterator[list[HiddenStates]]:
        """The answer to every packed row of ``plan``, in its order.

        :param fetched: answers to :meth:`requests` of the plan; they are taken as they are needed.
        """
        left = Counter(plan)
        try:
            for packed in plan:
                answer = self._held[packed] if packed in self._held else next(fetched)
                left[packed] -= 1
                if left[packed] and packed not in self._held:
                    self._held[packed] = answer
                    self.nbytes += answer_bytes(answer)
                elif not left[packed] and self._held.pop(packed, None) is not None:
                    self.nbytes -= answer_bytes(answer)
                yield answer
        finally:
            self._held.clear()
            self.nbytes = 0
