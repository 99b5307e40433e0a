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
from speculators.models.drafter import Draft, DraftBuilder
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


class ChainDrafter:
    """A :class:`~speculators.models.drafter.Drafter` over a chain-drafting model.

    :param model: on its device and in its dtype; put into evaluation mode.
    """

    def __init__(self, model: ChainModel) -> None:
        self.model = model.eval()
        self.max_draft_tokens = model.layout.most_draft_tokens
        self.layer_ids = tuple(model.target_layer_ids)
        self._requests: list[_Request] = []

    @property
    def verifier_ids(self) -> Tensor | None:
        if not self.model.reduced_vocabulary:
            return None
        return self.model.draft_to_verifier(torch.arange(self.model.draft_vocab_size, device=self._device))

    @property
    def _device(self) -> torch.device:
        return self.model.embed_tokens.weight.device

    def start(self, num_requests: int) -> None:
        self._requests = [_Request() for _ in range(num_requests)]

    def context_length(self, request: int) -> int:
        return self._requests[request].length

    def drop(self, request: int) -> None:
        self._requests[request] = _Request()

    @torch.no_grad()
    def extend(self, token_ids: list[Tensor], features: list[Tensor]) -> None:
        """Append tokens with the verifier's states at them.

        :raises ValueError: lists or lengths do not match the requests.
        """
        if not len(token_ids) == len(features) == len(self._requests):
            raise ValueError(
                f"expected {len(self._requests)} requests, got {len(token_ids)} token lists and {len(features)} features"
            )
        for request, ids, states in zip(self._requests, token_ids, features, strict=True):
            if ids.shape[0] != states.shape[0]:
                raise ValueError(f"{ids.shape[0]} tokens came with features of {states.shape[0]}")
            if ids.shape[0]:
                self._extend(request, ids.to(self._device), states.to(self._device))

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
        positions = torch.arange(first, request.length, device=self._device)
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

    @torch.no_grad()
    def propose(
        self,
        anchors: list[int],
        n: int,
        sampling: SamplingParams,
        generator: torch.Generator | None = None,
        full_block: bool = False,
    ) -> list[Draft]:
        """Draft n tokens per request. ``full_block`` changes nothing: a slot sees only those before it.

        :raises ValueError: n is outside the layout's range, a list has the wrong length, or a request has no context.
        """
        if len(anchors) != len(self._requests):
            raise ValueError(f"expected {len(self._requests)} anchors, got {len(anchors)}")
        self.model.layout.query_slots(n)
        return [self._propose(request, anchor, n, sampling, generator) for request, anchor in zip(self._requests, anchors)]

    def _propose(
        self, request: _Request, anchor: int, n: int, sampling: SamplingParams, generator: torch.Generator | None
    ) -> Draft:
        model = self.model
        if request.newest_state is None:
            raise ValueError("a chain drafts from the verifier's state before the anchor; extend the context first")
        slots: list[tuple[Tensor, Tensor]] = []
        state, token = request.newest_state, torch.tensor([anchor], device=self._device)
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
        model, device = self.model, self._device
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
