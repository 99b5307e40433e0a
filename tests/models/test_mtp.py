"""MTP drafts: layers are those of transformers, training computes what serving does, files have the format's names."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import CONFIG_MAPPING, LlamaConfig, PretrainedConfig

from speculators.config import SpeculatorModelConfig, VerifierConfig
from speculators.errors import ConfigError
from speculators.models import MTPDraftModel, MTPSpeculatorConfig, SpeculatorModel
from speculators.models.attention import causal_attention
from speculators.models.layers import RotaryEmbedding
from speculators.models.mtp import MTPDecoderLayer, build_mtp_decoder
from tests.models.small import HIDDEN, VOCAB, packed_row, verifier_config
from tests.models.test_chain import ANCHORS, LENGTHS, STEPS, served_logits

#: Kind -> transformers' module and prefix of its classes, and what differs from the defaults below.
KINDS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen3": ("qwen3", "Qwen3", {}),
    "qwen3_next": ("qwen3_next", "Qwen3Next", {}),
    "qwen3_next-dense": ("qwen3_next", "Qwen3Next", {"mlp_only_layers": [3]}),
    "qwen3_next-unnormed": ("qwen3_next", "Qwen3Next", {"norm_topk_prob": False}),
    "qwen3_5_text": ("qwen3_5", "Qwen3_5", {}),
    "qwen3_5_moe_text": ("qwen3_5_moe", "Qwen3_5Moe", {}),
}
EXPERTS = {"moe_intermediate_size": 8, "shared_expert_intermediate_size": 12, "num_experts": 4, "num_experts_per_tok": 2}


def decoder_config(kind: str) -> PretrainedConfig:
    """A verifier's text config of a kind: 6 layers, of which an MTP layer is like the fourth."""
    model_type = kind.partition("-")[0]
    shape: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": 24,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "initializer_range": 0.5,
    }
    if model_type != "qwen3":
        shape["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    if "next" in model_type or "moe" in model_type:
        shape |= EXPERTS
    if model_type.startswith("qwen3_5"):
        shape["rope_parameters"] |= {"mrope_section": [1, 1, 0], "mrope_interleaved": True}
    config = CONFIG_MAPPING[model_type](**(shape | KINDS[kind][2]))
    config._attn_implementation = "eager"
    return config


def mtp_model(kind: str = "qwen3", **values: Any) -> Any:
    record = VerifierConfig(name_or_path=None, architectures=[])
    config = MTPSpeculatorConfig.build(
        build_mtp_decoder(decoder_config(kind)), record, num_verifier_layers=6, speculative_tokens=STEPS, **values
    )
    torch.manual_seed(0)
    model = MTPDraftModel(config).double().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(torch.rand_like(parameter) - 0.5)
    return model


def mtp_row(padding: int = 0) -> Any:
    row = packed_row(LENGTHS, ANCHORS, padding=padding)
    assert row.features is not None
    row.features = row.features[:, :1]
    return row


@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_is_that_of_transformers(kind: str) -> None:
    module_name, prefix, _ = KINDS[kind]
    theirs_in = importlib.import_module(f"transformers.models.{module_name}.modeling_{module_name}")
    config = decoder_config(kind)
    torch.manual_seed(0)
    theirs = getattr(theirs_in, f"{prefix}DecoderLayer")(config, 3).double().eval()
    norm_class = getattr(theirs_in, f"{prefix}RMSNorm")
    rotary_name = "RotaryEmbedding" if hasattr(theirs_in, f"{prefix}RotaryEmbedding") else "TextRotaryEmbedding"
    norms = {name: norm_class(HIDDEN, eps=config.rms_norm_eps) for name in ("token", "hidden", "final")}
    with torch.no_grad():
        for module in (theirs, *norms.values()):
            for parameter in module.parameters():
                parameter.normal_(std=0.5)
    ours = MTPDecoderLayer(config).double().eval()
    tensors = dict(theirs.state_dict())
    tensors |= {f"{name}_layernorm.weight": norm.weight for name, norm in norms.items()}
    tensors["input_proj.weight"] = torch.randn(HIDDEN, 2 * HIDDEN)
    ours.load_state_dict(tensors)

    states, embeds = torch.randn(2, 6, HIDDEN, dtype=torch.float64)
    positions = torch.arange(3, 9)
    both = torch.cat([norms["token"](embeds), norms["hidden"](states)], dim=-1)
    mask = torch.full((6, 6), float("-inf"), dtype=torch.float64).triu(1)[None, None]
    rotary = getattr(theirs_in, prefix + rotary_name)(config)
    # Multimodal rope: a text token has one position in all three dimensions.
    triple = positions[None] if rotary_name == "RotaryEmbedding" else positions.expand(3, 1, -1)
    expected = theirs(
        (both @ tensors["input_proj.weight"].double().T)[None], attention_mask=mask, position_embeddings=rotary(both, triple)
    )
    expected = norms["final"](expected[0])
    documents = torch.zeros(6, dtype=torch.long)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return causal_attention(q, k, v, documents)

    found = ours(states, embeds, RotaryEmbedding(config)(positions, torch.float64), attend)
    # Theirs computes norms and angles in float32.
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_training_computes_what_serving_does(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, row = mtp_model(kind), mtp_row(padding=2)
    hidden = model.draft_hidden(row)
    # Experts are weighed in float32 by transformers.
    tolerance = 1e-5 if hasattr(model.layers[0].mlp, "experts") else 1e-9
    torch.testing.assert_close(model.draft_hidden(row, attn_impl="reference"), hidden, rtol=0, atol=tolerance)
    trained = model.lm_head(hidden)
    for place, anchor in enumerate(ANCHORS):
        start, end = (0, LENGTHS[0]) if anchor < LENGTHS[0] else (LENGTHS[0], sum(LENGTHS))
        served = served_logits(model, row, anchor, start, monkeypatch)
        slots = min(STEPS, end - anchor)
        torch.testing.assert_close(served[:slots], trained[place, :slots], rtol=0, atol=10 * tolerance)


def test_the_next_step_reads_the_normed_output() -> None:
    model, row = mtp_model(), mtp_row()
    row.anchors = torch.tensor([1])
    hidden = model.draft_hidden(row, 2)
    # One pair before any other: slot 1 sees slot 0's key and its own.
    rotation = model.rotary(torch.tensor([1, 2]), torch.float64)
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        kept.append((k, v))
        keys, values = (torch.cat(parts) for parts in zip(*kept, strict=True))
        return causal_attention(q, keys, values, torch.zeros(len(kept), dtype=torch.long))

    state = row.features[:1, 0]
    for slot in range(2):
        part = (rotation[0][slot : slot + 1], rotation[1][slot : slot + 1])
        state = model.layers[0](state, model.embed_tokens(row.input_ids[1 + slot : 2 + slot]), part, attend)
        torch.testing.assert_close(state[0], hidden[0, slot], rtol=0, atol=1e-10)


NORMS = ["input_layernorm", "post_attention_layernorm", "hidden_layernorm", "token_layernorm", "final_layernorm"]
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm"]
DENSE = ["mlp.gate_proj.weight", "mlp.up_proj.weight", "mlp.down_proj.weight"]
SPARSE = [
    "mlp.gate.weight",
    "mlp.experts.gate_up_proj",
    "mlp.experts.down_proj",
    "mlp.shared_expert.gate_proj.weight",
    "mlp.shared_expert.up_proj.weight",
    "mlp.shared_expert.down_proj.weight",
    "mlp.shared_expert_gate.weight",
]


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"])
def test_a_file_has_the_names_of_the_format_and_comes_back(kind: str, tmp_path: Path) -> None:
    model = mtp_model(kind)
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    names = [f"{name}.weight" for name in NORMS] + [f"self_attn.{name}.weight" for name in ATTENTION] + ["input_proj.weight"]
    names += SPARSE if kind in ("qwen3_next", "qwen3_5_moe_text") else DENSE
    assert sorted(tensors) == sorted(f"mtp_layers.0.{name}" for name in names)
    assert tensors["mtp_layers.0.input_proj.weight"].shape == (HIDDEN, 2 * HIDDEN)
    assert tensors["mtp_layers.0.self_attn.q_proj.weight"].shape == (32 if kind == "qwen3" else 64, HIDDEN)
    written = SpeculatorModelConfig.from_pretrained(tmp_path).to_dict()
    assert (written["architectures"], written["num_nextn_predict_layers"]) == (["MTPDraftModel"], 1)
    assert "draft_vocab_size" not in written
    assert written["transformer_layer_config"]["model_type"] == kind
    assert written["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == STEPS

    model.save_pretrained(tmp_path, include_embeddings=True)
    loaded = SpeculatorModel.from_pretrained(tmp_path, dtype=torch.float64)
    assert isinstance(loaded, MTPDraftModel)
    assert loaded.config.num_speculative_steps == STEPS
    row = mtp_row()
    torch.testing.assert_close(loaded.draft_hidden(row), model.draft_hidden(row), rtol=0, atol=0)


def test_the_state_is_the_one_that_is_served_unless_the_file_is_of_a_writer_without_the_key() -> None:
    served, trained_upstream = mtp_model().config, mtp_model(hidden_state_input="pre_norm").config
    assert (served.layer_ids, trained_upstream.layer_ids) == ([7], [6])
    assert SpeculatorModelConfig.from_dict(served.to_dict()).layer_ids == [7]
    values = served.to_dict()
    del values["hidden_state_input"]
    assert SpeculatorModelConfig.from_dict(values).hidden_state_input == "pre_norm"


def test_other_verifiers_get_a_qwen3_layer_of_their_shape() -> None:
    llama = LlamaConfig(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=24, num_hidden_layers=5, num_attention_heads=4, head_dim=8
    )
    decoder = build_mtp_decoder(llama)
    assert (decoder.model_type, decoder.num_hidden_layers, decoder.intermediate_size) == ("qwen3", 5, 24)
    assert set(decoder.layer_types) == {"full_attention"}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_nextn_predict_layers": 2}, "only 1 is supported"),
        ({"draft_vocab_size": 20}, "whole vocabulary"),
        ({"transformer_layer_config": {"model_type": "llama"}}, "no MTP layer of kind 'llama'"),
        ({"hidden_state_input": "normed"}, "hidden_state_input"),
    ],
)
def test_what_mtp_cannot_be_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        MTPSpeculatorConfig(**({"transformer_layer_config": decoder_config("qwen3")} | values))


def test_a_config_of_another_number_of_layers_is_refused() -> None:
    record = VerifierConfig(name_or_path=None, architectures=[])
    with pytest.raises(ConfigError, match="num_hidden_layers 6, but the verifier has 5;"):
        MTPSpeculatorConfig.build(verifier_config(), record, num_verifier_layers=5)
    linear = decoder_config("qwen3_next")
    linear.layer_types = ["linear_attention"] * 6
    with pytest.raises(ConfigError, match="no full_attention layer"):
        MTPDraftModel(MTPSpeculatorConfig(transformer_layer_config=linear))
