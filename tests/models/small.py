"""Small configs and packed rows for the tests of models."""

from __future__ import annotations

from typing import Any

import torch
from transformers import Qwen3Config

from speculators.batch import PackedBatch
from speculators.config import VerifierConfig
from speculators.models.dflash import DFlashSpeculatorConfig
from speculators.models.draft_config import build_draft_config
from speculators.models.dspark import DSparkSpeculatorConfig

VOCAB, HIDDEN, LAYER_IDS = 40, 16, (1, 3, 4)


def verifier_config(**values: Any) -> Qwen3Config:
    shape = {
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": 24,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        # Large weights, so that attention is far from uniform and a wrong mask shows.
        "initializer_range": 0.5,
    }
    return Qwen3Config(**(shape | values))


def draft_config(
    family: str = "dspark", *, verifier: str | None = None, decoder: dict[str, Any] | None = None, **values: Any
) -> Any:
    """A small draft's config; ``decoder`` holds arguments of :func:`build_draft_config`."""
    shape: dict[str, Any] = {"num_layers": 2, "sliding_window": 0} | (decoder or {})
    defaults: dict[str, Any] = {
        "aux_hidden_state_layer_ids": list(LAYER_IDS),
        "mask_token_id": VOCAB - 1,
        "draft_vocab_size": VOCAB,
        "block_size": 4,
    }
    if family == "dspark":
        defaults["markov_rank"] = 6
    config_class: Any = DSparkSpeculatorConfig if family == "dspark" else DFlashSpeculatorConfig
    record = VerifierConfig(name_or_path=verifier, architectures=["Qwen3ForCausalLM"])
    return config_class.build(build_draft_config(verifier_config(), **shape), record, **(defaults | values))


def packed_row(lengths: list[int], anchors: list[int], *, padding: int = 0, seed: int = 0) -> PackedBatch:
    """Random documents of these lengths, all supervised, with random float64 features."""
    generator = torch.Generator().manual_seed(seed)
    total = sum(lengths) + padding
    documents = [torch.full((length,), index) for index, length in enumerate(lengths)] + [torch.full((padding,), -1)]
    positions = [torch.arange(length) for length in (*lengths, padding)]
    return PackedBatch(
        input_ids=torch.randint(0, VOCAB, (total,), generator=generator),
        loss_mask=torch.ones(total, dtype=torch.bool),
        document_ids=torch.cat(documents),
        position_ids=torch.cat(positions),
        row_ids=tuple(range(len(lengths))),
        anchors=torch.tensor(anchors, dtype=torch.long),
        features=torch.randn(total, len(LAYER_IDS), HIDDEN, generator=generator, dtype=torch.float64),
        final_states=torch.randn(total, HIDDEN, generator=generator, dtype=torch.float64),
    )
