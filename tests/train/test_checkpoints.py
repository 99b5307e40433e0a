"""Checkpoints appear whole, torn ones are not seen, and a full disk costs nothing that was saved."""

import errno
import json
import os
from pathlib import Path

import pytest
import torch

from speculators.errors import SpeculatorsError
from speculators.train import checkpoints
from speculators.train.checkpoints import CheckpointStore, get_rng_state, set_rng_state


def save(store: CheckpointStore, step: int):
    return store.save(
        lambda path: (path / "config.json").write_text("{}"),
        {"a": torch.full((3,), float(step))},
        {"step": step},
        label=f"s{step}",
    )


def test_the_latest_complete_one_is_found(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    assert store.latest() is None
    for step in range(3):
        save(store, step)
    latest = store.latest()
    assert (latest.number, latest.state["step"]) == (2, 2)
    assert torch.equal(latest.tensors()["a"], torch.full((3,), 2.0))
    assert os.readlink(tmp_path / "s1") == "1"


def test_a_torn_one_that_is_passed_over_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = CheckpointStore(tmp_path)
    save(store, 0)
    assert store.to_resume().number == 0
    assert not caplog.messages
    os.truncate(save(store, 1).path / "training_state.safetensors", 20)
    assert store.to_resume().number == 0
    assert caplog.messages == [f"{tmp_path / '1'} is no complete checkpoint and is passed over; going on from {tmp_path / '0'}"]


@pytest.mark.parametrize(
    "tear",
    [
        lambda path: (path / "training_state.json").unlink(),
        lambda path: (path / "training_state.json").write_text('{"format": 1, "fil'),
        lambda path: (path / "training_state.json").write_text("[]"),
        lambda path: (path / "training_state.safetensors").unlink(),
        lambda path: os.truncate(path / "training_state.safetensors", 20),
        lambda path: (path / "config.json").write_text(""),
    ],
)
def test_a_torn_one_is_ignored_and_its_number_not_reused(tear, tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    save(store, 0)
    tear(save(store, 1).path)
    assert store.latest().number == 0
    assert save(store, 2).number == 2


def test_half_written_folders_are_swept(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    for name in (".3.99.tmp", ".1.99.old", ".keep.tmp", "5x"):
        (tmp_path / name).mkdir()
    store.sweep()
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [".keep.tmp", "5x"]
    assert store.latest() is None


@pytest.mark.parametrize("place", ["model", "state", "json", "fsync"])
def test_a_full_disk_is_one_sentence_and_loses_nothing(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = CheckpointStore(tmp_path)
    save(store, 0)
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def fail(*_: object, **__: object) -> None:
        raise full

    def write_model(path: Path) -> None:
        if place == "model":
            raise full

    if place == "state":
        monkeypatch.setattr(checkpoints, "save_file", fail)
    if place == "json":
        monkeypatch.setattr(Path, "write_text", fail)
    if place == "fsync":
        monkeypatch.setattr(checkpoints.os, "fsync", fail)
    with pytest.raises(SpeculatorsError, match=r"the disk is full while saving checkpoint 1 .* goes on from checkpoint .*/0$"):
        store.save(write_model, {"a": torch.zeros(1)}, {}, label="x")
    monkeypatch.undo()
    assert [checkpoint.number for checkpoint in store.complete()] == [0]
    assert not [entry for entry in tmp_path.iterdir() if entry.name.endswith(".tmp")]
    assert save(store, 1).number == 1


def test_pruning_touches_only_this_runs_checkpoints(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    for step in range(4):
        save(store, step)
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "9").mkdir()
    store.prune(keep={1, 3}, mine={0, 1, 2, 3})
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["1", "3", "9", "notes.txt", "s1", "s3"]


def test_the_state_is_json_and_the_generators_come_back() -> None:
    tensors, record = get_rng_state()
    record = json.loads(json.dumps(record))
    import random

    import numpy as np

    first = (torch.rand(3).tolist(), np.random.rand(3).tolist(), random.random())
    set_rng_state(tensors, record)
    assert first == (torch.rand(3).tolist(), np.random.rand(3).tolist(), random.random())
