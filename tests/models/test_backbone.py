"""The backbone against transformers' own decoder layer, and a packed row against its documents one by one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3RotaryEmbedding

from speculators.models.attention import attend
from speculators.models.backbone import BlockDecoderLayer
from speculators.models.dflash import DFlashDraftModel
from speculators.models.layers import RotaryEmbedding, apply_rotary
from tests.models.small import HIDDEN, draft_config, packed_row, verifier_config

ROPES: list[dict[str, Any]] = [
    {"rope_type": "default", "rope_theta": 5000.0},
    {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 64},
    {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
]


@pytest.mark.parametrize("rope", ROPES, ids=lambda rope: rope["rope_type"])
def test_rotation_is_that_of_transformers(rope: dict[str, Any]) -> None:
    config = verifier_config(rope_parameters=rope, max_position_embeddings=512)
    positions = torch.tensor([0, 1, 7, 300])
    expected = Qwen3RotaryEmbedding(config)(torch.zeros(1), positions[None])
    for found, wanted in zip(RotaryEmbedding(config)(positions, torch.float32), expected):
        torch.testing.assert_close(found, wanted[0])


def test_rotary_parts_of_a_head() -> None:
    config = verifier_config(rope_parameters={"rope_type": "default", "rope_theta": 10.0, "partial_rotary_factor": 0.5})
    heads = torch.randn(3, 2, 8)
    turned = apply_rotary(heads, RotaryEmbedding(config)(torch.arange(3), torch.float32))
    assert torch.equal(turned[..., 4:], heads[..., 4:])
    assert torch.equal(turned[0], heads[0])
    torch.testing.assert_close(turned.norm(dim=-1), heads.norm(dim=-1))
    assert not torch.allclose(turned[1:, :, :4], heads[1:, :, :4])


@pytest.mark.parametrize("bias", [False, True])
def test_layer_without_context_is_a_qwen3_layer(bias: bool) -> None:
    """A causal block that sees no context is an ordinary causal sequence at the block's positions."""
    config = verifier_config(attention_bias=bias, rms_norm_eps=1e-3)
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    theirs = Qwen3DecoderLayer(config, 0).double().eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_(std=0.4)
    ours = BlockDecoderLayer(config).double()
    ours.load_state_dict(theirs.state_dict())

    slots, first = 5, 11
    states = torch.randn(1, slots, HIDDEN, dtype=torch.float64)
    rotation = RotaryEmbedding(config)(torch.arange(first, first + slots)[None], torch.float64)
    mask = torch.full((slots, slots), float("-inf"), dtype=torch.float64).triu(1)[None, None]
    expected = theirs(states, attention_mask=mask, position_embeddings=rotation)
    expected = expected[0] if isinstance(expected, tuple) else expected
    no_context = torch.zeros(0, 2, 8, dtype=torch.float64)
    found = ours(
        states,
        (no_context, no_context),
        rotation,
        lambda q, kc, vc, kb, vb: attend(q, kc, vc, kb, vb, visible=None, causal_block=True),
    )
    # Their norms round to float32 in float64 models as well.
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def model_of(**values: Any) -> Any:
    torch.manual_seed(0)
    return DFlashDraftModel(draft_config("dflash", **values)).double().eval()


SHAPES: list[dict[str, Any]] = [
    {},
    {"decoder": {"sliding_window": 3, "full_attention_indices": [1]}},
    {"decoder": {"sliding_window": 3}, "sliding_window_reference": "slot", "sliding_window_non_causal": True},
    {"sample_from_anchor": True},
]


@pytest.mark.parametrize("values", SHAPES)
@pytest.mark.parametrize("impl", ["reference", "document"])
def test_packed_row_equals_its_documents(values: dict[str, Any], impl: Any) -> None:
    model = model_of(**values)
    row = packed_row([9, 7], [1, 8, 9, 12, 15], padding=3)
    together = model.draft_hidden(row, attn_impl=impl)
    for first, last, anchors, place in ((0, 9, [1, 8], [0, 1]), (9, 16, [0, 3, 6], [2, 3, 4])):
        alone = packed_row([last - first], anchors)
        alone.input_ids, alone.features = row.input_ids[first:last], row.features[first:last]
        torch.testing.assert_close(model.draft_hidden(alone, attn_impl=impl), together[place], rtol=0, atol=1e-12)


@pytest.mark.parametrize("values", SHAPES)
def test_whole_network_agrees_between_attention_implementations(values: dict[str, Any]) -> None:
    model = model_of(**values)
    row = packed_row([9, 7, 20], [1, 8, 9, 12, 15, 20, 30, 35], padding=2)
    results = []
    for impl in ("reference", "document"):
        hidden = model.draft_hidden(row, attn_impl=impl)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        results.append([hidden, *torch.autograd.grad(hidden.square().sum(), trained)])
    for expected, found in zip(*results):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def test_anchors_own_feature_and_later_ones_are_not_seen() -> None:
    model = model_of()
    row = packed_row([10], [4])
    before = model.draft_hidden(row)
    row.features[4:] += 1.0
    assert torch.equal(model.draft_hidden(row), before)
    row.features[3] += 1.0
    assert not torch.allclose(model.draft_hidden(row), before)


def test_positions_are_those_of_the_document() -> None:
    model = model_of()
    row = packed_row([10], [6])
    before = model.draft_hidden(row)
    row.position_ids += 5  # rotary embedding is relative
    torch.testing.assert_close(model.draft_hidden(row), before, rtol=0, atol=1e-6)
    row.position_ids[:6] -= 5
    assert not torch.allclose(model.draft_hidden(row), before, atol=1e-3)


def test_gradient_checkpointing_changes_nothing() -> None:
    model = model_of().train()
    row = packed_row([9, 7], [1, 8, 12])
    results = []
    for switch in (False, True):
        model.gradient_checkpointing = switch
        hidden = model.draft_hidden(row)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        results.append([hidden, *torch.autograd.grad(hidden.square().sum(), trained)])
    for expected, found in zip(*results):
        torch.testing.assert_close(found, expected)


def test_a_llama_decoder_config_is_read_too() -> None:
    config = draft_config("dflash")
    config.transformer_layer_config = Qwen3Config.from_dict({**verifier_config().to_dict(), "layer_types": None})
    assert DFlashDraftModel(config).windows[0].window is None


def test_missing_features_are_refused() -> None:
    row = packed_row([5], [1])
    row.features = None
    with pytest.raises(ValueError, match="no features"):
        model_of().draft_hidden(row)
