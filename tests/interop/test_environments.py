"""Peers' environments that cannot be made: the tests skip with a sentence, and nothing half-made is taken for whole."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.interop.environments import peer_python


def test_an_environment_that_cannot_be_made_skips_with_its_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECULATORS_INTEROP_ENVS", str(tmp_path))
    monkeypatch.setenv("PYTHON", "false")
    make = peer_python.__wrapped__
    with pytest.raises(pytest.skip.Exception, match=r"the environment of upstream cannot be made here .*venv failed"):
        make("upstream")
    assert not (tmp_path / "upstream" / ".made").exists()


def test_a_finished_environment_is_not_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECULATORS_INTEROP_ENVS", str(tmp_path))
    monkeypatch.setenv("PYTHON", "false")
    (tmp_path / "upstream").mkdir()
    (tmp_path / "upstream" / ".made").write_text("torch==2.13.0 speculators==0.9.0 1\n")
    assert peer_python.__wrapped__("upstream") == tmp_path / "upstream" / "bin" / "python"
