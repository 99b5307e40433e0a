"""Filling a store against the bare verifier, and reading one against reading its files.

    python benchmarks/store.py --verifier FOLDER [--rows 48] [--length 256] [--folder DIR] [--output FILE]

The verifier runs the same groups of rows alone and while a store is filled, in turns, so that a busy machine slows both.
Reading is measured after the files were dropped from the page cache: first as a plain program reads them, then by a source in
its threads (which checks what it reads the first time), then by the same source again.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from speculators.data import CutRows, Row, RowDataset
from speculators.evaluation.results import write_json_atomically
from speculators.pipelines.offline_states import FillSettings, fill_store
from speculators.verifiers.grouping import length_groups
from speculators.verifiers.loading import load_verifier
from speculators.verifiers.store import StoreSource
from speculators.verifiers.transformers_source import TransformersSource

BUDGET = 4096


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--verifier", required=True)
    parser.add_argument("--rows", type=int, default=48)
    parser.add_argument("--length", type=int, default=256, help="mean tokens of a row")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where the store lies meanwhile")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    verifier = load_verifier(arguments.verifier)
    dataset = _rows(arguments.rows, arguments.length, verifier.vocab_size)
    rows = CutRows(dataset, 8192)
    tokens = int(rows.lengths.sum())
    layers = (2, verifier.num_layers // 2, verifier.num_layers - 3)
    source = TransformersSource(verifier, layers, token_budget=BUDGET)
    groups = [[rows[place] for place in group] for group in length_groups(rows.lengths.tolist(), BUDGET)]
    source.fetch(groups[0])  # warm
    bare, filling = [], []
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        for repeat in range(arguments.repeats):
            begun = time.perf_counter()
            for group in groups:
                source.fetch(group)
            bare.append(tokens / (time.perf_counter() - begun))
            store = Path(folder) / str(repeat)
            # One row first: the verifier's own predictions, a fixed number of them, are not what is measured.
            fill_store(store, dataset, source, FillSettings(token_budget=BUDGET, max_samples=1), shown=False)
            begun = time.perf_counter()
            fill_store(store, dataset, source, FillSettings(token_budget=BUDGET), shown=False)
            filling.append(tokens / (time.perf_counter() - begun))
        result = {
            "tokens": tokens,
            "bytes": sum(file.stat().st_size for file in (store / "shards").iterdir()),
            "bare_tokens_per_s": statistics.median(bare),
            "filling_tokens_per_s": statistics.median(filling),
            "filling_to_bare": statistics.median(fill / alone for fill, alone in zip(filling, bare)),
            **_reading(store, rows),
        }
    print(json.dumps(result, indent=2))
    if arguments.output is not None:
        write_json_atomically(arguments.output, result)


def _rows(count: int, length: int, vocab_size: int) -> RowDataset:
    rng = np.random.default_rng(0)
    lengths = rng.integers(length // 2, length + length // 2, count)
    return RowDataset.from_rows([Row(i, rng.integers(0, vocab_size, n), np.ones(n, bool)) for i, n in enumerate(lengths)])


def _reading(store: Path, rows: CutRows) -> dict[str, float]:
    """GB/s of the plain files and of the source, and tokens/s of the source."""
    files = sorted((store / "shards").iterdir())
    size = sum(file.stat().st_size for file in files)
    rates = {}
    for name in ("plain_cold", "plain_warm"):
        if name == "plain_cold":
            _drop(files)
        begun = time.perf_counter()
        buffer = bytearray(1 << 20)
        for file in files:
            with open(file, "rb", buffering=0) as stream:
                while stream.readinto(buffer):
                    pass
        rates[name] = size / (time.perf_counter() - begun) / 1e9
    _drop(files)
    source = StoreSource(store, on_missing="raise")
    for name in ("source_cold", "source_again"):
        begun = time.perf_counter()
        with ThreadPoolExecutor(source.concurrency) as pool:
            for states in pool.map(lambda row_id: source.fetch([rows[row_id]])[0], range(len(rows))):
                states.features.sum()  # touches every byte, as copying into a packed row does
        rates[name] = size / (time.perf_counter() - begun) / 1e9
    rates["source_again_tokens_per_s"] = int(rows.lengths.sum()) / (size / rates["source_again"] / 1e9)
    source.close()
    return rates


def _drop(files: list[Path]) -> None:
    for file in files:
        with open(file, "rb") as stream:
            os.fsync(stream.fileno())
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


if __name__ == "__main__":
    main()
