"""Writing files so that a reader never sees a torn one, and a full disk costs nothing that was there."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import shutil
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from speculators.errors import DataError, SpeculatorsError

__all__ = [
    "AppendedRecords",
    "NO_ROOM",
    "atomic_write",
    "give_ordinary_mode",
    "locked_folder",
    "locked_place",
    "naming",
    "read_json",
    "sweep_temporaries",
    "temporary_beside",
    "write_text_atomically",
    "writing",
]

#: No room to write: on the disk, or within a quota or a limit on the size of files.
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

#: Names that :func:`temporary_beside` gives.
_TEMPORARY = re.compile(r"\.(?P<of>.+)\.\d+\.tmp(?P<suffix>(\.[^.]*)?)")


def read_json(path: Path) -> Any:
    """What a JSON file holds.

    :raises OSError: it cannot be read.
    :raises ValueError: it is no JSON in UTF-8, or nested deeper than can be read.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except RecursionError:
        raise ValueError("it is nested too deep") from None


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn what goes wrong while writing ``path`` into a :class:`DataError`."""
    try:
        yield
    except OSError as error:
        if error.errno in NO_ROOM:
            message = f"the disk is full while writing {path}; free some space and run again, nothing was replaced"
            raise DataError(message) from error
        raise DataError(f"cannot write {path} ({error.strerror or error}); choose another folder") from error


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Give an OSError the path it is about: the system names none when a write to an open file fails."""
    try:
        yield
    except OSError as error:
        if error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


def temporary_beside(path: Path) -> Path:
    """A name beside ``path`` (same suffix) for what is being written; a kill leaves it to :func:`sweep_temporaries`."""
    return path.with_name(f".{path.stem}.{os.getpid()}.tmp{path.suffix}")


@contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """A file beside ``path`` (same suffix) to fill; it is renamed over ``path`` if the body succeeds, and gone if not.

    :raises OSError: also when ``path`` is there and no file; renaming would put one in the place of a device such as /dev/null.
    """
    if path.exists() and not path.is_file():
        raise OSError(errno.EISDIR, "it is there and no ordinary file", str(path))
    temporary = temporary_beside(path)
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_text_atomically(path: Path, text: str) -> None:
    """Write ``text`` so that a reader, or a crash, sees the old file or the whole new one.

    :raises OSError: that names ``path``, whatever went wrong; ``path`` is then as it was.
    """
    with naming(path), _replacing(path) as temporary, open(temporary, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def atomic_write(path: str | Path, write: Callable[[Path], object]) -> None:
    """Let ``write`` fill a file beside ``path`` (same suffix), then rename it over ``path``.

    :raises DataError: on a full disk or a folder that cannot be written; ``path`` is then as it was.
    """
    path = Path(path)
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with _replacing(path) as temporary:
            write(temporary)


def sweep_temporaries(folder: Path, of: Path | None = None) -> None:
    """Remove what writers that were killed left half-written in ``folder``; the caller keeps other writers out.

    :param of: only what was to become this.
    """
    for entry in folder.iterdir() if folder.is_dir() else ():
        match = _TEMPORARY.fullmatch(entry.name)
        if match is None or (of is not None and (match["of"], match["suffix"]) != (of.stem, of.suffix)):
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry, ignore_errors=True)
        else:
            entry.unlink(missing_ok=True)


@contextmanager
def locked_folder(folder: Path, flag: str, name: str = ".lock", what: str = "folder", *, wait: bool = False) -> Iterator[None]:
    """Create ``folder`` if need be and keep other processes out of it; the lock dies with the process.

    :param flag: what names the folder, on the command line or in the environment, for the error's advice.
    :param name: of the lock's file.
    :param what: what the error calls the folder.
    :param wait: for a holder to be done, instead of the error.
    :raises SpeculatorsError: when another process holds the lock, or the folder cannot be written.
    """
    with _locked(folder / name, f"the {what} {folder}", flag, wait):
        yield


@contextmanager
def locked_place(path: Path, flag: str) -> Iterator[None]:
    """Keep other processes from making ``path``, which need not exist, by a lock beside it that goes afterwards.

    :param flag: as of :func:`locked_folder`.
    :raises SpeculatorsError: when another process holds the lock, or nothing can be written beside ``path``.
    """
    lock = path.with_name(f".{path.name}.lock")
    with _locked(lock, str(path), flag, wait=False):
        try:
            yield
        finally:
            lock.unlink(missing_ok=True)


@contextmanager
def _locked(path: Path, subject: str, flag: str, wait: bool) -> Iterator[None]:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Opened without truncation: the holder's name must stay readable for the one who is refused.
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise SpeculatorsError(f"{subject} cannot be written ({error.strerror}); choose another {flag}") from error
    with os.fdopen(descriptor, "r+", encoding="utf-8") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            # A holder that is done may have removed the file between our opening and locking it: another may hold a new one.
            if not os.path.samestat(os.fstat(descriptor), os.stat(path)):
                raise BlockingIOError
        except OSError:
            holder = lock.read().strip() or "another process"
            raise SpeculatorsError(f"{subject} is in use by {holder}; wait for it, or choose another {flag}") from None
        lock.truncate(0)
        lock.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        lock.flush()
        yield


class AppendedRecords:
    """A JSONL file that grows by one flushed line per record; a torn last line is dropped when it is opened."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.records: list[dict[str, Any]] = []
        path.parent.mkdir(parents=True, exist_ok=True)
        whole = 0
        if path.exists():
            for line in path.read_bytes().splitlines(keepends=True):
                try:
                    record = json.loads(line) if line.endswith(b"\n") else None
                except ValueError:
                    record = None
                if not isinstance(record, dict):
                    break
                self.records.append(record)
                whole += len(line)
            if whole < path.stat().st_size:
                os.truncate(path, whole)
        self._stream = path.open("ab")

    def append(self, record: Mapping[str, Any]) -> None:
        """Write one record through to the disk.

        :raises OSError: that names the file; a torn record is dropped when the file is opened again.
        """
        with naming(self.path):
            self._stream.write(json.dumps(record, ensure_ascii=False).encode() + b"\n")
            self._stream.flush()
            os.fsync(self._stream.fileno())
        self.records.append(dict(record))

    def close(self) -> None:
        with naming(self.path):
            self._stream.close()

    def __enter__(self) -> AppendedRecords:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def give_ordinary_mode(path: Path) -> None:
    """Give a file the permissions that ``open`` would have: safetensors makes its files readable for their owner only."""
    mask = os.umask(0o077)
    os.umask(mask)
    os.chmod(path, 0o666 & ~mask)
