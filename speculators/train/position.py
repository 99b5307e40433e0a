"""Where a training stands, and everything of it that a checkpoint holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from speculators.train.checkpoints import Checkpoint, get_rng_state, set_rng_state
from speculators.train.optimizers import Optimizers

__all__ = ["Position", "capture_state", "restore_state"]

WEIGHTS, OPTIMIZER = "weights/", "optimizer/"


@dataclass(slots=True)
class Position:
    """Counters of a run."""

    global_step: int = 0  #: optimiser steps done
    epoch: int = 0
    local_step: int = 0  #: steps done in the epoch
    seconds: float = 0.0  #: wall-clock up to the last checkpoint
    best_loss: float | None = None  #: lowest validation loss
    best_number: int | None = None  #: checkpoint of that loss
    saved: tuple[int, ...] = ()  #: checkpoints this run wrote
    #: metric sums of the steps since the last log, so that a resumed run logs what an undisturbed one does
    pending: dict[str, tuple[float, float]] = field(default_factory=dict)

    def record(self) -> dict[str, Any]:
        """As JSON."""
        return {name: getattr(self, name) for name in self.__slots__} | {"saved": list(self.saved)}

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Position:
        values = {name: record[name] for name in cls.__slots__}
        return cls(**{**values, "saved": tuple(record["saved"])})


def capture_state(model: nn.Module, optimizers: Optimizers) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Trainable weights, optimiser states and random-number generators as tensors, and the rest as JSON."""
    tensors, rng = get_rng_state()
    tensors |= {WEIGHTS + name: value for name, value in model.named_parameters() if value.requires_grad}
    tensors |= {OPTIMIZER + name: value for name, value in optimizers.state_tensors().items()}
    return tensors, {"rng": rng}


@torch.no_grad()
def restore_state(checkpoint: Checkpoint, model: nn.Module, optimizers: Optimizers) -> None:
    """Put back what :func:`capture_state` gave, bit for bit."""
    tensors = checkpoint.tensors()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            parameter.copy_(tensors[WEIGHTS + name])
    optimizers.load_state_tensors(
        {name.removeprefix(OPTIMIZER): value for name, value in tensors.items() if name.startswith(OPTIMIZER)}
    )
    set_rng_state(tensors, checkpoint.state["rng"])
