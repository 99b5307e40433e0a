"""Learning-rate factors against transformers' schedules."""

import pytest
import torch
from transformers import get_cosine_schedule_with_warmup, get_linear_schedule_with_warmup

from speculators.train.config.schema import SchedulerSettings
from speculators.train.schedules import build_schedule


def reference(kind: str, warmup: int, total: int, cycles: float) -> list[float]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    if kind == "linear":
        schedule = get_linear_schedule_with_warmup(optimizer, warmup, total)
    else:
        schedule = get_cosine_schedule_with_warmup(optimizer, warmup, total, cycles)
    factors = []
    for _ in range(total):
        factors.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    return factors


@pytest.mark.parametrize("kind", ["linear", "cosine"])
@pytest.mark.parametrize(("warmup", "total", "cycles"), [(0, 10, 0.5), (3, 20, 0.5), (5, 5, 0.5), (2, 30, 1.5)])
def test_factors_are_those_of_transformers(kind: str, warmup: int, total: int, cycles: float) -> None:
    settings = SchedulerSettings(scheduler_type=kind, scheduler_warmup_steps=warmup, scheduler_num_cosine_cycles=cycles)
    schedule = build_schedule(settings, total)
    assert [schedule.factor(step) for step in range(total)] == pytest.approx(reference(kind, warmup, total, cycles))


def test_warmup_length() -> None:
    assert build_schedule(SchedulerSettings(), 500).warmup == 5
    assert build_schedule(SchedulerSettings(scheduler_warmup_ratio=0.1), 500).warmup == 50
    assert build_schedule(SchedulerSettings(scheduler_warmup_ratio=0.1, scheduler_warmup_steps=7), 500).warmup == 7
    constant = build_schedule(SchedulerSettings(scheduler_type="none"), 500)
    assert [constant.factor(step) for step in (0, 1, 499, 9999)] == [1.0] * 4


def test_total_steps_of_the_schedule_may_differ_from_the_run() -> None:
    schedule = build_schedule(SchedulerSettings(scheduler_total_steps=10, scheduler_warmup_steps=0), 500)
    assert (schedule.factor(5), schedule.factor(10), schedule.factor(11)) == (0.5, 0.0, 0.0)
