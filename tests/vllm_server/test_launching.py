from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from speculators.errors import ConfigError, VerifierError
from speculators.vllm_server.launching import VllmServer, free_port, log_reason
from tests.vllm_server.processes import all_gone, fake_interpreter, fake_pids


def fake_server(folder: Path, mode: str, **settings) -> VllmServer:
    port = free_port()
    return VllmServer(
        [str(fake_interpreter(folder)), "serve", "--port", str(port)],
        environment={**os.environ, "FAKE_VLLM": mode, "FAKE_VLLM_PIDS": str(folder / "pids")},
        log=folder / "logs" / "server.log",
        port=port,
        **settings,
    )


def test_a_server_is_healthy_in_the_context_and_gone_behind_it(tmp_path):
    with fake_server(tmp_path, "slow") as server:
        assert server.healthy()
        assert server.endpoint == f"http://127.0.0.1:{server.port}/v1"
        assert server.exit_code() is None
        pids = fake_pids(tmp_path / "pids")
        assert len(pids) == 2
    assert all_gone(pids, 0.5)
    server.stop()  # again


def test_a_server_that_ignores_being_asked_is_made_to_end(tmp_path):
    with fake_server(tmp_path, "stubborn", stop_seconds=0.3):
        pids = fake_pids(tmp_path / "pids")
        started = time.monotonic()
    assert 0.3 <= time.monotonic() - started < 5
    assert all_gone(pids, 0.5)


def test_a_server_that_dies_is_one_sentence_with_the_cause_from_its_log(tmp_path):
    server = fake_server(tmp_path, "dies")
    expected = rf"the vLLM server on port {server.port} ended: ValueError: no room for the cache; see its log .*server\.log"
    with pytest.raises(VerifierError, match=expected), server:
        pass
    assert all_gone(fake_pids(tmp_path / "pids"), 0.5)


def test_a_server_that_never_answers_is_given_up(tmp_path):
    with pytest.raises(VerifierError, match="did not answer in 1 s"), fake_server(tmp_path, "silent", start_seconds=1.0):
        pass
    assert all_gone(fake_pids(tmp_path / "pids"), 0.5)


def test_a_taken_port_is_refused_before_anything_is_started(tmp_path):
    server = fake_server(tmp_path, "healthy")
    with socket.socket() as other:
        other.bind(("127.0.0.1", server.port))
        other.listen()
        with pytest.raises(ConfigError, match=f"port {server.port} on 127.0.0.1 cannot be used"):
            server.start()
    assert fake_pids(tmp_path / "pids") == []


def test_a_program_that_is_not_there_is_named(tmp_path):
    port = free_port()
    server = VllmServer([str(tmp_path / "nothing")], environment=dict(os.environ), log=tmp_path / "log", port=port)
    with pytest.raises(VerifierError, match=r"FileNotFoundError.*nothing"), server:
        pass


def test_the_cause_in_a_log():
    usage = "usage: api_server.py [options]\napi_server.py: error: unrecognized arguments: --nonsense\n"
    assert log_reason(usage) == "unrecognized arguments: --nonsense"
    trace = (
        "(Worker pid=9) ERROR [x.py:1] torch.OutOfMemoryError: CUDA out of memory.\n"
        "(EngineCore pid=3) RuntimeError: Engine core initialization failed. See root cause above.\n"
    )
    assert log_reason(trace) == "OutOfMemoryError: CUDA out of memory"
    assert log_reason("RuntimeError: Engine core initialization failed. See root cause above.") is not None
    assert log_reason("INFO all is well\n") is None


@pytest.mark.chaos
@pytest.mark.parametrize("victim", ["supervisor", "keeper"])
def test_a_server_does_not_outlive_a_supervisor_or_keeper_that_is_killed(tmp_path, victim):
    script = (
        "import os, sys, time\n"
        "from pathlib import Path\n"
        "from tests.vllm_server.test_launching import fake_server\n"
        "server = fake_server(Path(sys.argv[1]), 'healthy')\n"
        "server.start(); server.wait(show=False)\n"
        "print(server._keeper.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    supervisor = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert supervisor.stdout is not None
    keeper = int(supervisor.stdout.readline())
    pids = fake_pids(tmp_path / "pids")
    assert len(pids) == 2
    os.kill(supervisor.pid if victim == "supervisor" else keeper, signal.SIGKILL)
    try:
        # A keeper's server is told by the system; its worker is its own to end, as vLLM's engine does.
        assert all_gone(pids if victim == "supervisor" else pids[:1])
    finally:
        supervisor.kill()
        supervisor.wait()
        for pid in pids:
            if not all_gone([pid], 0.1):
                os.kill(pid, signal.SIGKILL)
