"""The one reader of tensor files that others wrote: a server in a shared folder, another machine, a damaged disk.

A file is believed in nothing. Its place is checked against the folder it must lie in, component by component, so that no
link leads out, not even one that is put there meanwhile. Its header is checked against its size before a byte is allocated
for a tensor. Only safetensors is read, which holds numbers and no code; a pickle is refused by name.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from speculators.errors import DataError

__all__ = ["Expected", "StatesFile", "StatesFileError", "TensorPlace", "read_tensors"]

#: Longest header that is read: some hundred thousand tensors.
MAX_HEADER = 64 << 20

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}

#: What files that hold code or are packed start with.
_FOREIGN = (
    (b"PK\x03\x04", "a zip archive, as torch.save writes"),
    (b"\x80\x02", "a pickle"),
    (b"\x80\x03", "a pickle"),
    (b"\x80\x04", "a pickle"),
    (b"\x80\x05", "a pickle"),
    (b"\x93NUMPY", "a numpy file"),
    (b"\x1f\x8b", "a gzip file"),
)


class StatesFileError(DataError):
    """A tensor file that is not read; the sentence names the file and what is wrong with it, ``problem`` only the latter."""

    def __init__(self, sentence: str, problem: str | None = None) -> None:
        super().__init__(sentence)
        self.problem = problem or sentence


@dataclass(frozen=True, slots=True)
class Expected:
    """What a tensor must be.

    :param dtypes: one of these.
    :param shape: sizes; None where any will do.
    """

    dtypes: tuple[torch.dtype, ...]
    shape: tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """Where a tensor lies: bytes ``begin`` to before ``end`` of the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


def read_tensors(
    path: str | os.PathLike[str],
    *,
    root: str | os.PathLike[str] | None = None,
    expected: Mapping[str, Expected] | None = None,
    mapped: bool = True,
) -> dict[str, Tensor]:
    """Tensors of a safetensors file.

    :param path: of the file; relative to ``root``, where that is given.
    :param root: the folder that the file must lie in once links are followed; None: wherever it is.
    :param expected: the tensors to read, all of which must be there; by default all that there are.
    :param mapped: whether tensors are views of the mapped file, which nobody may then shorten; else their bytes are copied.
        Either way writing to a tensor does not reach the file.
    :raises StatesFileError: when the file is elsewhere, unreadable, no safetensors file, or not as it or ``expected`` says.
    """
    with StatesFile(path, root=root, mapped=mapped) as file:
        for name, wanted in (expected or {}).items():
            file.check(name, wanted)
        return {name: file.tensor(name) for name in (file.places if expected is None else expected)}


class StatesFile:
    """An open safetensors file whose header has been checked against its size.

    Parameters as of :func:`read_tensors`. Tensors stay valid after :meth:`close`, which is also called when nobody uses it.

    :raises StatesFileError: as :func:`read_tensors`.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, root: str | os.PathLike[str] | None = None, mapped: bool = True
    ) -> None:
        self._descriptor = -1
        self._map: mmap.mmap | None = None
        self.path = Path(path) if root is None else Path(root) / path
        self._descriptor = _open_within(self.path, root)
        try:
            self.size = os.fstat(self._descriptor).st_size
            self.places, self.metadata = self._header()
            if mapped and self.size:
                # A private map: tensors may be written to, as torch demands of a buffer, and the file is never changed.
                self._map = mmap.mmap(self._descriptor, self.size, access=mmap.ACCESS_COPY)
        except OSError as error:
            self.close()
            raise self._error(f"it cannot be read ({error.strerror or error})") from error
        except BaseException:
            self.close()
            raise

    def __del__(self) -> None:
        self.close()

    def __enter__(self) -> StatesFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file; tensors that were read keep what they need of it."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor, self._map = -1, None

    def fileno(self) -> int:
        """Of the open file, to lock it or to read its bytes."""
        return self._descriptor

    def check(self, name: str, expected: Expected) -> None:
        """:raises StatesFileError: when there is no tensor ``name``, or another than ``expected``."""
        place = self.places.get(name)
        if place is None:
            raise self._error(f"it has no tensor {name!r}; it has {', '.join(sorted(map(repr, self.places))[:8]) or 'none'}")
        if place.dtype not in expected.dtypes:
            wanted = " or ".join(_name(dtype) for dtype in expected.dtypes)
            raise self._error(f"{name!r} is {_name(place.dtype)}, not {wanted}")
        fits = len(place.shape) == len(expected.shape) and all(
            wanted is None or size == wanted for size, wanted in zip(place.shape, expected.shape)
        )
        if not fits:
            wanted = ", ".join("any" if size is None else str(size) for size in expected.shape)
            raise self._error(f"{name!r} has shape {list(place.shape)}, not [{wanted}]")

    def tensor(self, name: str) -> Tensor:
        """Tensor ``name``.

        :raises StatesFileError: when there is none, or the file was cut short meanwhile.
        """
        if name not in self.places:
            raise self._error(f"it has no tensor {name!r}")
        place = self.places[name]
        if place.begin == place.end:
            return torch.empty(place.shape, dtype=place.dtype)
        count = place.end - place.begin
        if self._map is None:
            flat = torch.frombuffer(self._copied(place.begin, count), dtype=torch.uint8)
        else:
            flat = torch.frombuffer(self._map, dtype=torch.uint8, count=count, offset=place.begin)
            if place.begin % place.dtype.itemsize:
                flat = flat.clone()
        return flat.view(place.dtype).reshape(place.shape)

    def _copied(self, begin: int, count: int) -> bytearray:
        buffer = bytearray(count)
        view, done = memoryview(buffer), 0
        while done < count:
            read = os.preadv(self._descriptor, [view[done:]], begin + done)
            if not read:
                raise self._error("it was cut short while it was read")
            done += read
        return buffer

    def _header(self) -> tuple[dict[str, TensorPlace], dict[str, str]]:
        start = os.pread(self._descriptor, 8, 0)
        for magic, what in _FOREIGN:
            if start.startswith(magic):
                raise self._error(f"it is {what}, and only safetensors is read")
        if len(start) < 8:
            raise self._error(f"it has {len(start)} bytes, too few for a safetensors file")
        length = int.from_bytes(start, "little")
        if length > min(MAX_HEADER, self.size - 8):
            raise self._error(
                f"its header would be {length} bytes long, but the file has {self.size}; it is cut or no tensor file"
            )
        try:
            header = json.loads(os.pread(self._descriptor, length, 8).decode("utf-8"), object_pairs_hook=_distinct)
        except (ValueError, RecursionError) as error:
            raise self._error(f"its header is no JSON that can be read ({error})") from error
        if not isinstance(header, dict):
            raise self._error("its header is no JSON object")
        metadata = header.pop("__metadata__", {})
        if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
            raise self._error("its metadata is not a record of texts")
        places = {name: self._place(name, entry, 8 + length) for name, entry in header.items()}
        self._check_cover(places, 8 + length)
        return places, metadata

    def _place(self, name: str, entry: Any, data: int) -> TensorPlace:
        """One entry of the header; ``data`` is where the tensors' bytes start."""
        if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
            raise self._error(f"the header's entry of {name!r} is not dtype, shape and data_offsets")
        dtype = _DTYPES.get(entry["dtype"]) if isinstance(entry["dtype"], str) else None
        if dtype is None:
            raise self._error(f"{name!r} has dtype {entry['dtype']!r}, which is not known")
        shape, offsets = entry["shape"], entry["data_offsets"]
        if not _naturals(shape) or not _naturals(offsets) or len(offsets) != 2:
            raise self._error(f"{name!r} has shape {shape!r} and data_offsets {offsets!r}, which cannot be")
        begin, end = offsets
        if end < begin or data + end > self.size:
            raise self._error(
                f"{name!r} would lie at bytes {begin} to {end}, but {self.size - data} are there; it is cut or lies"
            )
        wanted = math.prod(shape) * dtype.itemsize
        if wanted != end - begin:
            raise self._error(f"{name!r} needs {wanted} bytes by its shape and dtype, but takes {end - begin}")
        return TensorPlace(dtype, tuple(shape), data + begin, data + end)

    def _check_cover(self, places: Mapping[str, TensorPlace], data: int) -> None:
        """Every byte after the header belongs to exactly one tensor."""
        at = data
        for name, place in sorted(places.items(), key=lambda item: (item[1].begin, item[1].end)):
            if place.begin < at:
                raise self._error(f"{name!r} overlaps another tensor")
            if place.begin > at:
                raise self._error(f"there are {place.begin - at} bytes before {name!r} that belong to no tensor")
            at = place.end
        if at != self.size:
            raise self._error(f"{self.size - at} bytes at its end belong to no tensor")

    def _error(self, problem: str) -> StatesFileError:
        return StatesFileError(f"the tensor file {self.path} is refused: {problem}", problem)


def _open_within(path: Path, root: str | os.PathLike[str] | None) -> int:
    """A descriptor of the ordinary file ``path``, opened without following a link below ``root``.

    :raises StatesFileError: when it is not there, no ordinary file, or outside ``root``.
    """
    if "\0" in str(path):
        raise StatesFileError(f"the tensor file {str(path)!r} is refused: its name has a zero byte")
    try:
        resolved = path.resolve(strict=True)
        base = resolved.parent if root is None else Path(root).resolve(strict=True)
    except (OSError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise StatesFileError(
            f"the tensor file {path} cannot be opened ({reason})", f"it cannot be opened ({reason})"
        ) from error
    if not resolved.is_relative_to(base) or resolved == base:
        raise StatesFileError(f"the tensor file {path} is refused: it lies outside {root}, the folder that is read")
    try:
        return _open_below(base, resolved.relative_to(base).parts)
    except OSError as error:
        raise StatesFileError(f"the tensor file {path} cannot be opened ({error.strerror or error})") from error
    except ValueError as error:
        raise StatesFileError(f"the tensor file {path} is refused: {error}") from error


def _open_below(base: Path, parts: Sequence[str]) -> int:
    """Open ``base/part/part`` through directory descriptors, so that a link that is swapped in now is an error."""
    folder = os.open(base, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for part in parts[:-1]:
            below = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
            os.close(folder)
            folder = below
        # Asked before opening: to open a device may do something.
        if not stat.S_ISREG(os.stat(parts[-1], dir_fd=folder, follow_symlinks=False).st_mode):
            raise ValueError("it is no ordinary file")
        descriptor = os.open(parts[-1], os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    finally:
        os.close(folder)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ValueError("it is no ordinary file")
    return descriptor


def _distinct(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    record = dict(pairs)
    if len(record) != len(pairs):
        raise ValueError("a name occurs twice")
    return record


def _naturals(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
