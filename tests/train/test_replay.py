"""Using captured rows several times: the order, the buffer, fresh anchors, and going on after a kill."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from speculators.data import Row
from speculators.layout import BlockLayout
from speculators.train import train
from speculators.train.account import check_account
from speculators.train.planning import Recipe, StepPlanner
from speculators.train.replay import ReplayBuffer, held_steps, use_order
from speculators.verifiers.source import CachedSource, HiddenStates
from tests.train.helpers import RowByRowSource, loaded_verifier, settings, tiny_rows


class Killed(BaseException):
    """Ends a training as a kill would: nothing of the library catches it."""


class CountingSource(RowByRowSource):
    """Notes what it is asked for."""

    def __init__(self, verifier: Any) -> None:
        super().__init__(verifier)
        self.asked: list[int] = []

    def fetch(self, rows: Sequence[Row]) -> list[HiddenStates]:
        self.asked.extend(row.row_id for row in rows)
        return super().fetch(rows)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("replay")


@pytest.fixture(scope="module")
def verifier(folder: Path) -> Any:
    return loaded_verifier(folder)


@pytest.fixture
def run(folder: Path, verifier: Any, tmp_path: Path):
    def do(name: str, source: Any = None, on_step: Any = None, **changes: Any) -> Any:
        config = settings(folder, save_path=str(tmp_path / name), **{"train_data_ratio": 1.0, **changes})
        return train(config, dataset=tiny_rows(), verifier=verifier, source=source, progress=False, on_step=on_step)

    return do


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]


def test_windows_are_run_several_times_over() -> None:
    assert use_order(5, 2, 2) == [(0, 0), (1, 0), (0, 1), (1, 1), (2, 0), (3, 0), (2, 1), (3, 1), (4, 0), (4, 1)]
    assert use_order(3, 1, 2) == [(0, 0), (1, 0), (2, 0)]


@given(steps=st.integers(1, 20), uses=st.integers(1, 4), window=st.integers(1, 25))
def test_every_step_is_used_as_often_and_no_more_than_a_window_is_held(steps: int, uses: int, window: int) -> None:
    order = use_order(steps, uses, window)
    assert Counter(order) == Counter({(step, use): 1 for step in range(steps) for use in range(uses)})
    first_uses = [step for step, use in order if use == 0]
    assert first_uses == list(range(steps))
    for done in range(len(order) + 1):
        held = held_steps(order, done)
        assert len(held) <= (window if uses > 1 else 0)
        # The buffer, filled by what is left of the plan, holds nothing else, wherever the run began.
    plan = [(step,) for step, _ in order]
    for begin in (0, len(order) // 2):
        buffer, left = ReplayBuffer(), plan[begin:]
        requests = buffer.requests(left)
        answers = buffer.answers(left, iter([[states(packed[0])] for packed in requests]))
        for place, packed in enumerate(left):
            assert next(answers)[0].row_id == packed[0]
            assert buffer.nbytes <= states(0).features.nbytes * 2 * len(held_steps(order, begin + place + 1))
        assert next(answers, None) is None
        assert buffer.nbytes == 0


def states(row_id: int) -> HiddenStates:
    return HiddenStates(row_id, torch.zeros(1), torch.zeros(1, 1, 2), torch.zeros(1, 2))


def planner(replay: int, window: int = 2, world: int = 1, rank: int = 0) -> StepPlanner:
    recipe = Recipe(tiny_rows(), 64, 4, "row", 0, BlockLayout(4, True), BlockLayout(2, True), 0.5)
    return StepPlanner(recipe, np.arange(12), 1 * world, world, rank, replay=replay, window=window)


def test_every_use_of_every_epoch_draws_anew_and_one_use_draws_by_epoch() -> None:
    plain, replayed = planner(1), planner(3)
    assert replayed.steps_per_epoch == 3 * plain.steps_per_epoch
    for epoch in range(3):
        for before, now in zip(plain.steps(epoch), [step for step in replayed.steps(epoch) if step.use == 0], strict=True):
            assert before.mine == now.mine
            assert before.draw == epoch  # what a training without replay has always drawn by
    draws = [(step.index, step.draw) for epoch in range(3) for step in replayed.steps(epoch)]
    assert len(set(draws)) == len(draws)
    anchors = {
        tuple(replayed.recipe.batch(step.mine[0], step.draw).anchors.tolist()) for step in replayed.steps(0) if step.index == 0
    }
    assert len(anchors) == 3


def test_which_rows_are_held_is_said_for_the_whole_job() -> None:
    for rank in (0, 1):
        two = planner(2, window=1, world=2, rank=rank)
        assert two.held_rows(1, 0) == ()
        assert two.held_rows(1, 1) == tuple(sorted(two.steps(1)[0].row_ids))
        assert two.held_rows(1, 2) == ()
        assert set(two.steps(1)[0].row_ids) > {row for packed in two.steps(1)[0].mine for row in packed}


def test_a_training_without_replay_has_the_losses_it_always_had(run, tmp_path: Path) -> None:
    """Recorded before there was replay; the first are compared closely, later ones carry a machine's rounding along."""
    run("plain", train_data_ratio=..., epochs=2)
    run("rich", train_data_ratio=..., epochs=3, short_block_size=2, noise_std=0.02, gradient_accumulation_steps=2)
    known = {
        "plain": [(1.940358397933534, 0.9024390243902439), (1.836366291949851, 0.9), (1.9449783482178693, 0.8571428571428571)],
        "rich": [(1.8935598291913722, 0.9012345679012346), (1.98312191457781, 0.9178082191780822)],
    }
    for name, numbers in known.items():
        found = [record["train"] for record in records(tmp_path / name) if "train" in record]
        for record, (loss, coverage) in zip(found, numbers):
            assert record["loss"] == pytest.approx(loss, abs=1e-5)
            assert record["anchor_coverage"] == coverage


def test_a_captured_row_is_used_so_often_and_asked_for_once(run, verifier: Any, tmp_path: Path) -> None:
    source = CountingSource(verifier)
    changes = {"epochs": 1, "replay": 3, "replay_window": 2}
    steps = run("replayed", source=source, **changes).total_steps
    assert steps == planner(3).steps_per_epoch
    # All rows, and the one that the start-up self-check asks for.
    assert sorted(Counter(source.asked).values()) == [1] * 11 + [2]
    assert check_account(tmp_path / "replayed", range(12), replay=3).exact
    # Where the source keeps all states itself nothing is kept beside it, and the bits are the same.
    keeping = CountingSource(verifier)
    keeping.keeps_states = True  # type: ignore[attr-defined]
    run("kept", source=keeping, **changes)
    assert len(keeping.asked) == 3 * 12 + 1
    with_buffer, without = (
        [record for record in records(tmp_path / name) if "train" in record] for name in ("replayed", "kept")
    )
    assert [record["train"] for record in without] == [record["train"] for record in with_buffer]
    assert max(record["source"]["replay_bytes"] for record in with_buffer) > 0
    assert {record["source"]["replay_bytes"] for record in without} == {0}


def test_a_cache_keeps_states_if_they_fit(verifier: Any) -> None:
    for room, keeps in ((1 << 30, True), (0, False)):
        assert CachedSource(RowByRowSource(verifier), tiny_rows(), max_bytes=room).keeps_states is keeps


CHANGES = {"epochs": 2, "replay": 2, "replay_window": 3, "checkpoint_steps": 5, "checkpoint_freq": 2, "noise_std": 0.02}


@pytest.fixture(scope="module")
def whole(folder: Path, verifier: Any) -> tuple[Path, CountingSource]:
    """A run that nothing disturbs, and its source."""
    source = CountingSource(verifier)
    config = settings(folder, save_path=str(folder / "whole"), train_data_ratio=1.0, **CHANGES)
    train(config, dataset=tiny_rows(), verifier=verifier, source=source, progress=False)
    return folder / "whole", source


@pytest.mark.parametrize("killed_at", [8, 13])
def test_a_killed_run_captures_again_what_it_held_and_goes_on_bit_for_bit(
    run, verifier: Any, whole: tuple[Path, CountingSource], tmp_path: Path, killed_at: int
) -> None:
    undisturbed, whole_source = whole

    def kill(info: Any) -> None:
        if info.global_step == killed_at:
            raise Killed

    with pytest.raises(Killed):
        run("cut", source=CountingSource(verifier), on_step=kill, **CHANGES)
    again = CountingSource(verifier)
    resumed = run("cut", source=again, **CHANGES)
    found, expected = ([r["train"] for r in records(path) if "train" in r] for path in (tmp_path / "cut", undisturbed))
    assert found == expected
    account = check_account(tmp_path / "cut", range(12), replay=2)
    assert account.exact, account.faults
    assert (tmp_path / "cut" / "account.jsonl").read_bytes() == (undisturbed / "account.jsonl").read_bytes()
    # Asked for once more: what the rest of the plan uses, rows that were held and their later uses included, once each.
    self_check = len(whole_source.asked) - 2 * 12
    assert resumed.resumed_from is not None
    state = json.loads((resumed.resumed_from / "training_state.json").read_text())
    plan = planner_of_run()
    remaining = {row for step in plan.steps(state["epoch"], state["local_step"]) for row in step.row_ids}
    assert state["replayed"] == list(plan.held_rows(state["epoch"], state["local_step"]))
    assert state["replayed"]
    assert set(state["replayed"]) <= remaining
    assert len(again.asked) - self_check == len(remaining) + (1 - state["epoch"]) * 12


def planner_of_run() -> StepPlanner:
    recipe = Recipe(tiny_rows(), 64, 16, "row", 42, BlockLayout(4, True))
    return StepPlanner(recipe, np.arange(12), 1, replay=2, window=3)
