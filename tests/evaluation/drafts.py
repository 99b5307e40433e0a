"""A random draft checkpoint for a tiny verifier."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from speculators.config import VerifierConfig
from speculators.models import DSparkDraftModel, DSparkSpeculatorConfig
from speculators.models.draft_config import build_draft_config


def random_checkpoint(verifier: Path, folder: Path, *, draft_vocab: int = 40, **values: Any) -> Path:
    """Write a DSpark draft with random weights and return its folder."""
    verifier_config = AutoConfig.from_pretrained(verifier)
    decoder = build_draft_config(verifier_config, num_layers=1)
    settings = {"block_size": 8, "aux_hidden_state_layer_ids": [1, 2, 3], "mask_token_id": 3, "markov_rank": 8, **values}
    config = DSparkSpeculatorConfig.build(
        decoder, VerifierConfig.from_pretrained(verifier), draft_vocab_size=draft_vocab, **settings
    )
    t2d = torch.arange(verifier_config.vocab_size) < draft_vocab
    d2t = torch.zeros(draft_vocab, dtype=torch.long)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = DSparkDraftModel.from_verifier(config, t2d=t2d, d2t=d2t, verifier=verifier)
    model.save_pretrained(folder)
    return folder
