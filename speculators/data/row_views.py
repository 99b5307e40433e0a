"""One row as it is shown: its pieces of text, what of them is supervised, and where the row comes from."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from speculators.data.row_checks import spans_of
from speculators.data.rows import RowDataset
from speculators.data.token_text import Piece, TokenTexts, shown_ranges, visible

__all__ = ["RowView", "Stretch", "view_row"]


@dataclass(frozen=True, slots=True)
class Stretch:
    """Pieces that follow one another, and how many tokens are left out before them."""

    pieces: tuple[Piece, ...]
    left_out: int


@dataclass(frozen=True, slots=True, eq=False)
class RowView:
    """A row of T tokens, cut to what is shown."""

    row_id: int
    input_ids: np.ndarray  #: int64 ``[T]``
    loss_mask: np.ndarray  #: bool ``[T]``
    ends: frozenset[int]  #: ids that end a turn
    stretches: tuple[Stretch, ...]
    left_out: int  #: tokens after the last stretch
    source: str | None  #: name, fit to be printed; None when not known
    record: int | None
    conversation: int | None
    turn: int | None  #: index of the only supervised message; -1 for all of them

    @property
    def supervised(self) -> int:
        return int(self.loss_mask.sum())

    def is_supervised(self, piece: Piece) -> bool:
        return bool(self.loss_mask[piece.start])

    def ends_turn(self, piece: Piece) -> bool:
        """Whether it is a supervised token that ends a turn."""
        return piece.count == 1 and self.is_supervised(piece) and int(self.input_ids[piece.start]) in self.ends

    def facts(self) -> list[str]:
        """What stands above a row: where it comes from, and how much of it is supervised."""
        facts = [] if self.source is None else [self.source]
        if self.record is not None:
            facts.append(f"record {self.record}")
        if self.conversation is not None:
            facts.append(f"conversation {self.conversation}")
        if self.turn is not None:
            facts.append("all turns" if self.turn < 0 else f"message {self.turn}")
        length = len(self.input_ids)
        share = f"{100 * self.supervised / length:.1f} %" if length else "none"
        return [*facts, f"{length:,} tokens", f"{self.supervised:,} supervised ({share})"]


def view_row(dataset: RowDataset, row_id: int, texts: TokenTexts, ends: Collection[int] = (), limit: int = 0) -> RowView:
    """Row ``row_id`` ready to be drawn.

    :param ends: ids that end a turn.
    :param limit: most tokens to show, about; 0 for all of them. The middle of long context and long answers goes first.
    :raises IndexError: when there is no such row.
    """
    row = dataset.row(row_id)
    ids, mask = np.asarray(row.input_ids), np.asarray(row.loss_mask)
    pieces = _pieces(ids, mask, texts)
    stretches, shown = [], 0
    for start, stop in shown_ranges(np.unique(spans_of(mask)).tolist(), len(ids), limit):
        part = tuple(piece for piece in pieces if start <= piece.start < stop)
        if part:  # a character of several tokens is shown whole, or not at all
            stretches.append(Stretch(part, part[0].start - shown))
            shown = part[-1].stop
    origin = dataset.origin(row_id)
    names = [source.name for source in dataset.manifest.sources]
    known = origin.source is not None and 0 <= origin.source < len(names)
    return RowView(
        row_id=row_id,
        input_ids=ids,
        loss_mask=mask,
        ends=frozenset(ends),
        stretches=tuple(stretches),
        left_out=len(ids) - shown,
        source=visible(names[origin.source or 0]).replace("\n", "") if known else None,
        record=origin.record,
        conversation=origin.conversation,
        turn=origin.turn,
    )


def _pieces(ids: np.ndarray, mask: np.ndarray, texts: TokenTexts) -> list[Piece]:
    """Pieces of a row; a character that the mask cuts in two is shown in parts."""
    pieces: list[Piece] = []
    for piece in texts.pieces(ids.tolist()):
        part = mask[piece.start : piece.stop]
        if piece.count == 1 or part.all() or not part.any():
            pieces.append(piece)
            continue
        for place in range(piece.start, piece.stop):
            alone = texts.pieces([int(ids[place])])[0]
            pieces.append(Piece(place, 1, alone.text, alone.marker, alone.broken))
    return pieces
