"""Sums that become means once, when they are logged, after reduction over accumulation steps and processes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from speculators.errors import SpeculatorsError
from speculators.losses import LossConfig

__all__ = ["MetricSums", "check_finite", "flatten_record", "loss_names"]


class MetricSums:
    """Named (numerator, denominator) pairs, added up on the device."""

    def __init__(self, device: torch.device) -> None:
        self._pairs: dict[str, Tensor] = {}
        self._device = device
        self._dtype = torch.float32 if device.type == "mps" else torch.float64

    def add(self, sums: Mapping[str, tuple[Any, Any]]) -> None:
        """Add one batch's pairs, detached scalars or numbers."""
        for name, values in sums.items():
            pair = torch.stack([torch.as_tensor(value, dtype=self._dtype, device=self._device) for value in values])
            self._pairs[name] = self._pairs[name] + pair if name in self._pairs else pair

    def clear(self) -> None:
        """Forget everything."""
        self._pairs = {}

    def reduced(self, accelerator: Any) -> dict[str, tuple[float, float]]:
        """The pairs summed over all processes, which must hold the same names; then forgets them."""
        names = sorted(self._pairs)
        if not names:
            return {}
        stacked = torch.stack([self._pairs[name] for name in names])
        if accelerator.num_processes > 1:
            stacked = accelerator.reduce(stacked, reduction="sum")
        self._pairs = {}
        return {name: (pair[0], pair[1]) for name, pair in zip(names, stacked.tolist())}

    def restore(self, pairs: Mapping[str, tuple[float, float]]) -> None:
        """Go on from what :meth:`reduced` gave; on one process only, for the pairs are sums over all."""
        self.clear()
        self.add(pairs)

    @staticmethod
    def means(pairs: Mapping[str, tuple[float, float]]) -> dict[str, float]:
        """The quotients; a pair over 0 has none and is left out."""
        return {name: numerator / denominator for name, (numerator, denominator) in pairs.items() if denominator > 0}


def check_finite(pairs: dict[str, tuple[float, float]], global_step: int) -> dict[str, tuple[float, float]]:
    """``pairs``, unless the training has diverged: every later step, and checkpoint, would be worthless.

    :raises SpeculatorsError: when loss or gradient norm is NaN or infinite.
    """
    for name in ("loss", "grad_norm"):
        if name in pairs and not math.isfinite(pairs[name][0]):
            raise SpeculatorsError(
                f"the training diverged: {name} is {pairs[name][0]} at step {global_step}; earlier checkpoints are kept, so "
                "lower --lr or --muon-lr and train in another --save-path, from one of them with --from-pretrained if you like"
            )
    return pairs


def loss_names(sums: Mapping[str, Any], config: LossConfig) -> dict[str, Any]:
    """Rename the loss's own terms ("tv") to what is logged ("tv_loss")."""
    terms = {*config.loss_fn, "confidence"}
    return {f"{name}_loss" if name in terms else name: value for name, value in sums.items()}


def flatten_record(record: Mapping[str, Any]) -> dict[str, float]:
    """A record flattened with "/" for trackers; what is no number is left out."""
    flat: dict[str, float] = {}
    for key, value in record.items():
        if isinstance(value, Mapping):
            flat |= {f"{key}/{inner}": number for inner, number in flatten_record(value).items()}
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            flat[key] = value
    return flat
