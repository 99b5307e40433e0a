"""Which row lies in which shard: a file of lines per writer, and the shards' own headers where a line is missing."""

from __future__ import annotations

import fcntl
import os
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from speculators.files import naming
from speculators.verifiers.store.records import ShardRecord, StoredRow, StoreRecord, line_of, read_line
from speculators.verifiers.store.shards import DamagedShardError, OpenShard

__all__ = ["Placed", "StoreIndex", "append_line", "mend_tail", "writer_of"]


class Placed(NamedTuple):
    """A stored row and the shard that holds it."""

    shard: str
    row: StoredRow


def writer_of(shard: str) -> str:
    """Whose shard it is: ``00003`` of ``00003-000017.safetensors``."""
    return shard.rpartition("-")[0]


def index_path(folder: Path, writer: str) -> Path:
    return folder / "index" / f"{writer}.jsonl"


def append_line(path: Path, values: Mapping[str, Any]) -> None:
    """Add a line and see it onto the disk; writers of one file take turns.

    :raises OSError: that names the file.
    """
    line = (line_of(values) + "\n").encode()
    with naming(path), open(path, "ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        at = file.seek(0, os.SEEK_END)
        try:
            file.write(line)
            file.flush()
            os.fsync(file.fileno())
        except OSError:
            os.truncate(path, at)  # half a line would spoil the next one
            raise


def mend_tail(path: Path) -> None:
    """Take away half a line at the end, which a killed writer left; the caller keeps that writer's successors out."""
    if not path.exists():
        return
    with open(path, "r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        text = file.read()
        whole = text.rfind(b"\n") + 1
        if whole < len(text):
            file.truncate(whole)


class StoreIndex:
    """The rows of a store, as far as its files say by now.

    :param folder: of the store.
    """

    def __init__(self, folder: Path, record: StoreRecord) -> None:
        self._folder = folder
        self._record = record
        self._read: dict[Path, int] = {}  #: bytes of each index file that were read
        self.shards: dict[str, ShardRecord] = {}
        self.rows: dict[int, Placed] = {}
        self.evicted: set[str] = set()
        self.refresh()
        self._adopt()

    def refresh(self) -> bool:
        """Read what writers have added since; whether there was anything."""
        found = False
        for path in sorted((self._folder / "index").glob("*.jsonl")):
            start = self._read.get(path, 0)
            size = path.stat().st_size
            if size <= start:
                continue
            with open(path, "rb") as file:
                file.seek(start)
                text = file.read(size - start)
            whole = text.rfind(b"\n") + 1  # the rest is being written, or was torn by a kill
            self._read[path] = start + whole
            for line in text[:whole].splitlines():
                self._take(path, line)
                found = True
        return found

    def _take(self, path: Path, line: bytes) -> None:
        try:
            values = read_line(line)
            if "evicted" in values:
                self._forget(str(values["evicted"]))
            else:
                self.add(ShardRecord.from_json(values))
        except ValueError:
            warnings.warn(
                f"a line of the index {path} is damaged and was passed over; rows that it named are looked for in the shards",
                stacklevel=2,
            )

    def add(self, shard: ShardRecord) -> None:
        """Take a shard in; one of the same name is replaced, and a row that two shards hold is read from the one added last."""
        if shard.name in self.shards:
            self._forget(shard.name)
        self.evicted.discard(shard.name)
        self.shards[shard.name] = shard
        for row in shard.rows():
            self.rows[row.row_id] = Placed(shard.name, row)

    def _forget(self, name: str) -> None:
        shard = self.shards.pop(name, None)
        self.evicted.add(name)
        for row in shard.rows() if shard is not None else ():
            if row.row_id in self.rows and self.rows[row.row_id].shard == name:
                del self.rows[row.row_id]

    def unlisted(self, names: Iterable[str] | None = None) -> list[ShardRecord]:
        """Records of whole shards that no line names: a writer was killed before it wrote one, or the line was damaged.

        :param names: of the files to look at; by default of all shards.
        """
        if names is None:
            names = [path.name for path in (self._folder / "shards").glob("*.safetensors") if not path.name.startswith(".")]
        found = []
        for name in sorted(set(names) - set(self.shards)):
            try:
                shard = OpenShard(self._folder / "shards" / name, self._record)
            except DamagedShardError:
                continue  # what no line names and cannot be read holds rows that are simply missing
            found.append(shard.record)
            shard.close()
        return found

    def _adopt(self) -> None:
        for record in self.unlisted():
            if record.name not in self.evicted:
                self.add(record)
