"""Draft models: one module per family, and what they share."""

from __future__ import annotations

from speculators.models.base import SpeculatorModel
from speculators.models.dflash import DFlashDraftModel, DFlashSpeculator, DFlashSpeculatorConfig
from speculators.models.dspark import DSparkDraftModel, DSparkSpeculator, DSparkSpeculatorConfig

__all__ = [
    "DFlashDraftModel",
    "DFlashSpeculator",
    "DFlashSpeculatorConfig",
    "DSparkDraftModel",
    "DSparkSpeculator",
    "DSparkSpeculatorConfig",
    "SpeculatorModel",
]
