"""What a block is trained towards: labels, previous tokens, verifier states, and which predictions count."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from speculators.batch import PackedBatch
from speculators.layout import counted_predictions, label_position, previous_position, state_position

__all__ = ["BlockTargets", "gather_block_labels", "gather_block_targets"]


@dataclass(slots=True)
class BlockTargets:
    """Targets of A blocks of N predicted tokens; column d is depth d.

    Columns that do not count hold ids and states of some token of the row: legal to look up, without meaning.
    """

    previous_ids: Tensor  #: int64 ``[A, N]``, verifier ids: what the Markov head reads
    label_ids: Tensor  #: int64 ``[A, N]``, verifier ids
    label_draft_ids: Tensor  #: int64 ``[A, N]``, -1 outside the draft vocabulary
    states: Tensor  #: ``[A, N, H]``, or ``[S, H]`` with ``state_index``; ready for the verifier's head (post-norm)
    counts: Tensor  #: bool ``[A, N]``
    #: int64 ``[A, N]``: row of ``states`` of each prediction. Blocks overlap, so the verifier's head runs on far fewer rows.
    state_index: Tensor | None = None

    def blocks(self, which: slice) -> BlockTargets:
        """The targets of some blocks, with the states that they need only."""
        if which == slice(None):
            return self
        if self.state_index is None:
            states, index = self.states[which], None
        else:
            used, index = self.state_index[which].unique(return_inverse=True)
            states = self.states[used]
        ids = (self.previous_ids[which], self.label_ids[which], self.label_draft_ids[which])
        return BlockTargets(*ids, states, self.counts[which], index)


def _positions(batch: PackedBatch, num_depths: int, place: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Row positions ``[A, N]``, those past the row's end brought back to its last token."""
    depths = torch.arange(num_depths, device=batch.anchors.device)
    return place(batch.anchors[:, None], depths[None, :]).clamp(max=batch.num_tokens - 1)


def gather_block_labels(
    batch: PackedBatch, num_depths: int, verifier_to_draft: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Label ids, their draft ids and the counts of a batch's blocks, all ``[A, N]``; needs no verifier states.

    :param verifier_to_draft: maps verifier ids to draft ids, -1 outside the draft vocabulary.
    """
    labels = batch.input_ids[_positions(batch, num_depths, label_position)]
    counts = counted_predictions(batch.anchors, num_depths, batch.loss_mask, batch.document_ids)
    if batch.depths is not None:
        counts = counts & (torch.arange(num_depths, device=counts.device) < batch.depths[:, None])
    return labels, verifier_to_draft(labels), counts


def gather_block_targets(
    batch: PackedBatch,
    num_depths: int,
    verifier_to_draft: Callable[[Tensor], Tensor],
    states: Tensor | None = None,
) -> BlockTargets:
    """Targets of the batch's anchors.

    :param num_depths: N, predicted tokens per block.
    :param verifier_to_draft: maps verifier ids to draft ids, -1 outside the draft vocabulary.
    :param states: the verifier's final states ``[T, H]``, ready for its head; ``batch.final_states`` when None.
    :raises ValueError: when there are no states.
    """
    if states is None:
        states = batch.final_states
    if states is None:
        raise ValueError("the batch carries no final states; attach them with speculators.data.attach_states first")
    labels, draft_labels, counts = gather_block_labels(batch, num_depths, verifier_to_draft)
    # Only the states of counted predictions are kept; the others point to row 0 of the selection.
    positions = _positions(batch, num_depths, state_position)
    needed = torch.zeros(batch.num_tokens, dtype=torch.bool, device=positions.device)
    needed[0] = True
    needed[positions[counts]] = True
    place = needed.long().cumsum(dim=0) - 1
    return BlockTargets(
        previous_ids=batch.input_ids[_positions(batch, num_depths, previous_position)],
        label_ids=labels,
        label_draft_ids=draft_labels,
        states=states[needed],
        counts=counts,
        state_index=torch.where(counts, place[positions], torch.zeros_like(positions)),
    )
