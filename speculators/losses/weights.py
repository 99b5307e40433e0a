"""Weights of the predicted tokens of a block, by depth."""

from __future__ import annotations

import torch
from torch import Tensor

from speculators.layout import depth_weight

__all__ = ["decay_weights", "dpace_weights"]


def decay_weights(num_depths: int, gamma: float, *, device: torch.device | None = None) -> Tensor:
    """exp(-d / gamma) for d = 0 .. num_depths - 1, float64 ``[N]``."""
    return torch.tensor([depth_weight(depth, gamma) for depth in range(num_depths)], dtype=torch.float64, device=device)


def dpace_weights(cross_entropy: Tensor, counts: Tensor, alpha: float) -> Tensor:
    """D-PACE weights: what an improvement at depth k is worth for the expected accepted length.

    s_d = (1 - alpha) exp(-CE_d) + alpha where the token counts, else 1; P_d = s_0 ... s_d; w_k = sum_{d >= k} P_d count_d.

    :param cross_entropy: ``[A, N]``; no gradient flows through the weights.
    :param counts: bool ``[A, N]``.
    :param alpha: smoothing in (0, 1].
    :returns: ``[A, N]``, 0 where a token does not count.
    """
    probability = torch.exp(-cross_entropy.detach())
    smoothed = torch.where(counts, (1 - alpha) * probability + alpha, torch.ones_like(probability))
    reached = smoothed.cumprod(dim=-1) * counts
    return reached.flip(-1).cumsum(dim=-1).flip(-1) * counts
