"""Writing files so that a reader never sees a torn one, and a full disk costs nothing that was there."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from speculators.errors import DataError

__all__ = ["atomic_write", "write_text_atomically", "writing"]


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn what goes wrong while writing ``path`` into a :class:`DataError`."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            message = f"the disk is full while writing {path}; free some space and run again, nothing was replaced"
            raise DataError(message) from error
        raise DataError(f"cannot write {path} ({error.strerror or error}); choose another folder") from error


@contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """A file beside ``path`` (same suffix) to fill; it is renamed over ``path`` if the body succeeds, and gone if not."""
    temporary = path.with_name(f".{path.stem}-{os.getpid()}{path.suffix}")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_text_atomically(path: Path, text: str) -> None:
    """Write ``text`` so that a reader, or a crash, sees the old file or the whole new one; an OSError is the caller's."""
    with _replacing(path) as temporary, open(temporary, "w", encoding="utf-8") as file:
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
