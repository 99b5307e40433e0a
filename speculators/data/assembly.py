"""From the blocks that workers left to the data set: repeated records out, conversations in order, rows gathered as a stream.

In memory are a few numbers a record and a row; tokens are read from the blocks' files as they are written.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from speculators.data.accounting import CODES, KEPT, OUTCOMES, WAITING, WARNINGS, Account
from speculators.data.block_files import BlockAccount, read_account, read_reasons, read_tokens, unpack_tokens
from speculators.data.render_blocks import block_path
from speculators.data.row_batches import BATCH_TOKENS, RowBatch
from speculators.errors import DataError

__all__ = ["Assembly", "BlockTable"]

_KEPT = [CODES[key] for key in KEPT]

#: Columns of the records and of the rows, with their types.
_RECORD_COLUMNS = {"outcomes": np.uint8, "keys": np.int64, "left_out": np.int32}
_ROW_COLUMNS = {"row_turn": np.int32, "row_length": np.int32, "row_flags": np.uint8}


@dataclass(eq=False)
class BlockTable:
    """Every record (R) and row (N) of the blocks in a folder. A record's *place* counts all records in reading order."""

    files: list[Path]  #: by their number
    file_block: np.ndarray  #: int32 ``[files]``, the block that each is of; ascending
    block_start: np.ndarray  #: int64 ``[blocks + 1]``, place of the first record of every block
    block_source: np.ndarray  #: int32 ``[blocks]``
    block_first: np.ndarray  #: int64 ``[blocks]``, index of the first record in its source
    broken: dict[int, str]  #: source -> where it breaks off
    outcomes: np.ndarray  #: uint8 ``[R]``
    keys: np.ndarray  #: int64 ``[R]``
    digests: np.ndarray  #: uint64 ``[R, 2]``
    left_out: np.ndarray  #: int32 ``[R]``
    row_record: np.ndarray  #: int64 ``[N]``, place of the row's record
    row_turn: np.ndarray  #: int32 ``[N]``
    row_length: np.ndarray  #: int32 ``[N]``
    row_flags: np.ndarray  #: uint8 ``[N]``
    row_file: np.ndarray  #: int32 ``[N]``, number of the file that has its tokens
    row_start: np.ndarray  #: int64 ``[N]``, number of its first token there

    @classmethod
    def read(cls, folder: Path, rounds: int, blocks: int) -> BlockTable:
        """The blocks of all rounds; a record that waits in one round may have been rendered in a later one.

        :raises DataError: when a file of the first round is gone, or one is damaged.
        """
        files: list[Path] = []
        file_block: list[int] = []
        accounts: list[BlockAccount] = []  # as many as files
        merged: list[BlockAccount] = []  # as many as blocks
        offsets: list[int] = []
        place = 0
        for number in range(blocks):
            for round_ in range(rounds):
                path = block_path(folder, round_, number)
                if round_ and not path.with_name(path.name + ".npz").exists():
                    continue  # none of its records was to be rendered in this round
                account = read_account(path)
                files.append(path)
                file_block.append(number)
                accounts.append(account)
                offsets.append(place)
                if round_:
                    new = account.outcomes != WAITING
                    for column in ("outcomes", "left_out"):
                        getattr(merged[-1], column)[new] = getattr(account, column)[new]
                else:
                    merged.append(account)
            place += len(merged[-1].outcomes)
        rows = [len(account.row_length) for account in accounts]
        return cls(
            files=files,
            file_block=np.array(file_block, dtype=np.int32),
            block_start=np.cumsum([0, *(len(account.outcomes) for account in merged)], dtype=np.int64),
            block_source=np.array([account.source for account in merged], dtype=np.int32),
            block_first=np.array([account.first for account in merged], dtype=np.int64),
            broken={account.source: account.broken for account in merged if account.broken},
            digests=np.concatenate([np.zeros((0, 2), np.uint64), *(account.digests for account in merged)]),
            row_record=_column([account.row_record + offset for account, offset in zip(accounts, offsets)], np.int64),
            row_file=np.repeat(np.arange(len(files), dtype=np.int32), rows),
            row_start=_column([np.cumsum(account.row_length, dtype=np.int64) - account.row_length for account in accounts]),
            **{name: _column([getattr(account, name) for account in merged], kind) for name, kind in _RECORD_COLUMNS.items()},
            **{name: _column([getattr(account, name) for account in accounts], kind) for name, kind in _ROW_COLUMNS.items()},
        )

    def origin(self, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Sources (int32) and indices in them (int64) of records at ``places``."""
        block = np.searchsorted(self.block_start, places, side="right") - 1
        return self.block_source[block], self.block_first[block] + places - self.block_start[block]


def _column(parts: Sequence[np.ndarray], kind: Any = np.int64) -> np.ndarray:
    return np.concatenate([np.zeros(0, kind), *parts]).astype(kind, copy=False)


class Assembly:
    """Which rows the data set gets, in which order, and what became of every record.

    :param keep_duplicates: keep records whose content an earlier one has, too.
    :param most: rows of the data set; None for all. Records behind the one that gives the last row are not needed.
    """

    def __init__(self, table: BlockTable, *, keep_duplicates: bool = False, most: int | None = None) -> None:
        self.table = table
        self.outcomes = table.outcomes.copy()
        #: Places of records that repeat another, ascending, and of the first with the same content.
        self._repeats = self._repeated = np.zeros(0, dtype=np.int64)
        if not keep_duplicates:
            self._drop_duplicates()
        self.order = self._arranged(most)  #: numbers of the rows that the data set gets, in its order

    def _drop_duplicates(self) -> None:
        """Of the kept records with the same content the first in reading order stays."""
        digests = self.table.digests
        order = np.lexsort((digests[:, 1], digests[:, 0]))  # stable: equal ones stay in reading order
        ordered = digests[order]
        begins = np.ones(len(order), dtype=bool)
        begins[1:] = (ordered[1:] != ordered[:-1]).any(axis=1)
        first = np.empty(len(order), dtype=np.int64)
        first[order] = order[np.maximum.accumulate(np.where(begins, np.arange(len(order)), 0))]
        # Only records that were read have a digest; equal content has equal outcomes, so the first is kept if these are.
        repeats = np.isin(self.outcomes, _KEPT) & (first != np.arange(len(order)))
        self._repeats = np.flatnonzero(repeats)
        self._repeated = first[repeats]
        self.outcomes[repeats] = CODES["duplicate"]

    def _arranged(self, most: int | None) -> np.ndarray:
        """Rows of kept records by (key, record, turn), as many as wanted; marks the records that are not needed for them."""
        table = self.table
        rows = np.flatnonzero(np.isin(self.outcomes[table.row_record], _KEPT))
        record = table.row_record[rows]
        order = rows[np.lexsort((table.row_turn[rows], record, table.keys[record]))]
        if most is None or len(order) < most:
            return order
        last = int(table.row_record[order[most - 1]])
        key = table.keys[last]
        behind = (table.keys > key) | ((table.keys == key) & (np.arange(len(table.keys)) > last))
        self.outcomes[behind & (self.outcomes != CODES["unreadable"])] = CODES["not_needed"]
        return order[:most]

    @property
    def complete(self) -> bool:
        """Whether every record has its outcome: none still waits to be rendered."""
        return not (self.outcomes == WAITING).any()

    def account(self, sources: Sequence[str]) -> Account:
        """Outcomes by source, what is odd about the rows, and where sources break off.

        :raises DataError: when a record has no outcome, because a file of its block has gone.
        """
        if not self.complete:
            folder = self.table.files[0].parent
            raise DataError(f"{folder} lacks blocks that were made; delete the folder and run the command again")
        table = self.table
        counts = np.zeros((len(sources), len(OUTCOMES)), dtype=np.int64)
        source = np.repeat(table.block_source, np.diff(table.block_start))
        np.add.at(counts, (source, self.outcomes), 1)
        flags = table.row_flags[self.order]
        warnings = {key: int((flags >> bit & 1).sum()) for bit, key in enumerate(WARNINGS)}
        left_out = int(table.left_out[np.isin(self.outcomes, _KEPT)].sum())
        return Account(sources, counts, table.broken, warnings, left_out)

    def batches(self, batch_tokens: int = BATCH_TOKENS) -> Iterator[RowBatch]:
        """The rows of the data set in order, about ``batch_tokens`` at a time.

        Rows of a block lie in the order of the data set, so that a batch needs one stretch of every file.

        :raises DataError: when a block's file is gone or damaged.
        """
        table = self.table
        ends = np.cumsum(table.row_length[self.order], dtype=np.int64)
        first = 0
        while first < len(self.order):
            done = ends[first - 1] if first else 0
            last = max(first + 1, int(np.searchsorted(ends, done + batch_tokens, side="right")))
            yield self._batch(self.order[first:last])
            first = last

    def _batch(self, rows: np.ndarray) -> RowBatch:
        table = self.table
        lengths = table.row_length[rows].astype(np.int64)
        offsets = np.cumsum(lengths) - lengths
        tokens = np.empty(int(lengths.sum()), dtype=np.uint32)
        by_file = np.argsort(table.row_file[rows], kind="stable")
        files, begins = np.unique(table.row_file[rows][by_file], return_index=True)
        for file, members in zip(files, np.split(by_file, begins[1:])):
            start = int(table.row_start[rows[members[0]]])
            stretch = read_tokens(table.files[file], start, int(table.row_start[rows[members[-1]]] + lengths[members[-1]]))
            for member in members:
                begin = int(table.row_start[rows[member]]) - start
                tokens[offsets[member] : offsets[member] + lengths[member]] = stretch[begin : begin + lengths[member]]
        ids, mask = unpack_tokens(tokens)
        record = table.row_record[rows]
        source, index = table.origin(record)
        return RowBatch(ids, mask, lengths, table.keys[record], source, index, table.row_turn[rows])

    def rejected(self, sources: Sequence[str]) -> Iterator[dict[str, Any]]:
        """Every record that was looked at and gave no row, in reading order: source, index, outcome, reason.

        :raises DataError: when a block's file is gone or damaged.
        """
        table, names = self.table, tuple(OUTCOMES)
        untold = [*_KEPT, CODES["not_needed"]]
        files = iter(zip(table.files, table.file_block.tolist()))
        file = next(files, None)
        for number, (start, stop) in enumerate(pairwise(table.block_start.tolist())):
            paths = []
            while file is not None and file[1] == number:
                paths.append(file[0])
                file = next(files, None)
            places = start + np.flatnonzero(~np.isin(self.outcomes[start:stop], untold))
            if not len(places):
                continue
            reasons = {place: reason for path in paths for place, reason in read_reasons(path).items()}
            for place in places.tolist():
                outcome = names[self.outcomes[place]]
                reason = self._repeated_record(place, sources) if outcome == "duplicate" else reasons.get(place - start, "")
                index = int(table.block_first[number]) + place - start
                yield {"source": sources[table.block_source[number]], "index": index, "outcome": outcome, "reason": reason}

    def _repeated_record(self, place: int, sources: Sequence[str]) -> str:
        original = self._repeated[np.searchsorted(self._repeats, place)]
        source, index = self.table.origin(np.array([original]))
        return f"the same as record {index[0]} of {sources[source[0]]}"
