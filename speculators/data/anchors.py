"""Drawing anchors: a pure function of (seed, epoch, row id), whatever the packing, the rank or the order of work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from speculators.errors import ConfigError
from speculators.layout import PAD_DOCUMENT, anchor_candidates, counted_predictions, label_position

__all__ = ["AnchorBudget", "AnchorCoverage", "sample_anchors"]

#: What ``max_anchors`` bounds: the anchors of a packed row (upstream), or of each document in it.
AnchorBudget = Literal["row", "document"]

#: First word of the random stream of anchors; see :mod:`speculators.data.packing`.
ANCHOR_STREAM = 0xA7C0


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
) -> tuple[Tensor, AnchorCoverage]:
    """Draw anchors uniformly without replacement among the candidates of a packed row.

    Every position of every document has a random key drawn from (seed, epoch, row id) alone; the candidates with the
    smallest keys win. So with the budget per document a row's anchors do not depend on what it is packed with, and a row
    that is cut keeps the keys of the tokens it keeps.

    :param row_ids: data-set row of document 0, 1, ...
    :param loss_mask: bool ``[T]``.
    :param document_ids: int ``[T]``, ascending, padding last.
    :param num_depths: N, predicted tokens per block, for the coverage.
    :returns: anchors int64 ``[A]`` ascending, and their coverage.
    :raises ConfigError: for ``max_anchors`` below 1 or an unknown budget.
    """
    if max_anchors < 1:
        raise ConfigError(f"max_anchors is {max_anchors}; choose at least 1")
    if per not in ("row", "document"):
        raise ConfigError(f"anchors are budgeted per {per!r}; choose row or document")
    candidates = anchor_candidates(loss_mask, document_ids)
    documents = document_ids.numpy()
    keys = np.zeros(len(documents))
    for document, row_id in enumerate(row_ids):
        start, stop = np.searchsorted(documents[documents != PAD_DOCUMENT], (document, document + 1))
        keys[start:stop] = np.random.default_rng([ANCHOR_STREAM, seed, epoch, row_id]).random(stop - start)
    positions = np.flatnonzero(candidates.numpy())
    groups = [positions] if per == "row" else [positions[documents[positions] == d] for d in range(len(row_ids))]
    chosen = [group[np.argsort(keys[group], kind="stable")[:max_anchors]] for group in groups]
    anchors = torch.from_numpy(np.sort(np.concatenate([np.zeros(0, np.int64), *chosen])).astype(np.int64))
    return anchors, _coverage(anchors, len(positions), num_depths, loss_mask, document_ids)


def _coverage(anchors: Tensor, num_candidates: int, num_depths: int, loss_mask: Tensor, document_ids: Tensor) -> AnchorCoverage:
    counts = counted_predictions(anchors, num_depths, loss_mask, document_ids)
    labels = label_position(anchors[:, None], torch.arange(num_depths)[None, :])
    # A candidate's successor is the one label that it can predict at depth 0: as many labels as candidates.
    return AnchorCoverage(covered=int(labels[counts].unique().numel()), supervised=num_candidates)
