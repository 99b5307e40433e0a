"""Rendered rows (token ids and loss mask) and the data set of them on disk.

On disk a data set is what ``datasets.Dataset.save_to_disk`` writes, with the columns ``input_ids``, ``loss_mask`` and
``seq_len``, plus a ``manifest.json``; data sets that upstream's ``prepare-data`` wrote are read too (they have no manifest).
Row ids are indices into the whole data set; a split keeps them.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from speculators.errors import ConfigError, DataError
from speculators.files import temporary_beside, writing

__all__ = ["AnswerRecord", "DataManifest", "Row", "RowDataset", "split_rows"]

MANIFEST = "manifest.json"
STATE = "state.json"
INFO = "dataset_info.json"


@dataclass(slots=True, eq=False)
class Row:
    """One rendered conversation of T tokens."""

    row_id: int
    input_ids: np.ndarray  #: int64 ``[T]``, verifier ids
    loss_mask: np.ndarray  #: bool ``[T]``, true on supervised tokens

    def __post_init__(self) -> None:
        if self.input_ids.shape != self.loss_mask.shape or self.input_ids.ndim != 1:
            shapes = f"{self.input_ids.shape} ids and {self.loss_mask.shape} mask values"
            raise DataError(f"row {self.row_id} has {shapes}; give every token one id and one mask value")

    def __len__(self) -> int:
        return len(self.input_ids)


class AnswerRecord(BaseModel):
    """How the supervised answers came about."""

    model_config = ConfigDict(extra="forbid")

    on_policy: bool  #: whether the verifier wrote them
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    max_new_tokens: int | None = None


class DataManifest(BaseModel):
    """Where a data set comes from; written beside its rows."""

    model_config = ConfigDict(populate_by_name=True)

    schema_version: int = Field(default=1, alias="schema")
    verifier: str = ""  #: name or path of the model whose tokenizer rendered the rows
    tokenizer_hash: str = ""
    answers: AnswerRecord | None = None  #: None when not known (answers found in the data, or a foreign data set)
    sources: list[str] = []
    seed: int = 0
    counts: dict[str, int] = {}  #: what became of every input record
    settings_hash: str = ""  #: of everything the rows are a function of; equal means a rerun would write the same rows
    fingerprint: str = ""  #: of the rows themselves; filled in by :meth:`RowDataset.save`


def _fingerprint(input_ids: np.ndarray, loss_mask: np.ndarray, offsets: np.ndarray) -> str:
    digest = hashlib.sha256()
    for array in (input_ids.astype("<i8"), loss_mask.astype("u1"), offsets.astype("<i8")):
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()[:16]


class RowDataset(Sequence[Row]):
    """Rows in memory as two flat arrays, so that a row is a view and lengths are free.

    :param input_ids: all rows' ids end to end, int64.
    :param loss_mask: the same for the masks, bool.
    :param offsets: start of every row and the end of the last, ``[rows + 1]``.
    """

    def __init__(self, input_ids: np.ndarray, loss_mask: np.ndarray, offsets: np.ndarray, manifest: DataManifest) -> None:
        self._input_ids = input_ids
        self._loss_mask = loss_mask
        self._offsets = offsets
        self.manifest = manifest

    @classmethod
    def from_rows(cls, rows: Iterable[Row], manifest: DataManifest | None = None) -> RowDataset:
        """A data set of ``rows`` in this order, without going through a disk; row ids become 0, 1, ..."""
        rows = list(rows)
        offsets = np.cumsum([0, *(len(row) for row in rows)], dtype=np.int64)
        ids = np.concatenate([np.zeros(0, np.int64), *(row.input_ids for row in rows)]).astype(np.int64)
        mask = np.concatenate([np.zeros(0, bool), *(row.loss_mask for row in rows)]).astype(bool)
        manifest = (manifest or DataManifest()).model_copy(update={"fingerprint": _fingerprint(ids, mask, offsets)})
        return cls(ids, mask, offsets, manifest)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> RowDataset:
        """Read a data set from its folder.

        :raises DataError: when the folder holds no readable data set, or columns that do not fit together.
        """
        folder = Path(path)
        if not (folder / STATE).is_file():
            raise DataError(f"{folder} holds no data set; make one with `speculators prepare-data --output {folder}`")
        try:
            table = datasets.load_from_disk(str(folder)).with_format(None)
        except Exception as error:
            raise DataError(f"the data set in {folder} cannot be read ({error}); make it again with prepare-data") from error
        if not isinstance(table, datasets.Dataset) or not {"input_ids", "loss_mask"} <= set(table.column_names):
            raise DataError(f"the data set in {folder} lacks the columns input_ids and loss_mask; make it with prepare-data")
        ids, offsets = _flat(table, "input_ids", folder)
        mask, mask_offsets = _flat(table, "loss_mask", folder)
        if not np.array_equal(offsets, mask_offsets):
            row = int(np.argmax(offsets != mask_offsets)) - 1
            raise DataError(f"row {row} of {folder} has as many mask values as ids not; make the data set again")
        if mask.dtype != bool and not np.isin(mask, (0, 1)).all():
            raise DataError(f"loss_mask in {folder} has values other than 0 and 1; make the data set again")
        dataset = cls(ids.astype(np.int64, copy=False), mask.astype(bool, copy=False), offsets, _read_manifest(folder))
        actual = _fingerprint(dataset._input_ids, dataset._loss_mask, offsets)
        if dataset.manifest.fingerprint not in ("", actual):
            raise DataError(f"rows and manifest in {folder} do not belong together; run prepare-data again with --overwrite")
        dataset.manifest.fingerprint = actual
        return dataset

    @staticmethod
    def save(
        path: str | os.PathLike[str], rows: Iterable[Row], manifest: DataManifest, *, overwrite: bool = False
    ) -> RowDataset:
        """Write ``rows`` to the folder ``path`` and return them as a data set.

        The rows are written beside the folder first. A reader sees the old data set or the new one, and other files in the
        folder are left alone.

        :raises DataError: without rows, when ``path`` holds a data set and ``overwrite`` is off, or on a full disk.
        """
        folder = Path(path)
        dataset = RowDataset.from_rows(rows, manifest)
        if not len(dataset):
            raise DataError(f"there are no rows to write to {folder}; check the input and the length limits")
        if (folder / STATE).exists() and not overwrite:
            raise DataError(f"{folder} already holds a data set; choose another folder or pass --overwrite")
        with writing(folder):
            folder.parent.mkdir(parents=True, exist_ok=True)
            temporary = temporary_beside(folder)
            try:
                _write(dataset, temporary)
                _install(temporary, folder)
            finally:
                shutil.rmtree(temporary, ignore_errors=True)
        return dataset

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self.row(row_id) for row_id in range(*index.indices(len(self)))]
        return self.row(index)

    def row(self, row_id: int) -> Row:
        """Row ``row_id``; its arrays are views.

        :raises IndexError: outside 0 .. len - 1.
        """
        if not 0 <= row_id < len(self):
            raise IndexError(f"row {row_id} of a data set of {len(self)} rows")
        span = slice(self._offsets[row_id], self._offsets[row_id + 1])
        return Row(int(row_id), self._input_ids[span], self._loss_mask[span])

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of every row, int64 ``[rows]``."""
        return np.diff(self._offsets)

    @property
    def fingerprint(self) -> str:
        """Hash of all ids, masks and row boundaries."""
        return self.manifest.fingerprint

    @property
    def supervised_tokens(self) -> int:
        return int(self._loss_mask.sum())

    def check_vocabulary(self, vocab_size: int) -> None:
        """:raises DataError: when an id lies outside a vocabulary of ``vocab_size``."""
        wrong = (self._input_ids < 0) | (self._input_ids >= vocab_size)
        if wrong.any():
            place = int(np.argmax(wrong))
            row = int(np.searchsorted(self._offsets, place, side="right")) - 1
            raise DataError(
                f"row {row} has token id {self._input_ids[place]}, but the verifier's vocabulary has {vocab_size} ids; "
                "render the data with this verifier's tokenizer"
            )


def _flat(table: datasets.Dataset, column: str, folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """A list column as one flat array and row offsets."""
    if table._indices is not None:
        table = table.flatten_indices()
    array = table.data.column(column).combine_chunks()
    if isinstance(array, pa.ChunkedArray):
        array = array.chunk(0) if array.num_chunks else pa.array([], type=array.type)
    if not (pa.types.is_list(array.type) or pa.types.is_large_list(array.type)) or array.null_count:
        raise DataError(f"column {column} in {folder} is not a list of numbers in every row; make the data set again")
    offsets = np.asarray(array.offsets, dtype=np.int64)
    return array.flatten().to_numpy(zero_copy_only=False), offsets - offsets[0]


def _read_manifest(folder: Path) -> DataManifest:
    path = folder / MANIFEST
    if not path.is_file():
        return DataManifest()
    try:
        return DataManifest.model_validate_json(path.read_text(encoding="utf-8"))
    except (ValidationError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read ({error}); make the data set again with prepare-data --overwrite") from error


@contextmanager
def _no_progress_bar() -> Iterator[None]:
    """Writing takes a moment, and the bars of ``datasets`` are not those of this library."""
    shown = not datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if shown:
            datasets.enable_progress_bars()


def _write(dataset: RowDataset, folder: Path) -> None:
    """``save_to_disk`` plus the manifest; data files are named by content, so that a new set never overwrites an old one's."""
    offsets = pa.array(dataset._offsets, type=pa.int32() if dataset._offsets[-1] < 2**31 else pa.int64())
    kind = pa.ListArray if offsets.type == pa.int32() else pa.LargeListArray
    columns = {
        "input_ids": kind.from_arrays(offsets, pa.array(dataset._input_ids)),
        "loss_mask": kind.from_arrays(offsets, pa.array(dataset._loss_mask.astype(np.int64))),
        "seq_len": pa.array(dataset.lengths),
    }
    with _no_progress_bar():
        # Upstream's readers want tensors.
        datasets.Dataset(pa.table(columns)).with_format("torch").save_to_disk(str(folder))
    state = json.loads((folder / STATE).read_text(encoding="utf-8"))
    for file in state["_data_files"]:
        named = f"{dataset.fingerprint}-{file['filename']}"
        os.replace(folder / file["filename"], folder / named)
        file["filename"] = named
    (folder / STATE).write_text(json.dumps(state, indent=2, sort_keys=True), encoding="utf-8")
    manifest = dataset.manifest.model_dump_json(indent=2, by_alias=True)
    (folder / MANIFEST).write_text(manifest + "\n", encoding="utf-8")


def _install(new: Path, folder: Path) -> None:
    """Move a written data set to its place; ``state.json``, which names the data files, goes last."""
    if not folder.exists():
        os.replace(new, folder)
        return
    kept = {file.name for file in new.iterdir()}
    for name in sorted(kept - {STATE, MANIFEST, INFO}):
        os.replace(new / name, folder / name)
    for name in (INFO, MANIFEST, STATE):
        os.replace(new / name, folder / name)
    for stale in folder.glob("*.arrow"):
        if stale.name not in kept:
            stale.unlink()


def split_rows(num_rows: int, train_ratio: float) -> tuple[np.ndarray, np.ndarray]:
    """Row ids of the training split (head) and of the validation split (tail, may be empty at ratio 1).

    :param train_ratio: share of the rows to train on, in (0, 1].
    :raises ConfigError: for a ratio outside (0, 1].
    :raises DataError: when no row is left to train on.
    """
    if not 0 < train_ratio <= 1:
        raise ConfigError(f"the train-data ratio is {train_ratio}; choose one above 0 and at most 1")
    boundary = int(num_rows * train_ratio)
    if not boundary:
        raise DataError(f"{num_rows} rows at a train-data ratio of {train_ratio} leave none to train on; add data or raise it")
    ids = np.arange(num_rows, dtype=np.int64)
    return ids[:boundary], ids[boundary:]
