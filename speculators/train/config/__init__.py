"""Settings of ``speculators train``: typed groups with upstream's names, and everything made from them."""

from speculators.train.config.derived import Derived, check_runnable, derive
from speculators.train.config.families import (
    BackendSettings,
    DFlash2Settings,
    DFlashSettings,
    DSparkSettings,
    MTPSettings,
    PEagleSettings,
    RaySettings,
    XPressSettings,
)
from speculators.train.config.model import TrainConfig
from speculators.train.config.schema import (
    DataSettings,
    DraftSettings,
    GenerationSettings,
    LoggingSettings,
    LossSettings,
    OptimizerSettings,
    SchedulerSettings,
    TrainerSettings,
    VerifierSettings,
)

__all__ = [
    "BackendSettings",
    "DFlash2Settings",
    "DFlashSettings",
    "DSparkSettings",
    "DataSettings",
    "Derived",
    "DraftSettings",
    "GenerationSettings",
    "LoggingSettings",
    "LossSettings",
    "MTPSettings",
    "OptimizerSettings",
    "PEagleSettings",
    "RaySettings",
    "SchedulerSettings",
    "TrainConfig",
    "TrainerSettings",
    "VerifierSettings",
    "XPressSettings",
    "check_runnable",
    "derive",
]
