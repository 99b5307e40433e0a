"""Which rows share a packed row, in which order, and which process gets it.

The order of an epoch is planned once for the whole job and then dealt out: :func:`plan_epoch` packs rows, :func:`plan_steps`
cuts the packed rows into optimiser steps, :func:`deal` gives every process its micro-batches. Only the last of them knows
how many processes there are, so one process and two see the same steps.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

import numpy as np

from speculators.errors import DataError

__all__ = ["PackedRow", "deal", "packing_waste", "plan_epoch", "plan_steps"]

#: Row ids that are laid end to end in one packed row; ``()`` is an empty slot.
PackedRow = tuple[int, ...]

#: First word of the random stream of row order, so that no two uses of a seed share their random numbers.
ORDER_STREAM = 0x0E0C


def plan_epoch(
    lengths: Sequence[int] | np.ndarray,
    seq_len: int,
    seed: int,
    epoch: int,
    row_ids: Sequence[int] | np.ndarray | None = None,
    *,
    shuffle: bool = True,
) -> list[PackedRow]:
    """Packed rows of an epoch, a pure function of the arguments.

    Rows go, longest first, into the fullest packed row that still has room; rows of equal length change places from epoch
    to epoch, and so does the order of the packed rows. The number of packed rows is the same in every epoch. Rows
    longer than ``seq_len`` count as ``seq_len`` tokens: they are cut when the batch is built.

    :param lengths: tokens of every row of the data set.
    :param row_ids: the rows to plan (a split); all when None.
    :param shuffle: off keeps packed rows in the order of their smallest row id, for validation.
    :raises DataError: without rows, or for an empty row.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    ids = np.arange(len(lengths)) if row_ids is None else np.asarray(row_ids, dtype=np.int64)
    if not len(ids):
        raise DataError("there are no rows to pack; add data or change the train-data ratio")
    sizes = np.minimum(lengths[ids], seq_len)
    if sizes.min() < 1:
        raise DataError(f"row {int(ids[np.argmin(sizes)])} has no tokens; make the data set again")
    rng = np.random.default_rng([ORDER_STREAM, seed, epoch])
    if shuffle:
        order = rng.permutation(len(ids))
        ids, sizes = ids[order], sizes[order]
    bins: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (tokens left, index into bins), ascending
    for index in np.argsort(-sizes, kind="stable").tolist():
        size = int(sizes[index])
        place = bisect_left(room, (size, -1))
        if place < len(room):
            left, target = room.pop(place)
        else:
            left, target = seq_len, len(bins)
            bins.append([])
        bins[target].append(int(ids[index]))
        if left > size:
            insort(room, (left - size, target))
    if shuffle:
        return [tuple(bins[index]) for index in rng.permutation(len(bins))]
    return sorted(tuple(sorted(packed)) for packed in bins)


def packing_waste(plan: Sequence[PackedRow], lengths: Sequence[int] | np.ndarray, seq_len: int) -> float:
    """Share of the plan's ``len(plan) * seq_len`` token places that hold no token."""
    used = sum(min(int(lengths[row]), seq_len) for packed in plan for row in packed)
    return 1 - used / (len(plan) * seq_len)


def plan_steps(packed: Sequence[PackedRow], rows_per_step: int, *, keep_tail: bool = True) -> list[list[PackedRow]]:
    """Optimiser steps of ``rows_per_step`` packed rows.

    :param rows_per_step: processes x accumulation steps x packed rows per micro-batch.
    :param keep_tail: keep a last step of fewer rows. Off drops them; which rows these are changes with the epoch.
    :raises DataError: when dropping the tail leaves no step.
    """
    steps = [list(packed[start : start + rows_per_step]) for start in range(0, len(packed), rows_per_step)]
    if not keep_tail and steps and len(steps[-1]) < rows_per_step:
        steps.pop()
        if not steps:
            raise DataError(f"{len(packed)} packed rows do not fill one step of {rows_per_step}; add data or accumulate less")
    return steps


def deal(step: Sequence[PackedRow], rank: int, world_size: int, rows_per_step: int | None = None) -> list[PackedRow]:
    """The packed rows of ``step`` that process ``rank`` works on, one per micro-batch.

    Every process gets the same number of micro-batches. Where the step has too few rows, slots are ``()``: an empty
    batch, which contributes a zero loss.

    :param rows_per_step: what the step was planned for; the step's own length when None.
    """
    slots = max(len(step), rows_per_step or 0)
    micro_batches = -(-slots // world_size)
    mine = list(step[rank::world_size])
    return mine + [()] * (micro_batches - len(mine))
