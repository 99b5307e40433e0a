"""What an evaluation measured, as the JSON that ``speculators evaluate`` and ``speculators quickstart`` write.

The keys are a contract (schema 1): fields may be added, none is renamed. All speeds are tokens per second of decoding wall
clock, prefill not counted; an *acceptance length* is tokens per round with the bonus token in it.
"""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from speculators.errors import DataError
from speculators.files import write_text_atomically

__all__ = [
    "RESULTS_FILE",
    "Average",
    "Baseline",
    "BenchmarkResult",
    "CostBound",
    "DraftDescription",
    "EvaluationResults",
    "NearTieRecord",
    "RunResult",
    "averages",
    "read_results",
    "write_json_atomically",
    "write_results",
]

#: Name of the file under ``--output``.
RESULTS_FILE = "results.json"


class _Record(BaseModel):
    # Readers keep fields that a later version added.
    model_config = ConfigDict(extra="allow", populate_by_name=True)


class DraftDescription(_Record):
    """One draft; ``family`` is the checkpoint's ``speculators_model_type``, ``layout`` the name of its block layout."""

    name: str
    path: str
    family: str
    layout: str
    #: Whether drafting used the checkpoint's Markov head; null for a draft that has none.
    markov: bool | None = None


class NearTieRecord(_Record):
    """A place where greedy outputs part because the verifier's two best tokens are as good as equal.

    ``prompt`` counts from 0 within the benchmark, ``position`` from the first generated token, ``margin`` is the gap of the
    two best logits recomputed one token at a time.
    """

    prompt: int
    position: int
    margin: float


class RunResult(_Record):
    """One draft at one number of speculative tokens on one benchmark."""

    draft: str
    n: int
    temperature: float
    tokens_per_second: float
    baseline_tokens_per_second: float
    speedup: float
    acceptance_length: float
    #: Share of rounds whose first k drafted tokens were all accepted, k = 1..n.
    acceptance_by_position: list[float]
    #: The same, among the rounds whose k - 1 earlier tokens were accepted; null where there was none.
    conditional_acceptance_by_position: list[float | None]
    drafted: int
    accepted: int
    rounds: int
    generated: int
    #: Whether greedy output equals plain decoding's (near ties excepted); null when sampling.
    identical_to_baseline: bool | None
    near_ties: list[NearTieRecord] = Field(default_factory=list)
    #: Bootstrap interval of the acceptance length over prompts; null with too few prompts.
    ci95: tuple[float, float] | None = None
    #: Tokens per second of each repeat, in the order measured.
    tokens_per_second_of_repeats: list[float] = Field(default_factory=list)


class Baseline(_Record):
    """Plain decoding by the same code. ``tokens_per_second`` is the median of ``repeats`` measurements."""

    tokens_per_second: float
    repeats: int
    tokens_per_second_of_repeats: list[float] = Field(default_factory=list)


class BenchmarkResult(_Record):
    """All runs over one set of prompts."""

    name: str
    prompts: int
    baseline: Baseline
    runs: list[RunResult] = Field(default_factory=list)


class Average(_Record):
    """Unweighted mean over the benchmarks; ``change_from_smallest_n`` compares speedups (0.178 means +17.8 %)."""

    draft: str
    n: int
    speedup: float
    acceptance_length: float
    change_from_smallest_n: float


class CostBound(_Record):
    """What one round costs on this machine, in units of one plain decoding step.

    Drafting pays when the acceptance length exceeds ``break_even_acceptance_length``, the sum of the two ratios.
    """

    draft: str
    n: int
    #: Time of one verifier pass over n + 1 tokens over the time of a pass over one.
    verify_cost_ratio: float
    #: Time of drafting n tokens (context update included) over the time of a pass over one token.
    draft_cost_ratio: float
    break_even_acceptance_length: float


class EvaluationResults(_Record):
    """The whole file."""

    schema_version: Literal[1] = Field(default=1, alias="schema")
    verifier: str
    engine: str
    machine: dict[str, Any]
    drafts: list[DraftDescription]
    benchmarks: list[BenchmarkResult]
    average: list[Average] = Field(default_factory=list)
    bound: list[CostBound] = Field(default_factory=list)
    #: Run parameters that matter for the figures (max_new_tokens, sampling, seed, repeats, dtype, ...).
    settings: dict[str, Any] = Field(default_factory=dict)

    def runs(self, draft: str, n: int) -> list[RunResult]:
        """The runs of one draft at one n, one per benchmark that has it."""
        return [run for benchmark in self.benchmarks for run in benchmark.runs if (run.draft, run.n) == (draft, n)]


def averages(benchmarks: list[BenchmarkResult]) -> list[Average]:
    """The unweighted average over benchmarks of each (draft, n), drafts in order of first appearance, n ascending.

    A run without a round of drafting, whose answers all ended at their first token, measured nothing and is left out.
    """
    by_key: dict[tuple[str, int], list[RunResult]] = {}
    for benchmark in benchmarks:
        for run in benchmark.runs:
            if run.rounds:
                by_key.setdefault((run.draft, run.n), []).append(run)
    drafts = list(dict.fromkeys(draft for draft, _ in by_key))
    result: list[Average] = []
    for draft in drafts:
        ns = sorted(n for name, n in by_key if name == draft)
        speedups = {n: fmean(run.speedup for run in by_key[draft, n]) for n in ns}
        result.extend(
            Average(
                draft=draft,
                n=n,
                speedup=speedups[n],
                acceptance_length=fmean(run.acceptance_length for run in by_key[draft, n]),
                change_from_smallest_n=speedups[n] / speedups[ns[0]] - 1.0 if speedups[ns[0]] > 0 else 0.0,
            )
            for n in ns
        )
    return result


def write_json_atomically(path: Path, payload: Any) -> None:
    """Write JSON so that ``path`` holds either its old content or all of the new one, whatever happens meanwhile."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text_atomically(path, json.dumps(payload, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def write_results(results: EvaluationResults, output: Path) -> Path:
    """Write ``output/results.json`` atomically and return its path."""
    path = output / RESULTS_FILE
    write_json_atomically(path, results.model_dump(mode="json", by_alias=True))
    return path


def read_results(path: Path) -> EvaluationResults:
    """Read a results file (or the one in a folder).

    :raises DataError: when there is none, or it is not one of ours.
    """
    file = path / RESULTS_FILE if path.is_dir() else path
    try:
        return EvaluationResults.model_validate_json(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(f"cannot read {file} ({error.strerror}); point at a results.json of `speculators evaluate`") from error
    except ValidationError as error:
        raise DataError(f"{file} is not a results file of schema 1; write it anew with `speculators evaluate`") from error
