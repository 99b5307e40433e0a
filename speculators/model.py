"""Upstream's import path of :class:`~speculators.models.base.SpeculatorModel`."""

from speculators.models.base import SpeculatorModel

__all__ = ["SpeculatorModel"]
