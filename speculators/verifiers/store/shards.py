"""One shard: a safetensors file of some rows' states, written at once and mapped to be read.

Tensors of row R: ``R.token_ids`` int64 ``[T]``; ``R.hidden_states [T, M + 1, H]``, the captured layers and the final state
last; with fp8 ``R.hidden_states_scales`` float32 ``[T, 1, 1]``.
"""

from __future__ import annotations

import fcntl
import os
import zlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from speculators.errors import DataError
from speculators.files import atomic_write, give_ordinary_mode
from speculators.verifiers.source import HiddenStates
from speculators.verifiers.state_dtypes import SCALES, STATES, decode, encode, torch_dtype
from speculators.verifiers.states_files import Expected, StatesFile, StatesFileError
from speculators.verifiers.store.records import ShardRecord, StoredRow, StoreRecord, hash_ids, line_of, read_line

__all__ = ["DamagedShardError", "EncodedRow", "OpenShard", "ShardPool", "encode_row", "shard_record", "write_shard"]

#: Key of a shard's record in its header; the only one, so that the same rows give the same bytes.
METADATA = "speculators_shard"

TOKENS = "token_ids"

#: Bytes that are read at once to check a row.
_CHUNK = 1 << 20


class DamagedShardError(DataError):
    """A shard that does not hold what it should; the sentence names it."""

    def __init__(self, path: Path, problem: str) -> None:
        super().__init__(f"the shard {path} is damaged: {problem}")
        self.name = path.name


class EncodedRow:
    """A row's tensors as they are stored."""

    def __init__(self, states: HiddenStates, tensors: Mapping[str, Tensor]) -> None:
        self.states = states
        self.tensors = tensors
        checksum = 0
        for name in (TOKENS, SCALES, STATES):
            if name in tensors:
                checksum = zlib.crc32(_bytes(tensors[name]), checksum)
        ids = tensors[TOKENS].numpy()
        self.record = StoredRow(states.row_id, len(ids), hash_ids(ids), checksum)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())


def encode_row(states: HiddenStates, record: StoreRecord) -> EncodedRow:
    """A row as the store keeps it; ``.states`` is what reading it will give.

    :raises DataError: when the states are not finite, out of the dtype's range or of another shape than the record says.
    """
    layers, hidden = len(record.states.layer_ids), record.states.hidden_size
    tokens = states.token_ids.to(torch.int64).contiguous()
    found = (tuple(states.features.shape), tuple(states.final.shape))
    if found != ((len(tokens), layers, hidden), (len(tokens), hidden)):
        raise DataError(
            f"the states of row {states.row_id} have shapes {list(found[0])} and {list(found[1])}, not those of {len(tokens)} "
            f"tokens, {layers} layers and size {hidden}; look for what the source does to them"
        )
    together = torch.cat([states.features, states.final[:, None]], dim=1)
    try:
        tensors = encode(together, record.dtype)
    except DataError as error:
        raise DataError(f"row {states.row_id}: {error}") from error
    read = decode(tensors, getattr(torch, record.states.dtype))
    return EncodedRow(HiddenStates(states.row_id, tokens, read[:, :-1], read[:, -1]), {TOKENS: tokens, **tensors})


def shard_record(name: str, passes: Sequence[Sequence[EncodedRow]]) -> ShardRecord:
    return ShardRecord(name, tuple(tuple(row.record for row in group) for group in passes))


def write_shard(path: Path, record: ShardRecord, passes: Sequence[Sequence[EncodedRow]]) -> None:
    """Write a shard so that a reader, or a crash, sees all of it or nothing.

    :raises DataError: on a full disk; what was there is as it was.
    """
    tensors = {
        f"{row.record.row_id}.{name}": tensor for group in passes for row in group for name, tensor in row.tensors.items()
    }

    def write(file: Path) -> None:
        try:
            save_file(tensors, file, metadata={METADATA: line_of(record.to_json())})
        except Exception as error:  # safetensors gives the system's errors a class of its own, without their number
            raise _system_error(error, file) from error
        give_ordinary_mode(file)
        with open(file, "rb") as written:
            os.fsync(written.fileno())

    atomic_write(path, write)


def _system_error(error: Exception, path: Path) -> BaseException:
    """The OSError that a library reports as a text such as ``... (os error 28)``, or ``error`` itself."""
    if isinstance(error, OSError):
        return error
    number = str(error).rpartition("os error ")[2].partition(")")[0]
    return OSError(int(number), os.strerror(int(number)), str(path)) if number.isdecimal() else error


class OpenShard:
    """A mapped shard, held against eviction until it is closed.

    :raises DamagedShardError: when it is gone, its header does not fit the file, or it is another shard's.
    """

    def __init__(self, path: Path, record: StoreRecord) -> None:
        self.path = path
        self._store = record
        try:
            self._file = StatesFile(path.name, root=path.parent)
        except StatesFileError as error:
            raise DamagedShardError(path, error.problem) from error
        fcntl.flock(self._file.fileno(), fcntl.LOCK_SH)
        try:
            self.record = ShardRecord.from_json(read_line(self._file.metadata.get(METADATA, "")))
        except ValueError as error:
            self.close()
            raise DamagedShardError(path, "its header has no record of its rows") from error
        if self.record.name != path.name:
            self.close()
            raise DamagedShardError(path, f"it is a copy of {self.record.name}")

    def close(self) -> None:
        """Let it be evicted; rows that were read stay readable."""
        self._file.close()

    def check(self, row: StoredRow) -> None:
        """Read a row's bytes once and compare their checksum; done through the file, not the map: a disk that cannot be read
        then raises an error instead of ending the process.

        :raises DamagedShardError: they are not what was written.
        """
        try:
            self._expect(row)
            checksum = 0
            buffer = bytearray(_CHUNK)
            for name in self._names():
                place = self._file.places[f"{row.row_id}.{name}"]
                for at in range(place.begin, place.end, _CHUNK):
                    view = memoryview(buffer)[: min(_CHUNK, place.end - at)]
                    if os.preadv(self._file.fileno(), [view], at) != len(view):
                        raise DamagedShardError(self.path, "it was cut short")
                    checksum = zlib.crc32(view, checksum)
        except (StatesFileError, OSError) as error:
            raise DamagedShardError(self.path, getattr(error, "problem", str(error))) from error
        if checksum != row.checksum:
            raise DamagedShardError(self.path, f"the bytes of row {row.row_id} do not fit their checksum")

    def token_ids(self, row: StoredRow) -> Tensor:
        """int64 ``[T]``, a view of the file."""
        return self._file.tensor(f"{row.row_id}.{TOKENS}")

    def read(self, row: StoredRow) -> HiddenStates:
        """A row's states, views of the file where they are stored in the dtype that is read."""
        tensors = {name: self._file.tensor(f"{row.row_id}.{name}") for name in self._names()}
        states = decode(tensors, getattr(torch, self._store.states.dtype))
        return HiddenStates(row.row_id, tensors[TOKENS], states[:, :-1], states[:, -1])

    def _names(self) -> tuple[str, ...]:
        return (TOKENS, SCALES, STATES) if self._store.dtype == "fp8" else (TOKENS, STATES)

    def _expect(self, row: StoredRow) -> None:
        states = self._store.states
        shapes: dict[str, Expected] = {
            TOKENS: Expected((torch.int64,), (row.tokens,)),
            SCALES: Expected((torch.float32,), (row.tokens, 1, 1)),
            STATES: Expected((torch_dtype(self._store.dtype),), (row.tokens, len(states.layer_ids) + 1, states.hidden_size)),
        }
        for name in self._names():
            self._file.check(f"{row.row_id}.{name}", shapes[name])


class ShardPool:
    """The shards that were read last, kept open. Not thread-safe.

    A shard that it lets go is closed when the last thread that reads it is done.
    """

    def __init__(self, folder: Path, record: StoreRecord, size: int = 64) -> None:
        self._folder = folder
        self._record = record
        self._size = size
        self._open: OrderedDict[str, OpenShard] = OrderedDict()

    def get(self, name: str) -> OpenShard:
        """:raises DamagedShardError: as of :class:`OpenShard`."""
        if name not in self._open:
            self._open[name] = OpenShard(self._folder / name, self._record)
            if len(self._open) > self._size:
                self._open.popitem(last=False)
        self._open.move_to_end(name)
        return self._open[name]

    def drop(self, name: str) -> None:
        """Let a shard go, because its file was replaced."""
        self._open.pop(name, None)

    def close(self) -> None:
        self._open.clear()


def _bytes(tensor: Tensor) -> memoryview:
    flat = tensor.contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy().data) if flat.numel() else memoryview(b"")
