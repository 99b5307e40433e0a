"""EAGLE-3 of other projects: config key by key, tensors bit by bit, drafts token by token, and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from speculators.convert import convert_model
from speculators.errors import ConfigError
from tests.convert.checks import ROUNDS, assumed, check_decoder, check_record
from tests.convert.foreign import (
    HEADS,
    HIDDEN,
    KEPT,
    LATENT,
    VOCAB,
    deepspec_eagle3_checkpoint,
    eagle3_checkpoint,
    equal,
    read,
    write,
)
from tests.convert.reference import ours
from tests.convert.reference_chain import drafted_chain

NORMS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
#: Of the verifier's six layers.
CAPTURED = [2, 3, 5]
IDS = {"eagle_aux_hidden_state_layer_ids": CAPTURED}


def same_drafts(source: Path, tensors: dict[str, Any], result: Path, verifier: str, steps: int, ids: list[int]) -> None:
    config, _ = read(source)
    facts: dict[str, Any] = {"capture_ids": ids, "steps": steps}
    expected = [drafted_chain(config, tensors, verifier, prompt, anchor, **facts) for prompt, anchor in ROUNDS]
    assert ours(result, verifier, ROUNDS) == expected
    assert len({token for tokens in expected for token in tokens}) > 4


@pytest.mark.parametrize("kind", ["llama", "qwen3", "deepseek_v3"])
@pytest.mark.parametrize("reduced", [True, False])
@pytest.mark.parametrize("layer", ["midlayer", "layers.0"])
def test_round_trip(kind: str, reduced: bool, layer: str, verifier: str, tmp_path: Path) -> None:
    source, tensors = eagle3_checkpoint(tmp_path / "theirs", kind, layer=layer, reduced=reduced, **IDS)
    report = convert_model(source, verifier, "eagle3", tmp_path / "ours", "cpu")
    config, written = read(tmp_path / "ours")
    assert report.format == ("vllm-mla-eagle3" if kind == "deepseek_v3" else "eagle3")
    assert equal(written, tensors)
    sizes = {"model_type": kind, "num_hidden_layers": 1}
    if kind == "deepseek_v3":
        sizes |= LATENT | {"num_key_value_heads": HEADS, "head_dim": LATENT["qk_rope_head_dim"], "rope_interleave": True}
    check_decoder(config, **sizes, layer_types=["full_attention"] if kind == "qwen3" else None)
    check_record(config, "eagle3", 3, verifier)
    assert config["draft_vocab_size"] == (KEPT if reduced else VOCAB)
    assert config["eagle_aux_hidden_state_layer_ids"] == CAPTURED
    assert {key: config[key] for key in NORMS} == dict.fromkeys(NORMS, False)
    expected: dict[str, Any] = {"speculative_tokens": 3} | dict.fromkeys(NORMS, False)
    if kind == "deepseek_v3":
        expected["rope_interleave"] = True
    if kind == "llama":
        expected["mlp_bias"] = False
    assert assumed(report) == expected
    same_drafts(source, tensors, tmp_path / "ours", verifier, 3, CAPTURED)

    convert_model(tmp_path / "ours", output_path=tmp_path / "native", to="vllm-native")
    native, back = read(tmp_path / "native")
    assert equal(back, tensors)
    architectures = {"llama": "Eagle3LlamaForCausalLM", "qwen3": "Eagle3Qwen3ForCausalLM"}
    assert native["architectures"] == [architectures.get(kind, "Eagle3DeepseekV2ForCausalLM")]
    assert native["model_type"] == ("kimi_k2" if kind == "deepseek_v3" else kind)
    assert native["num_aux_hidden_states"] == 3
    assert native["eagle_aux_hidden_state_layer_ids"] == CAPTURED
    assert native["eagle_config"] == {"eagle_aux_hidden_state_layer_ids": CAPTURED, "use_aux_hidden_state": True}
    for key in ("rms_norm_eps", "rope_theta", "hidden_size", "draft_vocab_size", *(LATENT if kind == "deepseek_v3" else ())):
        assert native[key] == read(source)[0][key], key
    again = convert_model(tmp_path / "native", verifier, output_path=tmp_path / "again")
    assert read(tmp_path / "again")[0] == config
    assert equal(read(tmp_path / "again")[1], tensors)
    assert assumed(again) == {"speculative_tokens": 3}


@pytest.mark.parametrize("kind", ["llama", "deepseek_v3"])
@pytest.mark.parametrize(
    "norms",
    [{"norm_before_residual": True}, {"fc_norm": True, "norm_output": True}, {"norm_before_fc": True}, {"norm_output": True}],
)
def test_norm_options(kind: str, norms: dict[str, bool], verifier: str, tmp_path: Path) -> None:
    source, tensors = eagle3_checkpoint(tmp_path / "theirs", kind, **IDS, **norms)
    convert_model(source, verifier, output_path=tmp_path / "ours")
    config, written = read(tmp_path / "ours")
    assert equal(written, tensors)
    assert {key: config[key] for key in NORMS} == dict.fromkeys(NORMS, False) | norms
    same_drafts(source, tensors, tmp_path / "ours", verifier, 3, CAPTURED)
    if kind == "deepseek_v3" and "norm_before_fc" in norms:
        with pytest.raises(ConfigError, match="does not have norm_before_fc"):
            convert_model(tmp_path / "ours", output_path=tmp_path / "native", to="vllm-native")
        return
    convert_model(tmp_path / "ours", output_path=tmp_path / "native", to="vllm-native")
    assert {key: read(tmp_path / "native")[0][key] for key in NORMS} == dict.fromkeys(NORMS, False) | norms


def test_norms_by_option_and_inside_eagle_config(verifier: str, tmp_path: Path) -> None:
    source, _ = eagle3_checkpoint(tmp_path / "theirs", norm_before_fc=True, **IDS)
    config, tensors = read(source)
    del config["norm_before_fc"]
    write(source, config | {"eagle_config": {"norm_before_fc": True}}, tensors)
    convert_model(source, verifier, output_path=tmp_path / "ours", norm_before_residual=True)
    config, _ = read(tmp_path / "ours")
    assert config["norm_before_fc"] is True
    assert config["norm_before_residual"] is True


@pytest.mark.parametrize("q_lora_rank", [LATENT["q_lora_rank"], None])
@pytest.mark.parametrize(
    "rope",
    [{}, {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "mscale_all_dim": 1.0}}],
    ids=["plain", "yarn"],
)
def test_latent_attention(q_lora_rank: int | None, rope: dict[str, Any], verifier: str, tmp_path: Path) -> None:
    source, tensors = eagle3_checkpoint(tmp_path / "theirs", "deepseek_v3", q_lora_rank=q_lora_rank, **IDS, **rope)
    convert_model(source, verifier, output_path=tmp_path / "ours")
    config, written = read(tmp_path / "ours")
    assert equal(written, tensors)
    assert config["transformer_layer_config"]["q_lora_rank"] == q_lora_rank
    if rope:
        expected = {"rope_type": "yarn", "rope_theta": 50000.0} | rope["rope_scaling"]
        expected.pop("type")
        assert config["transformer_layer_config"]["rope_parameters"] == expected
    else:
        same_drafts(source, tensors, tmp_path / "ours", verifier, 3, CAPTURED)
    if q_lora_rank is None:
        with pytest.raises(ConfigError, match="does not have q_lora_rank: null"):
            convert_model(tmp_path / "ours", output_path=tmp_path / "native", to="vllm-native")
        return
    convert_model(tmp_path / "ours", output_path=tmp_path / "native", to="vllm-native")
    convert_model(tmp_path / "native", verifier, output_path=tmp_path / "again")
    assert read(tmp_path / "again")[0] == config


@pytest.mark.parametrize(
    ("changes", "captured", "reason"),
    [
        ({"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}, [1, 3, 4], None),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 4]}}, [2, 3, 5], "outputs of layers"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 3, 5]}}, [2, 3, 5], "count layers as here"),
    ],
)
def test_captured_layers(
    changes: dict[str, Any], captured: list[int], reason: str | None, verifier: str, tmp_path: Path
) -> None:
    source, tensors = eagle3_checkpoint(tmp_path / "theirs", **changes)
    report = convert_model(source, verifier, output_path=tmp_path / "ours")
    assert read(tmp_path / "ours")[0]["eagle_aux_hidden_state_layer_ids"] == captured
    same_drafts(source, tensors, tmp_path / "ours", verifier, 3, captured)
    reasons = [item.reason for item in report.notes.assumed if item.key == "eagle_aux_hidden_state_layer_ids"]
    assert (reasons == []) if reason is None else (reason in reasons[0])


def test_captured_layers_of_nobody_are_everyones(tmp_path: Path) -> None:
    # 8 layers: after 2, 4 and 5.
    from tests.tiny import tiny_verifier

    verifier = str(tiny_verifier(tmp_path, vocab=VOCAB, hidden=HIDDEN, layers=8))
    source, tensors = eagle3_checkpoint(tmp_path / "theirs")
    report = convert_model(source, verifier, output_path=tmp_path / "ours")
    assert assumed(report)["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]
    same_drafts(source, tensors, tmp_path / "ours", verifier, 3, [2, 4, 5])


def test_vocabulary_sizes(verifier: str, tmp_path: Path) -> None:
    # Some files name the draft's vocabulary in vocab_size, and no draft_vocab_size.
    source, _ = eagle3_checkpoint(tmp_path / "theirs", vocab_size=KEPT, draft_vocab_size=None, **IDS)
    report = convert_model(source, verifier, output_path=tmp_path / "ours")
    config, _ = read(tmp_path / "ours")
    assert config["transformer_layer_config"]["vocab_size"] == VOCAB
    assert config["draft_vocab_size"] == KEPT
    assert "note: vocab_size 40 was read as 64, the verifier's vocabulary" in report.lines()


def test_ids_in_place_of_offsets_are_refused(verifier: str, tmp_path: Path) -> None:
    source, _ = eagle3_checkpoint(tmp_path / "theirs", **IDS)
    config, tensors = read(source)
    tensors["d2t"] = tensors["t2d"].nonzero().flatten()
    write(source, config, tensors)
    with pytest.raises(ConfigError, match="d2t and t2d contradict each other"):
        convert_model(source, verifier, output_path=tmp_path / "ours")


@pytest.mark.parametrize(
    ("kind", "changes", "sentence"),
    [
        ("llama", {"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state to False"),
        ("llama", {"qkv_bias": True}, "biases of queries"),
        ("llama", {"target_hidden_size": 16}, "target_hidden_size to 16"),
        ("llama", {"logit_scale": 2.0}, "scaled logits"),
        ("llama", {"eagle_aux_hidden_state_layer_ids": [2, 3, 9]}, "the state after 9 layers"),
        ("llama", {"eagle_aux_hidden_state_layer_ids": [2, 3]}, "fc.weight"),
        ("deepseek_v3", IDS | {"rms_norm_eps": 1e-6, "intermediate_size": 47}, "intermediate|mlp"),
        ("llama", {}, "names no captured layers and fc reads 3 of them"),
    ],
)
def test_refusals(kind: str, changes: dict[str, Any], sentence: str, verifier: str, tmp_path: Path) -> None:
    source, _ = eagle3_checkpoint(tmp_path / "theirs", kind, **changes)
    with pytest.raises(ValueError, match=sentence):
        convert_model(source, verifier, output_path=tmp_path / "ours")
    assert not (tmp_path / "ours").exists()


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"rope_interleave": False}, "rope_interleave"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "rope_type 'linear'"),
    ],
)
def test_what_vllms_latent_attention_has_not(changes: dict[str, Any], sentence: str, verifier: str, tmp_path: Path) -> None:
    source, _ = eagle3_checkpoint(tmp_path / "theirs", "deepseek_v3", **IDS, **changes)
    convert_model(source, verifier, output_path=tmp_path / "ours")
    with pytest.raises(ConfigError, match=sentence):
        convert_model(tmp_path / "ours", output_path=tmp_path / "native", to="vllm-native")


def test_deepspec_eagle3(verifier: str, tmp_path: Path) -> None:
    source, tensors = deepspec_eagle3_checkpoint(tmp_path / "theirs")
    report = convert_model(source, verifier, "eagle3", tmp_path / "ours", "cpu")
    config, written = read(tmp_path / "ours")
    assert report.format == "deepspec-eagle3"
    assert equal(written, tensors)
    check_decoder(config, num_hidden_layers=1, layer_types=["full_attention"])
    check_record(config, "eagle3", 4, verifier)
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 2, 3, 4, 5]
    assert {key: config[key] for key in NORMS} == dict.fromkeys(NORMS, False)
    same_drafts(source, tensors, tmp_path / "ours", verifier, 4, [1, 2, 3, 4, 5])
    deepspec_eagle3_checkpoint(source, ttt_length=None)
    with pytest.raises(ConfigError, match="DeepSpec EAGLE-3 config has no 'ttt_length'"):
        convert_model(source, verifier, output_path=tmp_path / "again")
