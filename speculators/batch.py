"""One packed row of training data, as tensors without a batch dimension.

A packed row lays several documents (rows of the data set) end to end. Everything a training step needs is in it: the tokens,
which of them are supervised, where documents begin, the anchors drawn for this epoch, and - once a hidden-state source
has answered - the verifier's states. Shape letters: T tokens, A anchors, M captured layers, H hidden size.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from speculators.layout import PAD_DOCUMENT

__all__ = ["PackedBatch"]


@dataclass(slots=True)
class PackedBatch:
    """A packed row; see the module's docstring for the letters.

    ``supervised`` and ``covered`` are the two halves of the anchor coverage: supervised tokens that some anchor could
    predict, and how many of them the drawn anchors do predict.
    """

    input_ids: Tensor  #: int64 ``[T]``, verifier ids
    loss_mask: Tensor  #: bool ``[T]``, true on supervised tokens
    document_ids: Tensor  #: int64 ``[T]``, 0, 1, ... in row order; :data:`~speculators.layout.PAD_DOCUMENT` on padding
    position_ids: Tensor  #: int64 ``[T]``, restarting at 0 in every document
    row_ids: tuple[int, ...]  #: data-set row of document 0, 1, ...
    anchors: Tensor  #: int64 ``[A]``, ascending positions in the packed row
    features: Tensor | None = None  #: ``[T, M, H]``, captured verifier states in the order of the source's layer ids
    final_states: Tensor | None = None  #: ``[T, H]``, the verifier's last state (pre- or post-norm as the source says)
    supervised: int = 0  #: supervised tokens that a block can predict
    covered: int = 0  #: those that a counted prediction of ``anchors`` predicts
    num_depths: int | None = None  #: tokens to predict per block, from depth 0 on; as many as the layout has when None
    depths: Tensor | None = None  #: int64 ``[A]``, predictions that count of every anchor, from depth 0 on; None: all

    @property
    def num_tokens(self) -> int:
        """T, padding included."""
        return self.input_ids.shape[0]

    @property
    def num_documents(self) -> int:
        return len(self.row_ids)

    @property
    def anchor_positions(self) -> Tensor:
        """Position ids of the anchors, ``[A]``."""
        return self.position_ids[self.anchors]

    @property
    def anchor_ids(self) -> Tensor:
        """Tokens at the anchors, ``[A]``, verifier ids."""
        return self.input_ids[self.anchors]

    def to(self, device: torch.device | str, *, dtype: torch.dtype | None = None, non_blocking: bool = False) -> PackedBatch:
        """The same row on ``device``; ``dtype``, if given, is that of the verifier's states."""

        def moved(tensor: Tensor) -> Tensor:
            return tensor.to(device=device, non_blocking=non_blocking)

        def moved_states(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor.to(device=device, dtype=dtype, non_blocking=non_blocking)

        return dataclasses.replace(
            self,
            input_ids=moved(self.input_ids),
            loss_mask=moved(self.loss_mask),
            document_ids=moved(self.document_ids),
            position_ids=moved(self.position_ids),
            anchors=moved(self.anchors),
            depths=None if self.depths is None else moved(self.depths),
            features=moved_states(self.features),
            final_states=moved_states(self.final_states),
        )

    @classmethod
    def empty(cls, num_layers: int | None = None, hidden_size: int | None = None) -> PackedBatch:
        """A row of one padding token without documents or anchors: fills a slot that the data cannot, at zero loss.

        With ``num_layers`` (M) and ``hidden_size`` (H) it carries zero states.
        """
        batch = cls(
            input_ids=torch.zeros(1, dtype=torch.long),
            loss_mask=torch.zeros(1, dtype=torch.bool),
            document_ids=torch.full((1,), PAD_DOCUMENT, dtype=torch.long),
            position_ids=torch.zeros(1, dtype=torch.long),
            row_ids=(),
            anchors=torch.zeros(0, dtype=torch.long),
        )
        if num_layers is not None and hidden_size is not None:
            batch.features = torch.zeros(1, num_layers, hidden_size)
            batch.final_states = torch.zeros(1, hidden_size)
        return batch

    @classmethod
    def filler(cls, block_size: int, num_layers: int, hidden_size: int) -> PackedBatch:
        """A made-up document with one anchor before a whole block, with zero states: a process that has no anchor in a step
        runs it through the draft to have a gradient of every weight, and takes its loss times 0.

        :param block_size: K.
        :param num_layers: M; ``hidden_size``: H.
        """
        length = block_size + 2
        return cls(
            input_ids=torch.zeros(length, dtype=torch.long),
            loss_mask=torch.ones(length, dtype=torch.bool),
            document_ids=torch.zeros(length, dtype=torch.long),
            position_ids=torch.arange(length),
            row_ids=(0,),
            # Not at the document's first token: the anchor's block must see context.
            anchors=torch.ones(1, dtype=torch.long),
            features=torch.zeros(length, num_layers, hidden_size),
            final_states=torch.zeros(length, hidden_size),
        )
