"""A step budget from a time limit: timed once, written down, and from then on a number of steps like any other."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from typing import TYPE_CHECKING

import torch

from speculators.train.distributed import main_first

if TYPE_CHECKING:
    from speculators.train.trainer import Trainer

__all__ = ["step_budget"]

_KEY = "step_budget"
#: Steps run before and while timing; none of them changes a weight.
WARMUP, TIMED = 1, 3
#: Share of the time kept back for checkpoints and for steps slower than the timed ones.
RESERVE = 0.08


def step_budget(trainer: Trainer, minutes: float) -> int:
    """Steps that fit into what is left of ``minutes``, at least 1; a resumed run gets the number it began with.

    The schedule follows this budget, so every later loss is again a pure function of seed and data.
    """
    known = main_first(trainer.accelerator, lambda: trainer.folder.recorded(_KEY))
    if known is not None:
        return int(known)
    step, validation = _time_steps(trainer), _timed(lambda: trainer.validate(record=False))
    left = 60 * minutes * (1 - RESERVE) - trainer.seconds()
    # Every val_freq-th epoch ends with a validation, and so does the run.
    steps_between = trainer.planner.steps_per_epoch * trainer.config.trainer.val_freq
    steps = int((left - validation) / (step + validation / steps_between))
    budget = _smallest(trainer, max(1, steps))
    main_first(trainer.accelerator, lambda: trainer.folder.record(_KEY, budget))
    return budget


def _smallest(trainer: Trainer, steps: int) -> int:
    """The smallest budget of any process."""
    if trainer.accelerator.num_processes == 1:
        return steps
    mine = torch.tensor([steps], device=trainer.accelerator.device)
    return int(trainer.accelerator.gather(mine).min())


def _time_steps(trainer: Trainer) -> float:
    """Seconds of one optimiser step, weights and states left as they are."""
    plan = trainer.planner.steps(0)
    chosen = [plan[index % len(plan)] for index in range(WARMUP + TIMED)]
    # At a learning rate of 0 an update computes everything and changes nothing but the optimisers' states, which are forgotten.
    trainer.optimizers.set_factor(0.0)
    seconds = []
    with closing(trainer.feeder.stream([packed for step in chosen for packed in step.mine])) as answers:
        for step in chosen:
            begun = time.monotonic()
            if trainer.stepper.accumulate(step, answers).trained:
                trainer.stepper.apply_gradient()
            seconds.append(time.monotonic() - begun)
    trainer.optimizers.forget()
    trainer.metrics.clear()
    return sorted(seconds[WARMUP:])[TIMED // 2]


def _timed(work: Callable[[], object]) -> float:
    begun = time.monotonic()
    work()
    return time.monotonic() - begun
