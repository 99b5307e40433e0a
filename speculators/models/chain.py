"""The chain-drafting backbone: every slot reads a token's embedding and a state, and predicts the next token.

    pair of token t     (embed(x_t), g_{t-1}), g the verifier's states combined            one per token but a document's first
    context             all pairs of the document up to the anchor's, causal, through all layers
    slot 0              the anchor's own pair
    slot k (recurrent)  (embed(x_{a+k}), what slot k - 1 gave out): EAGLE-3, MTP
    slot k (parallel)   (embed(mask), a learned state): P-EAGLE, all slots at once
    a slot sees         the context's pairs before its anchor's, and the slots of its own anchor up to itself

So a training step computes exactly what serving does: keys of the context come from true tokens and true states, and those of
later slots are only ever seen by their own anchor. Tokens of recurrent slots are the row's (teacher forcing). Shape letters: T
tokens of a packed row, P pairs, A anchors, K slots, M captured layers, H hidden size, h query heads, g key/value heads, c head
size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PretrainedConfig

from speculators.batch import PackedBatch
from speculators.layout import ChainLayout, WindowReference, chain_window, has_pair, previous_position, slot_position
from speculators.models.attention import AttentionImpl, AttentionPlan, block_attention, causal_attention, plan_attention
from speculators.models.backbone import layer_windows
from speculators.models.family import DraftModel, DraftModelConfig
from speculators.models.layers import Attend, GatedMLP, RMSNorm, RotaryEmbedding, Rotation, attention_of

if TYPE_CHECKING:
    from speculators.models.chain_drafter import ChainDrafter

__all__ = ["ChainConfig", "ChainDecoderLayer", "ChainModel"]

#: Steps of a chain whose config names no number of speculative tokens.
DEFAULT_STEPS = 3


class ChainConfig(DraftModelConfig):
    """What the configs of chain-drafting families share."""

    #: Whether later slots run one after another on what the slot before gave out, or all at once on a mask.
    recurrent: ClassVar[bool] = True

    #: Engines measure a chain's window from each slot's own position; ``anchor`` is upstream's EAGLE-3 training.
    sliding_window_reference: WindowReference = "slot"

    @property
    def layout(self) -> ChainLayout:
        return ChainLayout(self.speculative_tokens or DEFAULT_STEPS, self.recurrent)


class ChainDecoderLayer(nn.Module):
    """One decoder layer; a first layer reads [embedding ; state], twice as wide, and passes the state on as residual.

    :param first: whether it reads embeddings too.
    :param norm_before_residual: of a first layer, whether the residual is the normed state.
    """

    def __init__(self, decoder: PretrainedConfig, first: bool, norm_before_residual: bool = False) -> None:
        super().__init__()
        hidden, eps = decoder.hidden_size, decoder.rms_norm_eps
        self.self_attn = attention_of(decoder, 2 * hidden if first else None)
        self.mlp = GatedMLP(decoder)
        self.input_layernorm = RMSNorm(hidden, eps=eps)
        self.post_attention_layernorm = RMSNorm(hidden, eps=eps)
        if first:
            self.hidden_norm = RMSNorm(hidden, eps=eps)
        self.norm_before_residual = norm_before_residual

    def forward(self, states: Tensor, embeds: Tensor | None, rotation: Rotation, attend: Attend) -> Tensor:
        """``[..., H]`` of states ``[..., H]``; ``embeds`` ``[..., H]`` for a first layer only."""
        if embeds is None:
            residual, inputs = states, self.input_layernorm(states)
        else:
            normed = self.hidden_norm(states)
            residual = normed if self.norm_before_residual else states
            inputs = torch.cat([self.input_layernorm(embeds), normed], dim=-1)
        states = residual + self.self_attn(inputs, rotation, attend)
        return states + self.mlp(self.post_attention_layernorm(states))


@dataclass(slots=True)
class _Slots:
    """Keys and values ``[A, k, g, c]`` that the slots of every anchor have so far, of one layer."""

    keys: Tensor
    values: Tensor

    def of_anchors(self, rows: Tensor) -> _Slots:
        return _Slots(self.keys[rows], self.values[rows])

    def extended(self, keys: Tensor, values: Tensor) -> _Slots:
        return _Slots(torch.cat([self.keys, keys], dim=1), torch.cat([self.values, values], dim=1))


@dataclass(slots=True)
class _Context:
    """A packed row's pairs after they went through the layers."""

    place: Tensor  #: int64 ``[A]``, the anchors' pairs
    documents: Tensor  #: ``[P]``
    hidden: Tensor  #: ``[P, H]``, what the last layer gave
    keys_values: list[tuple[Tensor, Tensor]]  #: per layer, ``[P, g, c]`` each
    slots: list[_Slots] = field(default_factory=list)  #: per layer
    plans: dict[int | None, AttentionPlan] = field(default_factory=dict)  #: by window

    def of_anchors(self, rows: Tensor) -> _Context:
        """The same pairs for some of the anchors, by index."""
        slots = [layer.of_anchors(rows) for layer in self.slots]
        return _Context(self.place[rows], self.documents, self.hidden, self.keys_values, slots)


class ChainModel(DraftModel):
    """Base of chain-drafting models; a family says how states are combined and what a slot gives the next one."""

    config_class: Any = ChainConfig
    layers: nn.ModuleList
    windows: tuple[int | None, ...]
    gradient_checkpointing: bool = False
    #: Call the layers equally often in every forward, whatever the batch: sharded layers gather their weights on all processes.
    uniform_calls: bool = False

    # ---- what a family defines ------------------------------------------------------------------------------------

    def combine(self, features: Tensor) -> Tensor:
        """g ``[..., H]`` of captured verifier states ``[..., M, H]``."""
        raise NotImplementedError

    def final_norm(self, hidden: Tensor) -> Tensor:
        """States that the output head reads, of what the last layer gave; any leading shape."""
        raise NotImplementedError

    def handed_on(self, hidden: Tensor, normed: Tensor) -> Tensor:
        """What the next slot of a recurrent chain reads: of the last layer's output and :meth:`final_norm` of it."""
        return normed

    def masked_slot(self) -> tuple[Tensor, Tensor]:
        """State ``[H]`` and embedding ``[H]`` of the later slots of a parallel chain."""
        raise NotImplementedError

    # ---- the network ----------------------------------------------------------------------------------------------

    def add_rotary(self, decoder: PretrainedConfig) -> None:
        """Create what the layers share; call it once, in :meth:`add_network`."""
        self.rotary = RotaryEmbedding(decoder)
        reference = self.config.sliding_window_reference
        self.windows = tuple(chain_window(layer.window, reference) for layer in layer_windows(decoder, True))
        # Among pairs query and anchor are one position, and the window includes the query's own whatever it is measured from.
        self.pair_windows = tuple(layer.window for layer in layer_windows(decoder, True))

    @property
    def layout(self) -> ChainLayout:
        return cast(ChainLayout, self.config.layout)

    def run_layers(self, states: Tensor, embeds: Tensor, rotation: Rotation, attends: Sequence[Attend]) -> Tensor:
        """All layers over rows ``[..., H]``; ``attends`` has one entry per layer."""
        for index, (layer, attend) in enumerate(zip(self.layers, attends, strict=True)):
            run = partial(layer, embeds=embeds if index == 0 else None, rotation=rotation, attend=attend)
            recomputed = self.gradient_checkpointing and self.training
            states = checkpoint(run, states, use_reentrant=False) if recomputed else run(states)
        return states

    def draft_hidden(self, batch: PackedBatch, num_slots: int | None = None, attn_impl: AttentionImpl = "document") -> Tensor:
        if batch.features is None:
            raise ValueError("the batch carries no features; attach the verifier's hidden states first")
        slots = num_slots or self.layout.steps
        context = self._run_pairs(batch, attn_impl)
        first = context.hidden[context.place][:, None]  # [A, 1, H]
        if slots == 1:
            return self.final_norm(first)
        context.slots = [
            _Slots(keys[context.place][:, None], values[context.place][:, None]) for keys, values in context.keys_values
        ]
        if not self.layout.recurrent:
            rest = self._run_parallel(batch, context, slots - 1, attn_impl)
            return self.final_norm(torch.cat([first, rest], dim=1))
        hidden, outputs = first, [self.final_norm(first)]
        for slot in range(1, slots):
            state = self.handed_on(hidden, outputs[-1])
            hidden = self._run_slot(batch, context, slot, state, attn_impl)
            outputs.append(self.final_norm(hidden))
        return torch.cat(outputs, dim=1)

    def _run_pairs(self, batch: PackedBatch, attn_impl: AttentionImpl) -> _Context:
        """Slot 0 of every token: the context of all anchors, and the anchors' own."""
        pairs = has_pair(batch.document_ids).nonzero().squeeze(-1)
        documents = batch.document_ids[pairs]
        states = self.combine(cast(Tensor, batch.features)[pairs - 1].to(self.embed_tokens.weight.dtype))
        embeds = self.embed_tokens(batch.input_ids[pairs])
        rotation = self.rotary(batch.position_ids[pairs], states.dtype)
        kept: dict[int, tuple[Tensor, Tensor]] = {}

        def attend(q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
            kept[layer] = (k, v)
            return causal_attention(q, k, v, documents, window=self.pair_windows[layer], impl=attn_impl)

        hidden = self.run_layers(states, embeds, rotation, [partial(attend, layer=i) for i in range(len(self.layers))])
        place = torch.searchsorted(pairs, batch.anchors)
        return _Context(place, documents, hidden, [kept[layer] for layer in range(len(self.layers))])

    def _run_slot(self, batch: PackedBatch, context: _Context, slot: int, state: Tensor, attn_impl: AttentionImpl) -> Tensor:
        """One later slot of every anchor, ``[A, 1, H]``; its keys are kept for those after it."""
        # The token that slot k reads is the one before its prediction. Past the row's end nothing counts.
        tokens = previous_position(batch.anchors, slot).clamp(max=batch.num_tokens - 1)
        embeds = self.embed_tokens(batch.input_ids[tokens])[:, None]
        rotation = self.rotary(slot_position(batch.anchor_positions, slot)[:, None], embeds.dtype)
        before = list(context.slots)  # a layer that is computed again in the backward pass extends the same slots again

        def attend(q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
            context.slots[layer] = before[layer].extended(k, v)
            return self._attend_slots(q, context.slots[layer], context, layer, attn_impl)

        return self.run_layers(state, embeds, rotation, [partial(attend, layer=i) for i in range(len(self.layers))])

    def _run_parallel(self, batch: PackedBatch, context: _Context, count: int, attn_impl: AttentionImpl) -> Tensor:
        """All later slots of every anchor at once, ``[A, count, H]``; zeros where a slot is not trained."""
        if batch.depths is None or self.uniform_calls:
            return self._run_masked(batch.anchor_positions, context, count, attn_impl)
        # Anchors that keep as many slots run together; no anchor's slots depend on another's.
        rest = context.hidden.new_zeros(batch.anchors.shape[0], count, context.hidden.shape[-1])
        # Every process must bring a gradient of every weight, also where no anchor keeps a later slot.
        rest = rest + 0.0 * sum(part.sum() for part in self.masked_slot())
        later = (batch.depths - 1).clamp(max=count)
        for kept in later.unique().tolist():
            rows = (later == kept).nonzero().squeeze(-1)
            if kept > 0:
                hidden = self._run_masked(batch.anchor_positions[rows], context.of_anchors(rows), kept, attn_impl)
                rest = rest.index_put((rows[:, None], torch.arange(kept, device=rows.device)[None]), hidden)
        return rest

    def _run_masked(self, positions: Tensor, context: _Context, count: int, attn_impl: AttentionImpl) -> Tensor:
        """``count`` later slots of the context's anchors at these positions ``[A]``, ``[A, count, H]``."""
        state, embed = self.masked_slot()
        shape = (positions.shape[0], count, -1)
        slots = torch.arange(1, count + 1, device=positions.device)
        rotation = self.rotary(slot_position(positions[:, None], slots[None, :]), state.dtype)

        def attend(q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
            return self._attend_slots(q, context.slots[layer].extended(k, v), context, layer, attn_impl)

        attends = [partial(attend, layer=i) for i in range(len(self.layers))]
        return self.run_layers(state.expand(shape), embed.expand(shape), rotation, attends)

    def _attend_slots(self, q: Tensor, slots: _Slots, context: _Context, layer: int, attn_impl: AttentionImpl) -> Tensor:
        window, reference = self.windows[layer], self.config.sliding_window_reference
        if attn_impl == "document" and window not in context.plans:
            context.plans[window] = plan_attention(context.place, context.documents, window=window, window_reference=reference)
        return block_attention(
            q,
            *context.keys_values[layer],
            slots.keys,
            slots.values,
            context.place,
            context.documents,
            window=window,
            window_reference=reference,
            causal_block=True,
            impl=attn_impl,
            plan=context.plans.get(window),
        )

    def drafter(self) -> ChainDrafter:  # type: ignore[override]
        """The decoder's view of this model."""
        from speculators.models.chain_drafter import ChainDrafter

        return ChainDrafter(self)
