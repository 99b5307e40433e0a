"""One trainer per folder, one configuration per folder, and a metrics file without repeated steps."""

import subprocess
import sys
from pathlib import Path

import pytest

from speculators.errors import ConfigError, SpeculatorsError
from speculators.train.config import TrainConfig
from speculators.train.run_folder import MetricsFile, TrainingFolder

DSPARK = {"speculator_type": "dspark", "verifier_name_or_path": "v"}


def test_a_second_trainer_is_refused_and_told_who_is_there(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from speculators.train.run_folder import TrainingFolder\n"
        "with TrainingFolder(Path(sys.argv[1])).locked(): print('in', flush=True); sys.stdin.read()"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout.readline() == "in\n"
        with pytest.raises(SpeculatorsError, match=f"in use by process {holder.pid} on"), TrainingFolder(tmp_path).locked():
            pass
    finally:
        holder.kill()
        holder.wait()
    with TrainingFolder(tmp_path).locked():
        pass


def test_another_configuration_is_refused_with_what_differs(tmp_path: Path) -> None:
    folder = TrainingFolder(tmp_path)
    first = TrainConfig.from_flat(DSPARK, lr=1e-3, block_size=4)
    folder.check_config(first)
    folder.write_artifacts(first)
    folder.check_config(TrainConfig.from_flat(DSPARK, lr=1e-3, block_size=4, log_freq=5, save_best=True, logger="tensorboard"))
    with pytest.raises(ConfigError) as refused:
        folder.check_config(TrainConfig.from_flat(DSPARK, lr=1e-4, block_size=4))
    assert "optimizer.lr: 0.001 there, 0.0001 here" in str(refused.value)
    assert "--save-path" in str(refused.value)
    (tmp_path / "run.yaml").write_text("- no\n")
    with pytest.raises(ConfigError, match=r"not a readable run\.yaml"):
        folder.check_config(first)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"identity": null}'])
def test_a_run_state_that_is_none_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "run_state.json").write_text(text)
    with pytest.raises(ConfigError, match="not a readable run state"):
        TrainingFolder(tmp_path).check_identity({"rows": "a"})


def test_lines_that_are_no_records_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('[1]\n3\n{"global_step": 1}\n{"global_st')
    MetricsFile(path).rewind(1)
    assert MetricsFile(path).records() == [{"global_step": 1}]


def test_other_rows_or_another_verifier_are_refused(tmp_path: Path) -> None:
    folder = TrainingFolder(tmp_path)
    folder.check_identity({"rows": "a", "verifier": "b"})
    folder.record("step_budget", 7)
    folder.check_identity({"rows": "a", "verifier": "b"})
    assert folder.recorded("step_budget") == 7
    assert folder.recorded("nothing") is None
    with pytest.raises(ConfigError, match="rows: a there, c here"):
        folder.check_identity({"rows": "c", "verifier": "b"})


def test_a_run_that_was_moved_goes_on(tmp_path: Path) -> None:
    """Paths of rows and verifier may change; what they lead to is compared, as far as the run noted it down."""
    folder = TrainingFolder(tmp_path)
    folder.write_artifacts(TrainConfig.from_flat(DSPARK, data_path="run/data"))
    folder.check_config(TrainConfig.from_flat({**DSPARK, "verifier_name_or_path": "copy/v"}, data_path="copy/data"))
    folder.check_identity({"rows": "a"})
    folder.check_identity({"rows": "a", "draft vocabulary": "of a later version"})


def test_an_earlier_run_is_moved_aside_whole(tmp_path: Path) -> None:
    folder = TrainingFolder(tmp_path)
    assert folder.move_aside() is None
    (tmp_path / "0").mkdir()
    (tmp_path / "checkpoint_best").symlink_to("0")
    (tmp_path / "run.yaml").write_text("train: {}")
    (tmp_path / "mine.txt").write_text("x")
    moved = folder.move_aside()
    assert sorted(entry.name for entry in moved.iterdir()) == ["0", "checkpoint_best", "run.yaml"]
    assert (moved / "checkpoint_best").exists()
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["mine.txt", moved.name]


def test_metrics_rewind_to_a_step(tmp_path: Path) -> None:
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    metrics.rewind(0)
    for step in range(1, 5):
        metrics.append({"global_step": step})
    with open(metrics.path, "a") as file:
        file.write('{"global_step": 5, "tr')
    metrics.rewind(2)
    assert [record["global_step"] for record in metrics.records()] == [1, 2]


def test_what_killed_writers_left_is_swept(tmp_path: Path) -> None:
    for name in (".metrics.77.tmp.jsonl", ".run_state.77.tmp.json", "notes.tmp", ".notes.tmp"):
        (tmp_path / name).write_text("")
    (tmp_path / ".checkpoint_best.77.tmp").symlink_to("3")
    with TrainingFolder(tmp_path).locked():
        assert sorted(entry.name for entry in tmp_path.iterdir()) == [".notes.tmp", ".train.lock", "notes.tmp"]
