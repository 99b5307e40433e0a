"""The bytes of a file, plain or compressed, in pieces of one size and with everything before a break."""

from __future__ import annotations

import zlib
from collections.abc import Generator, Iterator
from pathlib import Path

import pyarrow as pa

__all__ = ["ByteStream"]

GZIP = b"\x1f\x8b"
ZSTD = b"\x28\xb5\x2f\xfd"

#: Bytes read, or decompressed, in one call.
STEP = 1 << 18


class ByteStream:
    """Decompressed bytes of ``path``; whether it is gzip or zstd is seen from its first bytes, not from its name.

    Pieces are ``size`` bytes, the last one may be shorter, so that where they end depends on the content alone. A file
    that breaks off or cannot be read further gives all bytes before that; then :attr:`fault` says in words what happened.

    :raises OSError: the file cannot be opened.
    """

    def __init__(self, path: Path, size: int) -> None:
        self.fault: str | None = None
        self.position = 0  #: bytes given so far
        self.consumed = 0  #: bytes of the file read so far, compressed as they are
        self._size = size
        self._path = path
        with path.open("rb") as file:
            start = file.read(4)
        self._compression = "gzip" if start.startswith(GZIP) else "zstd" if start.startswith(ZSTD) else ""
        self._steps = self._read()
        self._waiting = bytearray()

    def head(self, size: int) -> bytes:
        """The first ``size`` bytes, or all when there are fewer; to be called before any piece is taken."""
        self._fill(size)
        return bytes(self._waiting[:size])

    def __iter__(self) -> Iterator[bytes]:
        while True:
            self._fill(self._size)
            piece = bytes(self._waiting[: self._size])
            if not piece:
                return
            del self._waiting[: self._size]
            self.position += len(piece)
            yield piece

    def __enter__(self) -> ByteStream:
        return self

    def __exit__(self, *_: object) -> None:
        self._steps.close()

    def _fill(self, size: int) -> None:
        while len(self._waiting) < size:
            found = next(self._steps, None)
            if found is None:
                return
            step, self.consumed = found
            self._waiting += step

    def _read(self) -> Generator[tuple[bytes, int], None, None]:
        steps = {"gzip": _gunzip, "zstd": _unzstd, "": _plain}[self._compression]
        try:
            yield from steps(self._path)
        except EOFError:
            self.fault = f"its {self._compression} data ends too early"
        except zlib.error as error:
            # A checksum stands behind what it is of, which has been given by then.
            checked = "data check" in str(error) or "length check" in str(error)
            self.fault = "its checksum tells of damage somewhere before" if checked else "its gzip data is damaged"
        except OSError as error:
            damaged = self._compression and error.errno is None
            self.fault = f"its {self._compression} data is damaged" if damaged else f"it cannot be read further ({error})"


def _plain(path: Path) -> Iterator[tuple[bytes, int]]:
    """As all of these: (bytes, how far into the file it is)."""
    with path.open("rb") as file:
        while step := file.read(STEP):
            yield step, file.tell()


def _gunzip(path: Path) -> Iterator[tuple[bytes, int]]:
    """Members one after another; not gzip.GzipFile, which loses what it has of a buffer when the data ends too early."""
    with path.open("rb") as file:
        waiting = file.read(STEP)
        while waiting:
            member = zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)
            while not member.eof:
                if not waiting and not (waiting := file.read(STEP)):
                    if rest := member.flush():
                        yield rest, file.tell()
                    if not member.eof:
                        raise EOFError
                    break
                before = member.copy()
                try:
                    step = member.decompress(waiting, STEP)
                except zlib.error:
                    yield _up_to_damage(before, waiting), file.tell()
                    raise
                if step:
                    yield step, file.tell()
                waiting = member.unconsumed_tail
            # Zeros may fill the file up to a whole tape block.
            waiting = member.unused_data.lstrip(b"\0")
            while not waiting and (waiting := file.read(STEP)):
                waiting = waiting.lstrip(b"\0")


def _up_to_damage(member: zlib._Decompress, data: bytes) -> bytes:
    """What can be decompressed of damaged data: a call that fails gives nothing, so every call makes one byte of one byte."""
    text = bytearray()
    try:
        for place in range(len(data)):
            text += member.decompress(data[place : place + 1], 1)
            while step := member.decompress(member.unconsumed_tail, 1):
                text += step
    except zlib.error:
        pass
    return bytes(text)


def _unzstd(path: Path) -> Iterator[tuple[bytes, int]]:
    given = 0
    try:
        for step, consumed in _zstd_steps(path, STEP):
            given += len(step)
            yield step, consumed
    except OSError as error:
        # A read that fails loses what it had decompressed until then: read again up to there, and on byte by byte.
        try:
            yield from _zstd_steps(path, 1, behind=given)
        except OSError:
            if "truncated" in str(error).lower():
                raise EOFError from error
            raise


def _zstd_steps(path: Path, size: int, behind: int = 0) -> Iterator[tuple[bytes, int]]:
    """Decompressed bytes, ``size`` at a time, without the first ``behind``."""
    with pa.OSFile(str(path), "rb") as file, pa.CompressedInputStream(file, "zstd") as stream:
        for start in range(0, behind, STEP):
            stream.read(min(STEP, behind - start))
        while step := stream.read(size):
            yield step, file.tell()
