"""What a training tells its caller, while it runs and at its end."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

__all__ = ["OnStep", "StepInfo", "StopReason", "TrainResult"]

StopReason = Literal["finished", "interrupted", "time limit"]


@dataclass(frozen=True, slots=True)
class StepInfo:
    """One logged optimiser step."""

    global_step: int  #: optimiser steps done, this one included
    total_steps: int
    epoch: int
    learning_rates: Mapping[str, float]  #: by optimiser
    metrics: Mapping[str, float]  #: means over the steps since the last log
    seconds: float  #: wall-clock of this step


OnStep = Callable[[StepInfo], None]


@dataclass(slots=True)
class TrainResult:
    """How a training ended.

    ``checkpoint`` and ``best`` are folders to load the draft from; None where none was written or nothing was validated.
    """

    reason: StopReason
    global_step: int
    total_steps: int
    checkpoint: Path | None = None
    best: Path | None = None
    resumed_from: Path | None = None
    metrics: dict[str, float] = field(default_factory=dict)  #: last logged training means
    validation: dict[str, float] = field(default_factory=dict)  #: last validation's means
    signal: int | None = None  #: number of the signal that interrupted it
    seconds: float = 0.0  #: wall-clock of training, all resumed parts together
