"""A long flow of hidden states to a trainer: is memory bounded and flat, whichever side is slow, and who waits for whom?

The source is asked as a training asks it, by :func:`speculators.verifiers.prefetching.prefetch`; the trainer only reads the
states and takes its time. Two rates are made from the source's own, timed first: a slow trainer takes twice as long as the
source, a slow source gives answers at a quarter of its rate.

    python benchmarks/soak.py --minutes 10 --slow trainer --source fake
    python benchmarks/soak.py --minutes 10 --slow source --source ray

Exits with 1 when more bytes were in flight than ``--in-flight-gib`` allows (or one request, if that is larger), when memory
grows by more than ``--most-growth`` of itself in the run, or when a trainer that is the slower side waits 5 % of the time.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from speculators.data.rows import Row, RowDataset
from speculators.models.draft_config import default_layer_ids
from speculators.verifiers.flow import FlowMeter, request_bytes
from speculators.verifiers.loading import load_verifier
from speculators.verifiers.packaged import packaged_verifier
from speculators.verifiers.prefetching import prefetch
from speculators.verifiers.rollout import RaySource, RolloutSettings
from speculators.verifiers.source import HiddenStates, HiddenStateSource, StatesDescription
from speculators.verifiers.store.records import StoreRecord
from speculators.verifiers.store.source import StoreSource
from speculators.verifiers.store.store import StatesStore
from speculators.verifiers.store.writer import StoreWriter
from speculators.verifiers.transformers_source import TransformersSource

GIB = 2**30
#: Different rows; a soak goes round them.
ROWS = 64


class FakeSource:
    """States of the Kimi draft's kind in small: four layers and the last one, 1024 wide, in bfloat16; several calls at once."""

    description = StatesDescription((1, 8, 16, 24), "post_norm", "bfloat16", 1024, "none", "0")
    concurrency = 4

    def fetch(self, rows: Sequence[Row]) -> list[HiddenStates]:
        time.sleep(0.005)
        return [self._row(row) for row in rows]

    def _row(self, row: Row) -> HiddenStates:
        features = torch.full((len(row), 4, 1024), float(row.row_id), dtype=torch.bfloat16)
        return HiddenStates(row.row_id, torch.from_numpy(row.input_ids), features, features[:, 0].clone())

    def close(self) -> None:
        """Nothing is held."""


class Slowed:
    """A source that takes so many seconds more for every call."""

    def __init__(self, source: HiddenStateSource, seconds: float) -> None:
        self._source, self._seconds = source, seconds
        self.description = source.description

    def fetch(self, rows: Sequence[Row]) -> list[HiddenStates]:
        time.sleep(self._seconds)
        return self._source.fetch(rows)

    def close(self) -> None:
        """The source is closed by who opened it."""


def dataset_of(tokens: int, vocabulary: int) -> RowDataset:
    rng = np.random.default_rng(0)
    return RowDataset.from_rows(
        [Row(index, rng.integers(0, vocabulary, tokens), np.ones(tokens, dtype=bool)) for index in range(ROWS)]
    )


def opened(kind: str, dataset: RowDataset, folder: Path) -> Any:
    """The source, ready to be asked."""
    if kind == "fake":
        return FakeSource()
    if kind == "store":
        maker = FakeSource()
        record = StoreRecord(
            states=maker.description,
            dtype="bfloat16",
            captured_dtype="bfloat16",
            dataset=dataset.fingerprint,
            seq_length=int(dataset.lengths.max()),
            token_budget=int(dataset.lengths.max()),
        )
        store = StatesStore.create(folder, record)
        with StoreWriter(store, "00000") as writer:
            for row in range(len(dataset)):
                writer.add(maker.fetch([dataset.row(row)]))
            writer.flush()
        store.close()
        return StoreSource(folder, dataset)
    verifier = load_verifier(str(packaged_verifier()))
    layers = default_layer_ids(verifier.num_layers)
    if kind == "ray":
        return RaySource(verifier.name, layers, settings=RolloutSettings(workers=1))
    return TransformersSource(verifier, layers)


def resident() -> int:
    """Anonymous memory of this process in bytes; mapped files are the system's to drop."""
    fields = Path("/proc/self/statm").read_text().split()
    return (int(fields[1]) - int(fields[2])) * os.sysconf("SC_PAGE_SIZE")


def soak(options: argparse.Namespace, source: Any, dataset: RowDataset) -> dict[str, Any]:
    requests = [[dataset.row(row)] for row in range(len(dataset))]
    workers = int(getattr(source, "concurrency", 1))
    begun = time.monotonic()
    for rows in requests[:4]:
        source.fetch(rows)
    # As long as the source needs for one answer when it is asked for several at once, at best.
    alone = (time.monotonic() - begun) / 4
    source_seconds = 3 * alone if options.slow == "source" else 0.0
    trainer_seconds = 2 * alone if options.slow == "trainer" else 0.0
    asked = Slowed(source, source_seconds) if source_seconds else source
    meter, samples = FlowMeter(), []
    end = time.monotonic() + 60 * options.minutes

    def plan() -> Iterator[list[Row]]:
        while time.monotonic() < end:
            yield from requests

    begun, tokens, checksum = time.monotonic(), 0, 0.0
    most, bound = 0.0, max(options.in_flight_gib * GIB, request_bytes(source.description, requests[0]))
    waited, last = 0.0, begun
    answers = prefetch(
        asked, plan(), depth=options.depth + workers, max_bytes=options.in_flight_gib * GIB, workers=workers, meter=meter
    )
    while (now := time.monotonic()) < end:
        answer = next(answers)
        checksum += float(answer[0].final[0].float().sum())
        tokens += len(answer[0].token_ids)
        time.sleep(trainer_seconds)
        if now - last >= options.every:
            numbers = meter.take()
            most, waited = max(most, numbers["in_flight_bytes_max"]), waited + numbers["waited_share"] * (now - last)
            samples.append((now - begun, resident()))
            last = now
    answers.close()
    seconds = last - begun
    times, sizes = np.array(samples).T
    settled = times > 0.2 * seconds  # the allocator has what it needs
    slope = float(np.polyfit(times[settled], sizes[settled], 1)[0]) if settled.sum() > 1 else 0.0
    return {
        "source": options.source,
        "slow": options.slow,
        "seconds": round(seconds, 1),
        "tokens_per_s": round(tokens / (time.monotonic() - begun), 1),
        "bytes_per_s": round(tokens * source.description.bytes_per_token / (time.monotonic() - begun)),
        "waited_share": round(waited / seconds, 4),
        "in_flight_bytes_max": int(most),
        "in_flight_bytes_bound": int(bound),
        "resident_mib_mean": round(float(sizes[settled].mean()) / 2**20, 1),
        "resident_mib_per_minute": round(60 * slope / 2**20, 3),
        "growth": round(slope * seconds / float(sizes[settled].mean()), 4),
    }


def failures(found: dict[str, Any], most_growth: float) -> list[str]:
    """What does not hold, one sentence each."""
    wrong = []
    if found["in_flight_bytes_max"] > found["in_flight_bytes_bound"]:
        wrong.append(f"{found['in_flight_bytes_max']} bytes were in flight, more than {found['in_flight_bytes_bound']}")
    if found["growth"] > most_growth:
        wrong.append(f"memory grew by {found['growth']:.1%} of itself")
    if found["slow"] == "trainer" and found["waited_share"] >= 0.05:
        wrong.append(f"the slower trainer waited {found['waited_share']:.1%} of the time")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--slow", choices=["trainer", "source", "none"], default="trainer")
    parser.add_argument("--source", choices=["transformers", "store", "ray", "fake"], default="fake")
    parser.add_argument("--tokens", type=int, default=2048, help="of a request")
    parser.add_argument("--depth", type=int, default=4, help="answers ahead, as --prefetch-factor")
    parser.add_argument("--in-flight-gib", type=float, default=0.125)
    parser.add_argument("--every", type=float, default=1.0, help="seconds between looks at memory")
    parser.add_argument("--most-growth", type=float, default=0.05)
    parser.add_argument("--results", type=Path, help="a JSON file to add the result to")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="soak-"))
    try:
        dataset = dataset_of(options.tokens, 1000)
        source = opened(options.source, dataset, folder / "store")
        found = soak(options, source, dataset)
        source.close()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(json.dumps(found, indent=1))
    if options.results is not None:
        before = json.loads(options.results.read_text(encoding="utf-8")) if options.results.exists() else []
        options.results.write_text(json.dumps([*before, found], indent=1) + "\n", encoding="utf-8")
    wrong = failures(found, options.most_growth)
    for sentence in wrong:
        print(sentence, file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
