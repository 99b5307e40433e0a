"""The peers' virtual environments: made once from the package index by a script, kept between runs."""

from __future__ import annotations

import json
import os
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest

__all__ = ["peer_python", "run_peer"]

HERE = Path(__file__).parent

#: Minutes that one peer's environment may take to make.
MAKE_MINUTES = 20


def environments_folder() -> Path:
    """``$SPECULATORS_INTEROP_ENVS``, or a folder in the user's cache."""
    return Path(os.environ.get("SPECULATORS_INTEROP_ENVS") or Path.home() / ".cache" / "speculators" / "interop")


@cache
def peer_python(peer: str) -> Path:
    """The interpreter of a peer's environment (``upstream`` or ``vllm``), which ``make_<peer>.sh`` makes if need be.

    Skips the test with a sentence where it cannot be made.
    """
    folder = environments_folder() / peer
    script = HERE / f"make_{peer}.sh"
    try:
        done = subprocess.run(
            ["bash", str(script), str(folder)], capture_output=True, text=True, timeout=60 * MAKE_MINUTES, check=False
        )
        reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1] if done.returncode else None
    except subprocess.TimeoutExpired:
        reason = f"it took more than {MAKE_MINUTES} minutes"
    if reason is not None:
        pytest.skip(f"the environment of {peer} cannot be made here ({reason})")
    return folder / "bin" / "python"


def run_peer(peer: str, script: str, *arguments: object, timeout: float = 600, **environment: str) -> dict[str, Any]:
    """Run a script of this folder in a peer's environment; it prints one JSON object as its last line.

    The peer sees nothing of this library: no ``PYTHONPATH``, and a working directory outside the repository.
    """
    python = peer_python(peer)
    variables = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
    variables |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "2", **environment}
    command = [str(python), str(HERE / script), *(str(argument) for argument in arguments)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=timeout, check=False, env=variables, cwd=python.parent.parent
    )
    assert done.returncode == 0, f"{script} failed in the environment of {peer}:\n{done.stderr[-6000:]}"
    return dict(json.loads(done.stdout.strip().splitlines()[-1]))
