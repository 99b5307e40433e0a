"""Drafting with DFlash and DSpark models: one parallel pass per block, then one cheap step per token.

Per request and layer, the rotated keys and values of the context are cached (never those of a block), so that a round costs
the new context rows and one block. Shape letters: t context tokens, K slots, N predicted tokens, H hidden size, D draft
vocabulary, g key/value heads, c head size.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from speculators.layout import sees_context
from speculators.models.attention import attend
from speculators.models.backbone import AttendBlocks
from speculators.models.drafter import Draft, DraftBuilder, RequestsDrafter
from speculators.models.rows_cache import RowsCache
from speculators.sampling import SamplingParams

if TYPE_CHECKING:
    from speculators.models.dflash import DFlashDraftModel

__all__ = ["BlockDrafter"]


class BlockDrafter(RequestsDrafter[RowsCache]):
    """A :class:`~speculators.models.drafter.Drafter` over a block-drafting model, which reads the features of tokens only.

    :param model: on its device and in its dtype; put into evaluation mode.
    :param markov: whether the Markov head corrects the logits.
    """

    model: DFlashDraftModel

    def __init__(self, model: DFlashDraftModel, *, markov: bool = True) -> None:
        super().__init__(model, RowsCache)
        self.markov = markov
        # Rows that no layer can see any more are skipped; None if a layer sees everything.
        windows = [layer.window for layer in model.windows]
        self._reach = None if None in windows else max(window for window in windows if window is not None)

    def _extend(self, context: RowsCache, ids: Tensor, states: Tensor) -> None:
        positions = torch.arange(context.length, context.length + ids.shape[0], device=self.device)
        context.append(self.model.context_keys_values(self.model.context(states), positions))

    def block_hidden(self, request: int, anchor: int, num_slots: int) -> Tensor:
        """Post-norm states ``[N, H]`` of the predicting slots of a block that starts at the request's anchor."""
        return self.model.predicting(self._slot_states(self._contexts[request], anchor, num_slots))[0]

    def _slot_states(self, context: RowsCache, anchor: int, num_slots: int) -> Tensor:
        """Post-norm states ``[1, K, H]`` of all slots."""
        model = self.model
        device = model.norm.weight.device
        position = context.length
        start = 0 if self._reach is None else max(0, position - self._reach)
        if not context.keys:
            empty = model.context_keys_values(
                model.norm.weight.new_zeros(0, model.fc.out_features), torch.zeros(0, dtype=torch.long, device=device)
            )
            context.append(empty)
        embeds = model.embed_blocks(torch.tensor([anchor], device=device), num_slots)
        positions = torch.arange(start, position, device=device)
        anchor_position = torch.full((1, 1, 1), position, device=device)
        slots = torch.arange(num_slots, device=device)
        attend_layers: list[AttendBlocks] = []
        for window in model.windows:
            visible = None
            if window.window is not None:
                visible = sees_context(positions, anchor_position, slots[None, :, None], window.window, model.window_reference)
            attend_layers.append(partial(attend, visible=visible, causal_block=window.causal_block))
        rows = [context.rows(layer, start) for layer in range(len(model.layers))]
        return model.run_cached(embeds, position, attend_layers, rows)

    def _propose(
        self,
        context: RowsCache,
        anchor: int,
        n: int,
        num_slots: int,
        sampling: SamplingParams,
        generator: torch.Generator | None,
    ) -> Draft:
        model = self.model
        slot_states = self._slot_states(context, anchor, num_slots)
        heads = model.heads_of(slot_states, torch.tensor([anchor], device=slot_states.device))
        hidden = model.predicting(slot_states)[0, :n]  # [n, H]
        base = heads.lm_head(hidden)  # [n, D]
        markov: Any = heads.markov if self.markov else None
        state = None if markov is None else markov.start(1) if heads.markov_state is None else heads.markov_state
        previous = torch.tensor([anchor], device=hidden.device)
        built, before = DraftBuilder(model, sampling, generator), []
        for depth in range(n):
            logits = base[depth : depth + 1]
            if markov is not None:
                code, state = markov.step(hidden[depth : depth + 1], previous, state)
                logits = logits + markov.markov_w2(code)
            before.append(previous)
            previous = built.add(logits)
        confidence = heads.confidence_logits(hidden, torch.cat(before))
        return built.finish(None if confidence is None else confidence.sigmoid())
