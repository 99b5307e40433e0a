"""What a training writes about itself: ``run.yaml`` and ``train_command.txt``."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

from speculators.files import write_text_atomically

if TYPE_CHECKING:
    from speculators.train.config.model import TrainConfig

__all__ = ["save_artifacts"]

_PACKAGES = ("speculators", "torch", "transformers", "accelerate", "safetensors")


def save_artifacts(config: TrainConfig, directory: Path) -> None:
    """Write ``run.yaml`` (non-default settings) and ``train_command.txt`` (time, commit, versions, command)."""
    directory.mkdir(parents=True, exist_ok=True)
    write_text_atomically(directory / "run.yaml", config.dump_yaml())
    write_text_atomically(directory / "train_command.txt", command_record(config))


def command_record(config: TrainConfig) -> str:
    """Text of ``train_command.txt``."""
    lines = [
        f"# Timestamp: {datetime.datetime.now().astimezone().isoformat(timespec='seconds')}",
        f"# Git SHA: {_git_sha()}",
        f"# World size: {os.environ.get('WORLD_SIZE', '1')}",
        *(f"# {name}: {_version(name)}" for name in _PACKAGES),
        config.command_line(),
    ]
    return "\n".join(lines) + "\n"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _git_sha() -> str:
    try:
        result = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True, timeout=5, check=False
        )
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return result.stdout.strip() if result.returncode == 0 and result.stdout.strip() else "unknown"
