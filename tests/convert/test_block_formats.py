"""DSpark and DFlash of other projects: config key by key, tensors bit by bit, drafts token by token, and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from speculators import SpeculatorModel
from speculators.convert import convert_model
from speculators.errors import ConfigError, VerifierError
from tests.convert.checks import assumed, check_decoder, check_record, same_drafts
from tests.convert.foreign import (
    FOREIGN_IDS,
    HIDDEN,
    IDS,
    MASK,
    VERIFIER_LAYERS,
    VOCAB,
    Random,
    deepspec_checkpoint,
    equal,
    read,
    write,
    zlab_checkpoint,
)

# ---- DeepSpec ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
@pytest.mark.parametrize(("confidence", "with_markov"), [(True, True), (True, False), (False, False)])
def test_deepspec_dspark(kind: str, confidence: bool, with_markov: bool, verifier: str, tmp_path: Path) -> None:
    source, tensors = deepspec_checkpoint(tmp_path / "theirs", kind=kind, confidence=confidence, with_markov=with_markov)
    report = convert_model(source, verifier, "dspark", tmp_path / "ours", "cpu")
    config, written = read(tmp_path / "ours")
    assert report.format == "deepspec"
    assert equal(written, tensors)
    check_decoder(config)
    check_record(config, "dspark", 5, verifier)
    assert config["architectures"] == ["DSparkDraftModel"]
    assert config["aux_hidden_state_layer_ids"] == IDS
    assert config["block_size"] == 5
    assert config["sample_from_anchor"] is True
    assert config["mask_token_id"] == MASK
    assert config["draft_vocab_size"] == VOCAB
    assert config["markov_rank"] == 6
    assert config["markov_head_type"] == kind
    assert config["enable_confidence_head"] is confidence
    assert config["confidence_head_with_markov"] is with_markov
    assert assumed(report) == {"sample_from_anchor": True}
    assert report.drafted is not None
    assert len(report.drafted) == 5
    same_drafts(source, tmp_path / "ours", verifier, anchor_first=True)


@pytest.mark.parametrize(("algorithm", "family"), [(None, "dflash"), ("dflash", "dflash"), ("dspark", "dspark")])
def test_deepspec_dflash(algorithm: str | None, family: str, verifier: str, tmp_path: Path) -> None:
    source, tensors = deepspec_checkpoint(tmp_path / "theirs", rank=0, confidence=False, with_markov=False)
    convert_model(source, verifier, algorithm, tmp_path / "ours")
    config, written = read(tmp_path / "ours")
    assert equal(written, tensors)
    check_record(config, family, 5, verifier)
    assert config["sample_from_anchor"] is True
    assert config["aux_hidden_state_layer_ids"] == IDS
    assert config.get("markov_rank", 0) == 0
    same_drafts(source, tmp_path / "ours", verifier, anchor_first=True)


def test_deepspec_reads_the_embeddings_output_as_minus_one(verifier: str, tmp_path: Path) -> None:
    source, tensors = deepspec_checkpoint(tmp_path / "theirs")
    config, _ = read(source)
    write(source, config | {"target_layer_ids": [-1, 2, 3]}, tensors)
    convert_model(source, verifier, "dspark", tmp_path / "ours")
    assert read(tmp_path / "ours")[0]["aux_hidden_state_layer_ids"] == [0, 3, 4]
    same_drafts(source, tmp_path / "ours", verifier, anchor_first=True, foreign_ids=[-1, 2, 3])


def test_deepspec_last_verifier_layer(verifier: str, tmp_path: Path) -> None:
    # Its reader would take it after the final norm, engines before: a silent mismatch.
    source, tensors = deepspec_checkpoint(tmp_path / "theirs")
    config, _ = read(source)
    write(source, config | {"num_target_layers": 9}, tensors)
    with pytest.raises(VerifierError, match="made for a verifier of 9 layers"):
        convert_model(source, verifier, output_path=tmp_path / "ours")
    write(source, config | {"target_layer_ids": [0, 2, VERIFIER_LAYERS - 1]}, tensors)
    with pytest.raises(ConfigError, match=r"reads the verifier's last layer \(5\) after the final norm"):
        convert_model(source, verifier, output_path=tmp_path / "ours")


@pytest.mark.parametrize(
    "key", ["target_layer_ids", "mask_token_id", "markov_rank", "confidence_head_with_markov", "hidden_size"]
)
def test_deepspec_has_no_defaults(key: str, verifier: str, tmp_path: Path) -> None:
    source, tensors = deepspec_checkpoint(tmp_path / "theirs")
    config, _ = read(source)
    del config[key]
    write(source, config, tensors)
    with pytest.raises(ConfigError, match=f"DeepSpec config has no '{key}'"):
        convert_model(source, verifier, output_path=tmp_path / "ours")
    assert not (tmp_path / "ours").exists()


def test_a_dspark_draft_does_not_become_dflash(verifier: str, tmp_path: Path) -> None:
    source, _ = deepspec_checkpoint(tmp_path / "theirs")
    with pytest.raises(ConfigError, match="has DSpark's heads"):
        convert_model(source, verifier, "dflash", tmp_path / "ours")


# ---- z-lab ------------------------------------------------------------------------------------------------------------


def test_zlab_dflash_and_back(verifier: str, tmp_path: Path) -> None:
    source, tensors = zlab_checkpoint(tmp_path / "theirs")
    report = convert_model(source, verifier, "dflash", tmp_path / "ours", "cpu")
    config, written = read(tmp_path / "ours")
    assert report.format == "zlab-dflash"
    assert equal(written, tensors)
    check_decoder(config)
    check_record(config, "dflash", 3, verifier)
    assert config["aux_hidden_state_layer_ids"] == IDS
    assert config["block_size"] == 4
    assert config["sample_from_anchor"] is False
    assert config["mask_token_id"] == MASK
    assert config["draft_vocab_size"] == VOCAB
    assert assumed(report) == {"sample_from_anchor": False}
    same_drafts(source, tmp_path / "ours", verifier, anchor_first=False, block_size=4)

    convert_model(tmp_path / "ours", output_path=tmp_path / "native", to="vllm-native")
    native, back = read(tmp_path / "native")
    assert equal(back, tensors)
    theirs, _ = read(source)
    for key in ("architectures", "block_size", "dflash_config", "rms_norm_eps", "rope_theta", "head_dim", "hidden_size"):
        assert native[key] == theirs[key], key
    convert_model(tmp_path / "native", verifier, output_path=tmp_path / "again")
    again, tensors_again = read(tmp_path / "again")
    assert again == config
    assert equal(tensors_again, tensors)


@pytest.mark.parametrize(
    ("keys", "causal"),
    [({}, None), ({"is_causal": False}, False), ({"is_causal": True}, True)],
    ids=["unsaid", "bidirectional", "causal"],
)
def test_zlab_sliding_layers(keys: dict[str, Any], causal: bool | None, verifier: str, tmp_path: Path) -> None:
    sliding = {"layer_types": ["sliding_attention"] * 2, "use_sliding_window": True, "sliding_window": 6} | keys
    source, tensors = zlab_checkpoint(tmp_path / "theirs", **sliding)
    convert_model(source, verifier, output_path=tmp_path / "ours")
    config, _ = read(tmp_path / "ours")
    assert config["sliding_window_non_causal"] is (causal is False)
    assert config["sliding_window_reference"] == "slot"
    check_decoder(config, layer_types=["sliding_attention"] * 2, sliding_window=6)
    same_drafts(source, tmp_path / "ours", verifier, anchor_first=False, block_size=4, causal=causal)
    convert_model(tmp_path / "ours", output_path=tmp_path / "native", to="vllm-native")
    convert_model(tmp_path / "native", verifier, output_path=tmp_path / "again")
    assert read(tmp_path / "again")[0] == config
    assert equal(read(tmp_path / "again")[1], tensors)


def test_zlab_keys_inside_dflash_config_and_its_readers_defaults(verifier: str, tmp_path: Path) -> None:
    tensors = {"target_layer_ids": FOREIGN_IDS, "mask_token_id": MASK}
    source, _ = zlab_checkpoint(tmp_path / "theirs", block_size=None, rms_norm_eps=None, dflash_config=tensors)
    report = convert_model(source, verifier, output_path=tmp_path / "ours")
    config, _ = read(tmp_path / "ours")
    assert config["block_size"] == 16
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 15
    assert config["transformer_layer_config"]["rms_norm_eps"] == 1e-6
    assert assumed(report) == {"block_size": 16, "rms_norm_eps": 1e-6, "sample_from_anchor": False}
    assert "assumed: block_size = 16 (z-lab's default)" in report.lines()

    source, _ = zlab_checkpoint(tmp_path / "nested", block_size=None, dflash_config=tensors | {"block_size": 6})
    convert_model(source, verifier, output_path=tmp_path / "second")
    assert read(tmp_path / "second")[0]["block_size"] == 6


def test_zlab_without_layer_ids_takes_the_first_readers_spread(verifier: str, tmp_path: Path) -> None:
    # 2 draft layers over 6 verifier layers: outputs of layers 1 and 3.
    source, _ = zlab_checkpoint(tmp_path / "theirs", dflash_config={"mask_token_id": MASK})
    config, tensors = read(source)
    tensors["fc.weight"] = tensors["fc.weight"][:, : 2 * HIDDEN]
    write(source, config, tensors)
    report = convert_model(source, verifier, output_path=tmp_path / "ours")
    assert assumed(report)["target_layer_ids"] == [1, 3]
    assert read(tmp_path / "ours")[0]["aux_hidden_state_layer_ids"] == [2, 4]
    same_drafts(source, tmp_path / "ours", verifier, anchor_first=False, block_size=4, foreign_ids=[1, 3])


def test_zlab_last_verifier_layer(verifier: str, tmp_path: Path) -> None:
    nested = {"mask_token_id": MASK, "target_layer_ids": [0, VERIFIER_LAYERS - 1, 3]}
    source, tensors = zlab_checkpoint(tmp_path / "theirs", dflash_config=nested)
    with pytest.raises(ConfigError, match="reads the verifier's last layer"):
        convert_model(source, verifier, output_path=tmp_path / "ours")
    report = convert_model(source, verifier, output_path=tmp_path / "ours", drop_unsupported=True)
    config, written = read(tmp_path / "ours")
    assert config["aux_hidden_state_layer_ids"] == [1, 4]
    first, _, third = tensors["fc.weight"].split(HIDDEN, dim=1)
    assert torch.equal(written["fc.weight"], torch.cat([first, third], dim=1))
    assert any("must be trained further" in line for line in report.lines())


def test_laguna(verifier: str, tmp_path: Path) -> None:
    source, tensors = zlab_checkpoint(tmp_path / "theirs")
    config, _ = read(source)
    random = Random(1)
    fused = dict(tensors)
    for layer in range(2):
        names = [f"layers.{layer}.self_attn.{part}.weight" for part in ("q_proj", "k_proj", "v_proj")]
        fused[f"layers.{layer}.self_attn.qkv_proj.weight"] = torch.cat([fused.pop(name) for name in names])
    # Fused projections alone are another way of writing the same draft.
    write(source, config, fused)
    convert_model(source, verifier, output_path=tmp_path / "fused")
    assert equal(read(tmp_path / "fused")[1], tensors)
    # Gates and norms of captured layers are another network.
    extra = {f"aux_hidden_norms.{index}.weight": random.norm(HIDDEN) for index in range(3)}
    extra |= {f"layers.{layer}.self_attn.g_proj.weight": random.weight(4, HIDDEN) for layer in range(2)}
    write(source, config | {"architectures": ["DFlashLagunaForCausalLM"]}, fused | extra)
    with pytest.raises(ConfigError, match=r"this is a Laguna draft with aux_hidden_norms\.0\.weight and 4 more tensors"):
        convert_model(source, verifier, output_path=tmp_path / "ours")
    convert_model(source, verifier, output_path=tmp_path / "ours", drop_unsupported=True)
    assert equal(read(tmp_path / "ours")[1], tensors)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"architectures": ["DFlash2DraftModel"]}, "DFlash2"),
        ({"dflash_config": {"target_layer_ids": FOREIGN_IDS}}, "has no 'mask_token_id'"),
        ({"output_multiplier": 0.5}, "output_multiplier to 0.5"),
        ({"final_logit_softcapping": 30.0}, "capped logits"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantised weights"),
        ({"is_causal": True}, "makes full-attention layers causal"),
        ({"dflash_config": {"target_layer_ids": [0, 2, 9], "mask_token_id": MASK}}, "the state after 10 layers"),
        (
            {"dflash_config": {"target_layer_ids": FOREIGN_IDS, "mask_token_id": MASK, "attention_mode": "mla"}},
            "another attention",
        ),
        ({"hidden_size": 16}, "reads states of size 16"),
        ({"num_target_layers": 9}, "made for a verifier of 9 layers"),
        ({"vocab_size": 128}, "has a vocabulary of 128"),
    ],
)
def test_zlab_refusals(changes: dict[str, Any], sentence: str, verifier: str, tmp_path: Path) -> None:
    source, _ = zlab_checkpoint(tmp_path / "theirs", **changes)
    with pytest.raises(ValueError, match=sentence):
        convert_model(source, verifier, output_path=tmp_path / "ours")
    assert not (tmp_path / "ours").exists()


def test_mask_token_by_option(verifier: str, tmp_path: Path) -> None:
    source, _ = zlab_checkpoint(tmp_path / "theirs", dflash_config={"target_layer_ids": FOREIGN_IDS})
    convert_model(source, verifier, output_path=tmp_path / "ours", mask_token_id=7)
    assert read(tmp_path / "ours")[0]["mask_token_id"] == 7


# ---- any format ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("shards", "pickled"), [(3, False), (1, True)])
def test_weights_in_shards_and_pickles(shards: int, pickled: bool, verifier: str, tmp_path: Path) -> None:
    source, tensors = zlab_checkpoint(tmp_path / "whole")
    write(tmp_path / "theirs", read(source)[0], tensors, shards=shards, pickled=pickled)
    convert_model(tmp_path / "theirs", verifier, output_path=tmp_path / "ours")
    assert equal(read(tmp_path / "ours")[1], tensors)


def test_embeddings_are_dropped_if_they_are_the_verifiers(verifier: str, tmp_path: Path) -> None:
    source, tensors = deepspec_checkpoint(tmp_path / "theirs")
    with pytest.raises(ConfigError, match=r"embed_tokens.weight differs from the verifier's"):
        convert_model(source, verifier, output_path=tmp_path / "ours", drop_embeddings=True)
    theirs = read(Path(verifier))[1]
    tensors["embed_tokens.weight"] = theirs["model.embed_tokens.weight"].bfloat16()
    tensors["lm_head.weight"] = theirs["lm_head.weight"].bfloat16()
    write(source, read(source)[0], tensors)
    convert_model(source, verifier, output_path=tmp_path / "ours", drop_embeddings=True)
    kept = {name: value for name, value in tensors.items() if name not in ("embed_tokens.weight", "lm_head.weight")}
    assert equal(read(tmp_path / "ours")[1], kept)
    model = SpeculatorModel.from_pretrained(tmp_path / "ours")
    assert torch.equal(model.embed_tokens.weight, theirs["model.embed_tokens.weight"])
