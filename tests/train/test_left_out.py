"""Rows for which a source has no states: what is trained on, what is logged, and what the account says."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from speculators.data import Row, RowDataset
from speculators.errors import DataError
from speculators.train import train
from speculators.train.account import Account, check_account
from speculators.train.trainer import Trainer
from speculators.verifiers.source import CachedSource, HiddenStates
from tests.train.helpers import RowByRowSource, loaded_verifier, settings, tiny_rows


class Lacking(RowByRowSource):
    """Leaves rows out."""

    def __init__(self, verifier: Any, lacks: set[int]) -> None:
        super().__init__(verifier)
        self.lacks = lacks
        self.calls = 0

    def fetch(self, rows: Sequence[Row]) -> list[HiddenStates]:
        self.calls += 1
        return super().fetch([row for row in rows if row.row_id not in self.lacks])

    def status(self) -> dict[str, float | str]:
        return {"retries": 7, "place": "a test"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("left-out")


@pytest.fixture(scope="module")
def verifier(folder: Path) -> Any:
    return loaded_verifier(folder)


@pytest.fixture
def run(folder: Path, verifier: Any, tmp_path: Path):
    def do(name: str, lacks: set[int], rows: RowDataset | None = None, **changes: Any) -> Any:
        source = Lacking(verifier, lacks)
        base = {"epochs": 1, "on_missing": "skip", "gradient_accumulation_steps": 2}
        config = settings(folder, save_path=str(tmp_path / name), **{**base, **changes})
        return train(config, dataset=rows or tiny_rows(), verifier=verifier, source=source, progress=False)

    return do


def records(path: Path, kind: str) -> list[dict[str, Any]]:
    return [record for record in map(json.loads, (path / "metrics.jsonl").read_text().splitlines()) if kind in record]


def account(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (path / "account.jsonl").read_text().splitlines()][1:]


def test_waiting_for_states_first_changes_nothing_where_all_are_there(run, tmp_path: Path) -> None:
    run("first", set())
    run("as-they-come", set(), on_missing="generate")
    one, two = ([record["train"] for record in records(tmp_path / name, "train")] for name in ("first", "as-they-come"))
    assert one == two


def test_a_step_is_that_of_the_rows_that_are_there(run, folder: Path, verifier: Any, tmp_path: Path, caplog) -> None:
    """Its loss equals that of a batch without the row, denominators included: found by training on a data set without it."""
    packed = {"total_seq_len": 4096, "max_anchors": 4096, "gradient_accumulation_steps": 1, "train_data_ratio": 1.0}
    run("lacking", {3, 5}, **packed)
    # Anchors are drawn by row id, so the rows that stay keep theirs; all fit in one packed row.
    rows = tiny_rows()
    config = settings(folder, save_path=str(tmp_path / "without"), epochs=1, on_missing="generate", **packed)
    ids = [row for row in range(12) if row not in (3, 5)]
    train(
        config,
        dataset=rows,
        train_ids=np.array(ids),
        val_ids=np.zeros(0, np.int64),
        verifier=verifier,
        source=RowByRowSource(verifier),
        progress=False,
    )
    (lacking,), (without,) = records(tmp_path / "lacking", "train"), records(tmp_path / "without", "train")
    assert lacking["train"]["loss"] == pytest.approx(without["train"]["loss"], abs=1e-5)
    assert lacking["train"]["anchor_coverage"] == without["train"]["anchor_coverage"]
    assert lacking["source"]["rows_left_out"] == 2
    assert (lacking["source"]["retries"], lacking["source"]["place"]) == (7, "a test")
    (step,) = account(tmp_path / "lacking")
    assert (sorted(step["rows"]), step["left_out"]) == (list(range(12)), [3, 5])
    assert "step 1 went without 2 of 12 rows" in caplog.text
    found = check_account(tmp_path / "lacking", range(12))
    assert (found.exact, found.uses, found.left_out) == (True, 10, 2)


@pytest.mark.parametrize("replay", [1, 2])
def test_a_step_without_any_row_updates_nothing(run, tmp_path: Path, replay: int, monkeypatch: pytest.MonkeyPatch) -> None:
    train_on = Trainer.run

    def losing(trainer: Trainer) -> Any:
        trainer.feeder.source.lacks.update(range(12))  # type: ignore[attr-defined]
        return train_on(trainer)

    monkeypatch.setattr(Trainer, "run", losing)  # the self-check needs a row
    result = run("none", set(), epochs=1, replay=replay, train_data_ratio=1.0, states_cache_gib=0)
    assert (result.reason, result.global_step) == ("finished", result.total_steps)
    assert all(
        "loss" not in record["train"] and "grad_norm" not in record["train"] for record in records(tmp_path / "none", "train")
    )
    assert all(step["left_out"] == sorted(step["rows"]) for step in account(tmp_path / "none"))
    found = check_account(tmp_path / "none", range(12), replay=replay)
    assert (found.exact, found.uses, found.left_out) == (True, 0, 12 * replay)


def test_validation_goes_without_them_too(run, tmp_path: Path) -> None:
    """The last rows validate; without one of them the means are those of the other, and without both there are none."""
    some, all_there, none = (
        run(name, lacks).validation for name, lacks in (("some", {11}), ("all", set()), ("none", {10, 11}))
    )
    assert some["loss"] != all_there["loss"]
    assert np.isfinite(some["loss"])
    assert "loss" not in none


def test_a_row_without_states_is_an_error_where_none_may_be_left_out(run) -> None:
    with pytest.raises(DataError, match="gave no states for row"):
        run("strict", {3}, on_missing="generate")


def test_a_cache_leaves_out_what_its_source_does_and_asks_once(verifier: Any) -> None:
    rows = tiny_rows()
    source = Lacking(verifier, {3})
    cached = CachedSource(source, rows, max_bytes=1 << 30)
    for _ in range(2):
        assert [states.row_id for states in cached.fetch([rows[2], rows[3], rows[4]])] == [2, 4]
    calls = source.calls
    cached.fetch([rows[3]])
    assert source.calls == calls


# -- the account -----------------------------------------------------------------------------------------------------------


def lines(folder: Path, steps: list[dict[str, Any]], replay: int = 1) -> Path:
    book = Account(folder, replay, 2)
    book.rewind(0)
    for number, step in enumerate(steps):
        book.append(**{"global_step": number + 1, "epoch": 0, "step": number, "use": 0, "rows": [], **step})
    return folder


GOOD = [{"rows": [0, 1]}, {"rows": [2]}, {"rows": [2, 1], "epoch": 1}, {"rows": [0], "epoch": 1}]


@pytest.mark.parametrize(
    ("steps", "replay", "words"),
    [
        (GOOD, 1, None),
        (GOOD[:3], 1, None),  # the last epoch may be cut
        ([{"rows": [0, 1, 2]}, {"rows": [0, 1, 2], "use": 1}], 2, None),
        ([*GOOD[:2], {"rows": [2]}], 1, "epoch 0 used row 2 2 times"),
        ([GOOD[0], *GOOD[2:]], 1, "epoch 0 is over and did not use every row"),
        ([{"rows": [0, 7]}], 1, "used row 7 as use 0, which nobody planned"),
        ([{"rows": [0], "use": 1}], 1, "used row 0 as use 1, which nobody planned"),
        ([GOOD[0], {**GOOD[1], "global_step": 3}], 1, "step 2 is missing, double or out of order"),
        ([{"rows": [0], "left_out": [1]}], 1, "left out rows that it did not plan"),
        (GOOD, 2, "used rows 1 times, not 2"),
    ],
)
def test_an_account_is_exact_or_says_what_is_wrong(tmp_path: Path, steps: list, replay: int, words: str | None) -> None:
    folder = lines(tmp_path, steps, replay=1 if words and "not 2" in words else replay)
    found = check_account(folder, range(3), replay=replay)
    assert found.reorder_window == 0
    if words is None:
        assert found.exact, found.faults
    else:
        assert any(words in fault for fault in found.faults), found.faults


def test_what_is_no_account_is_refused(tmp_path: Path) -> None:
    for content in ("", "[]\n", "{\n", '{"loss": 1}\n{"a": 2}\n'):
        (tmp_path / "account.jsonl").write_text(content)
        with pytest.raises(DataError):
            check_account(tmp_path, [0])
