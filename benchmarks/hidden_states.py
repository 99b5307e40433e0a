"""Every source of hidden states against the bare verifier, in one run.

The bare verifier is the packaged SmolLM2's forward pass over groups of rows, nothing kept. Each source is asked for the same
groups as a training asks it, by :func:`speculators.verifiers.prefetching.prefetch`. All take turns, several times over, in
another order each time, so that a busy machine slows all of them; what counts is the median of the ratios of one turn.

    python benchmarks/hidden_states.py --sources transformers store filling ray
    python benchmarks/hidden_states.py --sources transformers vllm --vllm-python ENV/bin/python

``store`` is reading a store in float32, ``filling`` writing one from the in-process verifier. Exits with 1 when
``transformers``, ``store`` or ``filling`` is below 0.9 of the bare verifier.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from speculators.data import CutRows, Row, RowDataset
from speculators.files import write_text_atomically
from speculators.models.draft_config import default_layer_ids
from speculators.pipelines.offline_states import FillSettings, fill_store
from speculators.verifiers.grouping import length_groups
from speculators.verifiers.loading import Verifier, load_verifier
from speculators.verifiers.packaged import packaged_verifier
from speculators.verifiers.prefetching import prefetch
from speculators.verifiers.rollout import RaySource, RolloutSettings
from speculators.verifiers.source import HiddenStateSource
from speculators.verifiers.store import StoreSource
from speculators.verifiers.transformers_source import TransformersSource
from speculators.verifiers.vllm import VllmSettings, VllmSource
from speculators.vllm_server.command import ServerSettings, build_command, captured_layer_ids, server_environment
from speculators.vllm_server.launching import VllmServer, free_port
from speculators.vllm_server.versions import find_vllm

SOURCES = ("transformers", "store", "filling", "ray", "vllm")
#: That reach the bare verifier's rate; what a server or an actor reaches is its own machine's affair.
HELD = ("transformers", "store", "filling")
LEAST = 0.9
BUDGET = 2048
DEPTH = 4


def rows_of(count: int, length: int, vocab_size: int) -> RowDataset:
    rng = np.random.default_rng(0)
    lengths = rng.integers(length // 2, length + length // 2, count)
    return RowDataset.from_rows([Row(i, rng.integers(0, vocab_size, n), np.ones(n, bool)) for i, n in enumerate(lengths)])


class Bench:
    """The verifier, the groups of rows, and what runs them."""

    def __init__(self, verifier: Verifier, dataset: RowDataset, folder: Path) -> None:
        self.verifier, self.dataset, self.folder = verifier, dataset, folder
        self.rows = CutRows(dataset, int(dataset.lengths.max()))
        self.groups = [[self.rows[place] for place in group] for group in length_groups(self.rows.lengths.tolist(), BUDGET)]
        self.tokens = int(self.rows.lengths.sum())
        self.layers = default_layer_ids(verifier.num_layers)
        self.filled = 0

    def bare(self) -> None:
        with torch.no_grad():
            for group in self.groups:
                ids = [torch.tensor(row.input_ids) for row in group]
                self.verifier.states(torch.nn.utils.rnn.pad_sequence(ids, batch_first=True))

    def ask(self, source: HiddenStateSource) -> None:
        """As a training does: ahead, in order, every state read once."""
        workers = int(getattr(source, "concurrency", 1))
        with closing(prefetch(source, self.groups, depth=DEPTH + workers, max_bytes=2**30, workers=workers)) as answers:
            seen = 0
            for answer in answers:
                for states in answer:
                    states.features.sum()  # a step copies them into its packed row
                    seen += len(states.token_ids)
        if seen != self.tokens:
            raise SystemExit(f"a source gave {seen} tokens instead of {self.tokens}")

    def transformers(self) -> TransformersSource:
        return TransformersSource(self.verifier, self.layers, token_budget=BUDGET)

    def settings(self, **given: Any) -> FillSettings:
        return FillSettings(token_budget=BUDGET, seq_length=int(self.rows.lengths.max()), **given)

    def filling(self) -> Callable[[], None]:
        source = self.transformers()

        def run() -> None:
            fill_store(self.folder / f"store-{self.filled}", self.dataset, source, self.settings(), shown=False)

        return run

    def begin_store(self) -> None:
        self.filled += 1
        path = self.folder / f"store-{self.filled}"
        # The verifier's own predictions, a fixed number of them whatever a store's size, are not what is measured.
        fill_store(path, self.dataset, self.transformers(), self.settings(max_samples=1), shown=False)

    def opened(self, name: str, stack: ExitStack, vllm_python: Path | None) -> HiddenStateSource:
        if name == "transformers":
            return self.transformers()
        if name == "store":
            fill_store(self.folder / "read", self.dataset, self.transformers(), self.settings(), shown=False)
            return stack.enter_context(closing(StoreSource(self.folder / "read", self.dataset, on_missing="raise")))
        if name == "ray":
            settings = RolloutSettings(workers=1)
            return stack.enter_context(
                closing(RaySource(self.verifier.name, self.layers, "post_norm", BUDGET, settings=settings))
            )
        if vllm_python is None:
            raise SystemExit(
                "--sources vllm needs --vllm-python, the interpreter of an environment with vLLM and the connector"
            )
        return stack.enter_context(closing(self.server(stack, vllm_python)))

    def server(self, stack: ExitStack, python: Path) -> VllmSource:
        installation = find_vllm(python)
        settings = ServerSettings(
            model=self.verifier.name,
            layer_ids=captured_layer_ids(self.layers, self.verifier.num_layers),
            hidden_states_path=self.folder / "server",
            vllm_args=("--dtype", "float32", "--enforce-eager", "--max-model-len", "2048", "--max-num-batched-tokens", "2048"),
        )
        (self.folder / "server").mkdir()
        given = {"OMP_NUM_THREADS": str(torch.get_num_threads()), "VLLM_CPU_KVCACHE_SPACE": "1"}
        port, log = free_port(), self.folder / "server.log"
        command = build_command(installation, settings, port=port)
        environment = server_environment(installation, settings, {**os.environ, **given})
        running = stack.enter_context(VllmServer(command, environment=environment, log=log, port=port, start_seconds=600))
        return VllmSource(
            VllmSettings(
                endpoint=running.endpoint,
                backend="file",
                folder=self.folder / "server",
                on_missing="generate",
                on_generate="delete",
                request_timeout=120,
                max_retries=3,
                validation_retries=2,
                max_consecutive_failures=20,
            ),
            self.layers,
            self.verifier,
        )


def measure(bench: Bench, names: list[str], repeats: int, vllm_python: Path | None) -> dict[str, list[float]]:
    """Tokens/s of every turn."""
    rates: dict[str, list[float]] = {name: [] for name in ("bare", *names)}
    order = random.Random(0)
    with ExitStack() as stack:
        runs: dict[str, Callable[[], None]] = {"bare": bench.bare}
        for name in names:
            if name == "filling":
                runs[name] = bench.filling()
            else:
                source = bench.opened(name, stack, vllm_python)
                runs[name] = lambda source=source: bench.ask(source)  # type: ignore[misc]
        for turn in range(-1, repeats):  # the first turn warms
            turns = list(runs)
            order.shuffle(turns)
            for name in turns:
                if name == "filling":
                    bench.begin_store()
                begun = time.perf_counter()
                runs[name]()
                if turn >= 0:
                    rates[name].append(bench.tokens / (time.perf_counter() - begun))
    return rates


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sources", nargs="+", choices=SOURCES, default=["transformers", "store", "filling", "ray"])
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--length", type=int, default=256, help="mean tokens of a row")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--vllm-python", type=Path)
    parser.add_argument("--results", type=Path, help="where the numbers go; nowhere if not given")
    options = parser.parse_args()
    verifier = load_verifier(str(packaged_verifier()), dtype=torch.float32)
    with tempfile.TemporaryDirectory(prefix="hidden-states-") as folder:
        bench = Bench(verifier, rows_of(options.rows, options.length, verifier.vocab_size), Path(folder))
        rates = measure(bench, options.sources, options.repeats, options.vllm_python)
        ratios = {
            name: statistics.median(own / bare for own, bare in zip(rates[name], rates["bare"])) for name in options.sources
        }
    found = {
        "machine": platform.machine(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "tokens": bench.tokens,
        "bytes_per_token": bench.transformers().description.bytes_per_token,
        "tokens_per_s": {name: [round(rate, 1) for rate in values] for name, values in rates.items()},
        "ratio_to_bare": {name: round(ratio, 3) for name, ratio in ratios.items()},
    }
    table = Table("source", "tokens/s", "of the bare verifier")
    for name, values in rates.items():
        table.add_row(name, f"{statistics.median(values):,.0f}", f"{ratios.get(name, 1.0):.2f}")
    Console().print(table)
    if options.results is not None:
        options.results.parent.mkdir(parents=True, exist_ok=True)
        write_text_atomically(options.results, json.dumps(found, indent=1) + "\n")
    slow = [name for name in HELD if ratios.get(name, 1.0) < LEAST]
    if slow:
        print(f"below {LEAST} of the bare verifier: {', '.join(slow)}", file=sys.stderr)
    return 1 if slow else 0


if __name__ == "__main__":
    sys.exit(main())
