"""Which implementation of the loss and of attention a training uses, by our names and upstream's."""

from __future__ import annotations

from typing import Literal

from speculators.train.config.model import TrainConfig

__all__ = ["attention_impl", "loss_impl"]


def loss_impl(config: TrainConfig) -> Literal["reference", "chunked"]:
    """``impl`` of :func:`~speculators.losses.block_loss`; upstream's "eager" is the plain one, its "fused" the lean one."""
    return "reference" if config.loss.loss_implementation in ("reference", "eager") else "chunked"


def attention_impl(config: TrainConfig) -> Literal["reference", "document"]:
    """``impl`` of :func:`~speculators.models.attention.block_attention`; upstream's "eager" is the plain one."""
    return "reference" if config.draft.draft_attn_impl in ("reference", "eager") else "document"
