"""The files of a data set: what ``datasets.Dataset.save_to_disk`` writes, plus a manifest, written and read in constant memory.

A folder holds ``state.json``, which names the data files in order, ``dataset_info.json`` and the data files, Arrow streams of
record batches. Data files of ours carry the fingerprint of the rows in their names, so that a new set never overwrites the
old one's, and so that rows and manifest are known to belong together without reading a row.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa

from speculators.data.manifest import MANIFEST, DataManifest, read_manifest
from speculators.data.row_batches import ORIGIN, RowBatch
from speculators.errors import DataError
from speculators.files import read_json

__all__ = ["STATE", "ShardWriter", "StoredRows", "holds_rows", "install", "name_by", "open_rows"]

STATE = "state.json"
INFO = "dataset_info.json"

#: A data file is closed, and the next begun, when it is this large.
SHARD_BYTES = 500 << 20


@dataclass(frozen=True, slots=True, eq=False)
class StoredRows:
    """R rows of one record batch, as they are stored: mapped, not read."""

    input_ids: np.ndarray  #: integers ``[S]``
    loss_mask: np.ndarray | pa.BooleanArray  #: numbers ``[S]``, or Arrow's bits, which no numpy array can view
    offsets: np.ndarray  #: ``[R + 1]``, start of every row and the end of the last
    origin: dict[str, np.ndarray]  #: the columns of :data:`ORIGIN` that the data set has, each ``[R]``

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def tokens(self, first: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Ids (int64) and mask (bool) of the rows ``first`` to before ``stop``; ids are a view if stored as int64."""
        span = slice(int(self.offsets[first]), int(self.offsets[stop]))
        mask = self.loss_mask[span]
        if isinstance(mask, pa.Array):
            mask = mask.to_numpy(zero_copy_only=False)
        return self.input_ids[span].astype(np.int64, copy=False), mask.astype(bool, copy=False)

    def strange_mask(self) -> bool:
        """Whether a mask value is neither 0 nor 1."""
        values = self.loss_mask
        return isinstance(values, np.ndarray) and not bool(((values == 0) | (values == 1)).all())


def holds_rows(folder: Path) -> bool:
    """Whether there is a data set, readable or not."""
    return (folder / STATE).is_file()


def open_rows(folder: Path) -> tuple[list[StoredRows], DataManifest, bool]:
    """Map a data set: its rows, its manifest, and whether file names show that these belong together.

    :raises DataError: when the folder holds no readable data set, or columns that do not fit together.
    """
    while True:
        state = _state_text(folder)
        try:
            found = _open(folder, state)
        except DataError:
            if _state_text(folder) == state:
                raise
        else:
            # Named so, they are one set, whatever was installed meanwhile.
            if found[2] or _state_text(folder) == state:
                return found


def _state_text(folder: Path) -> str:
    try:
        return (folder / STATE).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise DataError(f"{folder} holds no data set; make one with `speculators prepare-data --output {folder}`") from None
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"the data set in {folder} cannot be read ({error}); make it again with prepare-data") from error


def _open(folder: Path, state: str) -> tuple[list[StoredRows], DataManifest, bool]:
    try:
        names = [str(file["filename"]) for file in json.loads(state)["_data_files"]]
        batches = [batch for name in names for batch in _mapped(folder / name)]
    except (OSError, ValueError, KeyError, TypeError, RecursionError, pa.ArrowException) as error:
        raise DataError(f"the data set in {folder} cannot be read ({error}); make it again with prepare-data") from error
    if not batches or not all({"input_ids", "loss_mask"} <= set(batch.schema.names) for batch in batches):
        raise DataError(f"the data set in {folder} lacks the columns input_ids and loss_mask; make it with prepare-data")
    stored, first = [], 0
    for batch in batches:
        stored.append(_stored(batch, first, folder))
        first += batch.num_rows
    manifest = _manifest(folder, names)
    return stored, manifest, all(name.startswith(f"{manifest.fingerprint}-") for name in names)


def _mapped(path: Path) -> list[pa.RecordBatch]:
    """The record batches of one file; empty ones too, for their schema."""
    with pa.memory_map(str(path)) as file:
        reader = pa.ipc.open_stream(file)
        batches = list(reader)
        return batches or [pa.RecordBatch.from_pylist([], schema=reader.schema)]


def _manifest(folder: Path, names: list[str]) -> DataManifest:
    """The manifest of these data files: :func:`install` may have been killed before it got its name."""
    waiting = folder / _waiting_manifest(names[0].split("-")[0]) if names else folder / MANIFEST
    return read_manifest(waiting) or read_manifest(folder / MANIFEST) or DataManifest()


def _waiting_manifest(fingerprint: str) -> str:
    """Name of the manifest until its set is in place."""
    return f".manifest-{fingerprint}.json"


def _stored(batch: pa.RecordBatch, first: int, folder: Path) -> StoredRows:
    """:param first: number of the batch's first row, for messages."""
    ids, offsets = _flat(batch, "input_ids", folder)
    mask, mask_offsets = _flat(batch, "loss_mask", folder)
    if not pa.types.is_integer(ids.type):
        raise DataError(f"column input_ids in {folder} holds {ids.type}, not whole numbers; make the data set again")
    if not np.array_equal(offsets, mask_offsets):
        row = int(np.argmax(np.diff(offsets) != np.diff(mask_offsets)))
        counts = f"{np.diff(offsets)[row]} ids and {np.diff(mask_offsets)[row]} mask values"
        raise DataError(f"row {first + row} of {folder} has {counts}; make the data set again")
    origin = {}
    for name, dtype in ORIGIN.items():
        place = batch.schema.get_field_index(name)
        # A foreign data set may have a column of that name with something else in it.
        if place >= 0 and pa.types.is_integer(batch.schema.field(place).type) and not batch.column(place).null_count:
            origin[name] = batch.column(place).to_numpy(zero_copy_only=False).astype(dtype, copy=False)
    return StoredRows(_viewed(ids), _viewed(mask), offsets, origin)


def _viewed(values: pa.Array) -> np.ndarray | pa.BooleanArray:
    return values if pa.types.is_boolean(values.type) else values.to_numpy()


def _flat(batch: pa.RecordBatch, column: str, folder: Path) -> tuple[pa.Array, np.ndarray]:
    """A list column as its values end to end and row offsets from 0 on."""
    array = batch.column(batch.schema.get_field_index(column))
    lists = pa.types.is_list(array.type) or pa.types.is_large_list(array.type)
    values = array.flatten() if lists and not array.null_count else None
    numbers = values is not None and (pa.types.is_primitive(values.type) and not pa.types.is_temporal(values.type))
    if values is None or not numbers or values.null_count:
        raise DataError(f"column {column} in {folder} is not a list of numbers in every row; make the data set again")
    offsets = np.asarray(array.offsets)
    return values, offsets - offsets[0] if len(offsets) and offsets[0] else offsets


class ShardWriter:
    """Writes rows to the data files of a folder, batch by batch.

    :param folder: empty; its data set has no manifest and no lasting names before :func:`name_by`.
    """

    def __init__(self, folder: Path) -> None:
        self.names: list[str] = []
        self._folder = folder
        self._file: BinaryIO | None = None
        self._stream: pa.RecordBatchStreamWriter | None = None
        self._schema: pa.Schema | None = None

    def write(self, batch: RowBatch) -> None:
        """:raises OSError: when there is no room."""
        table = _table_batch(batch)
        if self._file is not None and self._file.tell() >= SHARD_BYTES:
            self._finish_file()
        if self._file is None or self._stream is None:
            self.names.append(f"part-{len(self.names):05d}.arrow")
            self._file = open(self._folder / self.names[-1], "xb")  # noqa: SIM115 - closed by _finish_file or abandon
            self._stream = pa.ipc.new_stream(self._file, table.schema)
            self._schema = table.schema
        self._stream.write_batch(table)

    def finish(self) -> None:
        """Close the last file and name all of them in ``state.json``.

        :raises OSError: when there is no room.
        """
        self._finish_file()
        if self._schema is not None:
            _write_json(self._folder / INFO, _info(self._schema))
            _write_json(self._folder / STATE, _state(self.names, ""))

    def _finish_file(self) -> None:
        if self._file is not None and self._stream is not None:
            self._stream.close()
            _to_disk(self._file)
            self._file.close()
        self._file = self._stream = None

    def abandon(self) -> None:
        """Let go of a file that cannot be written to its end."""
        if self._file is not None:
            with suppress(OSError):
                self._file.close()
        self._file = self._stream = None


def _table_batch(batch: RowBatch) -> pa.RecordBatch:
    offsets = pa.array(np.concatenate([[0], np.cumsum(batch.lengths)]).astype(np.int32))
    columns = {
        "input_ids": pa.ListArray.from_arrays(offsets, pa.array(batch.input_ids.astype(np.int64, copy=False))),
        "loss_mask": pa.ListArray.from_arrays(offsets, pa.array(batch.loss_mask.astype(np.int64))),
        "seq_len": pa.array(batch.lengths.astype(np.int64, copy=False)),
    }
    columns |= {name: pa.array(column.astype(ORIGIN[name], copy=False)) for name, column in batch.origin().items()}
    return pa.RecordBatch.from_pydict(columns)


def _info(schema: pa.Schema) -> dict[str, Any]:
    """``dataset_info.json``: the columns in the words of ``datasets``, in the form that all its versions know."""

    def feature(kind: pa.DataType) -> dict[str, Any]:
        if pa.types.is_list(kind):
            return {"feature": feature(kind.value_type), "_type": "Sequence"}
        return {"dtype": str(kind), "_type": "Value"}

    features = {field.name: feature(field.type) for field in schema}
    return {"citation": "", "description": "", "features": features, "homepage": "", "license": ""}


def _state(names: list[str], fingerprint: str) -> dict[str, Any]:
    return {
        "_data_files": [{"filename": name} for name in names],
        "_fingerprint": fingerprint,
        "_format_columns": None,
        "_format_kwargs": {},
        "_format_type": "torch",  # upstream's readers want tensors
        "_output_all_columns": False,
        "_split": None,
    }


def name_by(folder: Path, names: list[str], manifest: DataManifest) -> None:
    """Name the files of a :class:`ShardWriter` after the fingerprint of their rows and put the manifest to them."""
    named = [f"{manifest.fingerprint}-data-{place:05d}-of-{len(names):05d}.arrow" for place in range(len(names))]
    for old, new in zip(names, named, strict=True):
        os.replace(folder / old, folder / new)
    _write_text(folder / _waiting_manifest(manifest.fingerprint), manifest.text())
    _write_json(folder / STATE, _state(named, manifest.fingerprint))


def install(new: Path, folder: Path, fingerprint: str) -> None:
    """Move a written data set to its place, whatever the place holds.

    The set is there as soon as ``state.json`` is, for it names the data files, and by them the manifest; up to then a reader
    finds the set that was there before.
    """
    waiting = _waiting_manifest(fingerprint)
    if not folder.exists():
        os.replace(new / waiting, new / MANIFEST)
        os.replace(new, folder)
        return
    kept = {file.name for file in new.iterdir()}
    stale = [file for file in _stale(folder) if file.name not in kept]
    for name in [*sorted(kept - {STATE, INFO}), INFO, STATE]:
        os.replace(new / name, folder / name)
    os.replace(folder / waiting, folder / MANIFEST)
    for file in stale:
        file.unlink(missing_ok=True)


def _stale(folder: Path) -> Iterator[Path]:
    """Files of the set that is to be replaced, and what kills left of others: names as ours, or named by its state."""
    for pattern in (f"{'[0-9a-f]' * 16}-data-*.arrow", _waiting_manifest("*")):
        yield from folder.glob(pattern)
    with suppress(OSError, ValueError, LookupError, TypeError):
        names = [Path(entry["filename"]).name for entry in read_json(folder / STATE)["_data_files"]]
        yield from (folder / name for name in names if name.endswith(".arrow"))


def _write_json(path: Path, content: dict[str, Any]) -> None:
    _write_text(path, json.dumps(content, indent=2, sort_keys=True) + "\n")


def _write_text(path: Path, text: str) -> None:
    with open(path, "wb") as file:
        file.write(text.encode())
        _to_disk(file)


def _to_disk(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())
