"""Filling a store: rows are gathered into shards, shards are written by atomic rename, and then named in the index."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from speculators.errors import DataError, SpeculatorsError
from speculators.files import locked_folder, writing
from speculators.verifiers.source import HiddenStates
from speculators.verifiers.store.index import append_line, index_path, mend_tail, writer_of
from speculators.verifiers.store.records import ShardRecord, read_line
from speculators.verifiers.store.shards import EncodedRow, encode_row, shard_record, write_shard
from speculators.verifiers.store.store import StatesStore

__all__ = ["SHARD_BYTES", "StoreFullError", "StoreWriter", "free_writer"]

#: Bytes from which on a shard is written.
SHARD_BYTES = 256 << 20


class StoreFullError(DataError):
    """The store's quota does not allow another shard."""


class StoreWriter:
    """One writer of a store; others, with other names, may write to it at once.

    A pass is never cut over two shards, so that after a kill all of its rows are there or none.

    :param name: of this writer, such as its rank: digits, letters.
    :param shard_bytes: from which on a shard is written.
    :param verify: read every shard back once it is written, and compare it with its checksums.
    :raises SpeculatorsError: when another process writes under this name.
    """

    def __init__(self, store: StatesStore, name: str, shard_bytes: int = SHARD_BYTES, *, verify: bool = False) -> None:
        self.store = store
        self.name = name
        self._shard_bytes = shard_bytes
        self._verify = verify
        self._passes: list[list[EncodedRow]] = []
        self._pending = 0
        self._index = index_path(store.path, name)
        self._shards = store.path / "shards"
        self._held = ExitStack()
        flag = "--rank" if name.isdecimal() else "--hidden-states-path"
        lock = locked_folder(store.path, flag, name=f".{name}.lock", what=f"part {name} of the store")
        self._held.enter_context(lock)
        with writing(self._index):
            self._recover()

    def _recover(self) -> None:
        """Take up what a killed writer of this name left."""
        mend_tail(self._index)
        for path in self._shards.glob(f".{self.name}-*.tmp.safetensors"):
            path.unlink(missing_ok=True)
        index = self.store.index
        index.refresh()
        own = [path.name for path in self._shards.glob(f"{self.name}-*.safetensors")]
        named = _named(self._index)
        for name in sorted(own):
            if name in named or name in index.evicted:
                continue
            record = index.shards.get(name) or next(iter(index.unlisted([name])), None)
            if record is None:
                (self._shards / name).unlink()  # no line, no header: nobody knows what it was
                continue
            append_line(self._index, record.to_json())
            index.refresh()
        numbers = [_number(name) for name in {*own, *named, *index.evicted} if name.startswith(f"{self.name}-")]
        self._next = max(numbers, default=-1) + 1

    def pending(self, row_id: int) -> HiddenStates | None:
        """States of a row that waits for its shard to be written."""
        for group in self._passes:
            for row in group:
                if row.record.row_id == row_id:
                    return row.states
        return None

    def add(self, states: Sequence[HiddenStates]) -> list[HiddenStates]:
        """Take in the rows of one pass, and write a shard when there is enough for one.

        :returns: the states as reading them from the store will give them.
        :raises DataError: states that cannot be stored, a full disk.
        :raises StoreFullError: no room within the quota; what was written stays.
        """
        rows = [encode_row(one, self.store.record) for one in states]
        if rows:
            self._passes.append(rows)
            self._pending += sum(row.nbytes for row in rows)
        if self._pending >= self._shard_bytes:
            self.flush()
        return [row.states for row in rows]

    def flush(self) -> ShardRecord | None:
        """Write what waits as a shard; None if nothing does.

        :raises DamagedShardError: what was written cannot be read back; only asked for by ``verify``.
        :raises DataError: as :meth:`add`; what waited is then given up, and is made again by whoever asks for it.
        """
        if not self._passes:
            return None
        passes, self._passes, pending, self._pending = self._passes, [], self._pending, 0
        name = f"{self.name}-{self._next:06d}.safetensors"
        record = shard_record(name, passes)
        limit = self.store.record.max_bytes
        if limit is None:
            write_shard(self._shards / name, record, passes)
        else:  # writers take turns, so that no two of them use the same room
            with locked_folder(self.store.path, "--output", name=".quota.lock", what="store", wait=True):
                self._make_room(pending, limit)
                write_shard(self._shards / name, record, passes)
        with writing(self._index):
            append_line(self._index, record.to_json())
        self._next += 1
        self.store.refresh()
        if self._verify:
            self.store.check_shard(name)
        return record

    def _make_room(self, needed: int, limit: int) -> None:
        used = self.store.nbytes
        if used + needed > limit and self.store.record.on_full == "evict" and needed <= limit:
            used = self._evict(used + needed - limit)
        if used + needed > limit:
            raise StoreFullError(
                f"the store in {self.store.path} is full: {used / 2**30:.3f} of {limit / 2**30:.3f} GiB are used and the next "
                f"shard needs {needed / 2**30:.3f}; raise --max-gib, or train from what there is"
            )

    def _evict(self, wanted: int) -> int:
        """Remove the oldest shards that no process has open until ``wanted`` bytes are free; returns the bytes still used."""
        self.store.index.refresh()
        ages = sorted((path.stat().st_mtime_ns, path.name) for path in self._shards.glob("*.safetensors"))
        for _, name in ages:
            if wanted <= 0:
                break
            wanted -= self._evict_shard(self._shards / name)
        return self.store.nbytes

    def _evict_shard(self, path: Path) -> int:
        """Remove a shard unless it is in use; returns the bytes freed."""
        self.store.reopen(path.name)  # what this process only keeps open is not in use
        with open(path, "r+b") as file:  # some network file systems lock only what may be written
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                return 0
            size = os.fstat(file.fileno()).st_size
            # Named first: a reader that then finds no file knows that none is to be there.
            with writing(self._index):
                append_line(index_path(self.store.path, writer_of(path.name)), {"evicted": path.name})
            path.unlink()
        self.store.index.refresh()
        return size

    def close(self) -> None:
        """Give the name back; what waits is not written."""
        self._passes, self._pending = [], 0
        self._held.close()

    def __enter__(self) -> StoreWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def free_writer(store: StatesStore, prefix: str, shard_bytes: int = SHARD_BYTES, most: int = 1000) -> StoreWriter:
    """A writer of the first name ``prefix0000``, ... that no other process uses.

    :raises SpeculatorsError: when the folder cannot be written, or all are in use.
    """
    for number in range(most):
        try:
            return StoreWriter(store, f"{prefix}{number:04d}", shard_bytes)
        except DataError:
            raise
        except SpeculatorsError as error:
            if "is in use by" not in str(error):
                raise
    raise SpeculatorsError(f"{most} processes write to the store in {store.path}; end some of them")


def _named(index: Path) -> set[str]:
    """Shards that whole lines of an index name."""
    names = set()
    for line in index.read_bytes().splitlines() if index.exists() else ():
        try:
            names.add(str(read_line(line).get("shard")))
        except ValueError:
            continue
    return names - {"None"}


def _number(name: str) -> int:
    digits = name.removesuffix(".safetensors").rpartition("-")[2]
    return int(digits) if digits.isdecimal() else -1
