"""How large a verifier's queries and keys are: what a draft that norms them must be told to attend as sharply."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from speculators.verifiers.loading import Verifier

__all__ = ["query_key_scales"]


@torch.inference_mode()
def query_key_scales(
    verifier: Verifier, token_ids: Tensor, layers: Sequence[int], head_dim: int
) -> list[tuple[float, float]] | None:
    """Mean root mean square of a query and of a key head, before any norm of theirs, per layer.

    The first token is left out: models park attention on it, with states of another size.

    :param token_ids: ``[T]``, ordinary text, at least two tokens.
    :param layers: indices of decoder layers.
    :param head_dim: size of a head.
    :returns: None when these layers have no plain query and key projections (fused or latent ones).
    """
    projections: list[nn.Module] = []
    for layer in layers:
        attention = getattr(verifier.parts.layers[layer], "self_attn", None)
        for name in ("q_proj", "k_proj"):
            projection = getattr(attention, name, None)
            if not isinstance(projection, nn.Module):
                return None
            projections.append(projection)
    sizes: dict[int, float] = {}

    def measure(place: int, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        heads = output.float().unflatten(-1, (-1, head_dim))[0, 1:]
        sizes[place] = float(heads.square().mean(dim=-1).sqrt().mean())

    handles = [module.register_forward_hook(partial(measure, place)) for place, module in enumerate(projections)]
    try:
        with verifier.lock:
            verifier.states(token_ids[None].to(verifier.device))
    finally:
        for handle in handles:
            handle.remove()
    if len(sizes) < len(projections):  # a layer that does not call its projections as modules
        return None
    return [(sizes[2 * place], sizes[2 * place + 1]) for place in range(len(layers))]
