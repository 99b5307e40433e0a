"""Which implementation of the loss and of attention a training uses, by our names and upstream's."""

from __future__ import annotations

import warnings
from typing import Literal

from speculators.train.config.model import TrainConfig

__all__ = ["attention_impl", "loss_impl"]


def loss_impl(config: TrainConfig) -> Literal["reference"]:
    """``impl`` of :func:`~speculators.losses.block_loss`. Says so when another one was asked for by name."""
    asked = config.loss.loss_implementation
    if asked in ("fused", "chunked"):
        warnings.warn(
            f"--loss-implementation {asked} is not built yet; using reference, whose values are the same", stacklevel=3
        )
    return "reference"


def attention_impl(config: TrainConfig) -> Literal["reference", "document"]:
    """``impl`` of :func:`~speculators.models.attention.block_attention`; upstream's "eager" is the plain one."""
    return "reference" if config.draft.draft_attn_impl in ("reference", "eager") else "document"
