"""Parts of decoder layers that all families are made of: rotary embedding, norms, attention projections and MLPs.

An attention module only projects: which keys a query sees is the caller's (:mod:`speculators.models.attention`). Both kinds
give queries, rotated keys and values per head, so that a layer does not care which it has. Shape letters: H hidden size, h
query heads, g key/value heads, c head size.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PretrainedConfig
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from speculators.models.verifier_weights import norm_adds_one

__all__ = [
    "Attend",
    "GatedMLP",
    "GroupedAttention",
    "LatentAttention",
    "RMSNorm",
    "RotaryEmbedding",
    "Rotation",
    "ZeroCentredRMSNorm",
    "apply_rotary",
    "attention_of",
    "norm_of",
]

#: Cosines and sines ``[..., r]`` of some positions, r being the rotated part of a head.
Rotation = tuple[Tensor, Tensor]

#: (q, k, v) -> output of some rows, each ``[..., heads, head size]``; it knows which other keys these rows see.
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def head_dim_of(decoder: PretrainedConfig) -> int:
    """Entries of one head; configs that do not say divide the hidden size by the heads."""
    return int(getattr(decoder, "head_dim", None) or decoder.hidden_size // decoder.num_attention_heads)


class RotaryEmbedding(nn.Module):
    """Rotary position embedding from the config's ``rope_parameters``, scaled types (linear, yarn, llama3, ...) included.

    Types whose frequencies depend on the sequence length (dynamic, longrope) keep those of the trained length.
    """

    inverse_frequencies: Tensor

    def __init__(self, decoder: PretrainedConfig) -> None:
        super().__init__()
        parameters = decoder.rope_parameters or {}
        rope_type = parameters.get("rope_type", "default")
        # A model may be built on the meta device; frequencies are constants and always real.
        with torch.device("cpu"):
            if rope_type == "default":
                size = int(head_dim_of(decoder) * parameters.get("partial_rotary_factor", 1.0))
                exponents = torch.arange(0, size, 2, dtype=torch.float) / size
                frequencies, scale = 1.0 / parameters.get("rope_theta", 10000.0) ** exponents, 1.0
            else:
                frequencies, scale = ROPE_INIT_FUNCTIONS[rope_type](decoder, torch.device("cpu"))
        self.scale = float(scale)
        self.register_buffer("inverse_frequencies", frequencies, persistent=False)

    def forward(self, positions: Tensor, dtype: torch.dtype) -> Rotation:
        """Rotation of position ids ``[...]``: cosines and sines ``[..., r]`` in ``dtype``, computed in fp32 (fp64 for fp64)."""
        precise = torch.float64 if dtype == torch.float64 else torch.float32
        frequencies = self.inverse_frequencies.to(device=positions.device, dtype=precise)
        angles = positions.to(precise)[..., None] * frequencies
        angles = torch.cat([angles, angles], dim=-1)
        return (angles.cos() * self.scale).to(dtype), (angles.sin() * self.scale).to(dtype)


def apply_rotary(heads: Tensor, rotation: Rotation) -> Tensor:
    """Rotate the first r entries of every head.

    :param heads: ``[..., heads, c]``.
    :param rotation: ``[..., r]`` each.
    """
    cosines, sines = (part.unsqueeze(-2) for part in rotation)
    size = cosines.shape[-1]
    turned, kept = heads[..., :size], heads[..., size:]
    first, second = turned.chunk(2, dim=-1)
    turned = turned * cosines + torch.cat([-second, first], dim=-1) * sines
    return turned if kept.shape[-1] == 0 else torch.cat([turned, kept], dim=-1)


class RMSNorm(nn.RMSNorm):
    """``x / rms(x) * weight`` in the weight's dtype: under autocast, bfloat16 projections are normed in float32."""

    def forward(self, states: Tensor) -> Tensor:
        """``[..., H]`` of ``[..., H]``, in the weight's dtype."""
        return super().forward(states.to(self.weight.dtype))


class ZeroCentredRMSNorm(RMSNorm):
    """``x / rms(x) * (1 + weight)``; at least in float32, since a small weight is lost in a bfloat16 1 + weight."""

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)

    def forward(self, states: Tensor) -> Tensor:
        """``[..., H]`` of ``[..., H]``, in the weight's dtype."""
        precise = torch.promote_types(self.weight.dtype, torch.float32)
        scale = 1.0 + self.weight.to(precise)
        return F.rms_norm(states.to(precise), self.normalized_shape, scale, self.eps).to(self.weight.dtype)


def norm_of(decoder: PretrainedConfig, size: int | None = None) -> RMSNorm:
    """The RMSNorm of a decoder's kind, over ``size`` entries; the hidden size when None."""
    kind = ZeroCentredRMSNorm if norm_adds_one(decoder) else RMSNorm
    return kind(size or decoder.hidden_size, eps=decoder.rms_norm_eps)


class GroupedAttention(nn.Module):
    """Projections of grouped-query attention; Qwen3-style decoders norm every query and key head, Llama-style ones do not.

    :param input_size: width of the inputs; the hidden size when None.
    :param head_norms: RMSNorm of queries and keys per head.
    :param output_gate: scale each head's result by a sigmoid of as many entries, which ``q_proj`` gives behind each query
        head's own (Qwen3-Next, Qwen3.5).
    """

    def __init__(
        self,
        decoder: PretrainedConfig,
        input_size: int | None = None,
        head_norms: bool = True,
        output_gate: bool = False,
    ) -> None:
        super().__init__()
        hidden, self.head_dim = decoder.hidden_size, head_dim_of(decoder)
        inputs = input_size or hidden
        bias = bool(getattr(decoder, "attention_bias", False))
        query_size = self.head_dim * (2 if output_gate else 1)
        self.q_proj = nn.Linear(inputs, decoder.num_attention_heads * query_size, bias=bias)
        self.k_proj = nn.Linear(inputs, decoder.num_key_value_heads * self.head_dim, bias=bias)
        self.v_proj = nn.Linear(inputs, decoder.num_key_value_heads * self.head_dim, bias=bias)
        self.o_proj = nn.Linear(decoder.num_attention_heads * self.head_dim, hidden, bias=bias)
        self.q_norm = norm_of(decoder, self.head_dim) if head_norms else nn.Identity()
        self.k_norm = norm_of(decoder, self.head_dim) if head_norms else nn.Identity()
        self.num_heads, self.output_gate = decoder.num_attention_heads, output_gate

    def forward(self, states: Tensor, rotation: Rotation, attend: Attend) -> Tensor:
        """The whole sublayer, ``[..., H]`` of normed states ``[..., input size]``."""
        queries, *gate = self.q_proj(states).unflatten(-1, (self.num_heads, -1)).split(self.head_dim, dim=-1)
        heads = attend(apply_rotary(self.q_norm(queries), rotation), *self.keys_values(states, rotation))
        return self.output(heads * gate[0].sigmoid() if self.output_gate else heads)

    def queries(self, states: Tensor, rotation: Rotation) -> Tensor:
        """Rotated queries ``[..., h, c]`` of normed states ``[..., input size]``, for attention without an output gate."""
        return apply_rotary(self.q_norm(self.q_proj(states).unflatten(-1, (-1, self.head_dim))), rotation)

    def keys_values(self, states: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
        """Rotated keys and values ``[..., g, c]`` of the same, or of context rows."""
        keys = self.k_norm(self.k_proj(states).unflatten(-1, (-1, self.head_dim)))
        return apply_rotary(keys, rotation), self.v_proj(states).unflatten(-1, (-1, self.head_dim))

    def output(self, heads: Tensor) -> Tensor:
        """``[..., H]`` of attention's result ``[..., h, c]``."""
        return self.o_proj(heads.flatten(-2))


class LatentAttention(nn.Module):
    """Projections of multi-head latent attention (MLA), as in DeepSeek-V3 and Kimi-K2, uncompressed: every head has its key.

    Keys and values come from one latent per token, and a rotated part of the key is shared by all heads. Queries and keys have
    ``qk_nope_head_dim + qk_rope_head_dim`` entries per head, values ``v_head_dim``. The softmax scale of a YaRN-extended model
    is folded into the queries, since :mod:`speculators.models.attention` divides by the root of the head size alone.

    :param input_size: width of the inputs; the hidden size when None.
    """

    def __init__(self, decoder: PretrainedConfig, input_size: int | None = None) -> None:
        super().__init__()
        inputs, heads, bias = input_size or decoder.hidden_size, decoder.num_attention_heads, bool(decoder.attention_bias)
        self.num_heads, self.latent_size = heads, decoder.kv_lora_rank
        self.plain_size, self.rotated_size, self.value_size = (
            decoder.qk_nope_head_dim,
            decoder.qk_rope_head_dim,
            decoder.v_head_dim,
        )
        self.interleaved = bool(getattr(decoder, "rope_interleave", True))
        query_size = heads * (self.plain_size + self.rotated_size)
        if decoder.q_lora_rank:
            self.q_a_proj = nn.Linear(inputs, decoder.q_lora_rank, bias=bias)
            self.q_a_layernorm = RMSNorm(decoder.q_lora_rank, eps=decoder.rms_norm_eps)
            self.q_b_proj = nn.Linear(decoder.q_lora_rank, query_size, bias=False)
        else:
            self.q_proj = nn.Linear(inputs, query_size, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(inputs, self.latent_size + self.rotated_size, bias=bias)
        self.kv_a_layernorm = RMSNorm(self.latent_size, eps=decoder.rms_norm_eps)
        self.kv_b_proj = nn.Linear(self.latent_size, heads * (self.plain_size + self.value_size), bias=False)
        self.o_proj = nn.Linear(heads * self.value_size, decoder.hidden_size, bias=bias)
        self.query_scale = yarn_softmax_scale(decoder.rope_parameters or {})

    def forward(self, states: Tensor, rotation: Rotation, attend: Attend) -> Tensor:
        """The whole sublayer, ``[..., H]`` of normed states ``[..., input size]``."""
        return self.output(attend(self.queries(states, rotation), *self.keys_values(states, rotation)))

    def queries(self, states: Tensor, rotation: Rotation) -> Tensor:
        """Rotated queries ``[..., h, nope + rope]`` of normed states ``[..., input size]``."""
        projected = self.q_proj(states) if hasattr(self, "q_proj") else self.q_b_proj(self.q_a_layernorm(self.q_a_proj(states)))
        plain, turned = projected.unflatten(-1, (self.num_heads, -1)).split([self.plain_size, self.rotated_size], dim=-1)
        return torch.cat([plain, self._rotate(turned, rotation)], dim=-1) * self.query_scale

    def keys_values(self, states: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
        """Rotated keys ``[..., h, nope + rope]`` and values ``[..., h, v]`` of the same."""
        latent, shared = self.kv_a_proj_with_mqa(states).split([self.latent_size, self.rotated_size], dim=-1)
        expanded = self.kv_b_proj(self.kv_a_layernorm(latent)).unflatten(-1, (self.num_heads, -1))
        plain, values = expanded.split([self.plain_size, self.value_size], dim=-1)
        turned = self._rotate(shared.unsqueeze(-2), rotation).expand(*plain.shape[:-1], self.rotated_size)
        return torch.cat([plain, turned], dim=-1), values

    def output(self, heads: Tensor) -> Tensor:
        """``[..., H]`` of attention's result ``[..., h, v]``."""
        return self.o_proj(heads.flatten(-2))

    def _rotate(self, heads: Tensor, rotation: Rotation) -> Tensor:
        # Interleaved pairs (0, 1), (2, 3), ... become (0, r/2), (1, r/2 + 1), ...: a reordering that query and key share.
        if self.interleaved:
            heads = heads.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
        return apply_rotary(heads, rotation)


def yarn_softmax_scale(rope_parameters: dict[str, object]) -> float:
    """What a YaRN-extended DeepSeek model multiplies its softmax scale by: m * m, m = 0.1 mscale_all_dim ln(factor) + 1."""
    mscale, factor = rope_parameters.get("mscale_all_dim"), rope_parameters.get("factor", 1.0)
    if rope_parameters.get("rope_type", "default") == "default" or not mscale or float(factor) <= 1:  # type: ignore[arg-type]
        return 1.0
    return (0.1 * float(mscale) * math.log(float(factor)) + 1.0) ** 2  # type: ignore[arg-type]


def attention_of(decoder: PretrainedConfig, input_size: int | None = None) -> GroupedAttention | LatentAttention:
    """The attention that a decoder's config describes: latent, or grouped with what its kind adds to the heads."""
    if getattr(decoder, "kv_lora_rank", None):
        return LatentAttention(decoder, input_size)
    kind = decoder.model_type
    return GroupedAttention(
        decoder, input_size, head_norms=kind.startswith("qwen3"), output_gate=kind.startswith(("qwen3_next", "qwen3_5"))
    )


class GatedMLP(nn.Module):
    """``down(act(gate(x)) * up(x))``."""

    def __init__(self, decoder: PretrainedConfig) -> None:
        super().__init__()
        bias = bool(getattr(decoder, "mlp_bias", False))
        self.gate_proj = nn.Linear(decoder.hidden_size, decoder.intermediate_size, bias=bias)
        self.up_proj = nn.Linear(decoder.hidden_size, decoder.intermediate_size, bias=bias)
        self.down_proj = nn.Linear(decoder.intermediate_size, decoder.hidden_size, bias=bias)
        self.activation = ACT2FN[decoder.hidden_act]

    def forward(self, states: Tensor) -> Tensor:
        """``[..., H]`` of ``[..., H]``."""
        return self.down_proj(self.activation(self.gate_proj(states)) * self.up_proj(states))
