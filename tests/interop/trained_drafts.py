"""Small drafts that know some greedy answers by heart: of prompts like these, some are drafted well and others badly.

They are trained once and kept beside the peers' environments. A random tiny verifier writes text that no draft could guess, so
what was not learned is rejected; with the packaged SmolLM2 the text is real.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from speculators.data import AnswerRecord, DataManifest, Row, RowDataset
from speculators.data.rendering import render_prompt
from speculators.decoding import Decoder
from speculators.train import train
from speculators.train.config import TrainConfig
from speculators.verifiers.loading import Verifier, load_verifier
from speculators.verifiers.packaged import packaged_verifier
from speculators.verifiers.session import TransformersSession
from tests.interop.environments import environments_folder
from tests.tiny import tiny_verifier

__all__ = ["DRAFTS", "TrainedDraft", "tiny_prompts", "trained_draft"]

VOCAB, HIDDEN, LEARNED = 96, 64, 6
QUESTIONS = ("Name three colours.", "Why is the sky blue?", "Write a short poem about the sea.", "What is two plus two?")

#: What every draft is trained with. One layer: vLLM's CPU kernel norms the keys of a block draft's later layers wrongly.
COMMON: dict[str, Any] = {
    "num_layers": 1,
    "lr": 1e-2,
    "sliding_window": 0,
    "target_layer_ids": [1, 3, 5],
    "hidden_states_dtype": "float32",
    "checkpoint_dtype": "float32",
    "checkpoint_freq": 1000,
    "total_seq_len": 1024,
    "max_anchors": 512,
    "log_freq": 50,
}
DRAFTS: dict[str, dict[str, Any]] = {
    "dspark": {
        "speculator_type": "dspark",
        "block_size": 5,
        "markov_rank": 16,
        "draft_vocab_size": 80,
        "sliding_window": 32,
        "sliding_window_reference": "slot",
        "epochs": 120,
    },
    "dflash": {"speculator_type": "dflash", "block_size": 5, "epochs": 120},
    "eagle3": {"speculator_type": "eagle3", "draft_arch": "llama", "ttt_steps": 3, "epochs": 120},
    "smollm2": {
        "speculator_type": "dspark",
        "block_size": 5,
        "markov_rank": 64,
        "draft_vocab_size": 512,
        "mask_token_id": 3,
        "target_layer_ids": [2, 15, 27],
        "lr": 2e-3,
        "epochs": 25,
    },
}


@dataclass(frozen=True)
class TrainedDraft:
    """A draft's checkpoint and the verifier it was trained for."""

    checkpoint: Path
    verifier: Path


def tiny_prompts(count: int) -> list[list[int]]:
    """Prompts of 8 to 24 random tokens; the first :data:`LEARNED` are those that the tiny verifier's drafts have learned."""
    rng = np.random.default_rng(17)
    return [rng.integers(6, VOCAB, size=int(rng.integers(8, 25))).tolist() for _ in range(count)]


def smollm2_prompts(verifier: Verifier) -> list[list[int]]:
    """Chat prompts; a draft has learned the first two."""
    return [render_prompt(verifier.tokenizer, [{"role": "user", "content": question}]) for question in QUESTIONS]


def trained_draft(name: str) -> TrainedDraft:
    """The draft of this name, trained on the first call (10 to 40 seconds)."""
    recipe = json.dumps([COMMON, DRAFTS[name], QUESTIONS, VOCAB, HIDDEN, LEARNED])
    home = environments_folder() / "drafts" / f"{name}-{hashlib.sha256(recipe.encode()).hexdigest()[:12]}"
    verifier = packaged_verifier() if name == "smollm2" else home / "verifier"
    found = TrainedDraft(home / "checkpoint", verifier)
    if found.checkpoint.exists():
        return found
    home.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(dir=home.parent))
    try:
        if name != "smollm2":
            # Text of far from uniform distributions, so that hardly any argmax is a near tie.
            shape = {"vocab": VOCAB, "layers": 6, "hidden": HIDDEN, "heads": 2, "kv_heads": 1, "intermediate": 96}
            tiny_verifier(home, **shape, initializer_range=0.3, seed=3)
        checkpoint = _train(DRAFTS[name], work, verifier, LEARNED if name != "smollm2" else 2)
        os.replace(checkpoint, found.checkpoint)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return found


def _train(values: dict[str, Any], work: Path, folder: Path, learned: int) -> Path:
    verifier = load_verifier(folder)
    tiny = verifier.vocab_size == VOCAB
    prompts = tiny_prompts(learned) if tiny else smollm2_prompts(verifier)[:learned]
    plain = Decoder(lambda: TransformersSession(verifier))
    rows = [_row(index, prompt, plain.decode(prompt, 100 if tiny else 40).tokens) for index, prompt in enumerate(prompts)]
    paths = {"verifier_name_or_path": str(folder), "save_path": str(work / "run")}
    config = TrainConfig.from_flat(COMMON | paths | values)
    dataset = RowDataset.from_rows(rows, DataManifest(answers=AnswerRecord(on_policy=True)))
    torch.manual_seed(0)
    ids = np.arange(len(rows))
    nothing = np.array([], int)
    result = train(config, dataset=dataset, train_ids=ids, val_ids=nothing, verifier=verifier, progress=False)
    return result.checkpoint


def _row(index: int, prompt: Sequence[int], answer: Sequence[int]) -> Row:
    ids = np.array([*prompt, *answer])
    return Row(index, ids, np.arange(len(ids)) >= len(prompt))
