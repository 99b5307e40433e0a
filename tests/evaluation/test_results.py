"""The results file: exactly the keys that were promised, averages over benchmarks, atomic writing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from speculators.errors import DataError
from speculators.evaluation.bootstrap import acceptance_interval
from speculators.evaluation.results import averages, read_results, write_json_atomically, write_results
from tests.evaluation.examples import example_results

RUN_KEYS = {
    "draft", "n", "temperature", "tokens_per_second", "baseline_tokens_per_second", "speedup", "acceptance_length",
    "acceptance_by_position", "conditional_acceptance_by_position", "drafted", "accepted", "rounds", "generated",
    "identical_to_baseline", "near_ties", "ci95",
}  # fmt: skip


def test_the_file_has_the_promised_keys(tmp_path: Path) -> None:
    written = json.loads(write_results(example_results(), tmp_path).read_text())
    assert written["schema"] == 1
    assert {"verifier", "engine", "machine", "drafts", "benchmarks", "average"} <= written.keys()
    assert {"name", "path", "family", "layout"} <= written["drafts"][0].keys()
    assert {"name", "prompts", "baseline", "runs"} <= written["benchmarks"][0].keys()
    assert {"tokens_per_second", "repeats"} <= written["benchmarks"][0]["baseline"].keys()
    assert written["benchmarks"][0]["runs"][0].keys() >= RUN_KEYS
    assert {"draft", "n", "speedup", "acceptance_length", "change_from_smallest_n"} <= written["average"][0].keys()
    near_tie = written["benchmarks"][1]["runs"][1]["near_ties"][0]
    assert near_tie == {"prompt": 2, "position": 17, "margin": 0.00021}


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    results = example_results()
    write_results(results, tmp_path)
    assert read_results(tmp_path) == results
    assert read_results(tmp_path / "results.json") == results


def test_the_average_is_unweighted_and_compared_with_the_smallest_n() -> None:
    results = example_results()
    small, large = averages(results.benchmarks)
    assert (small.n, large.n) == (3, 7)
    assert small.speedup == pytest.approx((2.05 + 2.35) / 2)
    assert small.change_from_smallest_n == 0.0
    assert large.change_from_smallest_n == pytest.approx((2.76 + 2.77) / (2.05 + 2.35) - 1)
    assert large.acceptance_length == pytest.approx((4.461 + 4.249) / 2)


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    write_json_atomically(path, {"old": True})
    with pytest.raises(ValueError, match="JSON compliant"):
        write_json_atomically(path, {"new": float("nan")})
    assert json.loads(path.read_text()) == {"old": True}
    assert [entry.name for entry in tmp_path.iterdir()] == ["results.json"]


def test_a_foreign_file_is_refused_in_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "results.json").write_text('{"schema": 2}')
    with pytest.raises(DataError, match="not a results file of schema 1"):
        read_results(tmp_path)
    with pytest.raises(DataError, match="cannot read"):
        read_results(tmp_path / "absent.json")


def test_the_interval_holds_the_pooled_length_and_shrinks_with_prompts() -> None:
    tokens, rounds = [30, 44, 51, 28, 60, 33], [15, 20, 17, 14, 20, 16]
    low, high = acceptance_interval(tokens, rounds) or (0.0, 0.0)
    assert low < sum(tokens) / sum(rounds) < high
    wide_low, wide_high = low, high
    low, high = acceptance_interval(tokens * 20, rounds * 20) or (0.0, 0.0)
    assert high - low < (wide_high - wide_low) / 3
    assert acceptance_interval(tokens[:4], rounds[:4]) is None
    assert acceptance_interval([0] * 6, [0] * 6) is None
