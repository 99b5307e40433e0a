"""Muon where torch's own does not do: hardware without bfloat16, and sharded matrices."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from speculators.train.sharding import part_of, whole

__all__ = ["Float32Muon", "WholeMuon", "orthogonalize"]


def orthogonalize(matrix: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """Nearest semi-orthogonal matrix, roughly: the quintic Newton-Schulz iteration X <- aX + (bG + cG^2)X, G = X X^T.

    The coefficients push singular values of the normed matrix into about 0.7 to 1.2 within a few steps instead of
    converging to 1 (Jordan et al., "Muon: an optimizer for hidden layers in neural networks", 2024).

    :param matrix: ``[rows, columns]``, whole.
    """
    a, b, c = coefficients
    wide = matrix.shape[0] <= matrix.shape[1]
    x = matrix if wide else matrix.T
    x = x / x.norm().clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x if wide else x.T


class WholeMuon(torch.optim.Muon):
    """:class:`torch.optim.Muon` with its states and arguments, for sharded matrices too.

    A part of a matrix has another orthogonalisation than the whole, so :meth:`step` gathers each update, one at a time; every
    process orthogonalises it and keeps its own rows. On whole matrices the bfloat16 arithmetic is torch's.
    """

    #: Type in which :meth:`step` orthogonalises.
    precision = torch.bfloat16

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update; see :class:`torch.optim.Muon`."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(parameter.grad)
                momentum = state["momentum_buffer"]
                momentum.lerp_(parameter.grad, 1 - group["momentum"])
                direction = parameter.grad.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum
                matrix = whole(direction).to(self.precision)
                update = orthogonalize(matrix, group["ns_coefficients"], group["ns_steps"], group["eps"])
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                rate = group["lr"] * _shape_factor(group["adjust_lr_fn"], parameter.shape)
                parameter.add_(part_of(update.to(parameter.dtype), parameter), alpha=-rate)
        return loss


class Float32Muon(WholeMuon):
    """:class:`WholeMuon` in float32 throughout, for hardware without bfloat16."""

    precision = torch.float32


def _shape_factor(kind: str | None, shape: torch.Size) -> float:
    """How the learning rate depends on the matrix's shape."""
    rows, columns = shape
    if kind == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1.0, rows / columns))
