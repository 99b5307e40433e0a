"""The data set of rendered rows (token ids and loss mask), in memory or mapped from its folder.

Row ids are indices into the whole data set; a split keeps them. See :mod:`speculators.data.row_files` for the files.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from speculators.data import row_files
from speculators.data.manifest import SCHEMA, AnswerRecord, DataManifest, SourceRecord
from speculators.data.row_batches import ORIGIN, Row, RowBatch, regrouped
from speculators.data.row_files import ShardWriter, StoredRows
from speculators.errors import DataError
from speculators.files import temporary_beside, writing
from speculators.progress import bar

__all__ = ["AnswerRecord", "DataManifest", "Origin", "Row", "RowBatch", "RowDataset", "SourceRecord", "write_rows"]

#: Rows that :meth:`RowDataset.save` takes at a time.
SAVED_TOGETHER = 256

#: Tokens from which on a pass over all rows takes seconds and shows a bar.
LONG_PASS = 1 << 26


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a row comes from; None for what its data set does not say."""

    conversation: int | None
    source: int | None  #: place in the manifest's sources
    record: int | None  #: place of the record in its source
    turn: int | None  #: index of the only supervised message; -1 for all of them


class RowDataset(Sequence[Row]):
    """Rows as parts that are flat arrays, so that a row is a view and lengths are cheap.

    A loaded data set is mapped: its tokens stay on the disk until a row is asked for, whatever its size, and it can be handed
    to another process for the cost of its path. Make one by :meth:`from_rows`, :meth:`load` or :func:`write_rows`.

    :param path: the folder that it was read from; None for rows in memory.
    """

    def __init__(self, parts: Sequence[StoredRows], manifest: DataManifest, path: Path | None = None) -> None:
        self._parts = list(parts)
        self._starts = [0, *np.cumsum([len(part) for part in self._parts], dtype=np.int64).tolist()]
        self.manifest = manifest
        self.path = path

    @classmethod
    def from_rows(
        cls,
        rows: Iterable[Row],
        manifest: DataManifest | None = None,
        conversations: Sequence[int] | np.ndarray | None = None,
    ) -> RowDataset:
        """A data set of ``rows`` in this order, without going through a disk; row ids become 0, 1, ...

        :param conversations: which conversation each row is of; without it every row is split off as one of its own.
        """
        batch = RowBatch.of(list(rows), conversations)
        offsets = np.concatenate([[0], np.cumsum(batch.lengths)]).astype(np.int64)
        part = StoredRows(batch.input_ids, batch.loss_mask, offsets, batch.origin())
        dataset = cls([part], (manifest or DataManifest()).model_copy())
        dataset.manifest.fingerprint = dataset._hash()
        return dataset

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> RowDataset:
        """Map a data set from its folder.

        Nothing but row boundaries is read of a data set of ours; one that was written by others is read through once, to
        check its masks and for its fingerprint.

        :raises DataError: when the folder holds no readable data set, or columns that do not fit together.
        """
        folder = Path(path)
        parts, manifest, named = row_files.open_rows(folder)
        dataset = cls(parts, manifest, folder)
        if not named:
            dataset._check_masks()
            actual = dataset._hash()
            if manifest.fingerprint not in ("", actual):
                raise DataError(
                    f"rows and manifest in {folder} do not belong together; run prepare-data again with --overwrite"
                )
            manifest.fingerprint = actual
        return dataset

    @staticmethod
    def save(
        path: str | os.PathLike[str],
        rows: Iterable[Row],
        manifest: DataManifest,
        *,
        overwrite: bool = False,
        conversations: Iterable[int] | None = None,
    ) -> RowDataset:
        """Write single rows to the folder ``path``, as :func:`write_rows` does.

        :param conversations: which conversation each row is of.
        :raises DataError: as :func:`write_rows`.
        """

        def batches() -> Iterator[RowBatch]:
            each, of = iter(rows), None if conversations is None else iter(conversations)
            while some := list(islice(each, SAVED_TOGETHER)):
                yield RowBatch.of(some, None if of is None else list(islice(of, len(some))))

        return write_rows(path, batches(), manifest, overwrite=overwrite)

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self.row(row_id) for row_id in range(*index.indices(len(self)))]
        return self.row(index)

    def row(self, row_id: int) -> Row:
        """Row ``row_id``; its ids are a view.

        :raises IndexError: outside 0 .. len - 1.
        """
        part, place = self._place(row_id)
        return Row(int(row_id), *part.tokens(place, place + 1))

    def origin(self, row_id: int) -> Origin:
        """Where row ``row_id`` comes from, as far as the data set says.

        :raises IndexError: outside 0 .. len - 1.
        """
        part, place = self._place(row_id)
        return Origin(**{name: int(part.origin[name][place]) if name in part.origin else None for name in ORIGIN})

    def _place(self, row_id: int) -> tuple[StoredRows, int]:
        if not 0 <= row_id < len(self):
            raise IndexError(f"row {row_id} of a data set of {len(self)} rows")
        part = bisect_right(self._starts, row_id) - 1
        return self._parts[part], int(row_id) - self._starts[part]

    def batches(self, first: int = 0, stop: int | None = None) -> Iterator[RowBatch]:
        """Rows ``first`` to before ``stop`` (all of them) in order, as flat arrays of some rows at a time.

        The way to go over a whole data set: arrays instead of rows, and no more than one part of it in memory.
        """
        stop = len(self) if stop is None else min(stop, len(self))
        for start, part in zip(self._starts, self._parts):
            low, high = max(first - start, 0), min(stop - start, len(part))
            if low < high:
                origin = {name: column[low:high] for name, column in part.origin.items()}
                yield RowBatch(*part.tokens(low, high), np.diff(part.offsets[low : high + 1]).astype(np.int64), **origin)

    @cached_property
    def lengths(self) -> np.ndarray:
        """Tokens of every row, int64 ``[rows]``."""
        return np.concatenate([np.zeros(0, np.int64), *(np.diff(part.offsets) for part in self._parts)]).astype(np.int64)

    @cached_property
    def conversations(self) -> np.ndarray | None:
        """Which conversation every row is of, int64 ``[rows]``; None when the data set does not say."""
        return self._column("conversation")

    @cached_property
    def sources(self) -> np.ndarray | None:
        """Place in the manifest's sources that every row is from, int32 ``[rows]``; None when the data set does not say."""
        return self._column("source")

    def _column(self, name: str) -> np.ndarray | None:
        if not all(name in part.origin for part in self._parts):
            return None
        return np.concatenate([np.zeros(0, ORIGIN[name]), *(part.origin[name] for part in self._parts)])

    @property
    def fingerprint(self) -> str:
        """Hash of all ids, masks and row boundaries."""
        return self.manifest.fingerprint

    @cached_property
    def supervised_tokens(self) -> int:
        return sum(int(np.count_nonzero(batch.loss_mask)) for batch in self.batches())

    def check_vocabulary(self, vocab_size: int) -> None:
        """:raises DataError: when an id lies outside a vocabulary of ``vocab_size``."""
        for start, part in zip(self._starts, self._parts):
            ids, _ = part.tokens(0, len(part))
            if len(ids) and (ids.min() < 0 or ids.max() >= vocab_size):
                place = int(np.argmax((ids < 0) | (ids >= vocab_size)))
                row = start + int(np.searchsorted(part.offsets, place, side="right")) - 1
                raise DataError(
                    f"row {row} has token id {ids[place]}, but the verifier's vocabulary has {vocab_size} ids; "
                    "render the data with this verifier's tokenizer"
                )

    def _hash(self) -> str:
        """The fingerprint: of all ids, then all masks, then all row boundaries, as if each were one array."""
        digest = hashlib.sha256()
        for part in self._over_parts("Hashing token ids"):
            digest.update(np.ascontiguousarray(part.tokens(0, len(part))[0], dtype="<i8").data)
        for part in self._over_parts("Hashing masks"):
            digest.update(np.ascontiguousarray(part.tokens(0, len(part))[1], dtype="u1").data)
        digest.update(np.concatenate([[0], np.cumsum(self.lengths)]).astype("<i8").data)
        return digest.hexdigest()[:16]

    def _check_masks(self) -> None:
        for part in self._over_parts("Checking masks"):
            if part.strange_mask():
                raise DataError(f"loss_mask in {self.path} has values other than 0 and 1; make the data set again")

    def _over_parts(self, label: str) -> Iterator[StoredRows]:
        """All parts in order, with a bar when that takes more than a moment."""
        shown = int(self.lengths.sum()) >= LONG_PASS
        with bar(label, len(self._parts), shown=shown, passing=True) as done:
            for part in self._parts:
                yield part
                done.advance()

    def __reduce__(self) -> tuple[Any, ...]:
        if self.path is None:
            return RowDataset, (self._parts, self.manifest)
        return _load_again, (self.path.resolve(), self.fingerprint)


def _load_again(path: Path, fingerprint: str) -> RowDataset:
    """In another process, the data set that was handed over.

    :raises DataError: when the folder holds other rows by now.
    """
    dataset = RowDataset.load(path)
    if dataset.fingerprint != fingerprint:
        raise DataError(f"the data set in {path} was replaced while it was in use; run again")
    return dataset


def write_rows(
    folder: str | os.PathLike[str],
    batches: Iterable[RowBatch],
    manifest: DataManifest | Callable[[], DataManifest],
    *,
    overwrite: bool = False,
) -> RowDataset:
    """Write rows to a folder as they come, and return them as a data set mapped from it.

    However many there are, no more than a batch is held in memory. They are written under another name first: a reader
    sees the old data set or the new one, and other files in the folder are left alone.

    :param batches: the rows in order; how they are cut into batches leaves no trace.
    :param manifest: or a function to ask for it once all rows are written, for counts that are known only then.
    :raises DataError: without rows, when ``folder`` holds a data set and ``overwrite`` is off, or on a full disk; what the
        folder held is then still there.
    """
    folder = Path(folder)
    if row_files.holds_rows(folder) and not overwrite:
        raise DataError(f"{folder} already holds a data set; choose another folder or pass --overwrite")
    # Within a folder that is there: it may be a link or a mount, and what stands beside it on another disk.
    temporary = temporary_beside(folder / "rows" if folder.is_dir() else folder)
    with writing(folder):
        shutil.rmtree(temporary, ignore_errors=True)  # of a killed process that had this one's number
        temporary.mkdir(parents=True)
    writer = ShardWriter(temporary)
    try:
        for batch in regrouped(batches):
            with writing(folder):
                writer.write(batch)
        if not writer.names:
            raise DataError(f"there are no rows to write to {folder}; check the input and the length limits")
        filled = (manifest() if callable(manifest) else manifest).model_copy(update={"schema_version": SCHEMA})
        with writing(folder):
            writer.finish()
            parts, _, _ = row_files.open_rows(temporary)
            filled.fingerprint = RowDataset(parts, filled)._hash()
            row_files.name_by(temporary, writer.names, filled)
            row_files.install(temporary, folder, filled.fingerprint)
    finally:
        writer.abandon()
        shutil.rmtree(temporary, ignore_errors=True)
    return RowDataset.load(folder)
