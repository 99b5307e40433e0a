"""Kills and signals at the places where a run is between two states."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from speculators.train import StepInfo, TrainResult, train
from speculators.train.checkpoints import CheckpointStore
from tests.train.helpers import loaded_verifier, settings, tiny_rows


class Killed(BaseException):
    """Ends a training as a kill would: nothing of the library catches it."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("resuming")


@pytest.fixture(scope="module")
def verifier(folder: Path) -> Any:
    return loaded_verifier(folder)


@pytest.fixture
def run(folder: Path, verifier: Any, tmp_path: Path):
    def do(name: str, on_step: Any = None, **changes: Any) -> TrainResult:
        config = settings(folder, save_path=str(tmp_path / name), **changes)
        return train(config, dataset=tiny_rows(), verifier=verifier, progress=False, on_step=on_step)

    return do


def validations(path: Path) -> list[dict[str, Any]]:
    records = map(json.loads, (path / "metrics.jsonl").read_text().splitlines())
    return [record for record in records if "val" in record]


def test_a_kill_between_saving_and_marking_the_best(run, tmp_path: Path, monkeypatch) -> None:
    changes = {"epochs": 3, "lr": 3e-2, "save_best": True}
    run("whole", **changes)
    mark_best, calls = CheckpointStore.mark_best, []

    def killed(store: CheckpointStore, checkpoint: Any) -> None:
        calls.append(checkpoint.number)
        if len(calls) == 2:
            raise Killed
        mark_best(store, checkpoint)

    with monkeypatch.context() as patched:
        patched.setattr(CheckpointStore, "mark_best", killed)
        with pytest.raises(Killed):
            run("cut", **changes)
    assert (tmp_path / "cut" / "checkpoint_best").resolve().name == "0"  # not yet the better one that was saved
    run("cut", **changes)
    for name in ("whole", "cut"):
        assert (tmp_path / name / "checkpoint_best" / "model.safetensors").is_file()
    best = [(tmp_path / name / "checkpoint_best").resolve().name for name in ("whole", "cut")]
    assert best[0] == best[1]


def test_a_signal_in_the_last_step_still_validates(run, tmp_path: Path) -> None:
    run("whole", max_steps=6)

    def send(info: StepInfo) -> None:
        if info.global_step == 6:
            signal.raise_signal(signal.SIGTERM)

    stopped = run("cut", max_steps=6, on_step=send)
    assert stopped.signal == signal.SIGTERM
    whole, cut = validations(tmp_path / "whole"), validations(tmp_path / "cut")
    assert [entry["val"] for entry in cut] == [entry["val"] for entry in whole]
    again = run("cut", max_steps=6)
    assert again.validation == whole[-1]["val"]
