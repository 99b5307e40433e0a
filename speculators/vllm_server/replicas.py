"""Several servers of one model: started together, restarted when they die, stopped together."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from speculators.errors import ConfigError, SpeculatorsError, VerifierError
from speculators.vllm_server.launching import VllmServer

__all__ = ["Replicas", "assign_devices", "devices_of_machine", "devices_per_replica", "processor_share"]

#: Seconds before the first restart of a server that died; doubled with every death that follows, up to the last.
FIRST_WAIT, LAST_WAIT = 1.0, 60.0
#: A server that has lived for so long starts with the first wait again.
STEADY_SECONDS = 600.0
#: Starts in a row that may fail before it is given up.
MOST_FAILED_STARTS = 5

#: Flags whose product is the number of accelerators of a server.
_PARALLEL = ("--tensor-parallel-size", "-tp", "--pipeline-parallel-size", "-pp", "--data-parallel-size", "-dp")


def devices_per_replica(vllm_args: Sequence[str]) -> int:
    """Accelerators that one server takes, by its parallel sizes.

    :raises ConfigError: when one of them is no number.
    """
    count = 1
    for index, argument in enumerate(vllm_args):
        flag, _, value = argument.partition("=")
        flag = flag.replace("_", "-")
        if flag not in _PARALLEL:
            continue
        value = value or (vllm_args[index + 1] if index + 1 < len(vllm_args) else "")
        if not value.isdigit() or int(value) < 1:
            raise ConfigError(f"{flag} behind -- is {value or 'empty'}; give a whole number of at least 1")
        count *= int(value)
    return count


def devices_of_machine(environment: Mapping[str, str], devices: Path = Path("/dev")) -> list[str]:
    """The CUDA devices that this process may use."""
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [device.strip() for device in visible.split(",") if device.strip()]
    numbers = [int(entry.name[6:]) for entry in devices.glob("nvidia*") if re.fullmatch(r"nvidia\d+", entry.name)]
    return [str(number) for number in sorted(numbers)]


def assign_devices(replicas: int, each: int, devices: Sequence[str]) -> list[str]:
    """``CUDA_VISIBLE_DEVICES`` of every replica: devices of their own, neighbours together.

    :raises ConfigError: when there are too few.
    """
    if replicas * each > len(devices):
        raise ConfigError(
            f"{replicas} servers of {each} accelerators each need {replicas * each}, and there are {len(devices)}; take fewer "
            "--replicas or a smaller --tensor-parallel-size"
        )
    return [",".join(devices[index * each : (index + 1) * each]) for index in range(replicas)]


@dataclass
class _Life:
    """Of one server: when it was started, and what came of it."""

    server: VllmServer
    started: float = 0.0
    healthy: bool = False
    wait: float = FIRST_WAIT
    due: float | None = None  #: when it is to be started again; None while it runs
    failed_starts: int = 0


class Replicas:
    """Servers that are kept alive until they are stopped.

    :param say: takes a sentence for the user.
    :param stop: set when it is time to end; from any thread, or a signal's handler.
    """

    def __init__(self, servers: Sequence[VllmServer], say: Callable[[str], None], stop: threading.Event) -> None:
        self._lives = [_Life(server) for server in servers]
        self._say = say
        self._stop = stop

    def start(self) -> None:
        """Start all at once and wait until each is healthy, or until it is time to end.

        :raises SpeculatorsError: when one cannot be started; the caller stops the others.
        """
        for life in self._lives:
            life.started = time.monotonic()
            life.server.start()
        for life in self._lives:
            life.server.wait(stop=self._stop.is_set)
            life.healthy = True

    def supervise(self, poll_seconds: float = 1.0) -> None:
        """Restart what dies, after waits that grow, until it is time to end.

        :raises VerifierError: when a server fails to start several times in a row.
        """
        while not self._stop.wait(poll_seconds):
            for life in self._lives:
                self._tend(life, time.monotonic())

    def stop(self) -> None:
        """End all; returns when no process is left."""
        with ThreadPoolExecutor(max(1, len(self._lives))) as pool:
            list(pool.map(lambda life: life.server.stop(), self._lives))

    def _tend(self, life: _Life, now: float) -> None:
        if life.due is not None:
            if now >= life.due:
                self._restart(life, now)
        elif life.server.exit_code() is not None:
            self._mourn(life, life.server.failure(), now)
        elif not life.healthy and life.server.healthy(timeout=1.0):
            life.healthy, life.failed_starts = True, 0
            self._say(f"the vLLM server on port {life.server.port} is back")

    def _mourn(self, life: _Life, why: str, now: float) -> None:
        life.server.stop()
        life.failed_starts = 0 if life.healthy else life.failed_starts + 1
        if life.failed_starts >= MOST_FAILED_STARTS:
            raise VerifierError(f"{why}; it failed to start {MOST_FAILED_STARTS} times in a row, so all servers are stopped")
        if life.healthy and now - life.started > STEADY_SECONDS:
            life.wait = FIRST_WAIT
        self._say(f"{why}; starting it again in {life.wait:.0f} s")
        life.due, life.wait, life.healthy = now + life.wait, min(2 * life.wait, LAST_WAIT), False

    def _restart(self, life: _Life, now: float) -> None:
        life.started, life.due = now, None
        try:
            life.server.start()
        except SpeculatorsError as error:  # the port may not be free yet
            self._mourn(life, str(error), now)


def processor_share(environment: Mapping[str, str], replicas: int) -> dict[str, str]:
    """Threads for each of several servers on one CPU, unless the user has chosen."""
    if "OMP_NUM_THREADS" in environment or replicas < 2:
        return {}
    return {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // replicas))}
