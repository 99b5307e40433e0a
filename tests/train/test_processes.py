"""Real processes: kill -9 and go on, and two processes that train as one."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

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
  optimizer: {lr: 1e-3}  # upstream's default; a higher one makes more of two processes' rounding with every step
  trainer: {epochs: 1000, max_steps: %d, checkpoint_freq: 100, checkpoint_steps: 7, val_freq: 10}
  dflash: {block_size: 4}
  dspark: {markov_rank: 8}
"""
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
TRAIN = [sys.executable, "-m", "speculators", "train"]
LAUNCHER = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2"]
TWO_PROCESSES = [*LAUNCHER, "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "-m", "speculators.train"]
#: A script that trains, and whose process of the given rank kills itself at step 20.
KILLING = Path(__file__).parent / "killing.py"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("processes")
    tiny_verifier(folder)
    # An odd number of packed rows: of two processes, one has nothing in the last step of every epoch.
    RowDataset.save(folder / "rows", random_rows(13, seed=5), DataManifest())
    (folder / "train.yaml").write_text(SETTINGS % STEPS)
    return folder


def start(
    folder: Path, run: str, *, command: list[str] | None = None, accumulation: int = 2, group: dict[str, str] | None = None
) -> subprocess.Popen:
    arguments = ["--config", "train.yaml", "--save-path", run, "--gradient-accumulation-steps", str(accumulation)]
    return subprocess.Popen(
        [*(command or TRAIN), *arguments],
        cwd=folder,
        env={**ENVIRONMENT, **(group or {})},
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


@pytest.fixture(scope="module")
def shards(folder: Path) -> Path:
    """A run of two processes with a part of the draft each."""
    finish(start(folder, "shards", command=[*TWO_PROCESSES, "--fsdp-shard"], accumulation=1))
    return folder / "shards"


@pytest.fixture(scope="module")
def copies(folder: Path) -> Path:
    """A run of two processes with a copy of the draft each."""
    finish(start(folder, "copies", command=TWO_PROCESSES, accumulation=1))
    return folder / "copies"


@pytest.mark.parametrize("kind", ["copies", "shards"])
def test_two_processes_train_as_one(kind: str, whole: Path, request: pytest.FixtureRequest) -> None:
    run: Path = request.getfixturevalue(kind)
    one, two = records(whole, "train"), records(run, "train")
    assert len(two) == STEPS
    for first, second in zip(one[:20], two[:20], strict=True):
        assert second["loss"] == pytest.approx(first["loss"], abs=1e-5)
        assert second["grad_norm"] == pytest.approx(first["grad_norm"], rel=1e-3)
        assert second["anchor_coverage"] == first["anchor_coverage"]
    assert records(run, "val")[0]["loss"] == pytest.approx(records(whole, "val")[0]["loss"], abs=1e-4)


def test_two_processes_train_short_blocks_as_one(folder: Path) -> None:
    """Packed rows of one step differ in the length of their blocks, and so processes in the metrics they have."""
    short = ["--short-block-size", "2", "--max-steps", "12"]
    finish(start(folder, "whole-short", command=[*TRAIN, *short]))
    finish(start(folder, "two-short", command=[*TWO_PROCESSES, *short], accumulation=1))
    one, two = records(folder / "whole-short", "train"), records(folder / "two-short", "train")
    assert len(one) == len(two) == 12
    for first, second in zip(one, two, strict=True):
        assert second["loss"] == pytest.approx(first["loss"], abs=1e-5)
        assert second.keys() == first.keys()


@pytest.mark.parametrize("rank", [0, 1])
def test_the_other_ends_with_a_sentence_when_one_is_killed(folder: Path, rank: int) -> None:
    """Without a launcher, which would end the other before it can say anything."""
    run = f"lost-{rank}"
    with socket.socket() as free:
        free.bind(("localhost", 0))
        group = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": "2"}
    command = [sys.executable, str(KILLING), str(rank)]
    processes = [start(folder, run, command=command, accumulation=1, group={**group, "RANK": str(each)}) for each in (0, 1)]
    try:
        outputs = [process.communicate(timeout=120)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert processes[rank].returncode == -signal.SIGKILL
    assert processes[1 - rank].returncode == 1
    assert outputs[1 - rank].splitlines()[-1].startswith("error: another process of this training is gone")
    assert "Traceback" not in outputs[1 - rank]
    finish(start(folder, run, command=TWO_PROCESSES, accumulation=1))
    assert len(records(folder / run, "train")) == STEPS


def test_accelerate_launches_it_too(folder: Path, whole: Path) -> None:
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "1", "--num_machines", "1"]
    options = ["--mixed_precision", "no", "--dynamo_backend", "no", "-m", "speculators.train"]
    finish(start(folder, "launched", command=[*launcher, *options, "--max-steps", "6"]))
    launched = records(folder / "launched", "train")
    assert len(launched) == 6
    # The schedule is that of 6 steps, so only the first loss is the same.
    assert launched[0]["loss"] == pytest.approx(records(whole, "train")[0]["loss"], abs=1e-5)


def test_shards_are_saved_whole_and_go_on_bit_for_bit(folder: Path, whole: Path, shards: Path) -> None:
    """The run cut back to what one that was killed before its next checkpoint leaves, and gone on with."""
    same_tensors_as_one_process(checkpoint_of(shards, 7), checkpoint_of(whole, 7))
    cut = folder / "cut"
    shutil.copytree(shards, cut, symlinks=True)
    for checkpoint in numbered(cut):
        if step_of(checkpoint) > 35:
            shutil.rmtree(checkpoint)
    finish(start(folder, "cut", command=[*TWO_PROCESSES, "--fsdp-shard"], accumulation=1))
    for kind in ("train", "val"):
        assert records(cut, kind) == records(shards, kind)
    last = [load_file(checkpoint_of(run, STEPS) / "training_state.safetensors") for run in (cut, shards)]
    assert last[0].keys() == last[1].keys()
    assert all(torch.equal(value, last[1][name]) for name, value in last[0].items())


def numbered(run: Path) -> list[Path]:
    return [path for path in run.iterdir() if path.name.isdigit()]


def step_of(checkpoint: Path) -> int:
    return int(json.loads((checkpoint / "training_state.json").read_text())["global_step"])


def checkpoint_of(run: Path, step: int) -> Path:
    return next(path for path in numbered(run) if step_of(path) == step)


def same_tensors_as_one_process(checkpoint: Path, whole: Path) -> None:
    """Names, shapes, and values up to the rounding of a few steps; the folder and the configs are the same too."""
    assert {path.name for path in checkpoint.iterdir()} == {path.name for path in whole.iterdir()}
    assert (checkpoint / "config.json").read_text() == (whole / "config.json").read_text()
    for name in ("model.safetensors", "training_state.safetensors"):
        ours, theirs = load_file(checkpoint / name), load_file(whole / name)
        assert ours.keys() == theirs.keys()
        for key in ours.keys() - {"rng/torch"}:
            torch.testing.assert_close(ours[key], theirs[key], rtol=1e-2, atol=1e-3)


def test_bad_settings_exit_with_2_and_one_line(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    monkeypatch.chdir(folder)
    for arguments, words in (
        (["--speculator-type", "dflash2"], "--speculator-type dflash2 cannot be trained by this version yet"),
        (["--epochs", "0"], "--epochs"),
        (["--hidden-states", "store"], "hidden_states"),
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
