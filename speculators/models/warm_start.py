"""Start a new draft from the verifier's own last layers instead of from noise.

A draft's decoder layer has the shape of a verifier's wherever its config was derived from it, and its output is read by
the verifier's head, so the verifier's last layers are a better start than random ones: the residual stream already lives in
the head's space. Nothing of the format changes; only the first values do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from speculators.errors import VerifierError
from speculators.models.verifier_weights import (
    norm_adds_one,
    read_layer_weights,
    read_verifier_config,
    read_verifier_weights,
    text_config,
)

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from speculators.models.dflash import DFlashDraftModel
    from speculators.models.heads import MarkovHead

__all__ = ["start_from_verifier"]

#: Scale that the random part of ``fc`` keeps beside the identity, so that all captured layers still take part.
FC_NOISE = 0.1

#: Standard deviation of the Markov bias at the start.
MARKOV_BIAS_STD = 0.006


@torch.no_grad()
def start_from_verifier(
    model: DFlashDraftModel,
    verifier: str,
    query_key_scales: Sequence[tuple[float, float]] | None = None,
    config: PretrainedConfig | None = None,
) -> list[str]:
    """Copy into a block draft of L layers what fits of the verifier's last L layers.

    - draft layer i takes the projections, MLP and norms of verifier layer n - L + i whose shapes agree;
    - where that layer does not norm its queries and keys, ``q_norm`` and ``k_norm`` take ``query_key_scales``, so that
      attention starts as sharp as the verifier's;
    - ``norm`` takes the verifier's final norm;
    - W1 of a Markov head takes the verifier's token embeddings along their principal directions, so that like tokens start
      alike, at unit scale, with W2 so small that the bias still starts near zero;
    - ``fc`` passes the deepest captured layer on (identity, plus a tenth of its random values), and ``hidden_norm`` takes the
      input norm of verifier layer n - L, which is what that layer's key and value projections expect of a context row.

    :param verifier: folder or hub id.
    :param query_key_scales: of these L layers, as :func:`speculators.verifiers.query_keys.query_key_scales` measures them; None
        leaves the norms at 1, with flatter attention than the verifier's.
    :param config: the verifier's config, if already at hand.
    :returns: names of the draft's parameters that were set.
    :raises VerifierError: nothing fits, as with latent attention and expert layers throughout.
    """
    config = read_verifier_config(verifier) if config is None else config
    num_verifier_layers, shift = text_config(config).num_hidden_layers, 1.0 if norm_adds_one(config) else 0.0
    num_layers = len(model.layers)
    if num_layers > num_verifier_layers:
        raise VerifierError(
            f"a draft of {num_layers} layers cannot start from the {num_verifier_layers} layers of {verifier!r}; "
            "use fewer layers or --draft-init random"
        )
    parameters = dict(model.named_parameters())
    taken: list[str] = []

    def take(name: str, value: Tensor) -> None:
        parameter = parameters.get(name)
        if parameter is not None and parameter.shape == value.shape:
            parameter.copy_(value.to(parameter.dtype) + (shift if name.endswith("norm.weight") else 0.0))
            taken.append(name)

    first = num_verifier_layers - num_layers
    for index in range(num_layers):
        weights = read_layer_weights(verifier, first + index)
        for name, value in weights.items():
            take(f"layers.{index}.{name}", value)
            if index == 0 and name == "input_layernorm.weight":
                take("hidden_norm.weight", value)
        if query_key_scales is not None:
            for kind, scale in zip("qk", query_key_scales[index]):
                norm = f"layers.{index}.self_attn.{kind}_norm.weight"
                if norm not in taken:
                    parameters[norm].fill_(scale)
                    taken.append(norm)
    if not any(name.endswith("proj.weight") for name in taken):
        raise VerifierError(f"no layer of {verifier!r} has the shapes of this draft's layers; use --draft-init random")
    take("norm.weight", read_verifier_weights(verifier, ["norm"])["norm"])
    markov = getattr(model, "markov_head", None)
    if markov is not None:
        _start_markov(markov, read_verifier_weights(verifier, ["embed_tokens"])["embed_tokens"])
        taken.append("markov_head.markov_w1.weight")
    hidden_size = model.fc.out_features
    model.fc.weight.mul_(FC_NOISE)
    model.fc.weight[:, -hidden_size:] += torch.eye(hidden_size, dtype=model.fc.weight.dtype, device=model.fc.weight.device)
    return [*taken, "fc.weight"]


def _start_markov(head: MarkovHead, embeddings: Tensor) -> None:
    """W1 ``[V, R]`` from the verifier's embeddings ``[V, H]``; directions beyond H stay random."""
    centred = embeddings.float() - embeddings.float().mean(dim=0)
    rank = min(head.rank, centred.shape[1])
    # Eigenvectors come in ascending order of variance.
    directions = torch.linalg.eigh(centred.T @ centred).eigenvectors.flip(1)[:, :rank]
    projected = centred @ directions
    head.markov_w1.weight.normal_()
    head.markov_w1.weight[:, :rank] = projected / projected.std(dim=0).clamp_min(1e-12)
    head.markov_w2.weight.normal_(std=MARKOV_BIAS_STD / head.rank**0.5)
