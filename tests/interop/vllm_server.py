"""vLLM's HTTP server, started in its own environment on a free port and stopped cleanly."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx

from tests.interop.environments import peer_python

__all__ = ["vllm_server"]

#: Seconds until the server must answer; about 40 on an idle machine with two cores.
START_SECONDS = 400


@contextmanager
def vllm_server(model: Path, log: Path, *arguments: str, modules: Path | None = None) -> Iterator[str]:
    """The address of a server of ``model`` in float32, while the context is open.

    :param log: file for what the server says.
    :param modules: folder of further modules that the server can import.
    """
    python = peer_python("vllm")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    variables = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
    variables |= {
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "2",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "LD_PRELOAD": str(python.parent.parent / "lib" / "libiomp5.so"),
    }
    if modules is not None:
        variables["PYTHONPATH"] = str(modules)
    command = [str(python), "-m", "vllm.entrypoints.cli.main", "serve", str(model), "--host", "127.0.0.1", "--port", str(port)]
    command += ["--dtype", "float32", "--enforce-eager", *arguments]
    address = f"http://127.0.0.1:{port}"
    with log.open("wb") as said:
        process = subprocess.Popen(
            command, env=variables, cwd=python.parent.parent, stdout=said, stderr=said, start_new_session=True
        )
        try:
            _wait(process, address, log)
            yield address
        finally:
            _stop(process)


def _wait(process: subprocess.Popen[bytes], address: str, log: Path) -> None:
    until = time.monotonic() + START_SECONDS
    while time.monotonic() < until:
        assert process.poll() is None, f"vLLM's server ended:\n{log.read_text(errors='replace')[-4000:]}"
        try:
            if httpx.get(f"{address}/health", timeout=5).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.5)
    raise AssertionError(f"vLLM's server did not start in {START_SECONDS} s:\n{log.read_text(errors='replace')[-4000:]}")


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Asked to end, then made to, with the engine's processes."""
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(60)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
