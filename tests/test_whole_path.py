"""The whole path by real commands on a tiny verifier: prepare, train, a kill, resume, evaluate. Under a minute."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from speculators.evaluation.results import read_results
from tests.tiny import tiny_verifier

STEPS = 60
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "speculators", *(str(argument) for argument in arguments)]


def run(*arguments: object) -> str:
    """Run a command to its end and return what it printed."""
    done = subprocess.run(command(*arguments), capture_output=True, text=True, check=False, env=ENVIRONMENT)
    assert done.returncode == 0, f"{done.args}\n{done.stderr}"
    return done.stdout


def kill_after_first_checkpoint(*arguments: object, folder: Path) -> None:
    """Start a command and kill -9 it once its first numbered checkpoint has appeared."""
    process = subprocess.Popen(command(*arguments), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=ENVIRONMENT)
    try:
        deadline = time.monotonic() + 60
        while not any(entry.name.isdigit() for entry in (folder.iterdir() if folder.is_dir() else ())):
            assert process.poll() is None, process.stderr.read().decode() if process.stderr else ""
            assert time.monotonic() < deadline
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == -signal.SIGKILL


@pytest.mark.timeout(180)
def test_prepare_train_resume_evaluate(tmp_path: Path) -> None:
    verifier = tiny_verifier(tmp_path)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"question {index}, please"}) + "\n" for index in range(24)))
    run(
        *("prepare-data", "--model", verifier, "--data", prompts, "--output", tmp_path / "data"),
        *("--generate", "--max-new-tokens", 40),
    )
    training = (
        *("train", "--speculator-type", "dspark", "--verifier-name-or-path", verifier, "--data-path", tmp_path / "data"),
        *("--num-layers", 1, "--draft-vocab-size", 40, "--markov-rank", 8, "--total-seq-len", 256, "--max-anchors", 16),
        *("--max-steps", STEPS, "--checkpoint-steps", 5, "--epochs", 1000, "--checkpoint-freq", 1000),
        *("--save-path", tmp_path / "run"),
    )
    kill_after_first_checkpoint(*training, folder=tmp_path / "run")
    run(*training)
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [record["global_step"] for record in records if "train" in record]
    assert steps == list(range(1, STEPS + 1))

    checkpoint = max(
        (entry for entry in (tmp_path / "run").iterdir() if entry.name.isdigit()), key=lambda entry: int(entry.name)
    )
    printed = run(
        *("evaluate", checkpoint, "--data", prompts, "--num-speculative-tokens", 3, 7, "--limit", 4),
        *("--max-new-tokens", 16, "--dtype", "float64", "--output", tmp_path / "results"),
    )
    results = read_results(tmp_path / "results")
    assert [run.n for run in results.benchmarks[0].runs] == [3, 7]
    assert all(run.identical_to_baseline for run in results.benchmarks[0].runs)
    assert "prompts" in printed
