"""The block-drafting backbone: Qwen3-style decoder layers whose context is the verifier's features (KV injection).

    context  C = RMSNorm(fc(concatenated features))                       [T, H], once for all layers
    layer    q from the block; k, v = projections of C and of the block   pre-norm attention and SwiGLU MLP, residual
    output   RMSNorm of the last layer                                    [A, K, H]

Context tokens are never queries, so a context token costs ``fc`` and two projections per layer. Shape letters: T tokens of a
packed row, A anchors, K slots, M captured layers, H hidden size, h query heads, g key/value heads, c head size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PretrainedConfig

from speculators.layout import WindowReference, slot_position
from speculators.models.attention import AttentionImpl, AttentionPlan, block_attention, plan_attention
from speculators.models.layers import GatedMLP, GroupedAttention, RMSNorm, RotaryEmbedding, Rotation

__all__ = ["BlockBackbone", "BlockDecoderLayer", "LayerWindow", "layer_windows"]

#: (q, k_context, v_context, k_block, v_block) -> output; shapes as in :func:`~speculators.models.attention.block_attention`.
AttendBlocks = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class LayerWindow:
    """What a layer's slots see: ``window`` context tokens (None: all), and whether the block is causal."""

    window: int | None
    causal_block: bool


def layer_windows(decoder: PretrainedConfig, sliding_window_non_causal: bool) -> tuple[LayerWindow, ...]:
    """Per layer; sliding layers are causal inside the block unless ``sliding_window_non_causal``, full ones never are."""
    types = getattr(decoder, "layer_types", None) or ["full_attention"] * decoder.num_hidden_layers
    windows = []
    for layer_type in types:
        sliding = layer_type == "sliding_attention"
        windows.append(LayerWindow(decoder.sliding_window if sliding else None, sliding and not sliding_window_non_causal))
    return tuple(windows)


class BlockDecoderLayer(nn.Module):
    """One decoder layer over blocks; the context enters as keys and values only, without the layer's input norm."""

    def __init__(self, decoder: PretrainedConfig) -> None:
        super().__init__()
        self.self_attn = GroupedAttention(decoder)
        self.mlp = GatedMLP(decoder)
        self.input_layernorm = RMSNorm(decoder.hidden_size, eps=decoder.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(decoder.hidden_size, eps=decoder.rms_norm_eps)

    def forward(
        self, block: Tensor, context_kv: tuple[Tensor, Tensor], block_rotation: Rotation, attend_blocks: AttendBlocks
    ) -> Tensor:
        """States ``[A, K, H]`` of states ``[A, K, H]``.

        :param context_kv: keys and values of the context rows, ``[T, heads, head size]`` each.
        :param block_rotation: of the slots' positions, ``[A, K, r]`` each.
        """
        normed = self.input_layernorm(block)
        queries, own = self.self_attn.queries(normed, block_rotation), self.self_attn.keys_values(normed, block_rotation)
        block = block + self.self_attn.output(attend_blocks(queries, *context_kv, *own))
        return block + self.mlp(self.post_attention_layernorm(block))

    def over_context(
        self, block: Tensor, context: Tensor, context_rotation: Rotation, block_rotation: Rotation, attend_blocks: AttendBlocks
    ) -> Tensor:
        """:meth:`forward` over context rows ``[T, H]``: everything that reads the layer's weights in one call, which is what a
        sharded layer gathers them for."""
        context_kv = self.self_attn.keys_values(context, context_rotation)
        return self.forward(block, context_kv, block_rotation, attend_blocks)


class BlockBackbone(nn.Module):
    """Mixin that gives a model ``fc``, ``hidden_norm``, ``layers`` and ``norm`` under the checkpoint's flat names."""

    layers: nn.ModuleList
    windows: tuple[LayerWindow, ...]
    window_reference: WindowReference
    gradient_checkpointing: bool = False

    def add_backbone(
        self,
        decoder: PretrainedConfig,
        num_features: int,
        *,
        sliding_window_non_causal: bool = False,
        window_reference: WindowReference = "anchor",
    ) -> None:
        """Create the modules; call it once, in the constructor.

        :param num_features: M, captured verifier layers.
        """
        self.fc = nn.Linear(num_features * decoder.hidden_size, decoder.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(decoder.hidden_size, eps=decoder.rms_norm_eps)
        self.layers = nn.ModuleList(BlockDecoderLayer(decoder) for _ in range(decoder.num_hidden_layers))
        self.norm = RMSNorm(decoder.hidden_size, eps=decoder.rms_norm_eps)
        self.rotary = RotaryEmbedding(decoder)
        self.windows = layer_windows(decoder, sliding_window_non_causal)
        self.window_reference = window_reference

    def context(self, features: Tensor) -> Tensor:
        """Context rows ``[T, H]`` of features ``[T, M, H]`` or ``[T, M * H]``."""
        return self.hidden_norm(self.fc(features.flatten(1).to(self.hidden_norm.weight.dtype)))

    def run_blocks(
        self,
        block_embeds: Tensor,
        context: Tensor,
        context_positions: Tensor,
        anchors: Tensor,
        anchor_positions: Tensor,
        document_ids: Tensor,
        attn_impl: AttentionImpl = "document",
    ) -> Tensor:
        """Post-norm states of all slots, ``[A, K, H]``.

        :param block_embeds: ``[A, K, H]``.
        :param context: ``[T, H]`` as from :meth:`context`.
        :param context_positions: position ids ``[T]``.
        :param anchors: row positions ``[A]``.
        :param anchor_positions: position ids ``[A]``.
        :param document_ids: ``[T]``.
        """
        slots = torch.arange(block_embeds.shape[1], device=block_embeds.device)
        block_rotation = self.rotary(slot_position(anchor_positions[:, None], slots[None, :]), block_embeds.dtype)
        context_rotation = self.rotary(context_positions, block_embeds.dtype)
        plans: dict[int | None, AttentionPlan] = {}
        hidden = block_embeds
        for layer, window in zip(self.layers, self.windows, strict=True):
            if attn_impl == "document" and window.window not in plans:
                plans[window.window] = plan_attention(
                    anchors, document_ids, window=window.window, window_reference=self.window_reference
                )
            attend_blocks = self._attend_blocks(anchors, document_ids, window, attn_impl, plans.get(window.window))

            def run(states: Tensor, rows: Tensor, layer: Any = layer, attend_blocks: AttendBlocks = attend_blocks) -> Tensor:
                return layer.over_context(states, rows, context_rotation, block_rotation, attend_blocks)

            if self.gradient_checkpointing and self.training:
                hidden = checkpoint(run, hidden, context, use_reentrant=False)
            else:
                hidden = run(hidden, context)
        return self.norm(hidden)

    def _attend_blocks(
        self,
        anchors: Tensor,
        document_ids: Tensor,
        window: LayerWindow,
        attn_impl: AttentionImpl,
        plan: AttentionPlan | None,
    ) -> AttendBlocks:
        def attend_blocks(q: Tensor, k_context: Tensor, v_context: Tensor, k_block: Tensor, v_block: Tensor) -> Tensor:
            return block_attention(
                q,
                k_context,
                v_context,
                k_block,
                v_block,
                anchors,
                document_ids,
                window=window.window,
                window_reference=self.window_reference,
                causal_block=window.causal_block,
                impl=attn_impl,
                plan=plan,
            )

        return attend_blocks

    def context_keys_values(self, context: Tensor, positions: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Every layer's rotated keys and values ``[T, g, c]`` of context rows: what a drafter caches."""
        rotation = self.rotary(positions, context.dtype)
        layers = cast(Iterable[BlockDecoderLayer], self.layers)
        return [layer.self_attn.keys_values(context, rotation) for layer in layers]

    def run_cached(
        self,
        block_embeds: Tensor,
        anchor_position: int,
        attend_layers: Sequence[AttendBlocks],
        context_kv: Sequence[tuple[Tensor, Tensor]],
    ) -> Tensor:
        """Post-norm states ``[1, K, H]`` of one block over cached context.

        :param block_embeds: ``[1, K, H]``.
        :param anchor_position: position id of the anchor.
        :param context_kv: per layer, ``[t, g, c]`` each, of the positions before the anchor.
        """
        slots = torch.arange(block_embeds.shape[1], device=block_embeds.device)
        rotation = self.rotary(slot_position(anchor_position, slots)[None, :], block_embeds.dtype)
        hidden = block_embeds
        for layer, kv, attend_blocks in zip(self.layers, context_kv, attend_layers, strict=True):
            hidden = layer(hidden, kv, rotation, attend_blocks)
        return self.norm(hidden)
