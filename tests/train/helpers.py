"""A tiny training, in memory: rows, a verifier's states computed row by row, and a draft."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from speculators.data import Row, RowDataset
from speculators.train.config import TrainConfig
from speculators.verifiers.loading import Verifier, load_verifier
from speculators.verifiers.source import HiddenStates, StatesDescription
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
    "mask_token_id": 3,
}


def settings(folder: Path, **changes: Any) -> TrainConfig:
    """:data:`SETTINGS` for the verifier in ``folder``, with changes; ``...`` leaves a setting to its default."""
    base = {"verifier_name_or_path": str(folder / "verifier"), "save_path": str(folder / "run")}
    values = {**SETTINGS, **base, **changes}
    return TrainConfig.from_flat({name: value for name, value in values.items() if value is not ...})


def tiny_rows(count: int = 12) -> RowDataset:
    return RowDataset.from_rows(random_rows(count, seed=5))


def loaded_verifier(folder: Path) -> Verifier:
    """The tiny verifier, written into ``folder`` the first time."""
    path = folder / "verifier"
    if not path.exists():
        tiny_verifier(folder)
    return load_verifier(path)


class RowByRowSource:
    """The verifier's states of one row at a time by transformers' own output: slow, and plainly right."""

    def __init__(self, verifier: Verifier, layer_ids: tuple[int, ...] = (1, 2)) -> None:
        self.verifier = verifier
        self.description = StatesDescription(
            layer_ids, "post_norm", "float32", verifier.hidden_size, verifier.name, verifier.hash
        )

    @torch.no_grad()
    def fetch(self, rows: Sequence[Row]) -> list[HiddenStates]:
        return [self._row(row) for row in rows]

    def _row(self, row: Row) -> HiddenStates:
        ids = torch.from_numpy(row.input_ids.copy())
        states = self.verifier.model(input_ids=ids[None], output_hidden_states=True).hidden_states
        features = torch.stack([states[layer][0] for layer in self.description.layer_ids], dim=1)
        return HiddenStates(row.row_id, ids, features, states[-1][0])

    def close(self) -> None:
        pass
