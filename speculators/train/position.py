"""Where a training stands, and everything of it that a checkpoint holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from speculators.errors import SpeculatorsError
from speculators.train.checkpoints import Checkpoint, get_rng_state, set_rng_state
from speculators.train.optimizers import Optimizers
from speculators.train.sharding import gathered, placed

__all__ = ["CapturedState", "Position", "capture_state", "captured_weights", "restore_state"]

#: Tensors by name, and what is left as JSON.
CapturedState = tuple[dict[str, Tensor], dict[str, Any]]

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
    #: rows whose states were used and will be used again: a resumed run asks for them once more
    replayed: tuple[int, ...] = ()
    #: metric sums of the steps since the last log, so that a resumed run logs what an undisturbed one does
    pending: dict[str, tuple[float, float]] = field(default_factory=dict)

    def record(self) -> dict[str, Any]:
        """As JSON."""
        return {name: getattr(self, name) for name in self.__slots__} | {
            "saved": list(self.saved),
            "replayed": list(self.replayed),
        }

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Position:
        values = {"replayed": [], **record}  # checkpoints of earlier versions have no replay
        values = {name: values[name] for name in cls.__slots__}
        return cls(**{**values, "saved": tuple(record["saved"]), "replayed": tuple(values["replayed"])})


def capture_state(model: nn.Module, optimizers: Optimizers, keep: bool = True) -> CapturedState:
    """Trainable weights, optimiser states and random-number generators as whole tensors, and the rest as JSON.

    Where the draft is sharded this gathers it, so every process must call it.

    :param keep: whether this process wants what it gathers; without it, sharded tensors are left out.
    """
    tensors, rng = get_rng_state()
    weights = {WEIGHTS + name: value for name, value in model.named_parameters() if value.requires_grad}
    states = {OPTIMIZER + name: value for name, value in optimizers.state_tensors().items()}
    return tensors | gathered(weights | states, keep), {"rng": rng}


def captured_weights(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The trainable weights in what :func:`capture_state` gave, under the model's names."""
    return {name.removeprefix(WEIGHTS): value for name, value in tensors.items() if name.startswith(WEIGHTS)}


@torch.no_grad()
def restore_state(checkpoint: Checkpoint, model: nn.Module, optimizers: Optimizers) -> None:
    """Put back what :func:`capture_state` gave, bit for bit; a sharded draft takes its parts of it.

    :raises SpeculatorsError: when the checkpoint has all its files, but not what belongs in them.
    """
    try:
        tensors = checkpoint.tensors()
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.copy_(placed(tensors[WEIGHTS + name], parameter))
        optimizers.load_state_tensors(
            {name.removeprefix(OPTIMIZER): value for name, value in tensors.items() if name.startswith(OPTIMIZER)}
        )
        set_rng_state(tensors, checkpoint.state["rng"])
        Position.from_record(checkpoint.state)
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise SpeculatorsError(
            f"the training state in {checkpoint.path} is damaged ({type(error).__name__}: {error}); remove that folder and run "
            "the same command again, which goes on from the checkpoint before it"
        ) from error
