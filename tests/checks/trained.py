"""Tiny drafts that know a few greedy answers by heart: a wrong reading of one shows at once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from speculators.data import AnswerRecord, DataManifest, RowDataset
from speculators.data.rendering import on_policy_row, render_prompt
from speculators.sampling import SamplingParams
from speculators.train import train
from speculators.verifiers import generate_answers, load_verifier
from tests.tiny import tiny_verifier
from tests.train.helpers import settings

PROMPTS = ["what is 1+1?", "hello", "name a cat", "why?", "tell me more, please", "9 times 7"]
ANSWER = 32

#: Settings of every draft here.
RECIPE: dict[str, Any] = {
    "num_layers": 2,
    "target_layer_ids": [1, 2, 3],
    "total_seq_len": 1024,
    "max_anchors": 512,
    "epochs": 120,
    "lr": 1e-2,
    "sliding_window": 0,
    "checkpoint_freq": 1000,
    "log_freq": 1000,
}


def learned_by_heart(folder: Path, family: str = "dspark", *, save_as: str | None = None, **changes: Any) -> Path:
    """Train a draft on the tiny verifier's answers to :data:`PROMPTS`, kept in ``prompts.jsonl``; returns its checkpoint."""
    if not (folder / "verifier").exists():
        tiny_verifier(folder, seed=3)
        (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
    verifier = load_verifier(folder / "verifier")
    prompts = [render_prompt(verifier.tokenizer, [{"role": "user", "content": prompt}]) for prompt in PROMPTS]
    answers = dict(generate_answers(verifier, prompts, ANSWER, SamplingParams()))
    rows = [on_policy_row(index, prompts[index], answers[index]) for index in sorted(answers)]
    dataset = RowDataset.from_rows(rows, DataManifest(answers=AnswerRecord(on_policy=True)))
    config = settings(folder, speculator_type=family, save_path=str(folder / (save_as or family)), **{**RECIPE, **changes})
    ids = np.arange(len(rows))
    return train(
        config, dataset=dataset, train_ids=ids, val_ids=np.array([], int), verifier=verifier, progress=False
    ).checkpoint
