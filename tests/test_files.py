"""Writing files: what goes wrong names the file, and costs nothing that was there."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import speculators.cli.train
from speculators.__main__ import main
from speculators.errors import DataError, SpeculatorsError
from speculators.files import AppendedRecords, atomic_write, locked_place, read_json, write_text_atomically
from speculators.train.run_folder import MetricsFile


@contextmanager
def no_room() -> Iterator[None]:
    """The system refuses to let a file grow beyond 64 bytes: on writing, as on a full disk, not on opening."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_under_a_text_file_names_it_and_keeps_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    write_text_atomically(path, "old")
    with no_room(), pytest.raises(OSError, match="File too large") as caught:
        write_text_atomically(path, "x" * 100)
    assert (caught.value.errno, caught.value.filename) == (errno.EFBIG, str(path))
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["run.yaml"]
    with pytest.raises(FileNotFoundError) as missing:
        write_text_atomically(tmp_path / "nowhere" / "run.yaml", "")
    assert missing.value.filename == str(tmp_path / "nowhere" / "run.yaml")  # not the name of the temporary file


def test_a_full_disk_under_a_file_that_grows_names_it(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    log = AppendedRecords(path)
    log.append({"number": 1})
    with no_room(), pytest.raises(OSError, match="File too large") as caught:
        log.append({"text": "x" * 100})
    assert caught.value.filename == str(path)
    with AppendedRecords(path) as log:
        assert log.records == [{"number": 1}]
    with no_room(), pytest.raises(OSError, match="File too large") as metrics:
        MetricsFile(tmp_path / "metrics.jsonl").append({"loss": "x" * 100})
    assert metrics.value.filename == str(tmp_path / "metrics.jsonl")


def test_a_full_disk_under_written_data_is_a_sentence(tmp_path: Path) -> None:
    with no_room(), pytest.raises(DataError, match=r"the disk is full while writing .*rejected\.jsonl; free some space"):
        atomic_write(tmp_path / "rejected.jsonl", lambda path: path.write_text("x" * 100))
    assert not list(tmp_path.iterdir())


def test_what_is_there_and_no_file_is_never_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"  # as a device such as /dev/null, which root can replace, is
    os.mkfifo(pipe)
    for place in (pipe, tmp_path, Path("/"), Path("")):
        with pytest.raises(DataError, match="no ordinary file"):
            atomic_write(place, lambda path: path.write_text("x"))
        with pytest.raises(OSError, match="no ordinary file"):
            write_text_atomically(place, "x")
    assert [entry.name for entry in tmp_path.iterdir()] == ["pipe"]
    assert not pipe.is_file()


def test_the_command_line_says_which_file_had_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def writes(_: list[str]) -> None:
        with no_room():
            write_text_atomically(tmp_path / "run.yaml", "x" * 100)

    monkeypatch.setattr(speculators.cli.train, "main", writes)
    assert main(["train"]) == 1
    assert f"error: the disk is full for {tmp_path / 'run.yaml'}; make room" in capsys.readouterr().err


def test_a_place_is_locked_beside_it_and_the_lock_goes(tmp_path: Path) -> None:
    place = tmp_path / "deep" / "draft"
    with (
        locked_place(place, "--output-path"),
        pytest.raises(SpeculatorsError, match=r"draft is in use by process \d+ on .*choose another --output-path"),
        locked_place(place, "--output-path"),
    ):
        pass
    assert list(place.parent.iterdir()) == []
    with locked_place(place, "--output-path"):
        assert not place.exists()


def test_json_that_is_nested_too_deep(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text("[" * 100_000)
    with pytest.raises(ValueError, match="nested too deep"):
        read_json(path)
