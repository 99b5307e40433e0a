"""Draft models: one module per family, and what they share."""

from __future__ import annotations

from speculators.models.base import SpeculatorModel
from speculators.models.dflash import DFlashDraftModel, DFlashSpeculator, DFlashSpeculatorConfig
from speculators.models.dspark import DSparkDraftModel, DSparkSpeculator, DSparkSpeculatorConfig
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3Speculator, Eagle3SpeculatorConfig
from speculators.models.mtp import MTPDraftModel, MTPSpeculator, MTPSpeculatorConfig
from speculators.models.peagle import PEagleDraftModel, PEagleSpeculator, PEagleSpeculatorConfig

__all__ = [
    "DFlashDraftModel",
    "DFlashSpeculator",
    "DFlashSpeculatorConfig",
    "DSparkDraftModel",
    "DSparkSpeculator",
    "DSparkSpeculatorConfig",
    "Eagle3DraftModel",
    "Eagle3Speculator",
    "Eagle3SpeculatorConfig",
    "MTPDraftModel",
    "MTPSpeculator",
    "MTPSpeculatorConfig",
    "PEagleDraftModel",
    "PEagleSpeculator",
    "PEagleSpeculatorConfig",
    "SpeculatorModel",
]
