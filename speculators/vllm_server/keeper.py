"""Stands between a supervisor and a server: ``python keeper.py GRACE COMMAND...``.

The server must not outlive whoever started it, however that one ends: a pipe from there is this process's standard input, and
when it closes the server is asked to end, and after GRACE seconds its whole process group is made to. Should this process be
killed, the system asks the server to end. The exit code is the server's; 128 + n if signal n ended it. Runs by path, in an
interpreter of its own: the standard library alone.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress

_POLL_SECONDS = 0.2
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def main(arguments: list[str]) -> int:
    grace = float(arguments[0])
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the pipe alone says when to stop
    # What the server leaves behind is then ours to wait for; whoever else would do it may take its time.
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    server = subprocess.Popen(arguments[1:], stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=_as_child)
    try:
        while server.poll() is None and not _closed():
            pass
        if server.poll() is None:
            server.terminate()
            with suppress(subprocess.TimeoutExpired):
                server.wait(grace)
    finally:
        _end_group(server)
    code = server.wait()
    return code if code >= 0 else 128 - code


def _closed() -> bool:
    readable, _, _ = select.select([0], [], [], _POLL_SECONDS)
    return bool(readable) and not os.read(0, 1)


def _end_group(server: subprocess.Popen[bytes]) -> None:
    """Until there is none of the group left: workers that a server left behind hold its memory and its port."""
    until = time.monotonic() + 10
    while time.monotonic() < until:
        try:
            os.killpg(server.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            return
        if server.poll() is not None:
            with suppress(ChildProcessError):  # one that nobody waits for stays in the group
                while os.waitpid(-server.pid, os.WNOHANG)[0]:
                    pass
        time.sleep(0.02)


def _as_child() -> None:
    """In the server's process, before its program: what is ignored would stay so."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def _prctl(option: int, value: int) -> None:
    with suppress(OSError, AttributeError):  # the call is Linux's
        ctypes.CDLL(None).prctl(option, value)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
