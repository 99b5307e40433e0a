"""From a verifier's config to the draft's decoder."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import DeepseekV3Config, Gemma3TextConfig, LlamaConfig, Qwen3Config

from speculators.errors import ConfigError
from speculators.models.draft_config import build_draft_config, default_layer_ids


def test_shape_is_the_verifiers() -> None:
    verifier = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        rms_norm_eps=1e-5,
        max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
    )
    draft = build_draft_config(verifier, num_layers=2)
    assert draft.model_type == "qwen3"
    assert (draft.vocab_size, draft.hidden_size, draft.intermediate_size, draft.num_hidden_layers) == (49152, 576, 1536, 2)
    assert (draft.num_attention_heads, draft.num_key_value_heads, draft.head_dim) == (9, 3, 64)
    assert (draft.rms_norm_eps, draft.max_position_embeddings) == (1e-5, 8192)
    assert draft.rope_parameters == {"rope_type": "default", "rope_theta": 100000.0}
    assert draft.layer_types == ["sliding_attention"] * 2
    assert (draft.sliding_window, draft.use_sliding_window) == (2048, True)
    # What is written is what is read.
    assert Qwen3Config(**draft.to_diff_dict()).layer_types == draft.layer_types


@pytest.mark.parametrize("window", [0, None])
def test_no_window_means_full_attention(window: int | None) -> None:
    draft = build_draft_config(LlamaConfig(), num_layers=2, sliding_window=window)
    assert draft.layer_types == ["full_attention"] * 2
    assert (draft.sliding_window, draft.use_sliding_window) == (None, False)


def test_some_layers_can_stay_full() -> None:
    draft = build_draft_config(LlamaConfig(), num_layers=3, sliding_window=64, full_attention_indices=[1])
    assert draft.layer_types == ["sliding_attention", "full_attention", "sliding_attention"]
    assert build_draft_config(LlamaConfig(), num_layers=1, full_attention_indices=[0]).sliding_window is None


def test_activation() -> None:
    verifier = LlamaConfig(hidden_act="gelu")
    assert build_draft_config(verifier).hidden_act == "silu"
    assert build_draft_config(verifier, draft_hidden_act=None).hidden_act == "gelu"
    assert build_draft_config(verifier, draft_hidden_act="relu").hidden_act == "relu"


def test_latent_attention_gets_grouped_heads() -> None:
    verifier = DeepseekV3Config(hidden_size=7168, intermediate_size=18432, vocab_size=163840, num_hidden_layers=61)
    draft = build_draft_config(verifier, num_layers=3, sliding_window=0)
    assert (draft.num_attention_heads, draft.num_key_value_heads, draft.head_dim) == (56, 8, 128)
    assert draft.intermediate_size == 18432


def test_rope_of_mixed_verifiers() -> None:
    scaled = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    assert build_draft_config(LlamaConfig(rope_parameters=scaled)).rope_parameters == scaled
    gemma = Gemma3TextConfig()
    assert isinstance(gemma.rope_parameters["sliding_attention"], dict)
    draft = build_draft_config(gemma)
    assert draft.rope_parameters["rope_theta"] == gemma.rope_parameters["sliding_attention"]["rope_theta"]
    partial = LlamaConfig(rope_parameters={"rope_type": "default", "rope_theta": 7.0, "partial_rotary_factor": 0.25})
    assert build_draft_config(partial).rope_parameters == {"rope_type": "default", "rope_theta": 7.0}


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"draft_arch": "gpt2"}, "draft_arch 'gpt2' does not exist; choose one of llama, qwen3, deepseek_v3"),
        ({"num_layers": 0}, "at least one layer"),
        ({"num_layers": 2, "full_attention_indices": [2]}, r"full_attention_indices \[2\]"),
        ({"sliding_window": -1}, "sliding_window is -1"),
    ],
)
def test_wrong_settings_are_refused(values: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        build_draft_config(LlamaConfig(), **values)


def test_default_layers() -> None:
    assert default_layer_ids(61) == [2, 30, 58]
    assert default_layer_ids(30) == [2, 15, 27]
    for layers in range(1, 8):
        ids = default_layer_ids(layers)
        assert ids == sorted(set(ids))
        assert all(0 <= layer <= layers for layer in ids)
