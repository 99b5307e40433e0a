"""Markov and confidence heads against plain loops over their formulas."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from speculators.models.dspark import DSparkDraftModel
from speculators.models.heads import ConfidenceHead, DraftHeads, MarkovHead
from tests.models.small import HIDDEN, VOCAB, draft_config

RANK, DRAFT = 6, 12
TYPES: list[Any] = ["vanilla", "gated", "rnn"]


def head_of(head_type: Any) -> MarkovHead:
    torch.manual_seed(0)
    return MarkovHead(head_type, HIDDEN, RANK, VOCAB, DRAFT).double()


def bias_by_loops(head: MarkovHead, hidden: Tensor, previous: Tensor) -> Tensor:
    """One block and depth at a time, from the formulas."""
    w1, w2 = head.markov_w1.weight, head.markov_w2.weight
    result = []
    for block in range(hidden.shape[0]):
        state, rows = torch.zeros(RANK, dtype=torch.float64), []
        for depth in range(hidden.shape[1]):
            embedded, h = w1[previous[block, depth]], hidden[block, depth]
            if head.head_type == "vanilla":
                code = embedded
            elif head.head_type == "gated":
                gate = torch.sigmoid(head.gate_proj.weight @ torch.cat([h, embedded]) + head.gate_proj.bias)
                code = gate * embedded
            else:
                joint = head.joint_proj.weight @ torch.cat([state, embedded, h]) + head.joint_proj.bias
                gate, candidate, out = torch.sigmoid(joint[:RANK]), joint[RANK : 2 * RANK], joint[2 * RANK :]
                state = gate * state + (1 - gate) * torch.tanh(candidate)
                code = torch.tanh(out)
            rows.append(w2 @ code)
        result.append(torch.stack(rows))
    return torch.stack(result)


@pytest.mark.parametrize("head_type", TYPES)
def test_teacher_forced_bias_is_the_formula(head_type: Any) -> None:
    head = head_of(head_type)
    lm_head = torch.nn.Linear(HIDDEN, DRAFT, bias=False).double()
    hidden = torch.randn(3, 4, HIDDEN, dtype=torch.float64)
    previous = torch.randint(0, VOCAB, (3, 4))
    logits = DraftHeads(lm_head, head).logits(hidden, previous)
    torch.testing.assert_close(logits, lm_head(hidden) + bias_by_loops(head, hidden, previous), rtol=0, atol=1e-12)


@pytest.mark.parametrize("head_type", TYPES)
def test_slots_that_predict_nothing_come_before_the_others(head_type: Any) -> None:
    """The fill-in layout's anchor slot is read first, as in upstream's training; only an rnn head remembers it."""
    head = head_of(head_type)
    lm_head = torch.nn.Linear(HIDDEN, DRAFT, bias=False).double()
    hidden = torch.randn(3, 5, HIDDEN, dtype=torch.float64)
    previous = torch.randint(0, VOCAB, (3, 5))
    whole = lm_head(hidden) + bias_by_loops(head, hidden, previous)
    heads = DraftHeads(lm_head, head).after(hidden, previous[:, 0], 1)
    torch.testing.assert_close(heads.logits(hidden[:, 1:], previous[:, 1:]), whole[:, 1:], rtol=0, atol=1e-12)
    parts = sum(torch.nn.functional.linear(*part) for part in heads.linear_parts(hidden[:, 1:], previous[:, 1:]))
    torch.testing.assert_close(parts, whole[:, 1:], rtol=0, atol=1e-12)
    last = heads.rows(slice(2, 3)).logits(hidden[2:, 1:], previous[2:, 1:])
    torch.testing.assert_close(last, whole[2:, 1:], rtol=0, atol=1e-12)


@pytest.mark.parametrize("head_type", TYPES)
def test_steps_equal_teacher_forcing(head_type: Any) -> None:
    head = head_of(head_type)
    hidden = torch.randn(3, 4, HIDDEN, dtype=torch.float64)
    previous = torch.randint(0, VOCAB, (3, 4))
    state, codes = head.start(3), []
    for depth in range(4):
        code, state = head.step(hidden[:, depth], previous[:, depth], state)
        codes.append(code)
    torch.testing.assert_close(torch.stack(codes, dim=1), head.codes(hidden, previous), rtol=0, atol=1e-12)


def test_without_heads_the_logits_are_the_base_heads() -> None:
    lm_head = torch.nn.Linear(HIDDEN, DRAFT, bias=False)
    hidden = torch.randn(2, 3, HIDDEN)
    heads = DraftHeads(lm_head)
    assert torch.equal(heads.logits(hidden, torch.zeros(2, 3, dtype=torch.long)), lm_head(hidden))
    assert heads.confidence_logits(hidden, torch.zeros(2, 3, dtype=torch.long)) is None


@pytest.mark.parametrize("with_markov", [True, False])
def test_confidence_is_linear_in_state_and_embedding(with_markov: bool) -> None:
    markov = head_of("vanilla")
    confidence = ConfidenceHead(HIDDEN, RANK if with_markov else 0, detach=False).double()
    heads = DraftHeads(torch.nn.Linear(HIDDEN, DRAFT, bias=False), markov, confidence, with_markov)
    hidden = torch.randn(2, 3, HIDDEN, dtype=torch.float64)
    previous = torch.randint(0, VOCAB, (2, 3))
    inputs = torch.cat([hidden, markov.markov_w1(previous)], dim=-1) if with_markov else hidden
    expected = inputs @ confidence.proj.weight[0] + confidence.proj.bias
    torch.testing.assert_close(heads.confidence_logits(hidden, previous), expected)


@pytest.mark.parametrize("detach", [True, False])
def test_detached_confidence_sends_no_gradient_back(detach: bool) -> None:
    model: Any = DSparkDraftModel(draft_config(confidence_detach=detach))
    hidden = torch.randn(2, 4, HIDDEN, requires_grad=True)
    logits = model.heads.confidence_logits(hidden, torch.randint(0, VOCAB, (2, 4)))
    logits.sum().backward()
    assert (hidden.grad is None) is detach
    assert (model.markov_head.markov_w1.weight.grad is None) is detach
    assert model.confidence_head.proj.weight.grad is not None


def test_heads_start_near_zero_whatever_the_decoders_range() -> None:
    torch.manual_seed(0)
    config = draft_config(markov_rank=256)
    assert config.transformer_layer_config.initializer_range == 0.5
    model: Any = DSparkDraftModel(config)
    model.requires_grad_(False)
    w1, w2 = model.markov_head.markov_w1.weight, model.markov_head.markov_w2.weight
    assert w1.std() == pytest.approx(0.02, rel=0.1)
    assert (w1 @ w2.t()).std() == pytest.approx(0.0064, rel=0.1)
    assert model.confidence_head.proj.weight.std() == pytest.approx(0.02, rel=0.3)
    assert not model.confidence_head.proj.bias.any()
    assert model.layers[0].mlp.up_proj.weight.std() == pytest.approx(0.5, rel=0.2)
    assert torch.equal(model.norm.weight, torch.ones(HIDDEN))
