"""The closing sentences say what the figures say."""

from __future__ import annotations

from speculators.evaluation.results import DraftDescription, averages
from speculators.pipelines.meaning import what_it_means
from tests.evaluation.examples import example_results, run


def test_a_draft_that_pays() -> None:
    results = example_results()
    results.drafts.append(
        DraftDescription(name="dspark without Markov", path="/c", family="dspark", layout="anchor-first", markov=False)
    )
    for benchmark in results.benchmarks:
        benchmark.runs.append(run(7, 300.0, benchmark.baseline.tokens_per_second, 3.5, draft="dspark without Markov"))
    results.average = averages(results.benchmarks)
    text = what_it_means(results)
    assert "a round of 7 drafted tokens yields 4.36 tokens (3.50 with the Markov head off)" in text
    assert "fastest with n=7: 2.76 times plain decoding's 131.7 tok/s" in text
    assert "costs as much as 1.86 plain steps" in text
    assert "token by token" in text


def test_a_draft_that_does_not_pay_yet() -> None:
    results = example_results()
    for benchmark in results.benchmarks:
        for one in benchmark.runs:
            one.speedup = 0.8 if one.n == 7 else 0.9
            one.identical_to_baseline = one.n == 7
    results.average = averages(results.benchmarks)
    text = what_it_means(results)
    assert "does not yet decode faster" in text
    assert "0.90 times at its best, n=3" in text
    assert "token by token" not in text
