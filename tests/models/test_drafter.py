"""Drafting with cached context equals the training forward, and the serial loop is the heads' own."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from speculators.models import SpeculatorModel
from speculators.sampling import SamplingParams, probabilities
from tests.models.small import HIDDEN, LAYER_IDS, VOCAB, draft_config, packed_row

GREEDY = SamplingParams()
LAYOUTS = [{"sample_from_anchor": True}, {"sample_from_anchor": False}]
WINDOWS: list[dict[str, Any]] = [
    {},
    {"decoder": {"sliding_window": 3}},
    {"decoder": {"sliding_window": 3}, "sliding_window_reference": "slot", "sliding_window_non_causal": True},
    {"decoder": {"sliding_window": 2, "full_attention_indices": [0]}, "sliding_window_reference": "slot"},
]
HEADS: list[dict[str, Any]] = [
    {"markov_head_type": "vanilla"},
    {"markov_head_type": "gated"},
    {"markov_head_type": "rnn", "confidence_head_with_markov": False},
    {"markov_rank": 0, "confidence_head_with_markov": False},
    {"enable_confidence_head": False},
]


def model_of(family: str = "dspark", **values: Any) -> Any:
    torch.manual_seed(0)
    config = draft_config(family, **values)
    model: Any = SpeculatorModel.registered_model_class_from_config(config)(config).double().eval()
    with torch.no_grad():
        for head in (getattr(model, "markov_head", None), getattr(model, "confidence_head", None)):
            for parameter in () if head is None else head.parameters():
                parameter.normal_(std=0.5)
    if model.reduced_vocabulary:
        t2d = torch.zeros(VOCAB, dtype=torch.bool)
        t2d[torch.randperm(VOCAB)[: model.draft_vocab_size]] = True
        model.load_vocab_mappings(t2d, t2d.nonzero().squeeze(-1) - torch.arange(model.draft_vocab_size))
    return model


def drafter_at(model: Any, row: Any, anchor: int, chunks: list[int], **options: Any) -> Any:
    """A drafter whose context grew in these chunks up to the anchor."""
    drafter = model.drafter(**options)
    drafter.start(1)
    start = 0
    for end in [*(chunk for chunk in chunks if chunk < anchor), anchor]:
        drafter.extend([row.input_ids[start:end]], [row.features[start:end]])
        start = end
    assert drafter.context_length(0) == anchor
    return drafter


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("heads", HEADS)
def test_proposal_equals_the_training_forward(layout: dict, window: dict, heads: dict) -> None:
    """For every anchor and n: same states, and logits as teacher-forced on the drafted tokens."""
    model = model_of(**layout, **window, **heads, draft_vocab_size=25)
    anchors = [0, 1, 5, 11]
    row = packed_row([12], anchors)
    sampling = SamplingParams(temperature=0.7)
    for place, anchor in enumerate(anchors):
        for n in (1, model.layout.max_draft_tokens):
            slots = model.layout.query_slots(n)
            slot_states = model.draft_hidden(row, num_slots=slots, attn_impl="reference")
            trained = model.predicting(slot_states)[place]
            trained_heads = model.heads_of(slot_states, row.anchor_ids).rows(slice(place, place + 1))
            drafter = drafter_at(model, row, anchor, [1, 2, 4, 9])
            anchor_id = int(row.input_ids[anchor])
            served = drafter.block_hidden(0, anchor_id, slots)
            torch.testing.assert_close(served, trained, rtol=0, atol=1e-10)

            (draft,) = drafter.propose([anchor_id], n, sampling, torch.Generator().manual_seed(anchor))
            previous = torch.cat([torch.tensor([anchor_id]), draft.tokens[:-1]])
            logits = trained_heads.logits(trained[None], previous[None])[0]
            torch.testing.assert_close(draft.probabilities, probabilities(logits, sampling), rtol=0, atol=1e-10)
            assert torch.equal(draft.tokens, model.draft_to_verifier(draft.draft_ids))
            confidence = trained_heads.confidence_logits(trained[None], previous[None])
            if confidence is None:
                assert draft.confidence is None
            else:
                torch.testing.assert_close(draft.confidence, confidence[0].sigmoid(), rtol=0, atol=1e-10)

            (greedy,) = drafter.propose([anchor_id], n, GREEDY)
            previous = torch.cat([torch.tensor([anchor_id]), greedy.tokens[:-1]])
            assert torch.equal(greedy.draft_ids, trained_heads.logits(trained[None], previous[None])[0].argmax(dim=-1))
            assert greedy.probabilities is None


def test_full_block_is_the_block_cut_to_n() -> None:
    model = model_of()
    row = packed_row([8], [6])
    drafter = drafter_at(model, row, 6, [3])
    anchor_id = int(row.input_ids[6])
    (cut,) = drafter.propose([anchor_id], 2, GREEDY, full_block=True)
    (whole,) = drafter.propose([anchor_id], 4, GREEDY)
    assert torch.equal(cut.tokens, whole.tokens[:2])
    torch.testing.assert_close(cut.confidence, whole.confidence[:2])
    # The slots that are not run would have been seen by the others.
    short = drafter.block_hidden(0, anchor_id, 2)
    assert not torch.allclose(short, drafter.block_hidden(0, anchor_id, 4)[:2])


def test_markov_head_can_be_switched_off() -> None:
    model = model_of()
    row = packed_row([8], [6])
    sampling = SamplingParams(temperature=1.0)
    drafter = drafter_at(model, row, 6, [], markov=False)
    anchor_id = int(row.input_ids[6])
    (draft,) = drafter.propose([anchor_id], 4, sampling)
    base = model.lm_head(drafter.block_hidden(0, anchor_id, 4))
    torch.testing.assert_close(draft.probabilities, base.softmax(dim=-1))


def test_filters_are_the_verifiers_alone_and_the_generator_decides() -> None:
    model = model_of()
    row = packed_row([8], [6])
    drafter = drafter_at(model, row, 6, [])
    drafts = [
        drafter.propose([3], 4, SamplingParams(temperature=1.0, top_k=1, top_p=0.1), torch.Generator().manual_seed(seed))[0]
        for seed in (0, 0, 1, 2)
    ]
    assert (drafts[0].probabilities > 0).all()
    assert torch.equal(drafts[0].tokens, drafts[1].tokens)
    assert any(not torch.equal(drafts[0].tokens, other.tokens) for other in drafts[2:])


def test_requests_are_independent() -> None:
    model = model_of()
    rows = [packed_row([9], [8], seed=1), packed_row([5], [4], seed=2)]
    drafter = model.drafter()
    drafter.start(2)
    drafter.extend([rows[0].input_ids[:8], rows[1].input_ids[:0]], [rows[0].features[:8], rows[1].features[:0]])
    drafter.extend([rows[0].input_ids[:0], rows[1].input_ids[:4]], [rows[0].features[:0], rows[1].features[:4]])
    together = drafter.propose([1, 2], 4, GREEDY)
    for row, anchor, length, draft in zip(rows, (1, 2), (8, 4), together):
        (alone,) = drafter_at(model, row, length, []).propose([anchor], 4, GREEDY)
        assert torch.equal(alone.tokens, draft.tokens)
    drafter.drop(0)
    assert (drafter.context_length(0), drafter.context_length(1)) == (0, 4)


def test_wrong_calls_are_refused() -> None:
    model = model_of(sample_from_anchor=False)
    drafter = model.drafter()
    assert drafter.max_draft_tokens == 3
    assert drafter.layer_ids == LAYER_IDS
    drafter.start(1)
    with pytest.raises(ValueError, match="ask for 1 to 3"):
        drafter.propose([1], 4, GREEDY)
    with pytest.raises(ValueError, match="expected 1 anchors"):
        drafter.propose([1, 2], 1, GREEDY)
    with pytest.raises(ValueError, match="2 tokens came with features of 1"):
        drafter.extend([torch.tensor([1, 2])], [torch.zeros(1, len(LAYER_IDS), HIDDEN)])
    with pytest.raises(ValueError, match="expected 1 requests"):
        drafter.extend([], [])


def test_dflash_drafts_too() -> None:
    model = model_of("dflash", sample_from_anchor=False)
    row = packed_row([8], [6])
    drafter = drafter_at(model, row, 6, [2])
    (draft,) = drafter.propose([5], 3, GREEDY)
    assert torch.equal(draft.tokens, model.lm_head(drafter.block_hidden(0, 5, 4)).argmax(dim=-1))
    assert draft.confidence is None
