"""vLLM's native DSpark: config key by key, tensors bit by bit, drafts token by token, and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from speculators.convert import convert_model
from speculators.errors import ConfigError
from tests.convert.checks import assumed, check_decoder, check_record, same_drafts
from tests.convert.foreign import IDS, KEPT, VOCAB, deepspec_checkpoint, equal, read, vllm_dspark_checkpoint, write


@pytest.mark.parametrize("reduced", [False, True])
@pytest.mark.parametrize("anchor_first", [True, False])
def test_vllm_dspark_and_back(reduced: bool, anchor_first: bool, verifier: str, tmp_path: Path) -> None:
    source, tensors = vllm_dspark_checkpoint(tmp_path / "theirs", reduced=reduced, sample_from_anchor=anchor_first)
    report = convert_model(source, verifier, "dspark", tmp_path / "ours", "cpu")
    config, written = read(tmp_path / "ours")
    assert report.format == "vllm-dspark"
    assert assumed(report) == {}
    assert equal(written, tensors)
    check_decoder(config)
    check_record(config, "dspark", 5 if anchor_first else 4, verifier)
    assert config["aux_hidden_state_layer_ids"] == IDS
    assert config["sample_from_anchor"] is anchor_first
    assert config["draft_vocab_size"] == (KEPT if reduced else VOCAB)
    assert config["markov_rank"] == 6
    assert config["enable_confidence_head"] is True
    assert config["confidence_head_with_markov"] is True
    same_drafts(source, tmp_path / "ours", verifier, anchor_first=anchor_first)

    convert_model(tmp_path / "ours", output_path=tmp_path / "native", to="vllm-native")
    native, back = read(tmp_path / "native")
    assert equal(back, tensors)
    theirs, _ = read(source)
    for key, value in theirs.items():
        if key not in ("rope_scaling", "torch_dtype"):
            assert native[key] == value, key
    convert_model(tmp_path / "native", verifier, output_path=tmp_path / "again")
    assert read(tmp_path / "again")[0] == config


@pytest.mark.parametrize(
    ("keys", "causal"), [({}, None), ({"dflash_config": {"causal": False}}, False), ({"is_causal": False}, False)]
)
def test_vllm_dspark_sliding_layers(keys: dict[str, Any], causal: bool | None, verifier: str, tmp_path: Path) -> None:
    types = ["full_attention", "sliding_attention"]
    sliding: dict[str, Any] = {"layer_types": types, "use_sliding_window": True, "sliding_window": 6}
    source, tensors = vllm_dspark_checkpoint(tmp_path / "theirs", **sliding, **keys)
    convert_model(source, verifier, output_path=tmp_path / "ours")
    config, _ = read(tmp_path / "ours")
    assert config["sliding_window_non_causal"] is (causal is False)
    assert config["sliding_window_reference"] == "slot"
    same_drafts(source, tmp_path / "ours", verifier, anchor_first=True, causal=causal)
    convert_model(tmp_path / "ours", output_path=tmp_path / "native", to="vllm-native")
    convert_model(tmp_path / "native", verifier, output_path=tmp_path / "again")
    assert read(tmp_path / "again")[0] == config
    assert equal(read(tmp_path / "again")[1], tensors)


def test_windows_measured_from_the_anchor_are_remarked_on_export(verifier: str, tmp_path: Path) -> None:
    types = ["sliding_attention"] * 2
    source, _ = vllm_dspark_checkpoint(tmp_path / "theirs", layer_types=types, use_sliding_window=True, sliding_window=6)
    convert_model(source, verifier, output_path=tmp_path / "ours")
    config, tensors = read(tmp_path / "ours")
    write(tmp_path / "anchored", config | {"sliding_window_reference": "anchor"}, tensors)
    report = convert_model(tmp_path / "anchored", output_path=tmp_path / "native", to="vllm-native")
    assert any("engines measure a sliding window from each slot" in line for line in report.lines())


def test_vllm_dspark_missing_keys_are_vllms(verifier: str, tmp_path: Path) -> None:
    missing = dict.fromkeys(
        ("sample_from_anchor", "rope_theta", "enable_confidence_head", "confidence_head_with_markov", "markov_head_type")
    )
    source, tensors = vllm_dspark_checkpoint(tmp_path / "theirs", draft_vocab_size=None, **missing)
    report = convert_model(source, verifier, output_path=tmp_path / "ours")
    config, written = read(tmp_path / "ours")
    assert config["sample_from_anchor"] is True
    assert config["transformer_layer_config"]["rope_parameters"]["rope_theta"] == 1e6
    assert config["enable_confidence_head"] is False
    assert equal(written, {name: value for name, value in tensors.items() if "confidence" not in name})
    assert assumed(report) == {
        "rope_theta": 1e6,
        "sample_from_anchor": True,
        "draft_vocab_size": VOCAB,
        "enable_confidence_head": False,
        "markov_head_type": "vanilla",
    }
    assert any("confidence head was left out" in line for line in report.lines())


@pytest.mark.parametrize(("kind", "rank"), [("gated", 6), ("rnn", 6), ("vanilla", 0)])
def test_vllm_runs_vanilla_markov_heads_only(kind: str, rank: int, verifier: str, tmp_path: Path) -> None:
    source, _ = deepspec_checkpoint(tmp_path / "theirs", kind=kind, rank=rank, confidence=False, with_markov=False)
    with pytest.raises(ConfigError, match="vanilla Markov heads only"):
        convert_model(source, verifier, "dspark", tmp_path / "native", to="vllm-native")


def test_anchor_first_dflash_has_no_native_form(verifier: str, tmp_path: Path) -> None:
    source, _ = deepspec_checkpoint(tmp_path / "theirs", rank=0, confidence=False, with_markov=False)
    with pytest.raises(ConfigError, match="vLLM drafts DFlash blocks fill-in only"):
        convert_model(source, verifier, "dflash", tmp_path / "native", to="vllm-native")
    assert list(tmp_path.iterdir()) == [tmp_path / "theirs"]
