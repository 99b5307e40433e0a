"""A source of made-up states, and stores filled from it."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from speculators.data import Row, RowDataset
from speculators.errors import VerifierError
from speculators.pipelines.offline_states import FillReport, FillSettings, fill_store
from speculators.verifiers.source import HiddenStates, NextTokens, StatesDescription
from tests.tiny import random_rows

HIDDEN = 8


class MadeUpSource:
    """States that depend on the tokens and, as a verifier's rounding does, on which rows share a pass."""

    def __init__(self, dtype: str = "float32", failing: Sequence[int] = (), concurrency: int = 2) -> None:
        self.description = StatesDescription((1, 2), "post_norm", dtype, HIDDEN, "made-up", "0123456789abcdef")
        self.concurrency = concurrency
        self.asked: list[list[int]] = []
        self.failing = set(failing)
        self.closed = False
        self._lock = threading.Lock()

    def fetch(self, rows: Sequence[Row]) -> list[HiddenStates]:
        with self._lock:
            self.asked.append([row.row_id for row in rows])
        if self.failing & {row.row_id for row in rows}:
            raise VerifierError("the verifier is out of order; wait")
        return [self._row(row, len(rows)) for row in rows]

    def _row(self, row: Row, together: int) -> HiddenStates:
        ids = torch.tensor(row.input_ids)
        values = torch.sin(
            ids[:, None, None] + torch.arange(3 * HIDDEN).view(3, HIDDEN) + torch.arange(len(row))[:, None, None]
        )
        values = (values * (1 + together * 1e-6)).to(getattr(torch, self.description.dtype))
        return HiddenStates(row.row_id, ids, values[:, :2].contiguous(), values[:, 2].contiguous())

    def next_tokens(self, row: Row, positions: Sequence[int], count: int) -> NextTokens:
        ids = torch.arange(count).repeat(len(positions), 1)
        return NextTokens(torch.tensor(positions), ids, torch.randn(ids.shape, generator=torch.Generator().manual_seed(1)))

    def close(self) -> None:
        self.closed = True


def rows(count: int = 24, seed: int = 5) -> RowDataset:
    return RowDataset.from_rows(random_rows(count, seed=seed))


#: Small shards: a few passes each.
SMALL = {"token_budget": 128, "seq_length": 32, "shard_bytes": 6 << 10}


def filled(path: Path, dataset: RowDataset, source: MadeUpSource | None = None, **changes: object) -> FillReport:
    settings = FillSettings(**(SMALL | changes))  # type: ignore[arg-type]
    return fill_store(path, dataset, source or MadeUpSource(), settings, shown=False)


def contents(path: Path) -> dict[str, bytes]:
    """Every file of a folder but locks, by name."""
    files = (file for file in sorted(path.rglob("*")) if file.is_file() and not file.name.endswith(".lock"))
    return {str(file.relative_to(path)): file.read_bytes() for file in files}


def cut(dataset: RowDataset, row_id: int, length: int = 32) -> Row:
    row = dataset[row_id]
    return Row(row_id, row.input_ids[:length], row.loss_mask[:length])


def same(left: HiddenStates, right: HiddenStates) -> bool:
    return (
        left.row_id == right.row_id
        and np.array_equal(left.token_ids.numpy(), right.token_ids.numpy())
        and torch.equal(left.features, right.features)
        and torch.equal(left.final, right.final)
    )
