from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from speculators.errors import ConfigError, VerifierError
from speculators.vllm_server import replicas as module
from speculators.vllm_server.replicas import Replicas, assign_devices, devices_of_machine, devices_per_replica
from tests.vllm_server.processes import all_gone, fake_pids
from tests.vllm_server.test_launching import fake_server


class FakeServer:
    """Dies as often as it is told to; counts its starts."""

    def __init__(self, port, deaths=0):
        self.port = port
        self.deaths = deaths
        self.starts = []
        self.running = False

    def start(self):
        self.starts.append(time.monotonic())
        self.running = True

    def wait(self, *, show=True, stop=None):
        pass

    def healthy(self, timeout=0.0):
        return self.running and self.deaths == 0

    def exit_code(self):
        if self.running and self.deaths:
            self.deaths -= 1
            self.running = False
        return None if self.running else 1

    def failure(self):
        return f"the vLLM server on port {self.port} ended"

    def stop(self):
        self.running = False


def supervise(servers, seconds, monkeypatch):
    monkeypatch.setattr(module, "FIRST_WAIT", 0.05)
    said, stop = [], threading.Event()
    kept = Replicas(servers, said.append, stop)
    for life in kept._lives:
        life.wait = 0.05
    kept.start()
    timer = threading.Timer(seconds, stop.set)
    timer.start()
    try:
        kept.supervise(poll_seconds=0.01)
    finally:
        timer.cancel()
        kept.stop()
    return said


def test_what_dies_is_started_again_after_waits_that_grow(monkeypatch):
    steady, mortal = FakeServer(1), FakeServer(2, deaths=3)
    said = supervise([steady, mortal], 1.0, monkeypatch)
    assert len(steady.starts) == 1
    assert len(mortal.starts) == 4
    waits = [later - earlier for earlier, later in zip(mortal.starts, mortal.starts[1:])]
    assert waits[0] < waits[1] < waits[2]
    assert waits[2] >= 0.2
    assert said[-1] == "the vLLM server on port 2 is back"
    assert sum("starting it again" in line for line in said) == 3


def test_what_fails_to_start_again_and_again_is_given_up(monkeypatch):
    monkeypatch.setattr(module, "LAST_WAIT", 0.05)
    with pytest.raises(VerifierError, match="port 1 ended; it failed to start 5 times in a row"):
        supervise([FakeServer(1, deaths=100)], 5.0, monkeypatch)


def test_devices_are_dealt_in_runs():
    assert devices_per_replica(["--tensor-parallel-size", "4", "-pp=2"]) == 8
    assert devices_per_replica(["--max-model-len", "4"]) == 1
    assert assign_devices(2, 4, [str(n) for n in range(8)]) == ["0,1,2,3", "4,5,6,7"]
    with pytest.raises(ConfigError, match="3 servers of 4 accelerators each need 12, and there are 8"):
        assign_devices(3, 4, [str(n) for n in range(8)])
    with pytest.raises(ConfigError, match="--tensor-parallel-size behind -- is empty"):
        devices_per_replica(["--tensor_parallel_size"])


def test_devices_are_those_that_are_visible(tmp_path):
    for name in ("nvidia0", "nvidia1", "nvidia10", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert devices_of_machine({}, tmp_path) == ["0", "1", "10"]
    assert devices_of_machine({"CUDA_VISIBLE_DEVICES": "3, 5"}, tmp_path) == ["3", "5"]
    assert devices_of_machine({"CUDA_VISIBLE_DEVICES": ""}, tmp_path) == []


@pytest.mark.chaos
def test_a_killed_server_comes_back_and_nothing_is_left_in_the_end(tmp_path):
    first, second = tmp_path / "1", tmp_path / "2"
    for folder in (first, second):
        folder.mkdir()
    said, stop = [], threading.Event()
    kept = Replicas([fake_server(first, "healthy"), fake_server(second, "healthy")], said.append, stop)
    kept.start()
    thread = threading.Thread(target=kept.supervise, args=(0.1,))
    thread.start()
    try:
        os.kill(fake_pids(first / "pids")[0], signal.SIGKILL)
        until = time.monotonic() + 20
        while not any("is back" in line for line in said) and time.monotonic() < until:
            time.sleep(0.05)
        assert "is back" in said[-1]
    finally:
        stop.set()
        thread.join()
        kept.stop()
    assert len(fake_pids(first / "pids")) == 4
    assert len(fake_pids(second / "pids")) == 2
    assert all_gone(fake_pids(first / "pids") + fake_pids(second / "pids"), 0.5)
