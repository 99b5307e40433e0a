"""The data set on disk: round trip, upstream's form, replacing, and everything that can be wrong with it."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import datasets
import numpy as np
import pytest

from speculators.data import AnswerRecord, DataManifest, Row, RowDataset, SourceRecord
from speculators.errors import DataError
from tests.tiny import random_rows


def same(left: RowDataset, right: list[Row]) -> bool:
    return len(left) == len(right) and all(
        np.array_equal(a.input_ids, b.input_ids) and np.array_equal(a.loss_mask, b.loss_mask)
        for a, b in zip(left, right, strict=True)
    )


def test_round_trip(tmp_path: Path) -> None:
    rows = random_rows(7)
    manifest = DataManifest(
        verifier="tiny",
        answers=AnswerRecord(on_policy=True, temperature=0.5),
        sources=[SourceRecord(name="a", hash="0f", records=9, broken="line 9 breaks off")],
        options={"seq_length": 64},
        seed=3,
        counts={"kept": 7},
    )
    saved = RowDataset.save(tmp_path / "rows", rows, manifest)
    loaded = RowDataset.load(tmp_path / "rows")
    assert same(saved, rows)
    assert same(loaded, rows)
    assert loaded.manifest == saved.manifest
    assert loaded.manifest.answers == manifest.answers
    assert loaded.fingerprint == saved.fingerprint != ""
    assert loaded.lengths.tolist() == [len(row) for row in rows]
    assert loaded.row(3).row_id == 3
    assert loaded.row(0).loss_mask.dtype == bool
    assert loaded.supervised_tokens == sum(int(row.loss_mask.sum()) for row in rows)
    assert [row.row_id for row in loaded[2:4]] == [2, 3]
    assert json.loads((tmp_path / "rows" / "manifest.json").read_text())["schema"] == 2
    with pytest.raises(IndexError):
        loaded.row(7)


def test_upstream_reads_it_and_it_reads_upstreams(tmp_path: Path) -> None:
    rows = random_rows(3)
    RowDataset.save(tmp_path / "ours", rows, DataManifest())
    theirs = datasets.load_from_disk(str(tmp_path / "ours"))
    assert set(theirs.column_names) == {"input_ids", "loss_mask", "seq_len"}
    assert theirs[1]["input_ids"].tolist() == rows[1].input_ids.tolist()  # torch format
    assert int(theirs[1]["seq_len"]) == len(rows[1])
    # As upstream writes it: no manifest, here with shuffled indices over several chunks.
    records = [
        {"input_ids": r.input_ids.tolist(), "loss_mask": r.loss_mask.astype(int).tolist(), "seq_len": len(r)} for r in rows
    ]
    parts = [datasets.Dataset.from_list([record]) for record in records]
    datasets.concatenate_datasets(parts).select([2, 0, 1]).save_to_disk(str(tmp_path / "theirs"))
    loaded = RowDataset.load(tmp_path / "theirs")
    assert same(loaded, [rows[2], rows[0], rows[1]])
    assert loaded.manifest.answers is None


def test_replacing_leaves_other_files_alone(tmp_path: Path) -> None:
    folder = tmp_path / "output"
    (folder / "hidden_states").mkdir(parents=True)
    (folder / "hidden_states" / "hs_0.safetensors").write_text("x")
    RowDataset.save(folder, random_rows(4), DataManifest())
    with pytest.raises(DataError, match="already holds a data set"):
        RowDataset.save(folder, random_rows(5), DataManifest())
    assert len(RowDataset.load(folder)) == 4
    RowDataset.save(folder, random_rows(5, seed=1), DataManifest(), overwrite=True)
    assert len(RowDataset.load(folder)) == 5
    assert len(list(folder.glob("*.arrow"))) == 1
    assert (folder / "hidden_states" / "hs_0.safetensors").read_text() == "x"
    assert [path.name for path in tmp_path.iterdir()] == ["output"]


def test_a_full_disk_replaces_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "output"
    RowDataset.save(folder, random_rows(4), DataManifest())

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DataError, match="disk is full"):
        RowDataset.save(folder, random_rows(5), DataManifest(), overwrite=True)
    assert len(RowDataset.load(folder)) == 4
    assert [path.name for path in tmp_path.iterdir()] == ["output"]


def test_nothing_to_save(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no rows to write"):
        RowDataset.save(tmp_path / "rows", [], DataManifest())


def test_unreadable_data_sets(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds no data set"):
        RowDataset.load(tmp_path / "nowhere")
    datasets.Dataset.from_dict({"text": ["a"]}).save_to_disk(str(tmp_path / "text"))
    with pytest.raises(DataError, match="lacks the columns"):
        RowDataset.load(tmp_path / "text")
    for name, mask, message in [("ragged", [[1]], "mask values"), ("weights", [[0, 2]], "other than 0 and 1")]:
        datasets.Dataset.from_dict({"input_ids": [[1, 2]], "loss_mask": mask}).save_to_disk(str(tmp_path / name))
        with pytest.raises(DataError, match=message):
            RowDataset.load(tmp_path / name)
    datasets.Dataset.from_dict({"input_ids": [1], "loss_mask": [1]}).save_to_disk(str(tmp_path / "scalars"))
    with pytest.raises(DataError, match="not a list"):
        RowDataset.load(tmp_path / "scalars")


def test_torn_data_sets(tmp_path: Path) -> None:
    RowDataset.save(tmp_path / "a", random_rows(4), DataManifest())
    RowDataset.save(tmp_path / "b", random_rows(4, seed=1), DataManifest())
    (tmp_path / "a" / "manifest.json").write_bytes((tmp_path / "b" / "manifest.json").read_bytes())
    with pytest.raises(DataError, match="do not belong together"):
        RowDataset.load(tmp_path / "a")
    (tmp_path / "b" / "manifest.json").write_text("{")
    with pytest.raises(DataError, match="cannot be read"):
        RowDataset.load(tmp_path / "b")
    arrow = next((tmp_path / "b").glob("*.arrow"))
    arrow.write_bytes(arrow.read_bytes()[:100])
    with pytest.raises(DataError, match="cannot be read"):
        RowDataset.load(tmp_path / "b")


def test_ids_outside_the_vocabulary() -> None:
    dataset = RowDataset.from_rows(random_rows(3, vocab=64))
    dataset.check_vocabulary(64)
    with pytest.raises(DataError, match=r"row \d has token id"):
        dataset.check_vocabulary(8)


def test_a_row_needs_a_mask_value_per_token() -> None:
    with pytest.raises(DataError, match="one mask value"):
        Row(0, np.arange(3), np.ones(2, bool))
