"""A data set's hidden states captured beforehand, into a store that a training reads."""

from __future__ import annotations

import time
import warnings
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Protocol

import torch

from speculators.data import CutRows, Row, RowDataset
from speculators.errors import ConfigError, DataError, SpeculatorsError
from speculators.progress import Bar, bar
from speculators.verifiers.source import HiddenStates, HiddenStateSource, NextTokens
from speculators.verifiers.state_dtypes import StateDtype
from speculators.verifiers.store import DamagedShardError, StatesStore, StoreRecord, StoreWriter
from speculators.verifiers.store.probes import (
    PROBE_COUNT,
    PROBE_ROWS,
    PROBE_TOKENS,
    Probe,
    probe_positions,
    read_probes,
    write_probes,
)
from speculators.verifiers.store.records import OnFull, hash_ids
from speculators.verifiers.store.source import canonical_groups, repair_shard
from speculators.verifiers.store.writer import SHARD_BYTES

__all__ = ["FillReport", "FillSettings", "fill_store"]

#: Dtypes that are stored as something smaller than what reading them gives.
_PACKED = ("float16", "fp8")


class CapturedSource(HiddenStateSource, Protocol):
    """What filling needs of a source."""

    @property
    def concurrency(self) -> int: ...

    def next_tokens(self, row: Row, positions: Sequence[int], count: int) -> NextTokens: ...


@dataclass(frozen=True, slots=True)
class FillSettings:
    """How a store is filled.

    :param dtype: of the stored states; None: the source's own.
    :param seq_length: tokens of a row that are kept.
    :param token_budget: tokens that go through the verifier together, padding included; a longer row goes alone.
    :param max_samples: only the first rows of the data set.
    :param max_bytes: most bytes of all shards; None: no limit.
    :param world_size: processes that share the work, of which this is number ``rank``.
    :param concurrency: most passes that are asked of the source at once.
    :param fail_on_error: end at the first pass that fails, instead of going on with the next.
    :param max_consecutive_errors: end after so many failed passes in a row.
    :param validate_outputs: compare every shard with its checksums, those of earlier runs first and each new one once written.
    :param shard_bytes: from which on a shard is written.
    """

    dtype: StateDtype | None = None
    seq_length: int = 8192
    token_budget: int = 4096
    max_samples: int | None = None
    max_bytes: int | None = None
    on_full: OnFull = "stop"
    world_size: int = 1
    rank: int = 0
    concurrency: int = 32
    fail_on_error: bool = False
    max_consecutive_errors: int = 32
    validate_outputs: bool = False
    shard_bytes: int = SHARD_BYTES


@dataclass(slots=True)
class FillReport:
    """What one run of one rank did."""

    rows: int = 0  #: of this rank's share
    present: int = 0  #: that were there before
    written: int = 0
    tokens: int = 0  #: written
    failed: int = 0  #: rows that the source did not give
    repaired: int = 0  #: shards that were damaged and made again
    evicted: int = 0  #: rows of this rank's share that made room for later ones
    nbytes: int = 0  #: of the whole store
    seconds: float = 0.0

    def lines(self) -> list[str]:
        """For a person."""
        rate = f", {self.tokens / self.seconds:,.0f} tokens/s" if self.tokens and self.seconds else ""
        lines = [
            f"{self.rows:,} rows: {self.present:,} were there, {self.written:,} were captured ({self.tokens:,} tokens{rate})",
            f"the store takes {_size(self.nbytes)}",
        ]
        if self.repaired:
            lines.append(f"{self.repaired} damaged shards were made again")
        if self.evicted:
            lines.append(f"{self.evicted:,} rows were evicted again to stay within --max-gib")
        if self.failed:
            lines.append(f"{self.failed:,} rows are missing because the source failed; run the same command again to try them")
        return lines


def fill_store(
    path: Path, dataset: RowDataset, source: CapturedSource, settings: FillSettings, *, shown: bool = True
) -> FillReport:
    """Capture the states of a data set's rows that a store lacks.

    May be stopped at any moment and run again: whole shards are kept, the rest is captured again. Several ranks may run at
    once on one folder.

    :param shown: whether to show a bar.
    :raises ConfigError: when the folder holds other states, or a rank is not one of the world's.
    :raises DataError: a full disk or quota (what is written stays usable), or a source that keeps failing.
    """
    if not 0 <= settings.rank < settings.world_size:
        raise ConfigError(f"--rank is {settings.rank} of --world-size {settings.world_size}; ranks count from 0")
    store = StatesStore.create(path, _record(dataset, source, settings))
    try:
        with StoreWriter(store, f"{settings.rank:05d}", settings.shard_bytes, verify=settings.validate_outputs) as writer:
            return _Filling(store, writer, dataset, source, settings).run(shown)
    finally:
        store.close()


def _record(dataset: RowDataset, source: CapturedSource, settings: FillSettings) -> StoreRecord:
    found = source.description
    dtype = settings.dtype or found.dtype
    return StoreRecord(
        states=replace(found, dtype=found.dtype, precision=dtype) if dtype in _PACKED else replace(found, dtype=dtype),
        dtype=dtype,  # type: ignore[arg-type]  # checked by the record
        captured_dtype=found.dtype,
        dataset=dataset.fingerprint,
        seq_length=settings.seq_length,
        token_budget=settings.token_budget,
        max_bytes=settings.max_bytes,
        on_full=settings.on_full,
    )


class _Filling:
    """One run of one rank."""

    def __init__(
        self, store: StatesStore, writer: StoreWriter, dataset: RowDataset, source: CapturedSource, settings: FillSettings
    ) -> None:
        self.store = store
        self.writer = writer
        self.rows = CutRows(dataset, settings.seq_length)
        self.source = source
        self.settings = settings
        self.report = FillReport()
        self._failures = 0  #: passes in a row

    def run(self, shown: bool) -> FillReport:
        started = time.monotonic()
        self._mend(shown)
        if self.settings.rank == 0:
            self._probe()
        share = self._share()
        requests = [missing for group in share if (missing := self._missing(group))]
        lengths = self.rows.lengths
        total = sum(int(lengths[row_id]) for group in share for row_id in group)
        left = sum(int(lengths[row_id]) for group in requests for row_id in group)
        self.report.rows = sum(map(len, share))
        self.report.present = self.report.rows - sum(map(len, requests))
        if requests:
            with bar("Capturing hidden states", total, shown=shown) as done:
                self._capture(requests, done, total - left)
        self.store.refresh()
        stored = sum(row_id in self.store.index.rows for group in share for row_id in group)
        self.report.evicted = max(0, self.report.present + self.report.written - stored)
        self.report.nbytes = self.store.nbytes
        self.report.seconds = time.monotonic() - started
        return self.report

    def _share(self) -> list[list[int]]:
        """This rank's groups, cut to the rows that are wanted; every rank gets groups of all lengths."""
        most = len(self.rows) if self.settings.max_samples is None else self.settings.max_samples
        groups = canonical_groups(self.rows.lengths, self.store.record)[self.settings.rank :: self.settings.world_size]
        cut = ([row_id for row_id in group if row_id < most] for group in groups)
        return [group for group in cut if group]

    def _missing(self, group: Sequence[int]) -> list[int]:
        rows, lengths = self.store.index.rows, self.rows.lengths
        return [row_id for row_id in group if row_id not in rows or rows[row_id].row.tokens < lengths[row_id]]

    def _capture(self, requests: Sequence[Sequence[int]], done: Bar, finished: int) -> None:
        rows = ([self.rows[row_id] for row_id in group] for group in requests)
        workers = max(1, min(self.settings.concurrency, self.source.concurrency))
        for asked, answer in _answers(self.source, rows, workers):
            if isinstance(answer, SpeculatorsError):
                self._failed(asked, answer)
            else:
                self._check(asked, answer)
                self._keep(answer)
                self._left_out(asked, answer)
            finished += sum(map(len, asked))
            done.update(finished)
        self.writer.flush()

    def _keep(self, states: Sequence[HiddenStates]) -> None:
        self.writer.add(states)
        self.report.written += len(states)
        self.report.tokens += sum(len(one.token_ids) for one in states)

    def _check(self, asked: Sequence[Row], answer: Sequence[HiddenStates]) -> None:
        """:raises DataError: when the source ran other tokens than it was asked to."""
        rows = {row.row_id: row for row in asked}
        for states in answer:
            row = rows.get(states.row_id)
            if row is None or hash_ids(states.token_ids.numpy()) != hash_ids(row.input_ids):
                raise DataError(f"the source gave states of other tokens than those of row {states.row_id}; check its verifier")

    def _left_out(self, asked: Sequence[Row], answer: Sequence[HiddenStates]) -> None:
        """Count the rows that the source left out of its answer; it has said why.

        :raises DataError: when that is one too many.
        """
        given = {states.row_id for states in answer}
        lost = [row.row_id for row in asked if row.row_id not in given]
        self._failures = 0
        self.report.failed += len(lost)
        if lost and self.settings.fail_on_error:
            raise DataError(f"the source gave no states of row {lost[0]}; mend it and run the same command again")

    def _failed(self, asked: Sequence[Row], error: SpeculatorsError) -> None:
        """Count a failed pass.

        :raises SpeculatorsError: when that is one too many.
        """
        self._failures += 1
        self.report.failed += len(asked)
        if self.settings.fail_on_error or isinstance(error, ConfigError):
            raise error
        if self._failures >= self.settings.max_consecutive_errors:
            raise DataError(
                f"the source failed {self._failures} times in a row, the last time with: {error}. What was captured is kept; "
                "mend the source and run the same command again"
            ) from error
        warnings.warn(f"{len(asked)} rows from row {asked[0].row_id} on were not captured: {error}", stacklevel=4)

    def _mend(self, shown: bool) -> None:
        """Make this rank's share of the damaged shards again."""
        known = sorted(self.store.index.shards)
        mine = known[self.settings.rank :: self.settings.world_size]
        with bar("Checking shards", len(mine), shown=shown and self.settings.validate_outputs, passing=True) as done:
            for name in mine:
                try:
                    self.store.check_shard(name, whole=self.settings.validate_outputs)
                except DamagedShardError as error:
                    warnings.warn(f"{error}; its states are made again", stacklevel=4)
                    repair_shard(self.store, name, lambda: self.source, lambda ids: [self.rows[row_id] for row_id in ids])
                    self.report.repaired += 1
                done.advance()

    def _probe(self) -> None:
        """Record the verifier's own predictions for a few rows, from which a training can tell wrong states."""
        if read_probes(self.store.path):
            return
        lengths = self.rows.lengths
        long_enough = (row_id for row_id in range(len(self.rows)) if lengths[row_id] > 1)
        probes = []
        for row_id in islice(long_enough, PROBE_ROWS):
            whole = self.rows[row_id]
            row = Row(row_id, whole.input_ids[:PROBE_TOKENS], whole.loss_mask[:PROBE_TOKENS])
            found = self.source.next_tokens(row, probe_positions(len(row)), PROBE_COUNT)
            probes.append(Probe(row_id, torch.tensor(row.input_ids), found))
        write_probes(self.store.path, probes)


def _size(nbytes: float) -> str:
    for unit in ("bytes", "KiB", "MiB"):
        if nbytes < 1024:
            return f"{nbytes:.4g} {unit}"
        nbytes /= 1024
    return f"{nbytes:.4g} GiB"


def _answers(
    source: CapturedSource, requests: Iterable[list[Row]], workers: int
) -> Iterator[tuple[list[Row], list[HiddenStates] | SpeculatorsError]]:
    """Requests with their states, or with what went wrong, in order; ``workers`` of them under way at once."""
    waiting: deque[tuple[list[Row], Future[list[HiddenStates]]]] = deque()
    pool = ThreadPoolExecutor(workers, thread_name_prefix="capture")
    try:
        for rows in requests:
            waiting.append((rows, pool.submit(source.fetch, rows)))
            if len(waiting) > workers:
                yield _answer(*waiting.popleft())
        while waiting:
            yield _answer(*waiting.popleft())
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _answer(rows: list[Row], future: Future[list[HiddenStates]]) -> tuple[list[Row], list[HiddenStates] | SpeculatorsError]:
    try:
        return rows, future.result()
    except SpeculatorsError as error:
        return rows, error
