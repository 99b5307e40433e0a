"""What decoding did, round by round, and the acceptance figures made of it.

One *round* drafts n tokens after an anchor and verifies them in one pass. Everything is kept as numerators and
denominators, so that prompts, repeats and machines can be added up before a ratio is taken.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

__all__ = ["AcceptanceStatistics", "Round"]


@dataclass(frozen=True, slots=True)
class Round:
    """One round of one request. Counts are those of the rule, as a serving engine counts them: before the output is cut."""

    anchor: int  #: position of the block's anchor: the newest token when the round began, counted from the prompt's first token
    drafted: int  #: drafted tokens that were verified
    accepted: int  #: drafted tokens accepted; those after an accepted end-of-sequence token do not count
    emitted: int  #: accepted plus the token after them; only the accepted ones when an accepted token ended the request
    kept: int  #: tokens of ``emitted`` in the output; fewer in a truncated round
    ended: bool = False  #: whether an accepted token was an end-of-sequence token
    complete: bool = True  #: whether every token it could draft lay within the token budget
    confidence: tuple[float, ...] | None = None  #: the draft's confidence of each drafted token, where it has a confidence head

    @property
    def truncated(self) -> bool:
        """Whether the token budget cut this round's output."""
        return self.kept < self.emitted


def _ratio(numerator: int, denominator: int) -> float | None:
    return numerator / denominator if denominator else None


@dataclass(slots=True)
class AcceptanceStatistics:
    """Sums over rounds; add rounds with :meth:`add`, other sums with ``+``.

    Position k (from 0) of the lists is the k-th drafted token of a round.
    """

    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    emitted: int = 0
    generated: int = 0  #: tokens in the outputs, the first one of each request (sampled at prefill) included
    drafted_at: list[int] = field(default_factory=list)  #: rounds that drafted a k-th token
    reached_at: list[int] = field(default_factory=list)  #: of these, those that accepted all earlier tokens and went on
    accepted_at: list[int] = field(default_factory=list)  #: of these, those that accepted the k-th token

    def add(self, rounds: Iterable[Round], generated: int) -> None:
        """Add the rounds of one request and the number of tokens it generated."""
        self.generated += generated
        for one in rounds:
            self.rounds += 1
            self.drafted += one.drafted
            self.accepted += one.accepted
            self.emitted += one.emitted
            self._widen(one.drafted)
            for k in range(one.drafted):
                self.drafted_at[k] += 1
                self.accepted_at[k] += k < one.accepted
                self.reached_at[k] += k < one.accepted or (k == one.accepted and not one.ended)

    def _widen(self, positions: int) -> None:
        for counts in (self.drafted_at, self.reached_at, self.accepted_at):
            counts.extend([0] * (positions - len(counts)))

    def __add__(self, other: AcceptanceStatistics) -> AcceptanceStatistics:
        total = AcceptanceStatistics()
        for part in (self, other):
            total._widen(len(part.drafted_at))
            for name in ("rounds", "drafted", "accepted", "emitted", "generated"):
                setattr(total, name, getattr(total, name) + getattr(part, name))
            for name in ("drafted_at", "reached_at", "accepted_at"):
                counts = getattr(total, name)
                for k, count in enumerate(getattr(part, name)):
                    counts[k] += count
        return total

    @property
    def acceptance_length(self) -> float | None:
        """Tokens per round, bonus token included; None without rounds."""
        return _ratio(self.emitted, self.rounds)

    @property
    def acceptance_by_position(self) -> list[float]:
        """Share of all rounds whose tokens 0..k were accepted."""
        return [accepted / drafted for accepted, drafted in zip(self.accepted_at, self.drafted_at, strict=True)]

    @property
    def conditional_acceptance_by_position(self) -> list[float | None]:
        """Share of rounds whose token k was accepted among those that got to it; None where none did.

        A round that an accepted end-of-sequence token ended never got to the tokens after it.
        """
        return [_ratio(accepted, reached) for accepted, reached in zip(self.accepted_at, self.reached_at, strict=True)]
