"""Real processes and a slow source: killed in the middle of a replay, two on one run folder, two that train as one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from speculators.train.account import check_account
from tests.train.helpers import loaded_verifier

pytestmark = pytest.mark.chaos

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
TWO_PROCESSES = ["-m", "torch.distributed.run", "--nproc_per_node", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint"]
#: 3 uses of windows of 2 steps; 6 epochs of 15 steps.
REPLAYED = {"epochs": 6, "replay": 3, "replay_window": 2, "checkpoint_steps": 4, "checkpoint_freq": 3}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("flow")
    loaded_verifier(folder)
    return folder


def start(
    folder: Path, run: str, changes: dict[str, Any], *options: str, launcher: list[str] | None = None
) -> subprocess.Popen:
    arguments = ["-m", "tests.train.slow_source", str(folder), run, json.dumps(changes), *options]
    command = [sys.executable, *(launcher or []), *arguments]
    return subprocess.Popen(command, cwd=ROOT, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finish(process: subprocess.Popen) -> str:
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    return output


def lines(run: Path) -> int:
    account = run / "account.jsonl"
    return account.read_bytes().count(b"\n") if account.exists() else 0


def wait_for(run: Path, count: int) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and lines(run) < count:
        time.sleep(0.002)
    assert lines(run) >= count


def losses(run: Path) -> list[dict[str, float]]:
    records = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [record["train"] for record in records if "train" in record]


@pytest.fixture
def slow(folder: Path) -> Iterator[subprocess.Popen]:
    """A training that is under way."""
    process = start(folder, "killed", REPLAYED, "--delay", "0.1")
    yield process
    process.kill()
    process.wait()


def test_killed_in_a_replay_and_refused_beside_another(folder: Path, slow: subprocess.Popen) -> None:
    run, whole = folder / "killed", start(folder, "whole", REPLAYED)
    wait_for(run, 8)
    slow.send_signal(signal.SIGSTOP)  # so that it is still there when the other has started
    second = start(folder, "killed", REPLAYED)
    output, _ = second.communicate(timeout=60)
    assert second.returncode == 1
    assert f"is in use by process {slow.pid} " in output.splitlines()[-1]
    assert output.splitlines()[-1].startswith("error: ")
    assert "Traceback" not in output
    slow.send_signal(signal.SIGCONT)
    wait_for(run, 20)
    slow.send_signal(signal.SIGKILL)
    slow.wait()
    assert lines(run) < 60
    finish(start(folder, "killed", REPLAYED))
    finish(whole)
    found = check_account(run, range(12), replay=3)
    assert found.exact, found.faults
    assert (found.epochs, found.uses, found.left_out, found.reorder_window) == (6, 6 * 3 * 12, 0, 0)
    assert losses(run) == losses(folder / "whole")
    assert (run / "account.jsonl").read_bytes() == (folder / "whole" / "account.jsonl").read_bytes()


def test_two_processes_leave_out_the_same_rows_as_one(folder: Path) -> None:
    """A process may lose all its rows of a step, and both may: they stay in step."""
    lacks = ["--lacks", "0", "1", "2", "4", "6", "7", "9", "10"]
    changes = {"epochs": 3, "replay": 2, "on_missing": "skip"}
    finish(start(folder, "one", {**changes, "gradient_accumulation_steps": 2}, *lacks))
    finish(start(folder, "two", changes, *lacks, launcher=[*TWO_PROCESSES, "localhost:0"]))
    one, two = losses(folder / "one"), losses(folder / "two")
    assert len(one) == len(two)
    for first, second in zip(one, two, strict=True):
        assert first.keys() == second.keys()
        if first:
            assert second["loss"] == pytest.approx(first["loss"], abs=1e-4)
            assert second["anchor_coverage"] == first["anchor_coverage"]
    assert (folder / "one" / "account.jsonl").read_text() == (folder / "two" / "account.jsonl").read_text()
    found = check_account(folder / "two", range(12), replay=2)
    assert found.exact, found.faults
    assert (found.uses, found.left_out) == (3 * 2 * 4, 3 * 2 * 8)
