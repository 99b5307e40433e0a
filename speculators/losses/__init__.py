"""Losses: one call for blocks (:func:`block_loss`), and upstream's functions by their names."""

from speculators.losses.block import (
    BlockHeads,
    BlockLossOutput,
    TeacherHead,
    batch_denominators,
    block_loss,
    loss_denominators,
)
from speculators.losses.config import LossConfig, resolve_loss_config
from speculators.losses.eager import (
    ce_loss,
    compound_loss,
    dflash_loss_decay,
    dpace_loss_decay,
    exp_loss_decay,
    js_div_loss,
    kl_div_loss,
    lk_hybrid_loss,
    loss_function,
    neg_log_acceptance_loss,
    reverse_kl_div_loss,
    tv_loss,
)
from speculators.losses.targets import BlockTargets, gather_block_labels, gather_block_targets
from speculators.losses.weights import decay_weights, dpace_weights

__all__ = [
    "BlockHeads",
    "BlockLossOutput",
    "BlockTargets",
    "LossConfig",
    "TeacherHead",
    "batch_denominators",
    "block_loss",
    "ce_loss",
    "compound_loss",
    "decay_weights",
    "dflash_loss_decay",
    "dpace_loss_decay",
    "dpace_weights",
    "exp_loss_decay",
    "gather_block_labels",
    "gather_block_targets",
    "js_div_loss",
    "kl_div_loss",
    "lk_hybrid_loss",
    "loss_denominators",
    "loss_function",
    "neg_log_acceptance_loss",
    "resolve_loss_config",
    "reverse_kl_div_loss",
    "tv_loss",
]
