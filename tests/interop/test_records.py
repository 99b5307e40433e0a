"""The table of measurements: rows of a peer are replaced as a whole, those of other peers stay."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.interop.records import END, START, Measurement, merged, read_rows, record


def row(peer: str, case: str, measured: str) -> Measurement:
    return Measurement("dspark", "ours -> peer", peer, case, "logits", measured)


def test_merging_keeps_other_peers_and_replaces_its_own() -> None:
    empty = f"before\n{START}\n{END}\nafter\n"
    first = merged(empty, [row("upstream", "base", "1e-6"), row("upstream", "gone", "2e-6")])
    second = merged(first, [row("engine", "base", "3e-6")])
    third = merged(second, [row("upstream", "base", "4e-6")])
    assert third.startswith("before\n")
    assert third.endswith("after\n")
    lines = [line for line in third.splitlines() if line.startswith("| dspark")]
    assert lines == [
        "| dspark | ours -> peer | engine | base | logits | 3e-6 |",
        "| dspark | ours -> peer | upstream | base | logits | 4e-6 |",
    ]
    assert merged(third, [row("upstream", "base", "4e-6")]) == third


def test_the_latest_figure_of_a_case_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECULATORS_CONFORMANCE_ROWS", str(tmp_path / "deep" / "rows.jsonl"))
    for measured in ("1", "2"):
        record(row("upstream", "base", measured))
    record(row("upstream", "other", "3"))
    assert [found.measured for found in read_rows()] == ["2", "3"]
