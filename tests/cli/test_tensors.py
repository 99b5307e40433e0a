"""``speculators tensors --write`` never writes over anything."""

from __future__ import annotations

from pathlib import Path

import pytest

from speculators.cli.app import run
from tests.checks.drafts import good_checkpoint
from tests.tiny import tiny_verifier


def test_write_takes_a_new_or_empty_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    verifier = tiny_verifier(tmp_path, layers=8)
    draft = good_checkpoint(verifier, tmp_path / "draft")
    before = (verifier / "model.safetensors").read_bytes()
    for place in (verifier, verifier / "config.json"):
        assert run(["tensors", str(draft), "--write", str(place)]) == 2
        assert "name a new or empty folder with --write" in capsys.readouterr().err
    assert (verifier / "model.safetensors").read_bytes() == before
    assert run(["tensors", str(draft), "--write", str(tmp_path / "new")]) == 0
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["config.json", "model.safetensors"]
