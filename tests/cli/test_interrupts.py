"""Ctrl-C, whenever it comes: one line, exit code 130, no traceback."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module

import pytest

from speculators.__main__ import main


@pytest.mark.parametrize("command", ["train", "prepare_data"])
def test_inside_a_command(command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(import_module(f"speculators.cli.{command}"), "main", interrupted)
    assert main([command.replace("_", "-")]) == 130
    printed = capsys.readouterr().err
    assert printed.strip() == "stopped; what was written is whole, and the same command can be run again"


def test_inside_a_command_with_an_application_of_its_own(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    import speculators.data.prepare_config

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(speculators.data.prepare_config, "PrepareConfig", interrupted)
    assert main(["prepare-data", "--model", "m", "--data", "d"]) == 130
    assert capsys.readouterr().err.startswith("\nstopped; ")


def test_while_modules_are_imported() -> None:
    # The finder stands for a signal that comes while the command line is still being imported.
    code = (
        "import sys\n"
        "class Interrupting:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'speculators.cli.app': raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupting())\n"
        "from speculators.__main__ import main; sys.exit(main(['train']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 130
    assert "Traceback" not in done.stderr
    assert done.stderr.strip().startswith("stopped; ")
