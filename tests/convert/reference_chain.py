"""What an EAGLE-3 checkpoint drafts by its own project's rules, in plain double-precision algebra written from the formulas."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from tests.convert.reference import Tensors, attend, rms, rotate, verifier_run

#: (q, k, v) of rows ``[T, 2H]`` at positions ``[T]``, heads ``[T, heads, c]``.
Heads = tuple[Tensor, Tensor, Tensor]


def grouped_heads(config: dict[str, Any], tensors: Tensors, rows: Tensor, positions: Tensor) -> Heads:
    """Llama's attention inputs; Qwen3's with head norms."""
    size, theta = config["head_dim"], config["rope_theta"]
    parts = []
    for name in ("q", "k", "v"):
        heads = (rows @ tensors[f"layers.0.self_attn.{name}_proj.weight"].T).unflatten(-1, (-1, size))
        norm = tensors.get(f"layers.0.self_attn.{name}_norm.weight")
        heads = heads if norm is None else rms(heads, norm, config["rms_norm_eps"])
        parts.append(heads if name == "v" else rotate(heads, positions, theta))
    return parts[0], parts[1], parts[2]


def latent_heads(config: dict[str, Any], tensors: Tensors, rows: Tensor, positions: Tensor) -> Heads:
    """DeepSeek's attention inputs, every head with a key of its own; rotated entries are neighbouring pairs."""
    weights = {
        name.removeprefix("layers.0.self_attn.").removesuffix(".weight"): tensor
        for name, tensor in tensors.items()
        if ".self_attn." in name
    }
    heads, nope, rope = config["num_attention_heads"], config["qk_nope_head_dim"], config["qk_rope_head_dim"]
    eps, theta = config["rms_norm_eps"], config["rope_theta"]
    if "q_proj" in weights:
        q = rows @ weights["q_proj"].T
    else:
        q = rms(rows @ weights["q_a_proj"].T, weights["q_a_layernorm"], eps) @ weights["q_b_proj"].T
    q = q.unflatten(-1, (heads, nope + rope))
    latent, shared = (rows @ weights["kv_a_proj_with_mqa"].T).split([config["kv_lora_rank"], rope], -1)
    expanded = (rms(latent, weights["kv_a_layernorm"], eps) @ weights["kv_b_proj"].T).unflatten(-1, (heads, -1))
    k, v = expanded.split([nope, config["v_head_dim"]], -1)

    def rotate_pairs(part: Tensor) -> Tensor:
        # As complex numbers, entry 2j + i * entry (2j + 1) turned by position / theta ** (2j / rope).
        pairs = torch.view_as_complex(part.unflatten(-1, (-1, 2)).contiguous())
        angles = positions[:, None].double() / theta ** (torch.arange(0, rope, 2).double() / rope)
        return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)[:, None]).flatten(-2)

    q = torch.cat([q[..., :nope], rotate_pairs(q[..., nope:])], -1)
    k = torch.cat([k, rotate_pairs(shared[:, None]).expand(-1, heads, -1)], -1)
    return q, k, v


def drafted_chain(
    config: dict[str, Any],
    tensors: Tensors,
    verifier: str,
    prompt: tuple[int, ...],
    anchor: int,
    *,
    capture_ids: list[int],
    steps: int,
) -> list[int]:
    """Greedy tokens of one round, as verifier ids.

    :param tensors: under ``layers.0`` names.
    :param capture_ids: k is the residual stream after k layers.
    """
    tensors = {name: tensor.double() if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}
    states, embedding, head = verifier_run(verifier, prompt)
    embedding = tensors.get("embed_tokens.weight", embedding)
    head = tensors.get("lm_head.weight", head)
    eps = config["rms_norm_eps"]
    captured = [states[layer] for layer in capture_ids]
    if config.get("fc_norm"):
        captured = [rms(state, tensors[f"fc_norm.{index}.weight"], eps) for index, state in enumerate(captured)]
    joined = torch.cat(captured, -1)
    if config.get("norm_before_fc"):
        joined = rms(joined, tensors["input_norm.weight"], eps)
    # The pair of a token: its embedding beside the combined states of the token before it.
    inputs = joined @ tensors["fc.weight"].T
    embeds = embedding[torch.tensor([*prompt[1:], anchor])]
    tokens: list[int] = []
    for _ in range(steps):
        normed = rms(inputs, tensors["layers.0.hidden_norm.weight"], eps)
        residual = normed if config.get("norm_before_residual") else inputs
        rows = torch.cat([rms(embeds, tensors["layers.0.input_layernorm.weight"], eps), normed], -1)
        positions = torch.arange(len(rows))
        heads = latent_heads if "kv_lora_rank" in config else grouped_heads
        attention = attend(*heads(config, tensors, rows, positions), positions[:, None] >= positions[None])
        hidden = residual + attention @ tensors["layers.0.self_attn.o_proj.weight"].T
        normed = rms(hidden, tensors["layers.0.post_attention_layernorm.weight"], eps)
        gate = torch.nn.functional.silu(normed @ tensors["layers.0.mlp.gate_proj.weight"].T)
        up = normed @ tensors["layers.0.mlp.up_proj.weight"].T
        hidden = hidden + (gate * up) @ tensors["layers.0.mlp.down_proj.weight"].T
        last = rms(hidden[-1], tensors["norm.weight"], eps)
        drawn = int((head @ last).argmax())
        token = drawn + int(tensors["d2t"][drawn]) if "d2t" in tensors else drawn
        tokens.append(token)
        handed_on = last if config.get("norm_output") else hidden[-1]
        inputs, embeds = torch.cat([inputs, handed_on[None]]), torch.cat([embeds, embedding[token][None]])
    assert math.isfinite(float(inputs.sum()))
    return tokens
