"""The folder of a store.

::

    hidden_states.json        what the states are (records.StoreRecord)
    next_tokens.json          the verifier's own predictions for some rows
    index/<writer>.jsonl      a line per shard
    shards/<writer>-<n>.safetensors
"""

from __future__ import annotations

import json
import os
import threading
from contextlib import suppress
from pathlib import Path

import torch

from speculators.data.rows import Row
from speculators.errors import ConfigError, DataError
from speculators.files import locked_folder, read_json, write_text_atomically, writing
from speculators.verifiers.source import HiddenStates
from speculators.verifiers.store.index import Placed, StoreIndex
from speculators.verifiers.store.records import StoreRecord, hash_ids
from speculators.verifiers.store.shards import DamagedShardError, OpenShard, ShardPool

__all__ = ["RECORD", "StatesStore"]

#: Name of the store's record.
RECORD = "hidden_states.json"


class StatesStore:
    """A store, open for reading; :class:`~speculators.verifiers.store.writer.StoreWriter` writes to one.

    Any number of processes may read while others write. Methods may be called by several threads.

    :param path: its folder.
    :raises DataError: when there is no store, or its record cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.record = _read_record(path)
        self.index = StoreIndex(path, self.record)
        self._pool = ShardPool(path / "shards", self.record)
        self._checked: set[int] = set()  #: rows whose bytes this process has compared with their checksum
        self._lock = threading.RLock()

    @classmethod
    def create(cls, path: Path, record: StoreRecord) -> StatesStore:
        """Open the store in ``path``, making it if there is none.

        :raises ConfigError: when there is one of other states, rows or groups.
        :raises DataError: when the folder cannot be written, or holds other files.
        """
        with locked_folder(path, "--output", name=".record.lock", what="store", wait=True):
            if not (path / RECORD).exists():
                foreign = sorted(entry.name for entry in path.iterdir() if not entry.name.startswith("."))
                if set(foreign) - {"shards", "index"}:
                    raise ConfigError(f"{path} holds other files ({', '.join(foreign[:3])}); choose an empty folder")
                with writing(path):
                    (path / "shards").mkdir(exist_ok=True)
                    (path / "index").mkdir(exist_ok=True)
                _write_record(path, record)
            found = _read_record(path)
            differences = found.differences(record)
            if differences:
                raise ConfigError(
                    f"the store in {path} holds other states ({'; '.join(differences)}); choose another "
                    "folder, or remove that one"
                )
            if found != record:  # another quota
                _write_record(path, record)
        return cls(path)

    def has(self, row: Row) -> bool:
        """Whether the store names the row, or a longer one that begins with it, without reading its states.

        A row that is as long as the stored one is told by its tokens' hash; of a shorter one the stored tokens are read.
        """
        placed = self.place(row.row_id)
        if placed is None or placed.row.tokens < len(row):
            return False
        if placed.row.tokens == len(row):
            return placed.row.ids_hash == hash_ids(row.input_ids)
        try:
            return _begins(self._checked_shard(placed).token_ids(placed.row), row)
        except DamagedShardError:
            return False

    def lacks(self, row: Row) -> bool:
        """Whether no row of this id, at least as long and of these tokens, was ever named; nothing is read but the index."""
        with self._lock:
            placed = self.index.rows.get(row.row_id)
            if placed is None or placed.row.tokens < len(row):
                return True
            return placed.row.tokens == len(row) and placed.row.ids_hash != hash_ids(row.input_ids)

    def place(self, row_id: int) -> Placed | None:
        """Where a row lies; looks for what writers have added since when it is not known."""
        with self._lock:
            if row_id not in self.index.rows and not self.index.refresh():
                return None
            return self.index.rows.get(row_id)

    def read(self, row: Row) -> HiddenStates | None:
        """States of a row, views of the mapped file where they are stored in the dtype that is read.

        The first time that a process reads a row, its bytes are compared with their checksum.

        :returns: None when the store has no such row: none of its id, a shorter one, or one of other tokens.
        :raises DamagedShardError: when what was written is not there any more.
        """
        while True:
            placed = self.place(row.row_id)
            if placed is None or placed.row.tokens < len(row):
                return None
            try:
                shard = self._checked_shard(placed)
                break
            except DamagedShardError:
                with self._lock:
                    self.index.refresh()
                    if self.index.rows.get(row.row_id) == placed:
                        raise
                # else it was evicted or replaced meanwhile
        states = shard.read(placed.row)
        return states.first(len(row)) if _begins(states.token_ids, row) else None

    def _checked_shard(self, placed: Placed) -> OpenShard:
        """The shard of a row whose bytes are as they were written; several threads may check at once."""
        row_id = placed.row.row_id
        with self._lock:
            shard = self._pool.get(placed.shard)
            if row_id in self._checked:
                return shard
        shard.check(placed.row)
        with self._lock:
            self._checked.add(row_id)
        return shard

    def check_shard(self, name: str, *, whole: bool = True) -> None:
        """Compare all rows of a shard with their checksums.

        :param whole: False to look at the header alone.
        :raises KeyError: for a shard that the index does not know.
        :raises DamagedShardError: one of them is not what was written.
        """
        with self._lock:
            record = self.index.shards[name]
            shard = self._pool.get(name)
            if shard.record != record:
                raise DamagedShardError(shard.path, "its header names other rows than the index")
            for row in record.rows() if whole else ():
                shard.check(row)
                self._checked.add(row.row_id)

    def refresh(self) -> None:
        """Read what writers have added since."""
        with self._lock:
            self.index.refresh()

    def reopen(self, name: str) -> None:
        """Forget what is held of a shard, because its file was replaced."""
        with self._lock:
            self._pool.drop(name)
            self._checked -= {row.row_id for row in self.index.shards[name].rows()} if name in self.index.shards else set()
            self.index.refresh()

    @property
    def nbytes(self) -> int:
        """Bytes of all shards on the disk, half-written ones included."""
        total = 0
        with os.scandir(self.path / "shards") as entries:
            for entry in entries:
                with suppress(FileNotFoundError):  # evicted meanwhile
                    total += entry.stat().st_size
        return total

    def close(self) -> None:
        """Let shards be evicted; rows that were read stay readable."""
        with self._lock:
            self._pool.close()


def _begins(stored: torch.Tensor, row: Row) -> bool:
    """Whether ``stored`` ids begin with the row's."""
    return bool(torch.equal(stored[: len(row)], torch.tensor(row.input_ids)))


def _write_record(path: Path, record: StoreRecord) -> None:
    with writing(path / RECORD):
        write_text_atomically(path / RECORD, json.dumps(record.to_json(), indent=2) + "\n")


def _read_record(path: Path) -> StoreRecord:
    try:
        return StoreRecord.from_json(read_json(path / RECORD))
    except FileNotFoundError:
        raise DataError(
            f"there are no stored hidden states in {path}; fill it with `speculators generate-offline-data`"
        ) from None
    except (OSError, ValueError) as error:
        raise DataError(f"the record {path / RECORD} cannot be used ({error}); fill a new store") from error
