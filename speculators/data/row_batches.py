"""Rows as flat arrays: single rows, and many of them at once for writing and for passes over a whole data set."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from speculators.errors import DataError

__all__ = ["ORIGIN", "BATCH_TOKENS", "Row", "RowBatch", "regrouped"]

#: Columns that say where a row comes from, with their dtypes on disk.
ORIGIN = {"conversation": np.int64, "source": np.int32, "record": np.int64, "turn": np.int32}

#: Tokens of a record batch on disk, which is also what a pass over the rows holds at a time.
BATCH_TOKENS = 1 << 18


@dataclass(slots=True, eq=False)
class Row:
    """One rendered conversation of T tokens."""

    row_id: int
    input_ids: np.ndarray  #: int64 ``[T]``, verifier ids
    loss_mask: np.ndarray  #: bool ``[T]``, true on supervised tokens

    def __post_init__(self) -> None:
        if self.input_ids.shape != self.loss_mask.shape or self.input_ids.ndim != 1:
            shapes = f"{self.input_ids.shape} ids and {self.loss_mask.shape} mask values"
            raise DataError(f"row {self.row_id} has {shapes}; give every token one id and one mask value")

    def __len__(self) -> int:
        return len(self.input_ids)


@dataclass(frozen=True, slots=True, eq=False)
class RowBatch:
    """Some rows end to end: R rows of S tokens together. Where rows come from is said for all of them or for none.

    :raises DataError: when the arrays do not fit together.
    """

    input_ids: np.ndarray  #: int64 ``[S]``
    loss_mask: np.ndarray  #: bool ``[S]``
    lengths: np.ndarray  #: int64 ``[R]``, tokens of every row
    conversation: np.ndarray | None = None  #: int64 ``[R]``, the same for all rows of a conversation and for no other
    source: np.ndarray | None = None  #: int32 ``[R]``, place in the manifest's sources
    record: np.ndarray | None = None  #: int64 ``[R]``, place of the record in its source
    turn: np.ndarray | None = None  #: int32 ``[R]``, index of the only supervised message; -1 for all of them

    def __post_init__(self) -> None:
        tokens = int(self.lengths.sum())
        if self.input_ids.shape != (tokens,) or self.loss_mask.shape != (tokens,):
            shapes = f"{self.input_ids.shape} ids and {self.loss_mask.shape} mask values"
            raise DataError(f"a batch of rows of {tokens} tokens has {shapes}; give every token one id and one mask value")
        for name in ORIGIN:
            column = getattr(self, name)
            if column is not None and column.shape != self.lengths.shape:
                raise DataError(f"a batch of {len(self)} rows has a column {name} of {column.shape}; give one value a row")

    def __len__(self) -> int:
        return len(self.lengths)

    @classmethod
    def of(cls, rows: Sequence[Row], conversations: Sequence[int] | np.ndarray | None = None) -> RowBatch:
        """The rows end to end.

        :param conversations: which conversation each row is of.
        """
        ids = np.concatenate([np.zeros(0, np.int64), *(row.input_ids for row in rows)]).astype(np.int64, copy=False)
        mask = np.concatenate([np.zeros(0, bool), *(row.loss_mask for row in rows)]).astype(bool, copy=False)
        lengths = np.fromiter((len(row) for row in rows), np.int64, len(rows))
        return cls(ids, mask, lengths, None if conversations is None else np.asarray(conversations, dtype=np.int64))

    def origin(self) -> dict[str, np.ndarray]:
        """The columns of :data:`ORIGIN` that are there."""
        return {name: column for name in ORIGIN if (column := getattr(self, name)) is not None}


def regrouped(batches: Iterable[RowBatch], tokens: int = BATCH_TOKENS) -> Iterator[RowBatch]:
    """The same rows in batches as large as ``tokens`` allows; a longer row is a batch of its own.

    What comes out does not depend on how the rows came in.

    :raises DataError: when some batches say where their rows come from and others do not.
    """
    held: list[RowBatch] = []
    room = tokens
    known: set[str] | None = None
    for batch in batches:
        if not len(batch):
            continue
        columns = set(batch.origin())
        known = columns if known is None else known
        if columns != known:
            raise DataError("some rows say which conversation they are of and others do not; give all of them or none")
        first = 0
        ends = np.cumsum(batch.lengths)
        while first < len(batch):
            before = int(ends[first - 1]) if first else 0
            stop = int(np.searchsorted(ends, before + room, side="right"))
            if stop == first and held:
                yield _joined(held)
                held, room = [], tokens
                continue
            stop = max(stop, first + 1)
            held.append(_part(batch, before, int(ends[stop - 1]), first, stop))
            room -= int(ends[stop - 1]) - before
            first = stop
            if room <= 0:
                yield _joined(held)
                held, room = [], tokens
    if held:
        yield _joined(held)


def _part(batch: RowBatch, start: int, end: int, first: int, stop: int) -> RowBatch:
    """Rows ``first`` to before ``stop``, whose tokens are ``start`` to before ``end``, as views."""
    origin = {name: column[first:stop] for name, column in batch.origin().items()}
    return RowBatch(batch.input_ids[start:end], batch.loss_mask[start:end], batch.lengths[first:stop], **origin)


def _joined(batches: list[RowBatch]) -> RowBatch:
    if len(batches) == 1:
        return batches[0]
    origin = {name: np.concatenate([getattr(batch, name) for batch in batches]) for name in batches[0].origin()}
    ids, mask, lengths = (
        np.concatenate([getattr(batch, name) for batch in batches]) for name in ("input_ids", "loss_mask", "lengths")
    )
    return RowBatch(ids, mask, lengths, **origin)
