"""Building packed batches: tokens and anchors first, the verifier's states when a source has answered."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from speculators.batch import PackedBatch
from speculators.data.anchors import AnchorBudget, sample_anchors
from speculators.data.rows import Row, RowDataset
from speculators.errors import DataError
from speculators.layout import PAD_DOCUMENT

__all__ = ["CutRows", "StatesOfRow", "attach_states", "batch_rows", "build_batch"]


class StatesOfRow(Protocol):
    """What :func:`attach_states` needs of a source's answer for one row of T tokens."""

    @property
    def row_id(self) -> int: ...

    @property
    def token_ids(self) -> Tensor:
        """``[T]``"""
        ...

    @property
    def features(self) -> Tensor:
        """``[T, M, H]``"""
        ...

    @property
    def final(self) -> Tensor:
        """``[T, H]``"""
        ...


class CutRows(Sequence[Row]):
    """A data set whose rows end after ``seq_len`` tokens: all that a training reads of them."""

    def __init__(self, dataset: RowDataset, seq_len: int) -> None:
        self._dataset = dataset
        self._seq_len = seq_len
        self.lengths = np.minimum(dataset.lengths, seq_len)

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[place] for place in range(*index.indices(len(self)))]
        return _cut(self._dataset[index], self._seq_len)


def batch_rows(dataset: Sequence[Row], row_ids: Sequence[int], seq_len: int) -> list[Row]:
    """The rows of a packed row, one longer than ``seq_len`` cut to it: what a hidden-state source is to answer."""
    return [_cut(dataset[row_id], seq_len) for row_id in row_ids]


def _cut(row: Row, seq_len: int) -> Row:
    return Row(row.row_id, row.input_ids[:seq_len], row.loss_mask[:seq_len])


def build_batch(
    dataset: Sequence[Row],
    row_ids: Sequence[int],
    seq_len: int,
    max_anchors: int,
    per: AnchorBudget,
    seed: int,
    epoch: int,
    num_depths: int,
    *,
    pad: bool = False,
    first_anchor: int = 0,
) -> PackedBatch:
    """Pack rows end to end and draw their anchors; no verifier states yet.

    :param dataset: indexed by row id, such as a :class:`~speculators.data.rows.RowDataset`.
    :param row_ids: documents of the packed row; none gives :meth:`PackedBatch.empty`.
    :param seq_len: longest row and longest packed row, in tokens.
    :param max_anchors: most anchors per packed row or per document, as ``per`` says.
    :param num_depths: N, predicted tokens per block.
    :param first_anchor: as of :func:`~speculators.layout.anchor_candidates`.
    :param pad: fill up to ``seq_len`` with padding, for engines that want one shape.
    :raises ValueError: when the rows do not fit in ``seq_len``.
    """
    if not row_ids:
        return PackedBatch.empty()
    rows = batch_rows(dataset, row_ids, seq_len)
    lengths = [len(row) for row in rows]
    total = sum(lengths)
    if total > seq_len:
        raise ValueError(f"rows {tuple(row_ids)} have {total} tokens, more than the {seq_len} of a packed row")
    size = seq_len if pad else total
    input_ids, mask = np.zeros(size, np.int64), np.zeros(size, bool)
    documents, positions = np.full(size, PAD_DOCUMENT, np.int64), np.zeros(size, np.int64)
    start = 0
    for document, row in enumerate(rows):
        span = slice(start, start + len(row))
        input_ids[span], mask[span] = row.input_ids, row.loss_mask
        documents[span], positions[span] = document, np.arange(len(row))
        start += len(row)
    loss_mask, document_ids = torch.from_numpy(mask), torch.from_numpy(documents)
    anchors, coverage = sample_anchors(
        row_ids, loss_mask, document_ids, max_anchors, per, seed, epoch, num_depths, first_anchor
    )
    return PackedBatch(
        input_ids=torch.from_numpy(input_ids),
        loss_mask=loss_mask,
        document_ids=document_ids,
        position_ids=torch.from_numpy(positions),
        row_ids=tuple(int(row_id) for row_id in row_ids),
        anchors=anchors,
        supervised=coverage.supervised,
        covered=coverage.covered,
        num_depths=num_depths,
    )


def attach_states(
    batch: PackedBatch,
    states: Sequence[StatesOfRow],
    empty_shape: tuple[int, int] | None = None,
    *,
    check_finite: bool = True,
) -> PackedBatch:
    """The batch with its rows' verifier states, each row's ids compared first.

    A row that was cut takes the states of the tokens it keeps: the verifier is causal, so they are the same.

    :param states: one answer per document, in any order.
    :param empty_shape: (M, H), needed for a batch without documents only.
    :param check_finite: refuse NaN and infinity; off where the source has checked already.
    :raises DataError: when an answer is missing, is for other tokens, or is not finite.
    """
    if not batch.row_ids:
        if empty_shape is None:
            raise ValueError("a batch without documents takes its states' shape from empty_shape")
        return PackedBatch.empty(*empty_shape)
    by_row = {answer.row_id: answer for answer in states}
    features: Tensor | None = None
    final: Tensor | None = None
    start = 0
    lengths = torch.bincount(batch.document_ids[batch.document_ids != PAD_DOCUMENT], minlength=len(batch.row_ids)).tolist()
    for row_id, length in zip(batch.row_ids, lengths, strict=True):
        answer = by_row.get(row_id)
        if answer is None:
            raise DataError(f"the hidden-state source gave no states for row {row_id}; check the source")
        span = slice(start, start + length)
        _check_answer(answer, batch.input_ids[span], check_finite)
        if features is None or final is None:
            features = answer.features.new_zeros((batch.num_tokens, *answer.features.shape[1:]))
            final = answer.final.new_zeros((batch.num_tokens, *answer.final.shape[1:]))
        features[span] = answer.features[:length]
        final[span] = answer.final[:length]
        start += length
    return dataclasses.replace(batch, features=features, final_states=final)


def _check_answer(answer: StatesOfRow, ids: Tensor, check_finite: bool) -> None:
    length = ids.shape[0]
    if not torch.equal(answer.token_ids[:length].cpu(), ids.cpu()):
        raise DataError(f"the states of row {answer.row_id} were computed for other tokens; delete them and capture again")
    if min(answer.features.shape[0], answer.final.shape[0]) < length:
        raise DataError(f"row {answer.row_id} has fewer states than tokens; delete them and capture again")
    if check_finite and not all(bool(torch.isfinite(t[:length]).all()) for t in (answer.features, answer.final)):
        raise DataError(f"the states of row {answer.row_id} are not finite; capture them again or leave the row out")
