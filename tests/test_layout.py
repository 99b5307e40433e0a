"""Layout facts as printed truth tables, and the counting rules against plain loops."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from speculators.layout import (
    PAD_DOCUMENT,
    BlockLayout,
    anchor_candidates,
    block_input_ids,
    counted_predictions,
    depth_weight,
    label_position,
    previous_position,
    sees_block,
    sees_context,
    slot_position,
    state_position,
    truth_table,
)

ANCHOR_FIRST = """\
slot | position | predicts | depth | previous | state
0 | 10 | x11 | 0 | x10 | h10
1 | 11 | x12 | 1 | x11 | h11
2 | 12 | x13 | 2 | x12 | h12
3 | 13 | x14 | 3 | x13 | h13"""

FILL_IN = """\
slot | position | predicts | depth | previous | state
0 | 10 | - | - | - | -
1 | 11 | x11 | 0 | x10 | h10
2 | 12 | x12 | 1 | x11 | h11
3 | 13 | x13 | 2 | x12 | h12"""


@pytest.mark.parametrize(("sample_from_anchor", "table"), [(True, ANCHOR_FIRST), (False, FILL_IN)])
def test_truth_table(sample_from_anchor: bool, table: str) -> None:
    assert truth_table(BlockLayout(4, sample_from_anchor), anchor=10) == table


@pytest.mark.parametrize("sample_from_anchor", [True, False])
def test_slots_and_depths_are_inverse_maps(sample_from_anchor: bool) -> None:
    layout = BlockLayout(8, sample_from_anchor)
    assert layout.max_draft_tokens == (8 if sample_from_anchor else 7)
    for depth in range(layout.max_draft_tokens):
        slot = layout.slot_of_depth(depth)
        assert 0 <= slot < layout.block_size
        assert layout.depth_of_slot(slot) == depth
    # The fill-in layout's mask slots predict their own position, anchor-first slots the one after.
    slots = torch.arange(8)
    predicted = label_position(10, layout.depth_of_slot(slots))
    assert torch.equal(predicted, slot_position(10, slots) + (1 if sample_from_anchor else 0))


def test_state_and_previous_token_sit_one_before_the_label() -> None:
    for depth in range(8):
        assert previous_position(10, depth) == state_position(10, depth) == label_position(10, depth) - 1


@pytest.mark.parametrize(("sample_from_anchor", "tokens", "slots"), [(True, 3, 3), (True, 8, 8), (False, 3, 4), (False, 7, 8)])
def test_query_slots(sample_from_anchor: bool, tokens: int, slots: int) -> None:
    assert BlockLayout(8, sample_from_anchor).query_slots(tokens) == slots


@pytest.mark.parametrize(("sample_from_anchor", "tokens"), [(True, 9), (False, 8), (True, 0), (False, -1)])
def test_query_slots_refuses_what_a_block_cannot_draft(sample_from_anchor: bool, tokens: int) -> None:
    with pytest.raises(ValueError, match=f"cannot draft {tokens} tokens"):
        BlockLayout(8, sample_from_anchor).query_slots(tokens)


@pytest.mark.parametrize(("block_size", "sample_from_anchor"), [(0, True), (1, False)])
def test_a_block_predicts_at_least_one_token(block_size: int, sample_from_anchor: bool) -> None:
    with pytest.raises(ValueError, match="leaves no token to predict"):
        BlockLayout(block_size, sample_from_anchor)


def test_depth_weights_of_a_block_of_eight() -> None:
    weights = [depth_weight(depth, 4.0) for depth in range(8)]
    assert [round(weight, 4) for weight in weights] == [1.0, 0.7788, 0.6065, 0.4724, 0.3679, 0.2865, 0.2231, 0.1738]
    assert math.isclose(sum(weights), 3.9090, abs_tol=5e-5)


def test_context_visibility_is_strictly_before_the_anchor() -> None:
    context = torch.arange(12)
    assert context[sees_context(context, 5, 0)].tolist() == [0, 1, 2, 3, 4]
    assert context[sees_context(context, 5, 3)].tolist() == [0, 1, 2, 3, 4]
    # A window of 3 measured from the anchor is the same for every slot; measured from the slot it slides along.
    assert context[sees_context(context, 5, 3, 3, "anchor")].tolist() == [2, 3, 4]
    assert [context[sees_context(context, 5, slot, 3, "slot")].tolist() for slot in range(4)] == [[3, 4], [4], [], []]


def test_block_visibility() -> None:
    slots = torch.arange(4)
    causal = sees_block(slots[:, None], slots[None, :], causal=True)
    assert torch.equal(causal, torch.ones(4, 4).tril().bool())
    assert bool(sees_block(slots[:, None], slots[None, :], causal=False).all())


def test_block_input_ids() -> None:
    assert block_input_ids(torch.tensor([7, 9]), 3, 63).tolist() == [[7, 63, 63], [9, 63, 63]]


def turn(start: int, end: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Mask of one supervised span [start, end) in one document of ``length`` tokens."""
    positions = torch.arange(length)
    return (positions >= start) & (positions < end), torch.zeros(length, dtype=torch.long)


def counted(anchors: list[int], depths: int, mask: torch.Tensor, documents: torch.Tensor) -> list[list[int]]:
    return counted_predictions(torch.tensor(anchors), depths, mask, documents).int().tolist()


def test_a_slot_is_gated_by_its_label_not_by_itself() -> None:
    """Field report vllm-project/speculators#865: turn 8-39, block 4, anchor 37; x39 is the last label, x40 is the separator."""
    mask, documents = turn(8, 40, 60)
    assert counted([37], BlockLayout(4, True).max_draft_tokens, mask, documents) == [[1, 1, 0, 0]]
    # The fill-in layout predicts the same tokens, from slots 1 to 3.
    assert counted([37], BlockLayout(4, False).max_draft_tokens, mask, documents) == [[1, 1, 0]]


def test_boundary_anchors_of_a_span() -> None:
    mask, documents = turn(8, 40, 60)
    candidates = anchor_candidates(mask, documents).nonzero().flatten().tolist()
    assert candidates == list(range(8, 39))  # the last token has no supervised successor
    assert counted([8, 38], 4, mask, documents) == [[1, 1, 1, 1], [1, 0, 0, 0]]


def test_blocks_never_run_into_the_next_document() -> None:
    """Field reports #901 and #678: everything supervised, documents [0, 6) and [6, 12)."""
    mask = torch.ones(12, dtype=torch.bool)
    documents = torch.tensor([0] * 6 + [1] * 6)
    assert counted([3, 4, 6], 4, mask, documents) == [[1, 1, 0, 0], [1, 0, 0, 0], [1, 1, 1, 1]]
    candidates = anchor_candidates(mask, documents)
    assert candidates.nonzero().flatten().tolist() == [0, 1, 2, 3, 4, 6, 7, 8, 9, 10]


def test_blocks_end_with_the_row_and_with_padding() -> None:
    mask = torch.ones(8, dtype=torch.bool)
    assert counted([5, 6], 4, mask, torch.zeros(8, dtype=torch.long)) == [[1, 1, 0, 0], [1, 0, 0, 0]]
    padded = torch.tensor([0] * 6 + [PAD_DOCUMENT] * 2)
    assert counted([3, 4], 4, mask, padded) == [[1, 1, 0, 0], [1, 0, 0, 0]]
    # Padding is never an anchor, whatever its mask says.
    assert anchor_candidates(mask, padded).nonzero().flatten().tolist() == [0, 1, 2, 3, 4]
    assert counted([6], 2, mask, torch.full((8,), PAD_DOCUMENT)) == [[0, 0]]


def test_counting_does_not_resume_on_the_next_turn() -> None:
    mask = torch.tensor([0, 1, 1, 0, 1, 1, 1, 0]).bool()
    assert counted([1], 5, mask, torch.zeros(8, dtype=torch.long)) == [[1, 0, 0, 0, 0]]


def test_no_anchor_gives_an_empty_table() -> None:
    mask = torch.zeros(4, dtype=torch.bool)
    result = counted_predictions(torch.zeros(0, dtype=torch.long), 3, mask, torch.zeros(4, dtype=torch.long))
    assert result.shape == (0, 3)


@st.composite
def rows(draw: st.DrawFn) -> tuple[list[bool], list[int]]:
    """A packed row: documents in order, padding at the end, any mask."""
    lengths = draw(st.lists(st.integers(1, 7), min_size=1, max_size=4))
    documents = [index for index, length in enumerate(lengths) for _ in range(length)]
    documents += [PAD_DOCUMENT] * draw(st.integers(0, 3))
    mask = draw(st.lists(st.booleans(), min_size=len(documents), max_size=len(documents)))
    return mask, documents


@settings(deadline=None, max_examples=150)
@given(rows())
def test_anchor_candidates_against_a_loop(row: tuple[list[bool], list[int]]) -> None:
    mask, documents = row
    expected = []
    for position in range(len(mask)):
        following = position + 1
        expected.append(
            documents[position] != PAD_DOCUMENT
            and mask[position]
            and following < len(mask)
            and mask[following]
            and documents[following] == documents[position]
        )
    assert anchor_candidates(torch.tensor(mask), torch.tensor(documents)).tolist() == expected


@settings(deadline=None, max_examples=150)
@given(rows(), st.integers(1, 9))
def test_counted_predictions_against_a_loop(row: tuple[list[bool], list[int]], num_depths: int) -> None:
    mask, documents = row
    anchors = list(range(len(mask)))
    expected = []
    for anchor in anchors:
        line, alive = [], documents[anchor] != PAD_DOCUMENT
        for depth in range(num_depths):
            label = anchor + 1 + depth
            alive = alive and label < len(mask) and mask[label] and documents[label] == documents[anchor]
            line.append(alive)
        expected.append(line)
    result = counted_predictions(torch.tensor(anchors), num_depths, torch.tensor(mask), torch.tensor(documents))
    assert result.tolist() == expected
    # Every candidate anchor predicts at least one token, and nothing else supervised does.
    candidates = anchor_candidates(torch.tensor(mask), torch.tensor(documents))
    assert torch.equal(candidates, result[:, 0] & torch.tensor(mask))
