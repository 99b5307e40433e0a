"""Passes over the sources until enough is rendered: one for everything, a few for the first N rows of the seed's order."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from speculators.data.assembly import Assembly, BlockTable
from speculators.data.readers import read_blocks
from speculators.data.render_blocks import LARGEST_KEY, BlockDone, BlockTask, Job, RenderRules, is_done
from speculators.data.sources import Source, source_files
from speculators.data.workers import WorkerPool
from speculators.files import read_json, write_text_atomically
from speculators.progress import bar

if TYPE_CHECKING:
    from speculators.data.rendered import Renderer

__all__ = ["Rounds", "worker_count"]

#: Bytes of sources that one process renders in less time than it takes another to start.
SMALL = 4 << 20

#: Most bytes of a block; a worker holds a few of them, parsed and rendered.
BLOCK_BYTES = 1 << 20

#: Blocks are smaller, down to this many bytes, where there would be too few to share out evenly.
LEAST_BLOCK_BYTES = 1 << 17
MANY_BLOCKS = 64

#: More records than the yield so far asks for, lest a round fall short by a few rows and another be needed.
MARGIN = 1.1


def worker_count(asked: int | None, source_bytes: int) -> int:
    """Processes to render with, 0 for none but this one.

    :param asked: None for one a core, unless the sources are so small that processes are not worth their start.
    """
    if asked is not None:
        return asked
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return 0 if source_bytes < SMALL else max(1, min(cores, 128))


class Rounds:
    """Renders blocks of the sources into a folder, or finds them there.

    :param make_renderer: picklable; called once in every process that renders.
    :param most: rows wanted; None for all there are.
    :param workers: processes; 0 for none but this one.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        folder: Path,
        make_renderer: Callable[[], Renderer],
        rules: RenderRules,
        *,
        most: int | None = None,
        keep_duplicates: bool = False,
        workers: int | None = None,
        shown: bool = False,
    ) -> None:
        self.sources = sources
        self.folder = folder
        self.rules = rules
        self.most = most
        self.keep_duplicates = keep_duplicates
        self.shown = shown
        self._bytes = sum(source_bytes(source) for source in sources)
        # Of the sources alone: a run that goes on behind a kill must cut the same blocks, with however many workers.
        self.block_bytes = min(BLOCK_BYTES, max(LEAST_BLOCK_BYTES, self._bytes // MANY_BLOCKS))
        self._pool: WorkerPool[Job, BlockDone]
        self._pool = WorkerPool(BlockTask(make_renderer, rules, folder), worker_count(workers, self._bytes), _describe)

    def enough(self) -> Assembly:
        """All rows, or the first ``most`` of them: those that rendering everything and cutting would give.

        For the first rows, one pass reads all records and learns their keys without rendering any; each further one
        renders the records of the next stretch of keys, as many as the stretches before let expect to be enough.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        with self._pool:
            return self._enough()

    def _enough(self) -> Assembly:
        if self.most is None:
            blocks = self._round(0, 0, LARGEST_KEY)
            return self._assembled(1, blocks)
        blocks = self._round(0, 0, -1)
        rounds, low = 1, 0
        while True:
            assembly = self._assembled(rounds, blocks)
            keys = np.sort(assembly.table.keys)
            done = int(np.searchsorted(keys, low))
            missing = self.most - len(assembly.order)
            if missing <= 0 or done == len(keys):
                return assembly
            rate = len(assembly.order) / done if done else 1.0  # rows a record
            wanted = math.ceil(MARGIN * missing / rate) if rate else len(keys)
            stop = done + max(wanted, done)  # at least as many again, so that the rounds are few
            high = int(keys[stop - 1]) if stop < len(keys) else LARGEST_KEY
            self._round(rounds, low, high, assembly.table)
            rounds, low = rounds + 1, high + 1

    def _assembled(self, rounds: int, blocks: int) -> Assembly:
        table = BlockTable.read(self.folder, rounds, blocks)
        return Assembly(table, keep_duplicates=self.keep_duplicates, most=self.most)

    def _round(self, number: int, low: int, high: int, known: BlockTable | None = None) -> int:
        """One pass: render the records with keys from ``low`` to ``high``; returns the number of blocks.

        :param known: the records, where a pass before has learnt their keys; blocks without one to render are skipped.
        """
        marker, facts = self.folder / f"round-{number}.json", {"low": low, "high": high}
        blocks = _finished_round(marker, facts)
        if blocks is not None:
            return blocks
        label = "reading" if high < low else "rendering"
        with bar(label, max(self._bytes, 1), shown=self.shown, share=True) as progress:
            feed = _Feed(self, number, low, high, known)
            rate = _Rate()
            for done in self._pool.map(feed.jobs()):
                feed.done += feed.sizes.pop(done.number)
                progress.update(min(feed.done, self._bytes), rate.note(done.rows, done.tokens))
            progress.update(max(self._bytes, 1), rate.note(0, 0))
        write_text_atomically(marker, json.dumps(facts | {"blocks": feed.blocks}))
        return feed.blocks


class _Feed:
    """The jobs of one pass, and how far it is in bytes of the sources."""

    def __init__(self, rounds: Rounds, number: int, low: int, high: int, known: BlockTable | None) -> None:
        self.blocks = 0
        self.done = 0
        self.sizes: dict[int, int] = {}  # bytes of the blocks that are being worked on
        self._rounds = rounds
        self._number = number
        self._band = (low, high)
        self._wanted = None if known is None else _blocks_with(known, low, high)
        self._read = 0

    def jobs(self) -> Iterator[Job]:
        """Blocks that have something to render and were not finished by an earlier run."""
        rounds = self._rounds
        before = np.cumsum([0, *(source_bytes(source) for source in rounds.sources)]).tolist()
        for number, block in enumerate(read_blocks(rounds.sources, block_bytes=rounds.block_bytes)):
            self.blocks = number + 1
            read = max(self._read, before[block.source] + block.consumed)
            size, self._read = read - self._read, read
            job = Job(number, self._number, *self._band, block)
            if (self._wanted is not None and not self._wanted[number]) or is_done(rounds.folder, job):
                self.done += size
                continue
            self.sizes[number] = size
            yield job


def _describe(job: Job) -> str:
    return f"records {job.block.first} to {job.block.first + len(job.block) - 1} of {job.block.name}"


class _Rate:
    """Rows and tokens so far, and how fast they come."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._rows = self._tokens = 0

    def note(self, rows: int, tokens: int) -> str:
        self._rows += rows
        self._tokens += tokens
        speed = self._tokens / max(time.monotonic() - self._began, 1e-3)
        return f"{self._rows} rows, {speed:,.0f} tokens/s"


def _blocks_with(table: BlockTable, low: int, high: int) -> np.ndarray:
    """Whether a block has a record with a key from ``low`` to ``high``, bool ``[blocks]``."""
    before = np.concatenate([[0], np.cumsum((table.keys >= low) & (table.keys <= high))])
    return np.asarray(np.diff(before[table.block_start]) > 0)


def source_bytes(source: Source) -> int:
    """Bytes of a source's files; 0 where they lie on a hub."""
    return sum(file.stat().st_size for file in source_files(source) if file.exists())


def _finished_round(marker: Path, facts: dict[str, int]) -> int | None:
    """Number of blocks of a pass that an earlier run finished; None when none did."""
    try:
        content = read_json(marker)
        return int(content["blocks"]) if content == facts | {"blocks": content["blocks"]} else None
    except (OSError, ValueError, LookupError, TypeError):
        return None
