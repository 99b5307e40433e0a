"""A small results object with figures that are easy to recognise."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from speculators.evaluation.results import (
    Baseline,
    BenchmarkResult,
    CostBound,
    DraftDescription,
    EvaluationResults,
    NearTieRecord,
    RunResult,
    averages,
)

ACCEPTANCE = (0.816, 0.720, 0.652, 0.598, 0.553, 0.512, 0.474)


def run(n: int, speed: float, baseline: float, length: float, **changes: Any) -> RunResult:
    """One run; speedup and acceptance by position follow."""
    position = list(ACCEPTANCE[:n])
    values: dict[str, Any] = {
        "draft": "dspark",
        "n": n,
        "temperature": 0.0,
        "tokens_per_second": speed,
        "baseline_tokens_per_second": baseline,
        "speedup": round(speed / baseline, 2),
        "acceptance_length": length,
        "acceptance_by_position": position,
        "conditional_acceptance_by_position": [position[0], *(b / a for a, b in pairwise(position))],
        "drafted": n * 100,
        "accepted": 180,
        "rounds": 100,
        "generated": 280,
        "identical_to_baseline": True,
    }
    return RunResult(**(values | changes))


def example_results() -> EvaluationResults:
    """Two benchmarks, one draft at n = 3 and 7."""
    tie = NearTieRecord(prompt=2, position=17, margin=0.00021)
    benchmarks = [
        BenchmarkResult(
            name="gsm8k",
            prompts=6,
            baseline=Baseline(tokens_per_second=131.3, repeats=1),
            runs=[run(3, 269.1, 131.3, 2.805), run(7, 362.9, 131.3, 4.461, ci95=(4.1, 4.8))],
        ),
        BenchmarkResult(
            name="math500",
            prompts=6,
            baseline=Baseline(tokens_per_second=132.0, repeats=1),
            runs=[run(3, 310.2, 132.0, 3.151), run(7, 366.0, 132.0, 4.249, near_ties=[tie])],
        ),
    ]
    return EvaluationResults(
        verifier="/models/verifier",
        engine="speculators 0.10",
        machine={"cores": 2},
        drafts=[DraftDescription(name="dspark", path="/runs/checkpoint", family="dspark", layout="anchor-first", markov=True)],
        benchmarks=benchmarks,
        average=averages(benchmarks),
        bound=[
            CostBound(draft="dspark", n=n, verify_cost_ratio=v, draft_cost_ratio=d, break_even_acceptance_length=v + d)
            for n, v, d in ((3, 1.31, 0.12), (7, 1.72, 0.14))
        ],
    )
