"""Learning-rate schedules as pure functions of the step: resuming needs no state."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from speculators.train.config.schema import SchedulerSettings

__all__ = ["Schedule", "build_schedule"]


@dataclass(frozen=True, slots=True)
class Schedule:
    """Factor of the learning rate at step 0, 1, ...: linear warm-up, then decay (the shapes of transformers' schedules).

    :param total: steps until the factor of linear decay is 0.
    :param warmup: steps of warm-up; the factor rises from 0 at step 0 to 1 at step ``warmup``.
    """

    kind: Literal["linear", "cosine", "none"]
    total: int
    warmup: int = 0
    cycles: float = 0.5

    def factor(self, step: int) -> float:
        """Factor for the update that is the ``step``-th, counted from 0."""
        if step < self.warmup:
            return step / self.warmup
        if self.kind == "none":
            return 1.0
        progress = min(1.0, (step - self.warmup) / max(1, self.total - self.warmup))
        if self.kind == "linear":
            return 1.0 - progress
        return max(0.0, 0.5 * (1.0 + math.cos(2.0 * math.pi * self.cycles * progress)))


def build_schedule(settings: SchedulerSettings, run_steps: int) -> Schedule:
    """Schedule of a run of ``run_steps`` optimiser steps. Without a decay there is warm-up only where it was asked for."""
    total = settings.scheduler_total_steps or run_steps
    if settings.scheduler_warmup_steps is not None:
        warmup = settings.scheduler_warmup_steps
    elif settings.scheduler_warmup_ratio is not None:
        warmup = int(total * settings.scheduler_warmup_ratio)
    else:
        warmup = 0 if settings.scheduler_type == "none" else total // 100
    return Schedule(settings.scheduler_type, total, warmup, settings.scheduler_num_cosine_cycles)
