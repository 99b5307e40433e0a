"""Upstream's loss functions by their names, over this library's terms: logits in, one value per position out.

Each takes draft logits ``[..., D]`` and verifier logits ``[..., D]`` over the same ids and returns ``[...]``; verifier
logits are constants. :func:`loss_function` and :func:`compound_loss` reduce as upstream does: weights and mask in the
numerator, the mask alone in the denominator. New code calls :func:`speculators.losses.block_loss`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from speculators.losses.terms import TERMS, Distributions, full_precision
from speculators.losses.weights import dpace_weights

__all__ = [
    "ce_loss",
    "compound_loss",
    "dflash_loss_decay",
    "dpace_loss_decay",
    "exp_loss_decay",
    "js_div_loss",
    "kl_div_loss",
    "lk_hybrid_loss",
    "loss_function",
    "neg_log_acceptance_loss",
    "reverse_kl_div_loss",
    "tv_loss",
]

ElementwiseLoss = Callable[[Tensor, Tensor], Tensor]
Decay = Callable[..., Tensor]

#: Keeps upstream's mean finite where nothing is supervised.
EPSILON = 1e-5


def _elementwise(name: str, logits: Tensor, targets: Tensor) -> Tensor:
    log_p = full_precision(targets.detach()).log_softmax(dim=-1)
    log_q = full_precision(logits).log_softmax(dim=-1)
    return TERMS[name](Distributions(log_q=log_q, log_p=log_p, labels=log_p.argmax(dim=-1)))


def ce_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy against the verifier's argmax."""
    return _elementwise("ce", logits, targets)


def kl_div_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """KL(p, q)."""
    return _elementwise("kl_div", logits, targets)


def reverse_kl_div_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """KL(q, p)."""
    return _elementwise("rkl", logits, targets)


def js_div_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Jensen-Shannon divergence."""
    return _elementwise("jsd", logits, targets)


def tv_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Total variation distance, 0 to 1."""
    return _elementwise("tv", logits, targets)


def neg_log_acceptance_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """-log of the acceptance probability."""
    return _elementwise("nla", logits, targets)


def lk_hybrid_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """KL and TV mixed by the acceptance reached."""
    return _elementwise("lk_hybrid", logits, targets)


def dflash_loss_decay(pos_idx: Tensor, gamma: float, sample_from_anchor: bool = False, **_: Any) -> Tensor:
    """exp(-depth / gamma) of block slots; 0 for the fill-in layout's slot 0.

    :param pos_idx: slots within the block, any shape.
    """
    depth = pos_idx if sample_from_anchor else pos_idx - 1
    return torch.where(depth >= 0, torch.exp(-depth / gamma), torch.zeros(()))


def exp_loss_decay(pos_idx: Tensor, gamma: float, **_: Any) -> Tensor:
    """gamma to the power of the slot."""
    return gamma**pos_idx


def dpace_loss_decay(
    pos_idx: Tensor, loss_mask: Tensor, block_size: int, dpace_alpha: float, elementwise_loss: Tensor, **_: Any
) -> Tensor:
    """D-PACE weights of flattened blocks; see :func:`speculators.losses.weights.dpace_weights`.

    :param loss_mask: ``[..., A * block_size]``.
    :param elementwise_loss: cross-entropy, same shape.
    """
    blocks = (-1, block_size)
    weights = dpace_weights(elementwise_loss.reshape(blocks), loss_mask.reshape(blocks).bool(), dpace_alpha)
    return weights.reshape(elementwise_loss.shape)


def loss_function(
    logits: Tensor,
    targets: Tensor,
    loss_mask: Tensor,
    pos_idx: Tensor,
    loss_fn: ElementwiseLoss = kl_div_loss,
    decay_fn: Decay | None = None,
) -> Tensor:
    """sum(mask * weight * loss) / (sum(mask) + 1e-5), mean over the batch.

    :param logits: ``[B, T, D]``.
    :param targets: verifier logits ``[B, T, D]``.
    :param loss_mask: ``[B, T]``.
    :param pos_idx: slots ``[B, T]``, handed to ``decay_fn``.
    :param decay_fn: called as ``decay_fn(pos_idx, loss_mask=..., elementwise_loss=...)``, returns weights ``[B, T]``.
    """
    elementwise = loss_fn(logits, targets)
    mask = loss_mask.to(elementwise.dtype)
    elementwise = elementwise * mask
    if decay_fn is not None:
        elementwise = elementwise * decay_fn(pos_idx, loss_mask=loss_mask, elementwise_loss=elementwise)
    return (elementwise.sum(dim=-1) / (mask.sum(dim=-1) + EPSILON)).mean()


def compound_loss(
    logits: Tensor,
    targets: Tensor,
    loss_mask: Tensor,
    pos_idx: Tensor,
    loss_config: Mapping[str, float],
    decay_fn: Decay | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Weighted sum of terms, and each term by ``{name}_loss`` where there are several.

    :param loss_config: term -> coefficient, as from :func:`speculators.losses.resolve_loss_config`.
    """
    terms = {
        name: loss_function(logits, targets, loss_mask, pos_idx, partial(_elementwise, name), decay_fn) for name in loss_config
    }
    loss = torch.stack([loss_config[name] * value for name, value in terms.items()]).sum()
    logged = {f"{name}_loss": value.detach() for name, value in terms.items()} if len(terms) > 1 else {}
    return loss, logged
