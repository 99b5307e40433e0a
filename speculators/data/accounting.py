"""What became of every input record: one bucket each, counted by source, said as a table and listed with the reasons."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["CODES", "KEPT", "OUTCOMES", "WAITING", "WARNINGS", "Account", "Refusal"]

#: What can become of an input record, and how it is said; every record has exactly one outcome.
OUTCOMES = {
    "kept": "kept",
    "truncated": "kept, cut at --seq-length",
    "unreadable": "not readable",
    "not_a_conversation": "not a conversation",
    "no_assistant_turn": "without an assistant turn",
    "role_order": "with roles out of order",
    "template_refused": "refused by the chat template",
    "unstable_template": "rendered differently with each turn, no boundary to be found",
    "tags_disagree": "whose generation tags and turns disagree",
    "nothing_supervised": "without a supervised token",
    "too_short": "with fewer supervised tokens than --minimum-valid-tokens",
    "prompt_too_long": "with a prompt that leaves no room for an answer within --seq-length",
    "duplicate": "the same as an earlier record",
    "empty_answer": "answered with nothing",
    "not_needed": "not needed for --max-samples",
}

#: Outcomes of records that gave rows.
KEPT = ("kept", "truncated")

#: Number of every outcome in arrays of one byte a record.
CODES = {key: code for code, key in enumerate(OUTCOMES)}

#: In place of an outcome: the record has not been rendered yet.
WAITING = 255

#: What can be odd about a row that is kept; bit k of a row's flags stands for the k-th.
WARNINGS = {
    "two_bos": "rows begin with two beginning-of-text tokens; the chat template writes one and the tokenizer adds another",
    "no_prompt": "rows are supervised from their first token; nothing in them asks for the answer",
    "no_end_of_turn": "rows that were not cut end without an end-of-turn token of the verifier",
}


class Refusal(Exception):
    """A record that gives no row: a key of :data:`OUTCOMES` and the reason."""

    def __init__(self, outcome: str, reason: str = "") -> None:
        super().__init__(reason)
        self.outcome = outcome


@dataclass(eq=False)
class Account:
    """Records by source and outcome; the outcomes of a source add up to its records."""

    sources: Sequence[str]
    counts: np.ndarray  #: int64 ``[sources, outcomes]``, in the order of :data:`OUTCOMES`
    broken: Mapping[int, str] = field(default_factory=dict)  #: place of a source -> where it breaks off
    warnings: Mapping[str, int] = field(default_factory=dict)  #: key of :data:`WARNINGS` -> rows
    left_out_turns: int = 0  #: turns of kept records without a row: too few supervised tokens, or beyond --seq-length

    @classmethod
    def of_counts(cls, counts: Mapping[str, int], broken: Mapping[int, str]) -> Account:
        """The account that a manifest keeps: all sources together.

        :param broken: place of a source -> where it breaks off.
        """
        return cls([""], np.array([[counts.get(key, 0) for key in OUTCOMES]], dtype=np.int64), broken)

    @property
    def records(self) -> int:
        return int(self.counts.sum())

    def totals(self) -> dict[str, int]:
        """Records of every outcome, all sources together."""
        return dict(zip(OUTCOMES, self.counts.sum(axis=0).tolist(), strict=True))

    def of_source(self, place: int) -> dict[str, int]:
        """Records of every outcome in one source."""
        return dict(zip(OUTCOMES, self.counts[place].tolist(), strict=True))

    def sentence(self) -> str:
        """The outcomes that occur, in one line."""
        return ", ".join(f"{count} {OUTCOMES[key]}" for key, count in self.totals().items() if count)

    def table(self) -> Table:
        """Outcomes that occur, with their share of all records; a column for every source where there are a few."""
        from rich.markup import escape
        from rich.table import Table

        table = Table(title=f"{self.records} records", title_justify="left")
        table.add_column("outcome")
        for heading in ("records", "share"):
            table.add_column(heading, justify="right")
        columns = range(len(self.sources)) if 1 < len(self.sources) <= 6 else range(0)
        for place in columns:
            table.add_column(escape(self.sources[place]), justify="right", overflow="fold")
        for code, (key, count) in enumerate(self.totals().items()):
            if count:
                by_source = [str(self.counts[place, code]) for place in columns]
                table.add_row(OUTCOMES[key], str(count), f"{count / self.records:.1%}", *by_source)
        return table

    def remarks(self) -> list[str]:
        """Sentences about sources that break off and rows that are odd."""
        remarks = [self.broken[place] for place in sorted(self.broken)]
        remarks += [f"{count} {WARNINGS[key]}" for key, count in self.warnings.items() if count]
        if self.left_out_turns:
            remarks.append(f"{self.left_out_turns} turns of kept records gave no row: too short, or beyond --seq-length")
        return remarks
