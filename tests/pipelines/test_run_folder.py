"""Step records, appended records and what a run folder refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from speculators.errors import ConfigError, SpeculatorsError
from speculators.files import AppendedRecords
from speculators.pipelines.run_folder import RunFolder

SETTINGS = {"minutes": 15.0, "seed": 0}


def test_a_step_is_done_once(tmp_path: Path) -> None:
    with RunFolder(tmp_path / "run", "quickstart").opened(SETTINGS) as folder:
        assert folder.product("load") is None
        folder.finish("load", {"verifier": "/v"})
    with RunFolder(tmp_path / "run", "quickstart").opened(SETTINGS) as folder:
        assert folder.product("load") == {"verifier": "/v"}


def test_other_settings_are_refused(tmp_path: Path) -> None:
    with RunFolder(tmp_path, "quickstart").opened(SETTINGS):
        pass
    with pytest.raises(ConfigError, match=r"seed 0 there, 1 asked for.*choose another --output"):  # noqa: SIM117
        with RunFolder(tmp_path, "quickstart").opened({**SETTINGS, "seed": 1}):
            pass


def test_a_folder_of_something_else_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(ConfigError, match=r"something else \(thesis.tex\)"):  # noqa: SIM117
        with RunFolder(tmp_path, "quickstart").opened(SETTINGS):
            pass
    assert (tmp_path / "thesis.tex").read_text() == "mine"


def test_a_second_process_is_kept_out(tmp_path: Path) -> None:
    with RunFolder(tmp_path, "quickstart").opened(SETTINGS), pytest.raises(SpeculatorsError, match="is in use by process"):  # noqa: SIM117
        with RunFolder(tmp_path, "quickstart").opened(SETTINGS):
            pass


def test_a_path_that_cannot_be_a_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SpeculatorsError, match="cannot be written"):  # noqa: SIM117
        with RunFolder(tmp_path / "file" / "run", "quickstart").opened(SETTINGS):
            pass


@pytest.mark.parametrize("tail", [b'{"index": 2, "ids": [1, 2', b'{"index": 2}', b"\x00\xff\n", b"17\n"])
def test_a_torn_last_line_is_dropped(tmp_path: Path, tail: bytes) -> None:
    path = tmp_path / "answers.jsonl"
    with AppendedRecords(path) as log:
        log.append({"index": 0})
        log.append({"index": 1})
    with path.open("ab") as stream:
        stream.write(tail)
    with AppendedRecords(path) as log:
        assert [record["index"] for record in log.records] == [0, 1]
        log.append({"index": 2})
    assert [json.loads(line)["index"] for line in path.read_text().splitlines()] == [0, 1, 2]
