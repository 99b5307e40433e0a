"""The draft's rotary embedding where the verifier's is multimodal: whole heads, or the verifier's own part of each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5TextRotaryEmbedding, apply_rotary_pos_emb

from speculators.errors import ConfigError
from speculators.models import SpeculatorModel
from speculators.models.draft_config import build_draft_config
from speculators.models.layers import RotaryEmbedding, apply_rotary
from speculators.train.drafts import DraftInputs, _decoder_config
from tests.models.small import draft_config, packed_row, verifier_config
from tests.train.helpers import settings

POSITIONS = torch.tensor([0, 1, 7, 300])


def verifier(**rope: Any) -> Qwen3_5TextConfig:
    """A verifier that rotates 8 of 32 entries of a head, by sections of 2 times, 1 height and 1 width."""
    parameters = {
        "rope_type": "default",
        "rope_theta": 5000.0,
        "partial_rotary_factor": 0.25,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    }
    return Qwen3_5TextConfig(
        vocab_size=40,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        rope_parameters={name: value for name, value in (parameters | rope).items() if value is not None},
    )


def test_without_the_hack_text_is_rotated_as_the_verifier_rotates_it() -> None:
    config = verifier()
    draft = build_draft_config(config, num_layers=1, mrope_full_head=False)
    assert draft.rope_parameters == {"rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 0.25}
    # A text token is at the same time, height and width.
    theirs = Qwen3_5TextRotaryEmbedding(config)(torch.zeros(1), POSITIONS[None, None].expand(3, 1, -1))
    ours = RotaryEmbedding(draft)(POSITIONS, torch.float32)
    for found, wanted in zip(ours, theirs):
        assert found.shape == (4, 8)
        torch.testing.assert_close(found, wanted[0])
    torch.manual_seed(0)
    heads = torch.randn(4, 3, 32)
    expected, _ = apply_rotary_pos_emb(heads.transpose(0, 1)[None], heads.transpose(0, 1)[None], *theirs)
    turned = apply_rotary(heads, ours)
    torch.testing.assert_close(turned, expected[0].transpose(0, 1))
    assert torch.equal(turned[..., 8:], heads[..., 8:])


def test_with_the_hack_whole_heads_are_rotated() -> None:
    draft = build_draft_config(verifier(), num_layers=1)
    assert draft.rope_parameters == {"rope_type": "default", "rope_theta": 5000.0}
    cosines, _ = RotaryEmbedding(draft)(POSITIONS, torch.float32)
    assert cosines.shape == (4, 32)
    heads = torch.randn(4, 3, 32)
    assert not torch.isclose(apply_rotary(heads, RotaryEmbedding(draft)(POSITIONS, torch.float32))[1:], heads[1:]).all(0).any()


@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(rope_parameters={"rope_type": "default", "rope_theta": 7.0}),
        LlamaConfig(rope_parameters={"rope_type": "default", "rope_theta": 7.0, "partial_rotary_factor": 0.25}),
        verifier(mrope_section=None),
        verifier(partial_rotary_factor=1.0, mrope_section=[6, 5, 5]),
    ],
    ids=["plain", "partial", "partial of a family with mrope", "mrope of whole heads"],
)
def test_other_verifiers_do_not_notice_the_flag(config: Any) -> None:
    with_hack, without = (build_draft_config(config, mrope_full_head=value).to_dict() for value in (True, False))
    assert with_hack == without
    assert "partial_rotary_factor" not in without["rope_parameters"]


def test_scaled_multimodal_rope_keeps_scaling_and_part() -> None:
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    draft = build_draft_config(verifier(**scaling), num_layers=1, mrope_full_head=False)
    assert draft.rope_parameters == scaling | {"rope_theta": 5000.0, "partial_rotary_factor": 0.25}
    assert RotaryEmbedding(draft)(POSITIONS, torch.float32)[0].shape == (4, 8)


def test_a_part_that_is_no_pairs_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"rotates 0\.1 of each head, 3 entries of the draft's 32"):
        build_draft_config(verifier(partial_rotary_factor=0.1), mrope_full_head=False)
    build_draft_config(verifier(partial_rotary_factor=0.1))


@pytest.mark.parametrize("hack", [True, False])
def test_the_flag_reaches_the_draft(hack: bool, tmp_path: Path) -> None:
    config = settings(tmp_path, draft_mrope_full_head_hack=hack)
    decoder = _decoder_config(config, DraftInputs("nowhere", verifier(), 3, "post_norm"))
    assert decoder.rope_parameters.get("partial_rotary_factor", 1.0) == (1.0 if hack else 0.25)


def test_a_draft_that_rotates_parts_comes_back_from_disk(tmp_path: Path) -> None:
    rope = {"rope_type": "default", "rope_theta": 10.0, "partial_rotary_factor": 0.5}
    config = draft_config("dspark")
    config.transformer_layer_config.rope_parameters = rope
    torch.manual_seed(0)
    model: Any = SpeculatorModel.registered_model_class_from_config(config)(config).eval()
    model.save_pretrained(tmp_path, include_embeddings=True)
    read: Any = SpeculatorModel.from_pretrained(tmp_path)
    assert read.config.transformer_layer_config.rope_parameters == rope
    row = packed_row([12, 20], [3, 8, 14, 25])
    row.features = row.features.float()
    found = read.draft_hidden(row)
    torch.testing.assert_close(found, model.draft_hidden(row))
    # And the part matters: the same weights over whole heads say something else.
    config.transformer_layer_config = verifier_config(
        num_hidden_layers=2, rope_parameters=rope | {"partial_rotary_factor": 1.0}
    )
    other: Any = SpeculatorModel.registered_model_class_from_config(config)(config).eval()
    other.load_state_dict(read.state_dict())
    assert not torch.allclose(other.draft_hidden(row), found, atol=1e-3)
