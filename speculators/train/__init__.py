"""Training of drafts: :func:`train`, its settings (:class:`TrainConfig`) and its loop (:class:`Trainer`).

Names are imported when they are first used, so that the settings, and with them ``--help``, do not wait for torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from speculators.train.config import TrainConfig
    from speculators.train.results import StepInfo, TrainResult
    from speculators.train.run import train
    from speculators.train.trainer import Trainer

__all__ = ["StepInfo", "TrainConfig", "TrainResult", "Trainer", "train"]

_HOMES = {
    "StepInfo": "results",
    "TrainConfig": "config",
    "TrainResult": "results",
    "Trainer": "trainer",
    "train": "run",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
