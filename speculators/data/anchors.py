"""Drawing anchors: a pure function of (seed, epoch, row id), whatever the packing, the rank or the order of work."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from speculators.batch import PackedBatch
from speculators.errors import ConfigError
from speculators.layout import PAD_DOCUMENT, anchor_candidates, counted_predictions, label_position

__all__ = ["AnchorBudget", "AnchorCoverage", "DepthDrop", "drop_depths", "sample_anchors"]

#: What ``max_anchors`` bounds: the anchors of a packed row (upstream), or of each document in it.
AnchorBudget = Literal["row", "document"]

#: First word of the random stream of anchors; see :mod:`speculators.data.packing`.
ANCHOR_STREAM = 0xA7C0
#: The same, of the depths that an anchor keeps.
DEPTH_STREAM = 0xDE97


@dataclass(frozen=True, slots=True)
class AnchorCoverage:
    """How much of the supervised text the drawn anchors teach; add both numbers up before dividing."""

    covered: int  #: supervised tokens that some counted prediction predicts
    supervised: int  #: supervised tokens that some block could predict (their predecessor is supervised too)


def sample_anchors(
    row_ids: Sequence[int],
    loss_mask: Tensor,
    document_ids: Tensor,
    max_anchors: int,
    per: AnchorBudget,
    seed: int,
    epoch: int,
    num_depths: int,
    first_anchor: int = 0,
) -> tuple[Tensor, AnchorCoverage]:
    """Draw anchors uniformly without replacement among the candidates of a packed row.

    Every position of every document has a random key drawn from (seed, epoch, row id) alone; the candidates with the
    smallest keys win. So with the budget per document a row's anchors do not depend on what it is packed with, and a row
    that is cut keeps the keys of the tokens it keeps.

    :param row_ids: data-set row of document 0, 1, ...
    :param loss_mask: bool ``[T]``.
    :param document_ids: int ``[T]``, ascending, padding last.
    :param num_depths: N, predicted tokens per block, for the coverage.
    :param first_anchor: as of :func:`~speculators.layout.anchor_candidates`.
    :returns: anchors int64 ``[A]`` ascending, and their coverage.
    :raises ConfigError: for ``max_anchors`` below 1 or an unknown budget.
    """
    if max_anchors < 1:
        raise ConfigError(f"max_anchors is {max_anchors}; choose at least 1")
    if per not in ("row", "document"):
        raise ConfigError(f"anchors are budgeted per {per!r}; choose row or document")
    candidates = anchor_candidates(loss_mask, document_ids, first_anchor)
    documents = document_ids.numpy()
    keys = _token_keys(ANCHOR_STREAM, row_ids, documents, seed, epoch)
    positions = np.flatnonzero(candidates.numpy())
    groups = [positions] if per == "row" else [positions[documents[positions] == d] for d in range(len(row_ids))]
    chosen = [group[np.argsort(keys[group], kind="stable")[:max_anchors]] for group in groups]
    anchors = torch.from_numpy(np.sort(np.concatenate([np.zeros(0, np.int64), *chosen])).astype(np.int64))
    return anchors, _coverage(anchors, len(positions), num_depths, loss_mask, document_ids)


def _token_keys(stream: int, row_ids: Sequence[int], documents: np.ndarray, seed: int, epoch: int) -> np.ndarray:
    """A random number in [0, 1) of every token of a packed row ``[T]``, drawn from (seed, epoch, row id) alone."""
    keys = np.zeros(len(documents))
    inside = documents[documents != PAD_DOCUMENT]
    for document, row_id in enumerate(row_ids):
        start, stop = np.searchsorted(inside, (document, document + 1))
        keys[start:stop] = np.random.default_rng([stream, seed, epoch, row_id]).random(stop - start)
    return keys


@dataclass(frozen=True, slots=True)
class DepthDrop:
    """How P-EAGLE thins out deep slots: depth d is kept with probability max(ratio ** d, least), if all before it are."""

    ratio: float
    least: float


def drop_depths(batch: PackedBatch, drop: DepthDrop, seed: int, epoch: int) -> PackedBatch:
    """The batch with ``depths`` ``[A]`` drawn: how many predictions of every anchor are trained.

    One number per anchor decides for all its depths, so what is kept is a prefix; it is a function of (seed, epoch, row id) and
    the anchor's place in its row.
    """
    keys = _token_keys(DEPTH_STREAM, batch.row_ids, batch.document_ids.numpy(), seed, epoch)[batch.anchors.numpy()]
    depths = np.arange(batch.num_depths or 1)
    kept = np.maximum(drop.ratio**depths, drop.least)
    kept[0] = 1.0
    return dataclasses.replace(batch, depths=torch.from_numpy((keys[:, None] < kept).sum(axis=1)))


def _coverage(anchors: Tensor, num_candidates: int, num_depths: int, loss_mask: Tensor, document_ids: Tensor) -> AnchorCoverage:
    counts = counted_predictions(anchors, num_depths, loss_mask, document_ids)
    labels = label_position(anchors[:, None], torch.arange(num_depths)[None, :])
    # A candidate's successor is the one label that it can predict at depth 0: as many labels as candidates.
    return AnchorCoverage(covered=int(labels[counts].unique().numel()), supervised=num_candidates)
