"""The table of an evaluation, for a terminal and as Markdown.

One row per benchmark and, in each draft's column for one n, ``tok/s / speedup / acceptance length`` over the acceptance by
position; the last row is the unweighted average. Below it stands the machine's own bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from speculators.evaluation.results import BenchmarkResult, EvaluationResults, RunResult

__all__ = ["markdown_table", "rich_tables"]

_LEGEND = "cells: tok/s / speedup / acceptance length (bonus token included), then acceptance by position"


def rich_tables(results: EvaluationResults) -> RenderableType:
    """The table and the bound, ready for ``Console.print``."""
    header, rows = _main_table(results)
    table = Table(title=f"verifier {_short(results.verifier)}", caption=_LEGEND, show_lines=True)
    for index, name in enumerate(header):
        table.add_column(name, justify="left" if index == 0 else "right", overflow="fold")
    for row in rows:
        table.add_row(*("\n".join(cell) for cell in row))
    parts: list[RenderableType] = [table]
    if results.bound:
        bound_header, bound_rows = _bound_table(results)
        bound = Table(title="this machine's bound: one round in units of one plain decoding step")
        for index, name in enumerate(bound_header):
            bound.add_column(name, justify="left" if index == 0 else "right")
        for bound_row in bound_rows:
            bound.add_row(*bound_row)
        parts.append(bound)
    parts.extend(Text(line) for line in _notes(results))
    return Group(*parts)


def markdown_table(results: EvaluationResults) -> str:
    """The same as Markdown, lines inside a cell joined by ``<br>``."""
    header, rows = _main_table(results)
    lines = [f"Verifier: {results.verifier}", "", *_markdown(header, [["<br>".join(cell) for cell in row] for row in rows])]
    lines += ["", _LEGEND[0].upper() + _LEGEND[1:] + "."]
    if results.bound:
        lines += ["", "This machine's bound, one round in units of one plain decoding step:", ""]
        lines += _markdown(*_bound_table(results))
    notes = _notes(results)
    if notes:
        lines += ["", *(f"- {note}" for note in notes)]
    return "\n".join(lines) + "\n"


def _main_table(results: EvaluationResults) -> tuple[list[str], list[list[list[str]]]]:
    """Header and rows; a cell is a list of lines."""
    columns = _columns(results)
    header = ["benchmark", "prompts", "baseline tok/s", *(f"{draft} n={n}" for draft, n in columns)]
    rows = []
    for benchmark in results.benchmarks:
        by_key = {(run.draft, run.n): run for run in benchmark.runs}
        cells = [_run_cell(by_key[key]) if key in by_key else ["-"] for key in columns]
        rows.append([[benchmark.name], [str(benchmark.prompts)], [f"{benchmark.baseline.tokens_per_second:.1f}"], *cells])
    if results.benchmarks:
        rows.append([["average"], [str(_total_prompts(results.benchmarks))], [_mean_baseline(results.benchmarks)]])
        rows[-1].extend(_average_cell(results, draft, n) for draft, n in columns)
    return header, rows


def _columns(results: EvaluationResults) -> list[tuple[str, int]]:
    """(draft, n) in the drafts' order, n ascending."""
    keys = {(run.draft, run.n) for benchmark in results.benchmarks for run in benchmark.runs}
    order = {draft.name: index for index, draft in enumerate(results.drafts)}
    return sorted(keys, key=lambda key: (order.get(key[0], len(order)), key[0], key[1]))


def _run_cell(run: RunResult) -> list[str]:
    return [
        f"{run.tokens_per_second:.1f} / {run.speedup:.2f}x / {run.acceptance_length:.3f}",
        _positions(run.acceptance_by_position),
    ]


def _average_cell(results: EvaluationResults, draft: str, n: int) -> list[str]:
    runs = results.runs(draft, n)
    speed = fmean(run.tokens_per_second for run in runs)
    average = next((item for item in results.average if (item.draft, item.n) == (draft, n)), None)
    speedup = average.speedup if average else fmean(run.speedup for run in runs)
    length = average.acceptance_length if average else fmean(run.acceptance_length for run in runs)
    lines = [f"{speed:.1f} / {speedup:.2f}x / {length:.3f}"]
    depth = max(len(run.acceptance_by_position) for run in runs)
    complete = [run.acceptance_by_position for run in runs if len(run.acceptance_by_position) == depth]
    lines.append(_positions([fmean(column) for column in zip(*complete)]))
    if average is not None and average.change_from_smallest_n != 0.0:
        lines.append(f"speedup {average.change_from_smallest_n:+.1%} from the smallest n")
    return lines


def _bound_table(results: EvaluationResults) -> tuple[list[str], list[list[str]]]:
    header = ["draft", "n", "verify n+1 tokens", "draft n tokens", "drafting pays from acceptance length", "measured"]
    lengths = {(item.draft, item.n): item.acceptance_length for item in results.average}
    rows = []
    for bound in results.bound:
        measured = lengths.get((bound.draft, bound.n))
        rows.append(
            [
                bound.draft,
                str(bound.n),
                f"{bound.verify_cost_ratio:.2f}",
                f"{bound.draft_cost_ratio:.2f}",
                f"{bound.break_even_acceptance_length:.2f}",
                "-" if measured is None else f"{measured:.2f}",
            ]
        )
    return header, rows


def _notes(results: EvaluationResults) -> list[str]:
    """One line on equality with plain decoding, another for every run that differs from it."""
    compared = [run for benchmark in results.benchmarks for run in benchmark.runs if run.identical_to_baseline is not None]
    if not compared:
        return []
    ties = sum(len(run.near_ties) for run in compared)
    same = sum(bool(run.identical_to_baseline) for run in compared)
    excepted = f" ({ties} near {'tie' if ties == 1 else 'ties'} excepted)" if ties else ""
    notes = [f"output identical to plain decoding in {same} of {len(compared)} runs{excepted}"]
    for benchmark in results.benchmarks:
        notes.extend(
            f"{benchmark.name}, {run.draft} n={run.n}: output differs from plain decoding, do not trust this run"
            for run in benchmark.runs
            if run.identical_to_baseline is False
        )
    return notes


def _positions(values: Sequence[float]) -> str:
    """Acceptance by position as in published tables: ``.816 .720``."""
    return " ".join(f"{value:.3f}".removeprefix("0") for value in values)


def _mean_baseline(benchmarks: Sequence[BenchmarkResult]) -> str:
    return f"{fmean(benchmark.baseline.tokens_per_second for benchmark in benchmarks):.1f}"


def _total_prompts(benchmarks: Sequence[BenchmarkResult]) -> int:
    return sum(benchmark.prompts for benchmark in benchmarks)


def _markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    escaped = [[cell.replace("|", "\\|") for cell in row] for row in [header, *rows]]
    lines = ["| " + " | ".join(row) + " |" for row in escaped]
    return [lines[0], "|" + "---|" * len(header), *lines[1:]]


def _short(path: str) -> str:
    return path.rstrip("/").rsplit("/", 1)[-1] or path
