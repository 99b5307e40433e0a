"""Data sets of ours in upstream's training: its reader takes the folder as it takes those of its own prepare-data."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from speculators.data import DataManifest, Row, RowBatch, RowDataset, row_files, split_rows, write_rows
from speculators.data.row_batches import regrouped
from tests.interop.environments import run_peer
from tests.tiny import random_rows

pytestmark = pytest.mark.interop


def test_upstream_trains_on_our_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_files, "SHARD_BYTES", 4000)
    monkeypatch.setattr("speculators.data.rows.regrouped", partial(regrouped, tokens=100))
    rows = random_rows(20)
    numbers = np.arange(20)
    origin = {
        "conversation": numbers // 2,
        "source": np.zeros(20, np.int32),
        "record": numbers,
        "turn": (numbers % 2).astype(np.int32),
    }
    batch = RowBatch.of(rows)
    whole = RowBatch(batch.input_ids, batch.loss_mask, batch.lengths, **origin)
    ours = write_rows(tmp_path / "rows", [whole], DataManifest())
    assert len(list((tmp_path / "rows").glob("*.arrow"))) > 1
    _with_states(tmp_path / "rows", rows)
    theirs = run_peer("upstream", "upstream_rows.py", tmp_path / "rows", 0.8)
    for ids, split in zip(split_rows(ours, 0.8), ("train", "val"), strict=True):
        expected = [rows[row_id] for row_id in ids]
        assert theirs[split]["lengths"] == [len(row) for row in expected]
        assert theirs[split]["input_ids"] == [row.input_ids.tolist() for row in expected]
        assert theirs[split]["loss_mask"] == [row.loss_mask.astype(int).tolist() for row in expected]
    assert len(RowDataset.load(tmp_path / "rows")) == 20


def _with_states(folder: Path, rows: list[Row]) -> None:
    """What upstream's reader asks for beside a row, two layers of four numbers."""
    (folder / "hidden_states").mkdir()
    for row_id, row in enumerate(rows):
        states = {"hidden_states": torch.zeros(len(row), 2, 4), "token_ids": torch.tensor(row.input_ids)}
        save_file(states, folder / "hidden_states" / f"hs_{row_id}.safetensors")
