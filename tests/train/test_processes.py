"""Real processes: kill -9 and go on, and two processes that train as one."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from speculators.__main__ import main
from speculators.data import DataManifest, RowDataset
from tests.tiny import random_rows, tiny_verifier

STEPS = 60
SETTINGS = """
train:
  speculator_type: dspark
  verifier: {verifier_name_or_path: verifier}
  draft: {num_layers: 1, target_layer_ids: [1, 2], mask_token_id: 3}
  data: {data_path: rows, total_seq_len: 64, max_anchors: 16, hidden_states_dtype: float32}
  optimizer: {lr: 1e-2}
  trainer: {epochs: 1000, max_steps: %d, checkpoint_freq: 100, checkpoint_steps: 7, val_freq: 10}
  dflash: {block_size: 4}
  dspark: {markov_rank: 8}
"""
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
TRAIN = [sys.executable, "-m", "speculators", "train"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("processes")
    tiny_verifier(folder)
    RowDataset.save(folder / "rows", random_rows(12, seed=5), DataManifest())
    (folder / "train.yaml").write_text(SETTINGS % STEPS)
    return folder


def start(folder: Path, run: str, *, command: list[str] | None = None, accumulation: int = 2) -> subprocess.Popen:
    arguments = ["--config", "train.yaml", "--save-path", run, "--gradient-accumulation-steps", str(accumulation)]
    return subprocess.Popen(
        [*(command or TRAIN), *arguments],
        cwd=folder,
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process: subprocess.Popen) -> str:
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    return output


@pytest.fixture(scope="module")
def whole(folder: Path) -> Iterator[Path]:
    """A run of one process that nothing disturbs."""
    finish(start(folder, "whole"))
    return folder / "whole"


def records(run: Path, kind: str) -> list[dict]:
    found = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [record[kind] for record in found if kind in record]


def test_a_run_killed_between_checkpoints_goes_on_bit_for_bit(folder: Path, whole: Path) -> None:
    process = start(folder, "killed")
    metrics = folder / "killed" / "metrics.jsonl"
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and (not metrics.exists() or metrics.read_bytes().count(b"\n") < 20):
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert metrics.read_bytes().count(b"\n") < STEPS
    assert f"trained at step {STEPS}" in finish(start(folder, "killed"))
    assert len(records(whole, "train")) == STEPS
    for kind in ("train", "val"):
        assert records(folder / "killed", kind) == records(whole, kind)


@pytest.mark.parametrize("short", [[], ["--short-block-size", "2"]], ids=["whole blocks", "short blocks"])
def test_two_processes_train_as_one(folder: Path, whole: Path, short: list[str]) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2"]
    rendezvous = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "-m", "speculators.train"]
    if short:  # packed rows of one step then differ in the length of their blocks
        whole = folder / "whole-short"
        finish(start(folder, "whole-short", command=[*TRAIN, *short]))
    run = "two-short" if short else "two"
    finish(start(folder, run, command=[*launcher, *rendezvous, *short], accumulation=1))
    one, two = records(whole, "train"), records(folder / run, "train")
    assert len(two) == STEPS
    for first, second in zip(one[:20], two[:20], strict=True):
        assert second["loss"] == pytest.approx(first["loss"], abs=1e-5)
        assert second["grad_norm"] == pytest.approx(first["grad_norm"], rel=1e-3)
        assert second["anchor_coverage"] == first["anchor_coverage"]
    assert records(folder / run, "val")[0]["loss"] == pytest.approx(records(whole, "val")[0]["loss"], abs=1e-4)


def test_bad_settings_exit_with_2_and_one_line(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    monkeypatch.chdir(folder)
    for arguments, words in (
        (["--speculator-type", "mtp"], "--speculator-type mtp cannot be trained by this version yet"),
        (["--epochs", "0"], "--epochs"),
        (["--fsdp-shard"], "--fsdp-shard is not built yet"),
        (["--verifier-name-or-path", "nowhere", "--save-path", "new"], "nowhere"),
        (["--data-path", "nowhere", "--save-path", "new"], "nowhere holds no data set"),
    ):
        code = main(["train", "--config", "train.yaml", *arguments])
        printed = capsys.readouterr()
        assert code in (1, 2)
        assert (code == 2) == (words[0] == "-")
        assert words in printed.err
        *warned, refusal = printed.err.splitlines()
        assert refusal.startswith("error: ") or "speculators train: error: " in refusal
        assert all(line.startswith("warning: ") for line in warned)
