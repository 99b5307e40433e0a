"""States as files in a folder that server and client share.

A server owns one folder, ``<root>/hs-<engine>``, and holds a lock on the file ``owner`` in it as long as it lives. So several
servers can share a root, and whatever folder nobody owns is a dead server's, which the next one to start removes.

The client's protocol is that of vLLM's own connector: it takes a shared lock on ``<path>.lock``, which it gets when the
request's states are there (or will never be), and reads ``<path>``. Here the file also appears by rename, whole or not at all.
When there is none, the lock's file says why.
"""

from __future__ import annotations

import fcntl
import hashlib
import itertools
import os
import re
import shutil
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

__all__ = ["FileTransport", "sweep_dead_servers"]

_PREFIX = "hs-"
_OWNER = "owner"
_ROOT_LOCK = ".hs-owners.lock"
_LONGEST_NAME = 100


class FileTransport:
    """See :class:`speculators_vllm_connector.transport.Transport`.

    :param root: the shared folder.
    :param engine: of the server; the same in the scheduler's process and the worker's.
    :param retention_seconds: files that nobody fetched go after this time; 0 keeps them until the server stops.
    :param locks: hold ``<path>.lock`` until a file is there. Without it a client has to poll for the file.
    """

    def __init__(
        self, root: str | os.PathLike[str], engine: str, retention_seconds: float = 1800.0, locks: bool = True
    ) -> None:
        self.root = Path(os.path.abspath(root))
        self.folder = self.root / f"{_PREFIX}{_safe(engine)}"
        self._retention = retention_seconds
        self._locks = locks
        self._numbers = itertools.count()
        self._held: dict[str, int] = {}  # ticket -> descriptor of its locked file
        self._owner: int | None = None
        self._mode = 0o644
        self._stopped = threading.Event()
        self._sweeper: threading.Thread | None = None

    def ticket(self, request_id: str) -> str:
        # The number makes it unique: a client may choose the request's id, and choose one twice.
        return str(self.folder / f"{_safe(request_id)}-{next(self._numbers)}.safetensors")

    def announcement(self, ticket: str, shapes: Mapping[str, tuple[str, tuple[int, ...]]]) -> dict[str, Any]:
        return {"hidden_states_path": ticket}

    def open(self) -> None:
        self.root.mkdir(parents=True, exist_ok=True)
        with _root_locked(self.root):
            _sweep(self.root)
            self.folder.mkdir(exist_ok=True)
            self._owner = os.open(self.folder / _OWNER, os.O_CREAT | os.O_RDWR, 0o644)
            fcntl.flock(self._owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
        mask = os.umask(0o077)
        os.umask(mask)
        self._mode = 0o666 & ~mask
        if self._retention > 0:
            self._sweeper = threading.Thread(target=self._sweep_unfetched, name="hidden-states-retention", daemon=True)
            self._sweeper.start()

    def expect(self, ticket: str) -> None:
        if not self._locks:
            return
        descriptor = os.open(_lock_of(ticket), os.O_CREAT | os.O_EXCL | os.O_WRONLY, self._mode)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self._held[ticket] = descriptor

    def deliver(self, ticket: str, tensors: Mapping[str, Tensor], header: Mapping[str, str]) -> None:
        temporary = f"{ticket}.tmp"
        try:
            save_file(dict(tensors), temporary, metadata=dict(header))
            os.chmod(temporary, self._mode)  # safetensors makes files that their owner alone can read
            os.replace(temporary, ticket)
        except BaseException:
            with suppress(OSError):
                os.unlink(temporary)
            raise
        self._release(ticket)

    def fail(self, ticket: str, reason: str) -> None:
        descriptor = self._held.get(ticket)
        if descriptor is not None:
            with suppress(OSError):  # on a full disk there may be no room for the reason either
                os.write(descriptor, f"{reason}\n".encode())
        self._release(ticket)

    def forget(self, ticket: str) -> None:
        with suppress(OSError):
            os.unlink(_lock_of(ticket))
        self._release(ticket)

    def close(self) -> None:
        self._stopped.set()
        if self._sweeper is not None:
            self._sweeper.join()
        for ticket in list(self._held):
            self._release(ticket)
        if self._owner is not None:
            shutil.rmtree(self.folder, ignore_errors=True)
            os.close(self._owner)
            self._owner = None

    def _release(self, ticket: str) -> None:
        descriptor = self._held.pop(ticket, None)
        if descriptor is not None:
            os.close(descriptor)  # and with it the lock

    def _sweep_unfetched(self) -> None:
        while not self._stopped.wait(min(self._retention / 4, 60.0)):
            self.sweep_unfetched(time.time() - self._retention)

    def sweep_unfetched(self, before: float) -> None:
        """Remove files last written before this time, but those of requests that are still under way."""
        busy = {name for ticket in list(self._held) for name in (_lock_of(ticket), f"{ticket}.tmp")}
        with suppress(OSError):
            for entry in list(os.scandir(self.folder)):
                if entry.name == _OWNER or entry.path in busy:
                    continue
                with suppress(OSError):
                    if entry.stat(follow_symlinks=False).st_mtime < before:
                        os.unlink(entry.path)


def sweep_dead_servers(root: str | os.PathLike[str]) -> None:
    """Remove what servers that were killed left in the shared folder ``root``."""
    if Path(root).is_dir():
        with _root_locked(Path(root)):
            _sweep(Path(root))


def _sweep(root: Path) -> None:
    for folder in root.glob(f"{_PREFIX}*"):
        owner = folder / _OWNER
        # Only what a server made: folders of that name with an owner's file, which nobody holds any more.
        if folder.is_symlink() or not owner.is_file():
            continue
        with suppress(OSError), open(owner, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _root_locked(root: Path) -> Iterator[None]:
    """One process at a time makes or removes servers' folders: none is swept between being made and being owned."""
    with open(root / _ROOT_LOCK, "a", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _lock_of(ticket: str) -> str:
    return f"{ticket}.lock"


def _safe(name: str) -> str:
    """A file's name out of an id that a client may have chosen."""
    if re.fullmatch(r"\w[\w.-]*", name, re.ASCII) and len(name) <= _LONGEST_NAME:
        return name
    return hashlib.sha256(name.encode()).hexdigest()[:32]
