"""Run ``speculators quickstart`` and hold it to its figures: what the README reports, checked by one command.

    python benchmarks/quickstart.py [--output runs/quickstart] [--minutes 15 40]

With 15 minutes on two cores the draft must yield at least 1.6 tokens a round at n=7 on held-out prompts, with 40 minutes at
least 1.9 and decode faster than plain decoding at its best n (median of the repeats). In both the Markov head must help,
greedy output must equal plain decoding's and memory must stay below 6 GB. Exits with 1 when something does not hold.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from speculators.evaluation.results import Average, EvaluationResults
from speculators.pipelines.quickstart import QuickstartSettings, run_quickstart

#: Least acceptance length at n=7 by minutes.
LEAST_ACCEPTANCE = {15.0: 1.6, 40.0: 1.9}
MOST_MEMORY_GIB = 6e9 / 2**30


def failures(results: EvaluationResults, minutes: float) -> list[str]:
    """What does not hold, one sentence each."""
    with_markov = {entry.n: entry for entry in results.average if entry.draft == "dspark"}
    without: dict[int, Average] = {entry.n: entry for entry in results.average if entry.draft == "dspark without Markov"}
    most = max(with_markov)
    reached, off = with_markov[most].acceptance_length, without[most].acceptance_length
    least = LEAST_ACCEPTANCE.get(minutes, 1.0)
    found = []
    if reached < least:
        found.append(f"acceptance length at n={most} is {reached:.3f}, less than {least}")
    if reached <= off:
        found.append(f"acceptance length at n={most} is {reached:.3f}, not above {off:.3f} without the Markov head")
    differing = [run for benchmark in results.benchmarks for run in benchmark.runs if not run.identical_to_baseline]
    if differing:
        found.append(f"{len(differing)} runs differ from plain decoding")
    best = max(with_markov.values(), key=lambda entry: entry.speedup)
    if minutes >= 40 and best.speedup <= 1:
        found.append(f"the best speedup is {best.speedup:.2f}, at n={best.n}")
    memory = results.settings["peak_memory_gib"]
    if memory is not None and memory > MOST_MEMORY_GIB:
        found.append(f"peak memory is {memory} GiB")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("runs/quickstart"), help="a run folder per time is made in it")
    parser.add_argument("--minutes", type=float, nargs="+", default=[15.0, 40.0])
    options = parser.parse_args()
    code = 0
    for minutes in options.minutes:
        results = run_quickstart(QuickstartSettings(minutes=minutes), options.output / f"{minutes:g}-minutes")
        for sentence in failures(results, minutes):
            print(f"{minutes:g} minutes: {sentence}", file=sys.stderr)
            code = 1
    return code


if __name__ == "__main__":
    sys.exit(main())
