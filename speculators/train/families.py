"""What the training of each family takes from the settings: one entry per family, and nothing about families elsewhere."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from speculators.models import (
    DFlashSpeculatorConfig,
    DSparkSpeculatorConfig,
    Eagle3SpeculatorConfig,
    MTPSpeculatorConfig,
    PEagleSpeculatorConfig,
)
from speculators.models.family import DraftModelConfig
from speculators.train.config.derived import derive
from speculators.train.config.model import TrainConfig

__all__ = ["CHECKPOINT_KEYS", "FAMILIES", "Family", "decay_length", "family_of"]

#: Settings that a checkpoint's config answers too, and its names for them.
CHECKPOINT_KEYS = {
    "block_size": "block_size",
    "sample_from_anchor": "sample_from_anchor",
    "sliding_window_non_causal": "sliding_window_non_causal",
    "sliding_window_reference": "sliding_window_reference",
    "target_layer_ids": "layer_ids",
    "mask_token_id": "mask_token_id",
    "draft_vocab_size": "draft_vocab_size",
    "markov_rank": "markov_rank",
    "markov_head_type": "markov_head_type",
    "enable_confidence_head": "enable_confidence_head",
    "confidence_head_with_markov": "confidence_head_with_markov",
    "norm_before_residual": "norm_before_residual",
    "norm_before_fc": "norm_before_fc",
    "norm_output": "norm_output",
    "fc_norm": "fc_norm",
    "embed_requires_grad": "embed_requires_grad",
    "ttt_steps": "speculative_tokens",
    "num_depths": "speculative_tokens",
    "num_speculative_steps": "speculative_tokens",
}


@dataclass(frozen=True, slots=True)
class Family:
    """One family's part of a training.

    :param values: fields of a new draft's config, of the settings and the captured layers.
    :param masked: whether the draft reads a mask token.
    :param blocks: whether it is a block draft: one that can start from the verifier's layers, with short blocks.
    :param every_anchor: whether every position is trained from unless ``--max-anchors`` is given.
    :param drops_depths: whether deep slots are thinned out while training.
    :param of_verifier: whether it is a layer of the verifier's own kind on its last state: neither shape nor captured layers
        are a choice, and the verifier may bring weights for it.
    """

    config_class: type[DraftModelConfig]
    values: Callable[[TrainConfig, list[int]], dict[str, Any]]
    masked: bool = True
    blocks: bool = False
    every_anchor: bool = False
    drops_depths: bool = False
    of_verifier: bool = False


def family_of(config: TrainConfig) -> Family:
    """The entry of ``--speculator-type``."""
    return FAMILIES[config.speculator_type]


def decay_length(config: TrainConfig) -> float:
    """gamma of the weights exp(-d / gamma) of the predicted tokens; infinite where all weigh the same."""
    if family_of(config).blocks:
        return config.dflash.dflash_decay_gamma
    if config.speculator_type == "eagle3":
        decay = config.loss.ttt_step_loss_decay
    elif config.speculator_type == "mtp":
        decay = config.mtp.step_weight_beta
    else:
        decay = 1.0
    return math.inf if decay == 1 else -1 / math.log(decay)


def _dflash(config: TrainConfig, layer_ids: list[int]) -> dict[str, Any]:
    derived = derive(config)
    return {
        "block_size": derived.block_size,
        "sample_from_anchor": derived.sample_from_anchor,
        "sliding_window_non_causal": derived.sliding_window_non_causal,
        "sliding_window_reference": config.draft.sliding_window_reference,
        "aux_hidden_state_layer_ids": layer_ids,
    }


def _dspark(config: TrainConfig, layer_ids: list[int]) -> dict[str, Any]:
    dspark = config.dspark
    return _dflash(config, layer_ids) | {
        "markov_rank": dspark.markov_rank,
        "markov_head_type": dspark.markov_head_type,
        "enable_confidence_head": dspark.enable_confidence_head,
        "confidence_head_with_markov": dspark.confidence_head_with_markov,
    }


def _eagle(config: TrainConfig, layer_ids: list[int]) -> dict[str, Any]:
    derived, draft = derive(config), config.draft
    values: dict[str, Any] = {
        "eagle_aux_hidden_state_layer_ids": layer_ids,
        "norm_before_residual": draft.norm_before_residual,
        "norm_before_fc": derived.norm_before_fc,
        "norm_output": derived.norm_output,
        "fc_norm": draft.fc_norm,
    }
    if config.given("sliding_window_reference"):
        values["sliding_window_reference"] = draft.sliding_window_reference
    return values


def _eagle3(config: TrainConfig, layer_ids: list[int]) -> dict[str, Any]:
    own = {"embed_requires_grad": config.draft.embed_requires_grad, "speculative_tokens": config.loss.ttt_steps}
    return _eagle(config, layer_ids) | own


def _peagle(config: TrainConfig, layer_ids: list[int]) -> dict[str, Any]:
    own: dict[str, Any] = {"speculative_tokens": config.peagle.num_depths}
    if config.given("embed_requires_grad"):
        own["embed_requires_grad"] = config.draft.embed_requires_grad
    return _eagle(config, layer_ids) | own


def _mtp(config: TrainConfig, layer_ids: list[int]) -> dict[str, Any]:
    return {"speculative_tokens": config.mtp.num_speculative_steps}


FAMILIES: dict[str, Family] = {
    "dflash": Family(DFlashSpeculatorConfig, _dflash, blocks=True),
    "dspark": Family(DSparkSpeculatorConfig, _dspark, blocks=True),
    "eagle3": Family(Eagle3SpeculatorConfig, _eagle3, masked=False, every_anchor=True),
    "peagle": Family(PEagleSpeculatorConfig, _peagle, drops_depths=True),
    "mtp": Family(MTPSpeculatorConfig, _mtp, masked=False, every_anchor=True, of_verifier=True),
}
