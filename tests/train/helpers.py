"""A tiny training, in memory: rows, a verifier's states computed row by row, and a draft."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from transformers import AutoTokenizer, LlamaForCausalLM

from speculators.data import RowDataset
from speculators.train.config import TrainConfig
from tests.tiny import random_rows, tiny_verifier

#: Settings of a training of a few seconds.
SETTINGS: dict[str, Any] = {
    "speculator_type": "dspark",
    "num_layers": 1,
    "block_size": 4,
    "markov_rank": 8,
    "target_layer_ids": [1, 2],
    "total_seq_len": 64,
    "max_anchors": 16,
    "hidden_states_dtype": "float32",
    "lr": 1e-2,
    "epochs": 2,
    "num_workers": 0,
    "mask_token_id": 3,
}


def settings(folder: Path, **changes: Any) -> TrainConfig:
    """:data:`SETTINGS` for the verifier in ``folder``, with changes."""
    base = {"verifier_name_or_path": str(folder / "verifier"), "save_path": str(folder / "run")}
    return TrainConfig.from_flat({**SETTINGS, **base, **changes})


def tiny_rows(count: int = 12) -> RowDataset:
    return RowDataset.from_rows(random_rows(count, seed=5))


def tiny_verifier_in_memory(folder: Path) -> Any:
    """What :func:`speculators.train.train` needs of a loaded verifier, without the loading module."""
    path = folder / "verifier"
    if not path.exists():
        tiny_verifier(folder)
    model = LlamaForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(path)
    return SimpleNamespace(model=model, config=model.config, tokenizer=tokenizer, eos_ids=(2,), path=path)


@dataclass
class RowByRowSource:
    """The verifier's states of one row at a time: slow, and plainly right."""

    verifier: Any
    layer_ids: tuple[int, ...] = (1, 2)

    def __post_init__(self) -> None:
        self.description = SimpleNamespace(final_state="post_norm", layer_ids=self.layer_ids, verifier_hash="tiny")
        self.calls = 0

    @torch.no_grad()
    def fetch(self, rows: list[Any]) -> list[Any]:
        self.calls += 1
        return [self._row(row) for row in rows]

    def _row(self, row: Any) -> Any:
        ids = torch.from_numpy(row.input_ids.copy())
        output = self.verifier.model(ids[None], output_hidden_states=True)
        features = torch.stack([output.hidden_states[layer][0] for layer in self.layer_ids], dim=1)
        return SimpleNamespace(row_id=row.row_id, token_ids=ids, features=features, final=output.hidden_states[-1][0])

    def close(self) -> None:
        pass
