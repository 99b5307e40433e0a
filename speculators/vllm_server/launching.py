"""A vLLM server as a process of ours: started, waited for, watched, and stopped with everything it started."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from types import TracebackType

from speculators.errors import ConfigError, VerifierError
from speculators.progress import Bar, bar

__all__ = ["VllmServer", "free_port", "log_reason", "require_free_port"]

_KEEPER = Path(__file__).with_name("keeper.py")
_POLL_SECONDS = 0.25

#: An exception in the log, behind vLLM's prefixes of process and place.
_EXCEPTION = re.compile(r"(?:^|\s)(?P<error>(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt)): (?P<text>.+)$")
#: Errors that only say that another one was the cause.
_SECONDARY = re.compile(
    r"root cause|Engine core initialization failed|WorkerProc initialization failed|EngineDeadError|cancelled"
)
#: What argument parsers print.
_USAGE = re.compile(r"^(?:\S+: )?error: (?P<text>.+)$")
_LOG_TAIL = 400_000


def free_port(host: str = "127.0.0.1") -> int:
    """A port that nothing listens on at the moment."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def require_free_port(host: str, port: int) -> None:
    """:raises ConfigError: when something listens there already."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigError(
                f"port {port} on {host} cannot be used ({error.strerror}); stop what uses it, or choose another --port"
            ) from error


class VllmServer:
    """One server. As a context manager it is started, waited for and in the end stopped.

    However this process ends, the server ends too (:mod:`speculators.vllm_server.keeper`).

    :param command: its arguments, as of :func:`~speculators.vllm_server.command.build_command`.
    :param environment: all of its variables.
    :param log: file for what it says; appended to.
    :param host: where it listens.
    :param start_seconds: to its first answer; a big model takes many minutes to load.
    :param stop_seconds: from being asked to end to being made to.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str],
        log: Path,
        port: int,
        host: str = "127.0.0.1",
        start_seconds: float = 3600.0,
        stop_seconds: float = 60.0,
    ) -> None:
        self.command = list(command)
        self.host = host
        self.port = port
        self.log = log
        self._environment = dict(environment)
        self._start_seconds = start_seconds
        self._stop_seconds = stop_seconds
        self._keeper: subprocess.Popen[bytes] | None = None
        self._log_from = 0

    @property
    def address(self) -> str:
        """Without a path: ``http://127.0.0.1:8000``."""
        return f"http://{self.host}:{self.port}"

    @property
    def endpoint(self) -> str:
        """For ``--vllm-endpoint``: ``http://127.0.0.1:8000/v1``."""
        return f"{self.address}/v1"

    def start(self) -> None:
        """Start the process; :meth:`wait` for it to answer.

        :raises ConfigError: when the port is taken or the log cannot be written.
        """
        require_free_port(self.host, self.port)
        try:
            self.log.parent.mkdir(parents=True, exist_ok=True)
            with self.log.open("ab") as said:
                self._log_from = said.tell()
                self._keeper = subprocess.Popen(
                    [sys.executable, "-I", str(_KEEPER), str(self._stop_seconds), *self.command],
                    stdin=subprocess.PIPE,
                    stdout=said,
                    stderr=said,
                    env=self._environment,
                    start_new_session=True,  # a Ctrl-C in the terminal is for us, who stop the server in order
                )
        except OSError as error:
            raise ConfigError(
                f"the server's log {self.log} cannot be written ({error.strerror}); choose another place"
            ) from error

    def wait(self, *, show: bool = True, stop: Callable[[], bool] = lambda: False) -> None:
        """Until the server is healthy, with a bar on the terminal.

        :param stop: asked several times a second; True ends the wait.
        :raises VerifierError: when it dies or does not answer in time; one sentence with the log's reason.
        """
        with bar(f"vLLM on port {self.port}", None, shown=show, passing=True) as waiting:
            self._wait(waiting, stop)

    def _wait(self, waiting: Bar, stop: Callable[[], bool]) -> None:
        until = time.monotonic() + self._start_seconds
        while not stop():
            if self.exit_code() is not None:
                raise VerifierError(self.failure())
            if self.healthy():
                return
            if time.monotonic() > until:
                seconds = f"{self._start_seconds:.0f} s"
                raise VerifierError(f"the vLLM server on port {self.port} did not answer in {seconds}; see its log {self.log}")
            waiting.update(0, self._last_words())
            time.sleep(_POLL_SECONDS)

    def healthy(self, timeout: float = 5.0) -> bool:
        """Whether it answers now."""
        connection = HTTPConnection(self.host, self.port, timeout=timeout)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except (OSError, HTTPException):
            return False
        finally:
            connection.close()

    def exit_code(self) -> int | None:
        """None while it runs, or before it is started."""
        return self._keeper.poll() if self._keeper is not None else None

    def failure(self) -> str:
        """One sentence on why it ended."""
        reason = log_reason(self._words())
        because = f": {reason}" if reason else f" with exit code {self.exit_code()}"
        return f"the vLLM server on port {self.port} ended{because}; see its log {self.log}"

    def stop(self) -> None:
        """End the server and all it started; returns when nothing is left. May be called twice."""
        if self._keeper is None:
            return
        keeper, self._keeper = self._keeper, None
        assert keeper.stdin is not None
        with suppress(OSError):
            keeper.stdin.close()
        keeper.wait()

    def __enter__(self) -> VllmServer:
        try:
            self.start()
            self.wait()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()

    def _words(self) -> str:
        """What this start of the server has said, its end at least."""
        try:
            with self.log.open("rb") as said:
                said.seek(0, 2)
                said.seek(max(self._log_from, said.tell() - _LOG_TAIL))
                return said.read().decode(errors="replace")
        except OSError:
            return ""

    def _last_words(self) -> str:
        lines = deque((line for line in self._words().splitlines() if line.strip()), maxlen=1)
        return lines[0].strip()[-60:] if lines else ""


def log_reason(text: str) -> str | None:
    """The error in a server's log that is the cause of the others: the first that does not point at another one."""
    usage: str | None = None
    secondary: str | None = None
    for line in text.splitlines():
        match = _EXCEPTION.search(line.rstrip())
        if match is not None:
            reason = f"{match['error'].rsplit('.', 1)[-1]}: {match['text'].strip()}"
            if _SECONDARY.search(reason) is None:
                return _short(reason)
            secondary = secondary or reason
        elif (match := _USAGE.match(line.strip())) is not None:
            usage = match["text"]
    last = usage or secondary
    return None if last is None else _short(last)


def _short(reason: str, most: int = 300) -> str:
    return (reason if len(reason) <= most else f"{reason[:most]}...").rstrip(".;: ")
