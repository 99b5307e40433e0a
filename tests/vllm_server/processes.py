"""Fake vLLM servers for tests, and what is left of them."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

FAKE = Path(__file__).with_name("fake_vllm.py")

__all__ = ["all_gone", "fake_interpreter", "fake_pids"]


def fake_interpreter(folder: Path) -> Path:
    """A program that behaves like the interpreter of vLLM's environment."""
    program = folder / "python"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -I "{FAKE}" "$@"\n')
    program.chmod(0o755)
    return program


def fake_pids(file: Path) -> list[int]:
    """Processes that fake servers have been: each server's, and its worker's."""
    return [int(line) for line in file.read_text().split()] if file.exists() else []


def all_gone(pids: list[int], seconds: float = 5.0) -> bool:
    """Whether none of these runs, after a while; one that nobody has waited for yet does not count."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if not any(_runs(pid) for pid in pids):
            return True
        time.sleep(0.05)
    return False


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False
