"""Drafting with chain models: EAGLE-3, P-EAGLE, MTP.

Per request and layer, the keys and values of the context's pairs are cached, and the newest state, which waits for its token:
the pair of token t needs the verifier's state before it. Slots of a chain are never cached, so there is nothing to undo after a
rejection. Shape letters: t context tokens, K slots, H hidden size, g key/value heads, c head size.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from speculators.layout import sees_context
from speculators.models.attention import attend, causal_attention
from speculators.models.drafter import Draft, DraftBuilder, RequestsDrafter
from speculators.models.rows_cache import RowsCache
from speculators.sampling import SamplingParams

if TYPE_CHECKING:
    from speculators.models.chain import ChainModel
    from speculators.models.layers import Attend

__all__ = ["ChainDrafter"]


@dataclass(slots=True)
class _Request:
    """One request's context: pairs of tokens 1 .. length - 1, and the state of the last token."""

    length: int = 0
    pairs: RowsCache = field(default_factory=RowsCache)
    newest_state: Tensor | None = None  #: g ``[1, H]``


class ChainDrafter(RequestsDrafter[_Request]):
    """A :class:`~speculators.models.drafter.Drafter` over a chain-drafting model; a slot sees only those before it, so that
    ``full_block`` changes nothing.

    :param model: on its device and in its dtype; put into evaluation mode.
    """

    model: ChainModel

    def __init__(self, model: ChainModel) -> None:
        super().__init__(model, _Request)

    def _extend(self, request: _Request, ids: Tensor, states: Tensor) -> None:
        model = self.model
        combined = model.combine(states.to(model.embed_tokens.weight.dtype))
        first = request.length
        known = combined if request.newest_state is None else torch.cat([request.newest_state, combined])
        if request.newest_state is None:
            ids = ids[1:]
            first = 1
        request.newest_state = combined[-1:]
        request.length = first + ids.shape[0]
        if not ids.shape[0]:
            return
        positions = torch.arange(first, request.length, device=self.device)
        rotation = model.rotary(positions, combined.dtype)
        added: list[tuple[Tensor, Tensor]] = []

        def attend_pairs(q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
            added.append((k, v))
            if request.pairs.length:
                before = request.pairs.rows(layer)
                k, v = torch.cat([before[0], k]), torch.cat([before[1], v])
            one_document = torch.zeros(k.shape[0], dtype=torch.long, device=k.device)
            return causal_attention(q, k, v, one_document, window=model.pair_windows[layer])

        attends: list[Attend] = [partial(attend_pairs, layer=index) for index in range(len(model.layers))]
        model.run_layers(known[:-1], model.embed_tokens(ids), rotation, attends)
        request.pairs.append(added)

    def _propose(
        self,
        request: _Request,
        anchor: int,
        n: int,
        num_slots: int,
        sampling: SamplingParams,
        generator: torch.Generator | None,
    ) -> Draft:
        """:raises ValueError: the request has no context."""
        model = self.model
        if request.newest_state is None:
            raise ValueError("a chain drafts from the verifier's state before the anchor; extend the context first")
        slots: list[tuple[Tensor, Tensor]] = []
        state, token = request.newest_state, torch.tensor([anchor], device=self.device)
        built = DraftBuilder(model, sampling, generator)
        if not model.layout.recurrent:
            hidden = self._run(request, *self._parallel_inputs(state, token, n), 0, slots)
            for row in model.heads.lm_head(model.final_norm(hidden[0])).split(1):
                built.add(row)
            return built.finish()
        for slot in range(n):
            hidden = self._run(request, state[None], model.embed_tokens(token)[None], slot, slots)[0]
            normed = model.final_norm(hidden)
            token = built.add(model.heads.lm_head(normed))
            state = model.handed_on(hidden, normed)
        return built.finish()

    def _parallel_inputs(self, state: Tensor, anchor: Tensor, n: int) -> tuple[Tensor, Tensor]:
        """States and embeddings ``[1, n, H]`` of all slots of a parallel chain."""
        embed = self.model.embed_tokens(anchor)
        if n > 1:
            masked_state, masked_embed = self.model.masked_slot()
            state = torch.cat([state, masked_state.expand(n - 1, -1)])
            embed = torch.cat([embed, masked_embed.expand(n - 1, -1)])
        return state[None], embed[None]

    def _run(
        self, request: _Request, states: Tensor, embeds: Tensor, first_slot: int, slots: list[tuple[Tensor, Tensor]]
    ) -> Tensor:
        """What the last layer gives for slots ``[1, K, H]`` from ``first_slot`` on.

        :param slots: each layer's keys and values of the slots before; takes up these.
        """
        model, device = self.model, self.device
        own = torch.arange(first_slot, first_slot + states.shape[1], device=device)
        rotation = model.rotary(request.length + own[None], states.dtype)
        # Pairs of tokens 1 .. length - 1, which the anchor at `length` sees but for its window.
        positions = torch.arange(1, request.length, device=device)
        anchor = torch.full((1, 1, 1), request.length, device=device)

        def attend_slots(q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
            if layer < len(slots):
                slots[layer] = (torch.cat([slots[layer][0], k], dim=1), torch.cat([slots[layer][1], v], dim=1))
            else:
                slots.append((k, v))
            window, visible = model.windows[layer], None
            if window is not None:
                reference = model.config.sliding_window_reference
                visible = sees_context(positions, anchor, own[None, :, None], window, reference)
            empty = (k.new_zeros(0, *k.shape[2:]), v.new_zeros(0, *v.shape[2:]))
            before = request.pairs.rows(layer) if request.pairs.length else empty
            return attend(q, *before, *slots[layer], visible=visible, causal_block=True)

        attends: list[Attend] = [partial(attend_slots, layer=index) for index in range(len(model.layers))]
        return model.run_layers(states, embeds, rotation, attends)
