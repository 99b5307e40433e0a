"""Processes killed while they replace a data set again and again."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from speculators.data import RowDataset

pytestmark = pytest.mark.chaos

#: Replaces one data set by the other, for ever; says when the first is there. Sizes and columns differ.
WRITER = """
import sys
import numpy as np
from speculators.data import DataManifest, RowBatch, write_rows

def batch(rows):
    ids = np.arange(rows * 50) % 1000 + rows
    origin = dict(conversation=np.arange(rows)) if rows == 300 else {}
    return RowBatch(ids, ids % 2 == 0, np.full(rows, 50), **origin)

while True:
    for rows in (300, 400):
        write_rows(sys.argv[1], [batch(rows)], DataManifest(seed=rows), overwrite=True)
        print("written", flush=True)
"""


def test_killed_writers_leave_a_whole_data_set(tmp_path: Path) -> None:
    folder, draws = tmp_path / "rows", random.Random(0)
    seen = set()
    for _ in range(20):
        with subprocess.Popen([sys.executable, "-c", WRITER, str(folder)], stdout=subprocess.PIPE) as writer:
            assert writer.stdout is not None
            writer.stdout.readline()
            until = time.monotonic() + draws.uniform(0, 0.1)
            while time.monotonic() < until:  # a reader at the same time
                _check(folder, seen)
            writer.send_signal(signal.SIGKILL)
            writer.wait()
        _check(folder, seen)
    assert seen == {300, 400}


def _check(folder: Path, seen: set[int]) -> None:
    dataset = RowDataset.load(folder)
    assert dataset.manifest.seed == len(dataset)
    assert dataset.row(0).input_ids[0] == len(dataset)
    assert RowDataset.from_rows(list(dataset)).fingerprint == dataset.fingerprint
    seen.add(len(dataset))
