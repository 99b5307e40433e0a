"""The whole life of servers of hidden states: from what was asked for to the last process gone."""

from __future__ import annotations

import os
import shlex
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType

from speculators.errors import ConfigError
from speculators.vllm_server.command import ServerSettings, build_command, server_environment
from speculators.vllm_server.launching import VllmServer
from speculators.vllm_server.leftovers import remove_if_empty, sweep_dead_servers
from speculators.vllm_server.replicas import Replicas, assign_devices, devices_of_machine, devices_per_replica, processor_share
from speculators.vllm_server.versions import VllmInstallation

__all__ = ["StatesServers"]

_TEMPORARY = "speculators-states-"
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True)
class StatesServers:
    """Servers of one verifier, to train against.

    :param settings: of each; without a folder for the states they get a temporary one.
    :param target_layer_ids: layers that the draft is to read.
    :param port: of the first; the others have the ports behind it.
    :param log_dir: folder of their logs.
    :param start_seconds: to a server's first answer.
    """

    vllm: VllmInstallation
    settings: ServerSettings
    target_layer_ids: tuple[int, ...]
    replicas: int = 1
    host: str = "127.0.0.1"
    port: int = 8000
    log_dir: Path = Path("vllm-logs")
    start_seconds: float = 3600.0
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))

    def commands(self) -> list[str]:
        """What would be started, each as a line for a shell.

        :raises ConfigError: for settings that do not go together.
        """
        lines = []
        settings = self.settings
        if settings.backend != "mooncake" and settings.hidden_states_path is None:
            settings = replace(settings, hidden_states_path=Path(tempfile.gettempdir(), f"{_TEMPORARY}XXXXXXXX"))
        for server, variables in self._servers(settings):
            assignments = [f"{key}={value}" for key, value in variables.items() if self.environment.get(key) != value]
            lines.append(shlex.join([*(["env", *sorted(assignments)] if assignments else []), *server.command]))
        return lines

    def run(self, say: Callable[[str], None]) -> int:
        """Start, say how to train, and keep the servers alive until a signal; no process is left afterwards.

        :returns: the exit code that shells have for the signal.
        :raises SpeculatorsError: when they cannot be started, or one of them fails to start again and again.
        """
        with _states_folder(self.settings) as settings, _signals() as stopped:
            servers = [server for server, _ in self._servers(settings)]
            replicas = Replicas(servers, say, stopped.event)
            try:
                replicas.start()
                if not stopped.event.is_set():
                    for line in self._ready(settings, servers):
                        say(line)
                replicas.supervise()
            finally:
                if stopped.number is not None:
                    say("stopping the servers")
                replicas.stop()
        return 128 + (stopped.number or 0)

    def _servers(self, settings: ServerSettings) -> Iterator[tuple[VllmServer, dict[str, str]]]:
        base = server_environment(self.vllm, settings, self.environment)
        shares: list[dict[str, str]] = [{}] * self.replicas
        if self.vllm.cpu:
            shares = [processor_share(base, self.replicas)] * self.replicas
        elif self.replicas > 1:
            each = devices_per_replica(settings.vllm_args)
            devices = assign_devices(self.replicas, each, devices_of_machine(self.environment))
            shares = [{"CUDA_VISIBLE_DEVICES": own} for own in devices]
        for index, share in enumerate(shares):
            port = self.port + index
            variables = base | share
            yield (
                VllmServer(
                    build_command(self.vllm, settings, port=port, host=self.host),
                    environment=variables,
                    log=self.log_dir / f"vllm-{port}.log",
                    port=port,
                    host=self.host,
                    start_seconds=self.start_seconds,
                ),
                variables,
            )

    def _ready(self, settings: ServerSettings, servers: list[VllmServer]) -> Iterator[str]:
        count = "1 vLLM server hands" if len(servers) == 1 else f"{len(servers)} vLLM servers hand"
        yield f"{count} over hidden states of layers {', '.join(map(str, settings.layer_ids))}; logs are in {self.log_dir}"
        flags = ["--verifier-name-or-path", settings.model, "--hidden-states", "vllm"]
        flags += ["--vllm-endpoint", ",".join(server.endpoint for server in servers)]
        flags += ["--hidden-states-backend", settings.backend]
        if settings.hidden_states_path is not None:
            flags += ["--hidden-states-path", str(settings.hidden_states_path)]
        if set(self.target_layer_ids) - set(settings.layer_ids[-1:]):
            flags += ["--target-layer-ids", *map(str, self.target_layer_ids)]
        yield "train with"
        yield f"  speculators train {shlex.join(flags)} ..."


@dataclass
class _Stopped:
    event: threading.Event = field(default_factory=threading.Event)
    number: int | None = None


@contextmanager
def _signals() -> Iterator[_Stopped]:
    """While the body runs, a signal to stop is heeded at the next poll, not in the middle of something."""
    stopped = _Stopped()

    def note(number: int, frame: FrameType | None) -> None:
        stopped.number = stopped.number or number
        stopped.event.set()

    before = {number: signal.signal(number, note) for number in _SIGNALS}
    try:
        yield stopped
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _states_folder(settings: ServerSettings) -> Iterator[ServerSettings]:
    """The folder that servers and trainer share: made if need be, cleaned of what killed servers left."""
    if settings.backend == "mooncake":
        yield settings
        return
    own = settings.hidden_states_path
    folder = Path(tempfile.mkdtemp(prefix=_TEMPORARY)) if own is None else own
    try:
        if own is not None:
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ConfigError(f"{folder} cannot be made ({error.strerror}); choose another --hidden-states-path") from error
            sweep_dead_servers(folder)
        yield replace(settings, hidden_states_path=folder)
    finally:
        sweep_dead_servers(folder)
        if own is None:
            remove_if_empty(folder)
