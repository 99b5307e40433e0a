"""The connector's Mooncake backend and the client's, over TCP on loopback, with a real master."""

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.interop.environments import HERE, environments_folder

pytestmark = pytest.mark.interop

SECONDS = 60


@pytest.fixture(scope="module")
def wheel():
    folder = environments_folder() / "mooncake"
    command = ["bash", str(HERE / "make_mooncake.sh"), str(folder), sys.executable]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode:
        pytest.skip(f"Mooncake's wheel cannot be had here ({(done.stderr.strip().splitlines() or ['no reason'])[-1]})")
    return folder


def environment(wheel: Path) -> dict[str, str]:
    root = HERE.parent.parent
    paths = [root, root / "integrations/vllm_connector/src", wheel / "site"]
    return {**os.environ, "PYTHONPATH": ":".join(map(str, paths)), "LD_LIBRARY_PATH": str(wheel / "lib")}


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [opened.getsockname()[1] for opened in sockets]
    for opened in sockets:
        opened.close()
    return ports


def wait_for(condition, process, log: Path) -> None:
    until = time.monotonic() + SECONDS
    while not condition():
        assert process.poll() is None, log.read_text()[-2000:]
        assert time.monotonic() < until, log.read_text()[-2000:]
        time.sleep(0.05)


def answers_on(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 1).close()
    except OSError:
        return False
    return True


def test_states_go_through_a_real_store(wheel, tmp_path):
    port, metrics = free_ports(2)
    master_command = [
        str(wheel / "site/mooncake/mooncake_master"),
        *(f"--rpc_port={port}", "--rpc_address=127.0.0.1", f"--metrics_port={metrics}", "--metrics_host=127.0.0.1"),
    ]
    member = [sys.executable, str(HERE / "mooncake_member.py")]
    log = tmp_path / "log"
    with log.open("w") as out:
        given = {"env": environment(wheel), "stdout": out, "stderr": out}
        master = subprocess.Popen(master_command, **given)
        writer = None
        try:
            wait_for(lambda: answers_on(port), master, log)
            writer = subprocess.Popen([*member, "write", f"127.0.0.1:{port}", str(tmp_path)], stdin=subprocess.PIPE, **given)
            wait_for((tmp_path / "answers.json").exists, writer, log)
            command = [*member, "read", f"127.0.0.1:{port}", str(tmp_path), str(master.pid)]
            subprocess.run(command, timeout=SECONDS, check=True, **given)
        finally:
            for process in filter(None, (writer, master)):
                process.kill()
                process.wait()
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["good"] == "equal bfloat16"
    assert found["failed"] == "BadStates: the server wrote no states: the disk is full"
    assert "were not in Mooncake's store at the end of --request-timeout" in found["missing"]
    assert found["forgotten"] == found["missing"]
    assert found["lies"].startswith("BadStates: its object has")
    assert "but it spoke of" in found["lies"]
    assert found["dead"].startswith(f"VerifierError: the Mooncake master at 127.0.0.1:{port} does not answer any more")
    assert found["seconds"] < 10
