"""Row order, packing, anchors and batches: pure functions of (seed, epoch, row id), whatever the number of processes."""

from __future__ import annotations

import dataclasses
from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from speculators.batch import PackedBatch
from speculators.data import (
    Row,
    RowDataset,
    attach_states,
    build_batch,
    deal,
    packing_waste,
    plan_epoch,
    plan_steps,
    sample_anchors,
)
from speculators.errors import ConfigError, DataError
from speculators.layout import PAD_DOCUMENT, anchor_candidates, counted_predictions
from tests.tiny import random_rows

LENGTHS = np.random.default_rng(0).integers(5, 120, size=400)


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=40),
    st.integers(8, 50),
    st.integers(0, 5),
    st.integers(0, 3),
    st.booleans(),
)
def test_every_row_is_packed_once_and_fits(lengths: list[int], seq_len: int, seed: int, epoch: int, shuffle: bool) -> None:
    plan = plan_epoch(lengths, seq_len, seed, epoch, shuffle=shuffle)
    assert sorted(row for packed in plan for row in packed) == list(range(len(lengths)))
    assert all(sum(min(lengths[row], seq_len) for row in packed) <= seq_len for packed in plan)
    assert plan == plan_epoch(lengths, seq_len, seed, epoch, shuffle=shuffle)


def test_packing_wastes_little() -> None:
    plan = plan_epoch(LENGTHS, 256, seed=0, epoch=0)
    assert packing_waste(plan, LENGTHS, 256) < 0.02


def test_seed_and_epoch_change_the_order_but_not_the_number_of_steps() -> None:
    plans = {key: plan_epoch(LENGTHS, 256, *key) for key in [(0, 0), (0, 1), (1, 0)]}
    assert len({tuple(plan) for plan in plans.values()}) == 3
    assert len({len(plan) for plan in plans.values()}) == 1
    # Rows of equal length change company too.
    assert {frozenset(packed) for packed in plans[0, 0]} != {frozenset(packed) for packed in plans[0, 1]}


def test_a_split_is_packed_by_global_ids_and_in_order_for_validation() -> None:
    held_out = np.arange(360, 400)
    plan = plan_epoch(LENGTHS, 256, 0, 0, held_out, shuffle=False)
    assert sorted(row for packed in plan for row in packed) == held_out.tolist()
    assert plan == sorted(plan)
    assert plan == plan_epoch(LENGTHS, 256, 5, 7, held_out, shuffle=False)


def test_plans_refuse_nothing_and_empty_rows() -> None:
    with pytest.raises(DataError, match="no rows to pack"):
        plan_epoch([], 10, 0, 0)
    with pytest.raises(DataError, match="row 1 has no tokens"):
        plan_epoch([3, 0], 10, 0, 0)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_steps_do_not_depend_on_the_number_of_processes(world_size: int) -> None:
    plan = plan_epoch(LENGTHS, 256, 0, 0)
    steps = plan_steps(plan, 8)
    assert [packed for step in steps for packed in step] == plan
    for step in steps:
        hands = [deal(step, rank, world_size, 8) for rank in range(world_size)]
        # Equal work: the same number of micro-batches everywhere, empty ones where the step is short.
        assert {len(hand) for hand in hands} == {8 // world_size}
        assert Counter(packed for hand in hands for packed in hand if packed) == Counter(step)
        assert sum(not packed for hand in hands for packed in hand) == 8 - len(step)


def test_the_tail_is_kept_unless_told_otherwise() -> None:
    plan = [(index,) for index in range(10)]
    assert [len(step) for step in plan_steps(plan, 4)] == [4, 4, 2]
    assert [len(step) for step in plan_steps(plan, 4, keep_tail=False)] == [4, 4]
    assert deal(plan_steps(plan, 4)[-1], 1, 2, 4) == [(9,), ()]
    assert deal([(0,), (1,), (2,)], 1, 2) == [(1,), ()]
    with pytest.raises(DataError, match="do not fill one step"):
        plan_steps(plan[:3], 4, keep_tail=False)


def test_dropped_rows_change_with_the_epoch() -> None:
    dropped = []
    for epoch in range(3):
        plan = plan_epoch(LENGTHS, 256, 0, epoch)
        kept = [packed for step in plan_steps(plan, 7, keep_tail=False) for packed in step]
        dropped.append(frozenset(plan) - frozenset(kept))
    assert len(set(dropped)) == 3


DATASET = RowDataset.from_rows(random_rows(12, min_length=20, max_length=60))


def make(row_ids: tuple[int, ...], max_anchors: int = 6, per: str = "document", epoch: int = 0, **options: int) -> PackedBatch:
    return build_batch(DATASET, row_ids, 256, max_anchors, per, 0, epoch, 4, **options)  # type: ignore[arg-type]


def anchors_by_row(batch: PackedBatch) -> dict[int, list[int]]:
    """Position ids of the anchors, by data-set row."""
    result: dict[int, list[int]] = {row_id: [] for row_id in batch.row_ids}
    for anchor in batch.anchors.tolist():
        result[batch.row_ids[int(batch.document_ids[anchor])]].append(int(batch.position_ids[anchor]))
    return result


def test_a_batch_holds_its_rows_end_to_end() -> None:
    batch = make((3, 7, 1))
    rows = [DATASET.row(row_id) for row_id in (3, 7, 1)]
    assert batch.row_ids == (3, 7, 1)
    assert batch.num_documents == 3
    assert batch.input_ids.tolist() == [token for row in rows for token in row.input_ids]
    assert batch.loss_mask.tolist() == [value for row in rows for value in row.loss_mask]
    assert batch.document_ids.tolist() == [document for document, row in enumerate(rows) for _ in row.input_ids]
    assert batch.position_ids.tolist() == [position for row in rows for position in range(len(row))]
    assert torch.equal(batch.anchor_ids, batch.input_ids[batch.anchors])
    assert torch.equal(batch.anchor_positions, batch.position_ids[batch.anchors])


def test_anchors_are_candidates_in_order_and_cover_what_is_said() -> None:
    batch = make((3, 7, 1))
    candidates = anchor_candidates(batch.loss_mask, batch.document_ids)
    assert candidates[batch.anchors].all()
    assert (batch.anchors.diff() > 0).all()
    counts = counted_predictions(batch.anchors, 4, batch.loss_mask, batch.document_ids)
    labels = {
        anchor + 1 + depth for anchor, length in zip(batch.anchors.tolist(), counts.sum(1).tolist()) for depth in range(length)
    }
    assert batch.covered == len(labels)
    predictable = [t for t in range(1, batch.num_tokens) if candidates[t - 1]]
    assert batch.supervised == len(predictable)
    assert labels <= set(predictable)
    everything = make((3, 7, 1), max_anchors=1000)
    assert everything.covered == everything.supervised == len(predictable)
    assert len(everything.anchors) == len(predictable)


def test_anchors_of_a_row_do_not_depend_on_its_company() -> None:
    alone = {row: anchors_by_row(make((row,)))[row] for row in (1, 3, 7)}
    for order in [(3, 7, 1), (1, 3, 7), (7, 3)]:
        assert anchors_by_row(make(order)) == {row: alone[row] for row in order}
    assert all(len(anchors) == 6 for anchors in alone.values())
    assert anchors_by_row(make((3,), epoch=1))[3] != alone[3]
    # A row that is cut keeps the keys of the tokens it keeps: its anchors are among the best of the same order.
    row = DATASET.row(3)
    cut = RowDataset.from_rows([*random_rows(3), Row(3, row.input_ids[:-3], row.loss_mask[:-3])])
    kept = anchors_by_row(build_batch(cut, (3,), 256, 6, "document", 0, 0, 4))[3]
    assert set(kept) >= {anchor for anchor in alone[3] if anchor < len(row) - 4}


def test_the_budget_per_document_does_not_starve_short_conversations() -> None:
    """Field report #1071: one budget for the packed row leaves a short document few anchors."""
    rows = [Row(0, np.zeros(200, np.int64), np.ones(200, bool)), Row(1, np.zeros(8, np.int64), np.ones(8, bool))]
    per_row = build_batch(rows, (0, 1), 256, 7, "row", 0, 0, 4)
    per_document = build_batch(rows, (0, 1), 256, 7, "document", 0, 0, 4)
    assert len(per_row.anchors) == 7
    assert {row: len(anchors) for row, anchors in anchors_by_row(per_document).items()} == {0: 7, 1: 7}


def test_anchors_are_uniform() -> None:
    mask, documents = torch.ones(9, dtype=torch.bool), torch.zeros(9, dtype=torch.long)
    drawn: Counter[int] = Counter()
    for epoch in range(1500):
        anchors, _ = sample_anchors((0,), mask, documents, 2, "row", 0, epoch, 4)
        drawn.update(anchors.tolist())
    assert set(drawn) == set(range(8))
    assert all(abs(count - 375) < 90 for count in drawn.values())


def test_wrong_budgets_are_refused() -> None:
    with pytest.raises(ConfigError, match="max_anchors is 0"):
        make((3,), max_anchors=0)
    with pytest.raises(ConfigError, match="choose row or document"):
        make((3,), per="token")


def test_rows_longer_than_the_packed_row_are_cut() -> None:
    batch = build_batch(DATASET, (3,), 10, 4, "row", 0, 0, 4)
    assert batch.num_tokens == 10
    with pytest.raises(ValueError, match="more than the 10"):
        build_batch(DATASET, (3, 4), 10, 4, "row", 0, 0, 4)


def test_padding() -> None:
    batch = make((3,), pad=True)
    length = len(DATASET.row(3))
    assert batch.num_tokens == 256
    assert (batch.document_ids[length:] == PAD_DOCUMENT).all()
    assert not batch.loss_mask[length:].any()
    assert torch.equal(batch.anchors, make((3,)).anchors)


@dataclass
class States:
    row_id: int
    token_ids: torch.Tensor
    features: torch.Tensor
    final: torch.Tensor


def states_of(row: Row) -> States:
    generator = torch.Generator().manual_seed(row.row_id)
    length = len(row)
    features, final = torch.randn(length, 3, 8, generator=generator), torch.randn(length, 8, generator=generator)
    return States(row.row_id, torch.from_numpy(row.input_ids), features, final)


def test_states_go_to_their_rows_in_any_order() -> None:
    batch = make((3, 7, 1), pad=True)
    answers = [states_of(DATASET.row(row_id)) for row_id in (1, 3, 7)]
    attached = attach_states(batch, answers)
    assert attached.features is not None
    assert attached.final_states is not None
    assert attached.features.shape == (256, 3, 8)
    by_row = {answer.row_id: answer for answer in answers}
    for document, row_id in enumerate((3, 7, 1)):
        mine = batch.document_ids == document
        assert torch.equal(attached.features[mine], by_row[row_id].features)
        assert torch.equal(attached.final_states[mine], by_row[row_id].final)
    assert (attached.features[batch.document_ids == PAD_DOCUMENT] == 0).all()
    assert batch.features is None  # the batch itself is not changed
    cut = attach_states(build_batch(DATASET, (3,), 10, 4, "row", 0, 0, 4), answers)
    assert torch.equal(cut.features, by_row[3].features[:10])


def test_wrong_states_are_refused() -> None:
    batch = make((3, 7))
    good = [states_of(DATASET.row(row_id)) for row_id in (3, 7)]
    with pytest.raises(DataError, match="no states for row 7"):
        attach_states(batch, good[:1])
    other = dataclasses.replace(good[1], token_ids=good[1].token_ids + 1)
    with pytest.raises(DataError, match="row 7 were computed for other tokens"):
        attach_states(batch, [good[0], other])
    short = dataclasses.replace(good[1], final=good[1].final[:-1])
    with pytest.raises(DataError, match="row 7 has fewer states"):
        attach_states(batch, [good[0], short])
    broken = dataclasses.replace(good[1], features=good[1].features / 0)
    with pytest.raises(DataError, match="row 7 are not finite"):
        attach_states(batch, [good[0], broken])
    assert attach_states(batch, [good[0], broken], check_finite=False).features is not None


def test_the_empty_slot() -> None:
    batch = attach_states(make(()), [], (3, 8))
    assert batch.features is not None
    assert batch.features.shape == (1, 3, 8)
    assert batch.anchors.shape == (0,)
    assert batch.supervised == batch.covered == 0
    with pytest.raises(ValueError, match="empty_shape"):
        attach_states(make(()), [])


def test_moving_a_batch_casts_states_only() -> None:
    batch = attach_states(make((3,)), [states_of(DATASET.row(3))])
    moved = batch.to("cpu", dtype=torch.float64)
    assert moved.features is not None
    assert moved.final_states is not None
    assert moved.features.dtype == moved.final_states.dtype == torch.float64
    assert moved.input_ids.dtype == torch.long
    assert (moved.row_ids, moved.supervised, moved.covered) == (batch.row_ids, batch.supervised, batch.covered)
