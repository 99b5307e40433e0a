"""Training from stored hidden states, and making those again that are missing or damaged."""

from __future__ import annotations

import os
import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Literal

import numpy as np

from speculators.data.rows import Row
from speculators.errors import ConfigError, DataError, SpeculatorsError
from speculators.files import locked_folder, writing
from speculators.verifiers.grouping import length_groups
from speculators.verifiers.source import HiddenStates, HiddenStateSource, NextTokens, StatesDescription
from speculators.verifiers.store.index import append_line, index_path, writer_of
from speculators.verifiers.store.probes import read_probes
from speculators.verifiers.store.records import ShardRecord, StoredRow, StoreRecord, hash_ids
from speculators.verifiers.store.shards import DamagedShardError, EncodedRow, encode_row, shard_record, write_shard
from speculators.verifiers.store.store import StatesStore
from speculators.verifiers.store.writer import StoreWriter, free_writer

__all__ = ["OnMissing", "StoreSource", "canonical_groups", "repair_shard"]

OnMissing = Literal["generate", "skip", "warn", "raise"]

#: Bytes of states kept of rows that were made again and are not written to the store.
RECENT_BYTES = 256 << 20


def canonical_groups(lengths: Sequence[int] | np.ndarray, record: StoreRecord) -> list[list[int]]:
    """Row ids that are asked of a source together: those that a cached source asks for, so that the bits are the same.

    :param lengths: tokens of every row of the data set.
    """
    return length_groups([min(int(length), record.seq_length) for length in lengths], record.token_budget)


class StoreSource:
    """Reads states from a store, and makes those again that it lacks.

    :param path: of the store.
    :param dataset: the rows that are trained on, indexed by row id, whole; needed to make states again.
    :param fallback: opens the source that makes missing or damaged states; called when the first one is needed.
    :param on_missing: what becomes of a row that the store lacks or holds damaged: it is made again, left out without or with a
        warning, or an error.
    :param keep: whether rows that were missing are written to the store. Damaged ones always are.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        dataset: Sequence[Row] | None = None,
        fallback: Callable[[], HiddenStateSource] | None = None,
        on_missing: OnMissing = "generate",
        *,
        keep: bool = True,
    ) -> None:
        self.store = StatesStore(Path(path))
        self.concurrency = min(4, os.cpu_count() or 1)
        self._dataset = dataset
        self._open_fallback = fallback
        self._fallback: HiddenStateSource | None = None
        self._on_missing = on_missing
        self._keep = keep
        self._writer: StoreWriter | None = None
        self._recent: OrderedDict[int, HiddenStates] = OrderedDict()
        self._recent_bytes = 0
        self._making = threading.RLock()
        self._probes = {probe.row_id: probe for probe in read_probes(self.store.path)}
        found = getattr(getattr(dataset, "manifest", None), "fingerprint", None)
        if found and found != self.store.record.dataset:
            warnings.warn(
                f"the store in {path} was filled from another data set (rows {self.store.record.dataset}, not {found}); rows "
                "whose tokens are not the same count as missing",
                stacklevel=2,
            )

    @property
    def description(self) -> StatesDescription:
        return self.store.record.states

    @property
    def keeps_states(self) -> bool:
        """Whether a row may be asked for again at the price of reading it."""
        return self._keep or self._on_missing != "generate"

    def fetch(self, rows: Sequence[Row]) -> list[HiddenStates]:
        """See :meth:`speculators.verifiers.source.HiddenStateSource.fetch`. A row may be a prefix of the stored one.

        :raises DataError: for a row that is missing or damaged and cannot, or is not to, be made again.
        """
        answers = (self._row(row) for row in rows)
        return [answer for answer in answers if answer is not None]

    def _row(self, row: Row) -> HiddenStates | None:
        try:
            found = self.store.read(row)
            problem = f"the store in {self.store.path} has no states of row {row.row_id}"
        except DamagedShardError as error:
            found, problem = None, str(error)
            if self._on_missing == "generate":
                if self._open_fallback is None:
                    raise DataError(f"{problem}, and nothing is there to make it again; name a --store-source") from error
                self._repair(error)
                found, problem = self.store.read(row), f"{problem}, and was made again without row {row.row_id}"
        if found is not None:
            return found
        if self._on_missing == "generate":
            return self._make(row, problem)
        if self._on_missing == "raise":
            raise DataError(f"{problem}; run generate-offline-data again, or pass --on-missing generate")
        if self._on_missing == "warn":
            warnings.warn(f"{problem}; it is left out", stacklevel=3)
        return None

    # -- making states -------------------------------------------------------------------------------------------------------

    def _source(self) -> HiddenStateSource:
        """The fallback, opened.

        :raises ConfigError: when its states are not those of the store.
        """
        if self._open_fallback is None:
            raise DataError(f"nothing can make states that the store in {self.store.path} lacks; name a --store-source")
        if self._fallback is None:
            source = self._open_fallback()
            check_source(self.store.record, source.description, self.store.path)
            self._fallback = source
        return self._fallback

    def _rows(self, row_ids: Sequence[int]) -> list[Row]:
        """Rows of the data set, as long as the store keeps them."""
        if self._dataset is None:
            raise DataError(f"the store in {self.store.path} lacks states, and there is no data set to make them from")
        return [_cut(self._dataset[row_id], self.store.record.seq_length) for row_id in row_ids]

    def _repair(self, damage: DamagedShardError) -> None:
        with self._making:
            warnings.warn(f"{damage}; its states are made again", stacklevel=4)
            repair_shard(self.store, damage.name, self._source, self._rows)

    def _make(self, row: Row, problem: str) -> HiddenStates:
        """States of a row that the store lacks, made together with its group."""
        limit = self.store.record.seq_length
        if len(row) > limit:
            raise DataError(
                f"row {row.row_id} has {len(row)} tokens and the store in {self.store.path} keeps {limit} of a row; fill "
                "another store with a larger --seq-length"
            )
        with self._making:
            made = self._waiting(row) or self.store.read(row)  # another thread may have made it meanwhile
            if made is not None:
                return made
            if self._open_fallback is None:
                raise DataError(f"{problem}, and nothing is there to make them; name a --store-source")
            group = self._groups[self._group_of[row.row_id]] if row.row_id in self._group_of else []
            rows = self._rows(group)
            mine = next((one for one in rows if one.row_id == row.row_id), None)
            if mine is None or not np.array_equal(mine.input_ids[: len(row)], row.input_ids):
                raise DataError(f"row {row.row_id} is not the one of the data set; pass its own rows")
            states = self._source().fetch(rows)
            # The whole group goes through the verifier, for the sake of its bits, but rows that are stored stay as they are.
            lacking = {row.row_id} | {one.row_id for one in rows if self.store.lacks(one)}
            for one in self._store([one for one in states if one.row_id in lacking]):
                self._remember(one)
            made = self._waiting(row)
        if made is None:
            raise DataError(f"{problem}, and the source that makes them gave none")
        return made

    @cached_property
    def _groups(self) -> list[list[int]]:
        dataset = self._dataset if self._dataset is not None else []
        lengths = getattr(dataset, "lengths", None)
        return canonical_groups([len(row) for row in dataset] if lengths is None else lengths, self.store.record)

    @cached_property
    def _group_of(self) -> dict[int, int]:
        return {row_id: place for place, group in enumerate(self._groups) for row_id in group}

    def _store(self, states: Sequence[HiddenStates]) -> list[HiddenStates]:
        """Write made states to the store, if they are to be kept; the answer is what reading them gives, either way."""
        record = self.store.record
        if self._keep:
            try:
                if self._writer is None:
                    self._writer = free_writer(self.store, "made")
                return self._writer.add(states)
            except SpeculatorsError as error:
                self._keep = False
                warnings.warn(f"states that were missing are used, but no longer kept: {error}", stacklevel=5)
        return [encode_row(one, record).states for one in states]

    def _waiting(self, row: Row) -> HiddenStates | None:
        states = self._recent.get(row.row_id)
        if states is None and self._writer is not None:
            states = self._writer.pending(row.row_id)
        if states is None or not np.array_equal(states.token_ids[: len(row)].numpy(), row.input_ids):
            return None
        return states.first(len(row))

    def _remember(self, states: HiddenStates) -> None:
        """Keep the last made rows in memory: their neighbours of the same group are asked for sooner or later."""
        before = self._recent.pop(states.row_id, None)
        self._recent_bytes -= 0 if before is None else _nbytes(before)
        self._recent[states.row_id] = states
        self._recent_bytes += _nbytes(states)
        while self._recent_bytes > RECENT_BYTES and len(self._recent) > 1:
            self._recent_bytes -= _nbytes(self._recent.popitem(last=False)[1])

    # -- the verifier's own predictions --------------------------------------------------------------------------------------

    @property
    def probed_rows(self) -> tuple[int, ...]:
        """Rows whose next tokens are recorded."""
        return tuple(sorted(self._probes))

    def next_tokens(self, row: Row, positions: Sequence[int], count: int) -> NextTokens:
        """The verifier's predictions at those of the row's positions that were recorded when the store was filled, whichever
        ``positions`` are asked for; the answer says which.

        :raises DataError: when none were recorded for this row.
        """
        probe = self._probes.get(row.row_id)
        if probe is None or not probe.fits(row):
            known = ", ".join(map(str, self.probed_rows)) or "none"
            raise DataError(
                f"the store in {self.store.path} has no predictions of the verifier for row {row.row_id} (it has some for "
                f"rows: {known}); run generate-offline-data again"
            )
        return probe.within(len(row), count)

    def close(self) -> None:
        """Write what waits, and close the store and the source that made states."""
        with self._making:
            if self._writer is not None:
                try:
                    self._writer.flush()
                except DataError as error:
                    warnings.warn(f"the last states that were missing are not kept: {error}", stacklevel=2)
                self._writer.close()
                self._writer = None
            self._recent.clear()
            self._recent_bytes = 0
            if self._fallback is not None:
                self._fallback.close()
                self._fallback = None
            self.store.close()


def check_source(record: StoreRecord, found: StatesDescription, path: Path) -> None:
    """:raises ConfigError: when a source's states are not those that the store keeps."""
    wanted = record.states
    pairs = [
        ("layers", list(wanted.layer_ids), list(found.layer_ids)),
        ("final state", wanted.final_state, found.final_state),
        ("hidden size", wanted.hidden_size, found.hidden_size),
        ("dtype", record.captured_dtype, found.dtype),
        ("verifier", wanted.verifier_hash, found.verifier_hash),
    ]
    for what, stored, given in pairs:
        if stored != given:
            raise ConfigError(
                f"the store in {path} holds states of {what} {stored} and the source gives {given}; use the source that filled "
                "it, or fill another store"
            )


def repair_shard(
    store: StatesStore,
    name: str,
    source: Callable[[], HiddenStateSource],
    rows: Callable[[Sequence[int]], list[Row]],
) -> None:
    """Make a damaged shard again, from the same rows in the same passes; nothing is done if another process was faster.

    :param rows: of the data set, by row id, as long as the store keeps them.
    :raises DataError: when the data set has other rows by now, or the source fails; the damaged shard is then still there.
    """
    with locked_folder(store.path, "--hidden-states-path", name=".repair.lock", what="store", wait=True):
        store.reopen(name)
        try:
            store.check_shard(name)
            return
        except KeyError:
            return  # evicted meanwhile
        except DamagedShardError:
            pass
        old = store.index.shards[name]
        passes = [_again(group, source(), rows([row.row_id for row in group]), store) for group in old.passes]
        record: ShardRecord = shard_record(name, passes)
        write_shard(store.path / "shards" / name, record, passes)
        index = index_path(store.path, writer_of(name))
        if record != old:
            with writing(index):
                append_line(index, record.to_json())
        store.reopen(name)


def _again(group: Sequence[StoredRow], source: HiddenStateSource, rows: Sequence[Row], store: StatesStore) -> list[EncodedRow]:
    """The rows of one pass, made again."""
    cut = [_cut(row, stored.tokens) for row, stored in zip(rows, group)]
    for row, stored in zip(cut, group):
        if hash_ids(row.input_ids) != stored.ids_hash:
            raise DataError(
                f"row {row.row_id} of the data set has other tokens than the damaged one in the store {store.path}; fill "
                "another store from this data set"
            )
    return [encode_row(states, store.record) for states in source.fetch(cut)]


def _cut(row: Row, length: int) -> Row:
    return row if len(row) <= length else Row(row.row_id, row.input_ids[:length], row.loss_mask[:length])


def _nbytes(states: HiddenStates) -> int:
    return states.features.nbytes + states.final.nbytes + states.token_ids.nbytes
