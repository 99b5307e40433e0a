"""The printed table and its Markdown twin, against golden text."""

from __future__ import annotations

from io import StringIO

from rich.console import Console

from speculators.evaluation.results import EvaluationResults
from speculators.evaluation.tables import markdown_table, rich_tables
from tests.evaluation.examples import example_results

MARKDOWN = """\
Verifier: /models/verifier

| benchmark | prompts | baseline tok/s | dspark n=3 | dspark n=7 |
|---|---|---|---|---|
| gsm8k | 6 | 131.3 | 269.1 / 2.05x / 2.805<br>.816 .720 .652 | 362.9 / 2.76x / 4.461<br>.816 .720 .652 .598 .553 .512 .474 |
| math500 | 6 | 132.0 | 310.2 / 2.35x / 3.151<br>.816 .720 .652 | 366.0 / 2.77x / 4.249<br>.816 .720 .652 .598 .553 .512 .474 |
| average | 12 | 131.7 | 289.6 / 2.20x / 2.978<br>.816 .720 .652 | 364.4 / 2.76x / 4.355<br>.816 .720 .652 .598 .553 .512 .474\
<br>speedup +25.7% from the smallest n |

Cells: tok/s / speedup / acceptance length (bonus token included), then acceptance by position.

This machine's bound, one round in units of one plain decoding step:

| draft | n | verify n+1 tokens | draft n tokens | drafting pays from acceptance length | measured |
|---|---|---|---|---|---|
| dspark | 3 | 1.31 | 0.12 | 1.43 | 2.98 |
| dspark | 7 | 1.72 | 0.14 | 1.86 | 4.36 |

- output identical to plain decoding in 4 of 4 runs (1 near tie excepted)
"""


def printed(results: EvaluationResults, width: int) -> str:
    stream = StringIO()
    Console(file=stream, width=width, no_color=True).print(rich_tables(results))
    return stream.getvalue()


def test_markdown() -> None:
    assert markdown_table(example_results()) == MARKDOWN


def test_the_terminal_shows_the_same_figures() -> None:
    text = printed(example_results(), width=140)
    for piece in ("gsm8k", "131.3", "269.1 / 2.05x / 2.805", ".816 .720 .652 .598 .553 .512 .474", "289.6 / 2.20x / 2.978"):
        assert piece in text
    for piece in ("drafting pays from acceptance length", "1.72", "1.86", "4 of 4 runs (1 near tie excepted)"):
        assert piece in text


def test_a_narrow_terminal_loses_no_figure() -> None:
    text = printed(example_results(), width=80)
    assert max(map(len, text.splitlines())) <= 80
    for piece in ("269.1", "4.461", "289.6"):
        assert piece in text


def test_a_missing_run_is_a_dash_and_a_differing_output_is_said() -> None:
    results = example_results()
    results.benchmarks[0].runs.pop(0)
    results.benchmarks[1].runs[0].identical_to_baseline = False
    text = markdown_table(results)
    assert "| gsm8k | 6 | 131.3 | - | 362.9" in text
    assert "- math500, dspark n=3: output differs from plain decoding, do not trust this run" in text
    assert "in 2 of 3 runs" in text


def test_sampling_says_nothing_of_equality() -> None:
    results = example_results()
    for benchmark in results.benchmarks:
        for run in benchmark.runs:
            run.identical_to_baseline = None
    assert "identical" not in markdown_table(results)
