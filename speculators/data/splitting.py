"""Rows to train on and rows to validate on, with every conversation on one side."""

from __future__ import annotations

import warnings

import numpy as np

from speculators.data.rows import RowDataset
from speculators.errors import ConfigError, DataError

__all__ = ["split_rows"]


def split_rows(dataset: RowDataset, train_ratio: float) -> tuple[np.ndarray, np.ndarray]:
    """Row ids of the training split and of the validation split, each ascending.

    Conversations are taken in the order of their first rows. The first ones, as many as bring the number of training rows
    nearest to ``train_ratio`` of all, are trained on. Where the rows of a conversation stand together, as prepare-data writes
    them, these are the head and the tail of the data set; where they do not, its later rows go to the side of its first.
    A data set that does not say which conversation a row is of is cut at ``int(rows * train_ratio)``.

    :param train_ratio: share of the rows to train on, in (0, 1].
    :returns: int64 arrays; the second may be empty, at ratio 1 or when there is but one conversation.
    :raises ConfigError: for a ratio outside (0, 1].
    :raises DataError: when no row is left to train on.
    """
    if not 0 < train_ratio <= 1:
        raise ConfigError(f"the train-data ratio is {train_ratio}; choose one above 0 and at most 1")
    rows = len(dataset)
    wanted = int(rows * train_ratio)
    if not wanted:
        raise DataError(f"{rows} rows at a train-data ratio of {train_ratio} leave none to train on; add data or raise it")
    ids = np.arange(rows, dtype=np.int64)
    if wanted == rows:
        return ids, ids[:0]
    conversations = dataset.conversations
    if conversations is None:
        if _may_hold_several_rows_of_one(dataset):
            warnings.warn(
                f"the data set in {dataset.path} does not say which conversation a row is of, so turns of one conversation may "
                "be both trained on and validated on; make it again with prepare-data to keep them apart",
                UserWarning,
                stacklevel=2,
            )
        return ids[:wanted], ids[wanted:]
    trained = _first_conversations(conversations, wanted)
    return ids[trained], ids[~trained]


def _first_conversations(conversations: np.ndarray, wanted: int) -> np.ndarray:
    """Which rows are of the first conversations, as many of these as have nearest to ``wanted`` rows together; bool ``[rows]``.

    Of two that are as near the smaller is taken, and neither side is left empty unless there is but one conversation.
    """
    _, first, of_row, sizes = np.unique(conversations, return_index=True, return_inverse=True, return_counts=True)
    order = np.argsort(first)
    together = np.cumsum(sizes[order])
    distance = np.abs(together[:-1] - wanted)
    count = int(np.argmin(distance)) + 1 if len(distance) else 1
    chosen = np.zeros(len(order), dtype=bool)
    chosen[order[:count]] = True
    return chosen[of_row]


def _may_hold_several_rows_of_one(dataset: RowDataset) -> bool:
    """Rows in memory stand for conversations, and the counts of older data sets of ours say when each record gave one row."""
    counts = dataset.manifest.counts
    return dataset.path is not None and counts.get("kept", 0) + counts.get("kept_cut", 0) != len(dataset)
