"""Train, prove and ship speculative-decoding drafts."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from speculators.config import SpeculatorModelConfig, SpeculatorsConfig, VerifierConfig, reload_schemas
    from speculators.models import (
        DFlashDraftModel,
        DFlashSpeculator,
        DFlashSpeculatorConfig,
        DSparkDraftModel,
        DSparkSpeculator,
        DSparkSpeculatorConfig,
        Eagle3DraftModel,
        Eagle3Speculator,
        Eagle3SpeculatorConfig,
        MTPDraftModel,
        MTPSpeculator,
        MTPSpeculatorConfig,
        PEagleDraftModel,
        PEagleSpeculator,
        PEagleSpeculatorConfig,
        SpeculatorModel,
    )
    from speculators.proposals import TokenProposalConfig

# Imported when first used: torch and transformers take seconds, and most commands' --help needs neither.
_MODULES = {
    "SpeculatorModelConfig": "speculators.config",
    "SpeculatorsConfig": "speculators.config",
    "VerifierConfig": "speculators.config",
    "reload_schemas": "speculators.config",
    "TokenProposalConfig": "speculators.proposals",
    "DFlashDraftModel": "speculators.models",
    "DFlashSpeculator": "speculators.models",
    "DFlashSpeculatorConfig": "speculators.models",
    "DSparkDraftModel": "speculators.models",
    "DSparkSpeculator": "speculators.models",
    "DSparkSpeculatorConfig": "speculators.models",
    "Eagle3DraftModel": "speculators.models",
    "Eagle3Speculator": "speculators.models",
    "Eagle3SpeculatorConfig": "speculators.models",
    "MTPDraftModel": "speculators.models",
    "MTPSpeculator": "speculators.models",
    "MTPSpeculatorConfig": "speculators.models",
    "PEagleDraftModel": "speculators.models",
    "PEagleSpeculator": "speculators.models",
    "PEagleSpeculatorConfig": "speculators.models",
    "SpeculatorModel": "speculators.models",
}

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
    "SpeculatorModelConfig",
    "SpeculatorsConfig",
    "TokenProposalConfig",
    "VerifierConfig",
    "reload_schemas",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
