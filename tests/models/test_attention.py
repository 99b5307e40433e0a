"""Attention of anchored blocks: the reference against explicit loops, and the fast implementation against the reference."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from speculators.models import attention
from speculators.models.attention import block_attention, plan_attention

SETTINGS = [
    {"window": window, "window_reference": reference, "causal_block": causal}
    for window, reference in ((None, "anchor"), (3, "anchor"), (3, "slot"), (1, "slot"), (100, "slot"))
    for causal in (False, True)
]


def tensors(num_anchors: int, num_slots: int, length: int, heads: int = 4, kv_heads: int = 2, size: int = 3) -> list[Tensor]:
    generator = torch.Generator().manual_seed(num_anchors + 7 * length)
    shapes = [(num_anchors, num_slots, heads, size)] + [(length, kv_heads, size)] * 2
    shapes += [(num_anchors, num_slots, kv_heads, size)] * 2
    return [torch.randn(*shape, generator=generator, dtype=torch.float64, requires_grad=True) for shape in shapes]


def by_loops(
    inputs: list[Tensor],
    anchors: list[int],
    documents: list[int],
    window: int | None,
    window_reference: str,
    causal_block: bool,
) -> Tensor:
    """The definition, one slot and head at a time, without the library's masks."""
    q, k_context, v_context, k_block, v_block = (tensor.detach() for tensor in inputs)
    group = q.shape[2] // k_context.shape[1]
    output = torch.zeros_like(q)
    for block, anchor in enumerate(anchors):
        for slot in range(q.shape[1]):
            seen = []
            for position in range(k_context.shape[0]):
                if documents[position] != documents[anchor] or documents[anchor] == -1 or position >= anchor:
                    continue
                if window is not None:
                    oldest = anchor - window if window_reference == "anchor" else anchor + slot - window + 1
                    if position < oldest:
                        continue
                seen.append((k_context[position], v_context[position]))
            for other in range(q.shape[1]):
                if not causal_block or other <= slot:
                    seen.append((k_block[block, other], v_block[block, other]))
            for head in range(q.shape[2]):
                own = head // group
                scores = torch.stack([q[block, slot, head] @ key[own] / math.sqrt(q.shape[3]) for key, _ in seen])
                values = torch.stack([value[own] for _, value in seen])
                output[block, slot, head] = scores.softmax(dim=0) @ values
    return output


@pytest.mark.parametrize("setting", SETTINGS)
def test_reference_is_the_definition(setting: dict[str, Any]) -> None:
    documents = [0] * 6 + [1] * 5 + [-1] * 2
    anchors = [0, 2, 5, 6, 7, 10, 11]
    inputs = tensors(len(anchors), 3, len(documents))
    output = block_attention(*inputs, torch.tensor(anchors), torch.tensor(documents), impl="reference", **setting)
    torch.testing.assert_close(output, by_loops(inputs, anchors, documents, **setting), rtol=0, atol=1e-12)


def assert_same(inputs: list[Tensor], anchors: Tensor, documents: Tensor, **setting: Any) -> None:
    weights = torch.randn(inputs[0].shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    results = []
    for impl in ("reference", "document"):
        output = block_attention(*inputs, anchors, documents, impl=impl, **setting)
        results.append([output, *torch.autograd.grad((output * weights).sum(), inputs)])
    for expected, found in zip(*results):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("blocks_per_range", [1, 2, 32])
def test_document_equals_reference(setting: dict[str, Any], blocks_per_range: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "BLOCKS_PER_RANGE", blocks_per_range)
    documents = torch.tensor([0] * 9 + [1] * 1 + [2] * 12 + [-1] * 3)
    anchors = torch.tensor([0, 3, 4, 8, 9, 10, 13, 14, 20, 21, 22])
    assert_same(tensors(len(anchors), 4, len(documents)), anchors, documents, **setting)


def test_unsorted_anchors_keep_their_order() -> None:
    documents = torch.tensor([0] * 8 + [1] * 8)
    anchors = torch.tensor([12, 3, 15, 7, 3])
    for setting in SETTINGS:
        assert_same(tensors(5, 2, 16), anchors, documents, **setting)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_document_equals_reference_on_any_row(data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))
    padding = data.draw(st.integers(0, 3))
    documents = [index for index, length in enumerate(lengths) for _ in range(length)] + [-1] * padding
    anchors = sorted(data.draw(st.lists(st.integers(0, len(documents) - 1), min_size=1, max_size=8)))
    setting = data.draw(st.sampled_from(SETTINGS))
    slots, heads = data.draw(st.integers(1, 4)), data.draw(st.sampled_from([(4, 2), (3, 3), (3, 1)]))
    inputs = tensors(len(anchors), slots, len(documents), *heads)
    assert_same(inputs, torch.tensor(anchors), torch.tensor(documents), **setting)


def test_no_anchor_gives_an_empty_output_with_a_graph() -> None:
    inputs = tensors(0, 4, 5)
    output = block_attention(*inputs, torch.zeros(0, dtype=torch.long), torch.zeros(5, dtype=torch.long))
    assert output.shape == (0, 4, 4, 3)
    gradients = torch.autograd.grad(output.sum(), inputs)
    assert all(not gradient.any() for gradient in gradients)


def test_a_wide_row_is_cut_to_what_its_blocks_see() -> None:
    documents = torch.zeros(1000, dtype=torch.long)
    anchors = torch.arange(100, 1000, 10)
    plan = plan_attention(anchors, documents, window=50)
    assert [part.first_block for part in plan.ranges] == [0, 32, 64]
    assert plan.ranges[1].context_start == 100 + 320 - 50
    assert plan.ranges[1].context_end == 100 + 630
    assert plan_attention(anchors, documents).ranges[1].context_start == 0


def test_scattered_documents_are_refused() -> None:
    with pytest.raises(ValueError, match="one run of positions"):
        plan_attention(torch.tensor([1]), torch.tensor([0, 1, 0]))


def test_unknown_implementation_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown block_attention implementation"):
        block_attention(*tensors(1, 2, 3), torch.tensor([1]), torch.zeros(3), impl="flash")  # type: ignore[arg-type]
