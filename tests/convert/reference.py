"""The foreign side, run: what a foreign checkpoint drafts by its own project's rules, in plain double-precision algebra.

Written from the formulas alone, so that a wrong layer id, layout, window or head in a converter shows as another token.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

Tensors = dict[str, Tensor]


@cache
def verifier_run(folder: str, prompt: tuple[int, ...]) -> tuple[list[Tensor], Tensor, Tensor]:
    """``hidden_states`` (embeddings first) ``[T, H]`` each, embedding and head of a verifier, in double precision."""
    model = AutoModelForCausalLM.from_pretrained(folder).double().eval()
    with torch.no_grad():
        states = model(torch.tensor([prompt]), output_hidden_states=True).hidden_states
    return [state[0] for state in states], model.get_input_embeddings().weight.detach(), model.lm_head.weight.detach()


def rms(states: Tensor, weight: Tensor, eps: float) -> Tensor:
    return states * torch.rsqrt(states.square().mean(-1, keepdim=True) + eps) * weight


def rotate(heads: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Half-split rotation of ``[T, heads, c]``."""
    size = heads.shape[-1]
    angles = positions[:, None].double() / theta ** (torch.arange(0, size, 2).double() / size)
    cosines, sines = angles.cos()[:, None].repeat(1, 1, 2), angles.sin()[:, None].repeat(1, 1, 2)
    first, second = heads.chunk(2, -1)
    return heads * cosines + torch.cat([-second, first], -1) * sines


def attend(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    """Grouped attention of ``[Q, heads, c]`` over ``[K, groups, c]``."""
    repeat = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
    scores = torch.einsum("qhc,khc->hqk", q, k) / q.shape[-1] ** 0.5
    weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
    return torch.einsum("hqk,khc->qhc", weights, v).flatten(1)


def block_hidden(config: dict[str, Any], tensors: Tensors, features: Tensor, embeds: Tensor, causal: bool | None) -> Tensor:
    """Post-norm states of one block ``[K, H]`` that starts right after the context.

    :param features: ``[T, M * H]``.
    :param embeds: ``[K, H]``.
    :param causal: for all layers; None: sliding layers only.
    """
    tensors = {name: tensor.double() if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}
    eps, theta, size = config["rms_norm_eps"], config["rope_theta"], config["head_dim"]
    context = rms(features @ tensors["fc.weight"].T, tensors["hidden_norm.weight"], eps)
    length, slots = len(context), len(embeds)
    positions = torch.arange(length + slots)
    types = config.get("layer_types") or ["full_attention"] * config["num_hidden_layers"]
    hidden = embeds
    for layer, kind in enumerate(types):

        def weight(name: str, layer: int = layer) -> Tensor:
            return tensors[f"layers.{layer}.{name}.weight"]

        normed = rms(hidden, weight("input_layernorm"), eps)
        rows = torch.cat([context, normed])
        q = rms((normed @ weight("self_attn.q_proj").T).unflatten(-1, (-1, size)), weight("self_attn.q_norm"), eps)
        k = rms((rows @ weight("self_attn.k_proj").T).unflatten(-1, (-1, size)), weight("self_attn.k_norm"), eps)
        v = (rows @ weight("self_attn.v_proj").T).unflatten(-1, (-1, size))
        q, k = rotate(q, positions[length:], theta), rotate(k, positions, theta)
        ahead = positions[length:, None] - positions[None]  # > 0: the key lies before the query
        visible = torch.ones_like(ahead, dtype=torch.bool)
        if kind == "sliding_attention":
            visible &= ahead < config["sliding_window"]
        if causal if causal is not None else kind == "sliding_attention":
            visible &= ahead >= 0
        hidden = hidden + attend(q, k, v, visible) @ weight("self_attn.o_proj").T
        normed = rms(hidden, weight("post_attention_layernorm"), eps)
        gate = torch.nn.functional.silu(normed @ weight("mlp.gate_proj").T)
        hidden = hidden + (gate * (normed @ weight("mlp.up_proj").T)) @ weight("mlp.down_proj").T
    return rms(hidden, tensors["norm.weight"], eps)


def drafted(
    config: dict[str, Any],
    tensors: Tensors,
    verifier: str,
    prompt: tuple[int, ...],
    anchor: int,
    *,
    foreign_ids: list[int],
    mask_token_id: int,
    block_size: int,
    anchor_first: bool,
    causal: bool | None = None,
) -> list[int]:
    """Greedy tokens of one round, as verifier ids: context ``prompt``, newest token ``anchor``."""
    states, embedding, head = verifier_run(verifier, prompt)
    embedding = tensors.get("embed_tokens.weight", embedding).double()
    head = tensors.get("lm_head.weight", head).double()
    features = torch.cat([states[layer + 1] for layer in foreign_ids], -1)
    ids = torch.tensor([anchor, *[mask_token_id] * (block_size - 1)])
    hidden = block_hidden(config, tensors, features, embedding[ids], causal)[0 if anchor_first else 1 :]
    return walk(tensors, hidden, hidden @ head.T, anchor)


def walk(tensors: Tensors, hidden: Tensor, logits: Tensor, anchor: int) -> list[int]:
    """Tokens from left to right under the Markov head that the tensors hold."""
    weights = {name.removeprefix("markov_head."): tensor.double() for name, tensor in tensors.items() if "markov_head" in name}
    previous, tokens = anchor, []
    state = torch.zeros(weights["markov_w1.weight"].shape[1]).double() if weights else None
    for row, base in zip(hidden, logits, strict=True):
        if weights:
            code = weights["markov_w1.weight"][previous]
            if "gate_proj.weight" in weights:
                gate = weights["gate_proj.weight"] @ torch.cat([row, code]) + weights["gate_proj.bias"]
                code = gate.sigmoid() * code
            elif "joint_proj.weight" in weights:
                joint = weights["joint_proj.weight"] @ torch.cat([state, code, row]) + weights["joint_proj.bias"]
                keep, candidate, output = joint.chunk(3)
                state = keep.sigmoid() * state + (1 - keep.sigmoid()) * candidate.tanh()
                code = output.tanh()
            base = base + weights["markov_w2.weight"] @ code
        drawn = int(base.argmax())
        previous = drawn + int(tensors["d2t"][drawn]) if "d2t" in tensors else drawn
        tokens.append(previous)
    return tokens


def ours(folder: Any, verifier: str, rounds: list[tuple[tuple[int, ...], int]]) -> list[list[int]]:
    """Greedy tokens of a round per context and newest token, of a checkpoint of ours: as many as its config says, features by
    its own layer ids."""
    from speculators import SpeculatorModel
    from speculators.sampling import SamplingParams

    model: Any = SpeculatorModel.from_pretrained(folder, verifier=verifier, dtype=torch.float64)
    drafter = model.drafter()
    drafter.start(len(rounds))
    states = [verifier_run(verifier, prompt)[0] for prompt, _ in rounds]
    features = [torch.stack([state[layer] for layer in drafter.layer_ids], 1) for state in states]
    drafter.extend([torch.tensor(prompt) for prompt, _ in rounds], features)
    anchors = [anchor for _, anchor in rounds]
    drafts = drafter.propose(anchors, model.config.speculative_tokens, SamplingParams(temperature=0.0))
    return [draft.tokens.tolist() for draft in drafts]
