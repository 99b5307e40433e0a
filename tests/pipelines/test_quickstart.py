"""The whole quickstart on a tiny verifier: its run folder, its resuming, its refusals."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from speculators.data.rows import RowDataset
from speculators.errors import ConfigError, SpeculatorsError, StoppedError
from speculators.evaluation.results import EvaluationResults, read_results
from speculators.pipelines import quickstart
from speculators.pipelines.quickstart import run_quickstart
from speculators.pipelines.settings import QuickstartSettings
from speculators.train import StepInfo
from tests.tiny import tiny_verifier

SCRIPT = """
import sys
from pathlib import Path
from tests.pipelines.test_quickstart import tiny_settings
from speculators.pipelines.quickstart import run_quickstart
run_quickstart(tiny_settings(Path(sys.argv[1])), Path(sys.argv[2]), quiet=True)
"""


def tiny_settings(folder: Path, **changes: object) -> QuickstartSettings:
    values = {
        "minutes": 0.3,
        "prompts": folder / "prompts",
        "verifier": folder / "verifier",
        "human_eval": False,
        "held_out_share": 0.25,
        "generate_batch": 8,
        "draft_vocab_size": 40,
        "num_layers": 1,
        "markov_rank": 8,
        "total_seq_len": 256,
        "max_anchors": 16,
        "decode_prompts": 3,
        "decode_tokens": 12,
        "generate_share": 0.5,
    }
    return QuickstartSettings(**(values | changes))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("quickstart")
    tiny_verifier(folder)
    (folder / "prompts").mkdir()
    for domain, count in (("chat", 14), ("math", 9)):
        lines = [json.dumps({"prompt": f"{domain} question {index}"}) for index in range(count)]
        (folder / "prompts" / f"{domain}.jsonl").write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture(scope="module")
def finished(folder: Path) -> tuple[Path, EvaluationResults, str]:
    stream = StringIO()
    results = run_quickstart(tiny_settings(folder), folder / "run", console=Console(file=stream, width=160), quiet=True)
    return folder / "run", results, stream.getvalue()


def test_the_run_folder_holds_what_was_promised(finished: tuple[Path, EvaluationResults, str]) -> None:
    path, results, printed = finished
    for name in ("run.yaml", "metrics.jsonl", "results.json", "results.md", "answers.jsonl", "prompts.json"):
        assert (path / name).is_file(), name
    checkpoint = path / json.loads((path / "steps" / "train.json").read_text())["checkpoint"]
    assert (checkpoint / "model.safetensors").is_file()
    assert (checkpoint / "config.json").is_file()
    assert read_results(path) == results
    assert {benchmark.name for benchmark in results.benchmarks} == {"chat", "math"}
    assert sum(benchmark.prompts for benchmark in results.benchmarks) == 3
    kinds = {(run.draft, run.n) for benchmark in results.benchmarks for run in benchmark.runs}
    assert kinds == {("dspark", 3), ("dspark", 7), ("dspark without Markov", 7)}
    assert all(run.identical_to_baseline for benchmark in results.benchmarks for run in benchmark.runs)
    assert "On held-out prompts a round of 7 drafted tokens yields" in printed


def test_no_held_out_prompt_was_trained_on(finished: tuple[Path, EvaluationResults, str]) -> None:
    path, _, _ = finished
    split = json.loads((path / "prompts.json").read_text())
    train, held_out = (
        {message["content"] for prompts in split[side].values() for prompt in prompts for message in prompt}
        for side in ("train", "held_out")
    )
    assert held_out
    assert not train & held_out
    answers = [json.loads(line) for line in (path / "answers.jsonl").read_text().splitlines()]
    assert len(answers) == len(train)


def test_rows_are_the_generated_ids_and_on_policy(finished: tuple[Path, EvaluationResults, str]) -> None:
    path, _, _ = finished
    answers = {record["index"]: record for record in map(json.loads, (path / "answers.jsonl").read_text().splitlines())}
    dataset = RowDataset.load(path / "data")
    for row, index in zip(dataset, sorted(answers)):
        assert row.input_ids.tolist() == answers[index]["prompt_ids"] + answers[index]["answer_ids"]
        assert row.loss_mask.sum() == len(answers[index]["answer_ids"])
    assert dataset.manifest.answers is not None
    assert dataset.manifest.answers.on_policy


def test_a_finished_run_only_shows_its_results(
    folder: Path, finished: tuple[Path, EvaluationResults, str], capsys: pytest.CaptureFixture[str]
) -> None:
    path, results, _ = finished
    before = {file: file.stat().st_mtime_ns for file in path.rglob("*.json*") if "load" not in file.name}
    assert run_quickstart(tiny_settings(folder), path, quiet=True) == results
    assert {file: file.stat().st_mtime_ns for file in before} == before
    assert "average" in capsys.readouterr().out


def test_other_settings_are_refused(folder: Path, finished: tuple[Path, EvaluationResults, str]) -> None:
    with pytest.raises(ConfigError, match=r"seed 0 there, 5 asked for"):
        run_quickstart(tiny_settings(folder, seed=5), finished[0], quiet=True)


@pytest.mark.timeout(240)
def test_kills_anywhere_lose_nothing(folder: Path, tmp_path: Path) -> None:
    """Kill -9 while answering, while training and after training; the next start goes on each time."""
    run = tmp_path / "run"

    def step_numbers() -> list[str]:
        return [entry.name for entry in run.iterdir() if entry.name.isdigit()]

    moments = [
        lambda: (run / "answers.jsonl").is_file() and (run / "answers.jsonl").stat().st_size > 0,
        lambda: bool(step_numbers()),
        lambda: (run / "steps" / "train.json").is_file(),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    for reached in moments:
        process = subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(folder), str(run)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=environment,
        )
        deadline = time.monotonic() + 60
        while not reached():
            assert process.poll() is None, process.stderr.read().decode() if process.stderr else ""
            assert time.monotonic() < deadline
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
        process.wait()
    answers_before = (run / "answers.jsonl").read_bytes()
    results = run_quickstart(tiny_settings(folder), run, quiet=True)
    assert (run / "answers.jsonl").read_bytes() == answers_before
    assert results.benchmarks
    steps = [record["global_step"] for record in map(json.loads, (run / "metrics.jsonl").read_text().splitlines())]
    assert steps == sorted(steps)


def test_too_few_minutes_are_said_beforehand(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = QuickstartSettings(minutes=1)
    assert settings.least_seconds(5, 0.04) == pytest.approx(5 + 0.53 * 60 + 1.1 * 4 * 8 * 64 * 0.04 + 3)

    def stop(*_: object) -> None:
        raise SpeculatorsError("enough seen")

    for minutes, warned in ((0.01, True), (10_000, False)):  # enough even for a machine with much else to do
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(quickstart._Quickstart, "_generate", stop)
            with pytest.raises(SpeculatorsError, match="enough seen"):
                run_quickstart(tiny_settings(folder, minutes=minutes), tmp_path / str(minutes))
        assert (f"--minutes {minutes:g} is less than the steps of fixed length take" in capsys.readouterr().err) == warned


def test_a_stop_while_training_has_the_signals_exit_code(folder: Path, tmp_path: Path, monkeypatch) -> None:
    trained = quickstart.train

    def send(info: StepInfo) -> None:
        if info.global_step == 2:
            signal.raise_signal(signal.SIGTERM)

    def train(*arguments: Any, **changes: Any) -> Any:
        return trained(*arguments, **changes, on_step=send)

    monkeypatch.setattr(quickstart, "train", train)
    run = tmp_path / "run"
    with pytest.raises(StoppedError, match="run the same command again") as stopped:
        run_quickstart(tiny_settings(folder), run, quiet=True)
    assert stopped.value.exit_code == 128 + signal.SIGTERM
    monkeypatch.undo()
    # It goes on in a copy of the folder, too.
    shutil.copytree(run, tmp_path / "copy", symlinks=True)
    assert run_quickstart(tiny_settings(folder), tmp_path / "copy", quiet=True).benchmarks


def test_time_that_other_steps_took_is_not_trained() -> None:
    settings = QuickstartSettings(minutes=15)
    assert settings.decode_counts == (3, 7)
    # 290 s used, decoding of 4 x 8 x 64 tokens at 70 ms with a tenth on top, 30 s kept back
    assert settings.train_seconds(290, 0.07) == pytest.approx(900 - 290 - 1.1 * 4 * 8 * 64 * 0.07 - 30)
    assert settings.train_seconds(880, 0.07) == 180
    assert QuickstartSettings(minutes=40).decode_repeats == 3
