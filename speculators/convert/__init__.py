"""Converters between this library's checkpoints and those of other projects.

Each format has one adapter, the only place that knows its names; see ``docs/converters.md``.
"""

from __future__ import annotations

from speculators.convert.entrypoints import ConversionReport, convert_model, maybe_convert_external_checkpoint
from speculators.convert.stitch import stitch_mtp

__all__ = ["ConversionReport", "convert_model", "maybe_convert_external_checkpoint", "stitch_mtp"]
