"""Speculators checkpoints of older trees: what they left out is read as their own reader took it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from speculators import SpeculatorModel
from speculators.convert import convert_model, maybe_convert_external_checkpoint
from speculators.errors import ConfigError, VerifierError
from tests.convert.checks import ROUNDS, assumed, check_decoder, check_record
from tests.convert.foreign import (
    HIDDEN,
    IDS,
    KEPT,
    MASK,
    VOCAB,
    Random,
    eagle3_checkpoint,
    equal,
    old_speculators_checkpoint,
    qwen3_keys,
    read,
    write,
    zlab_checkpoint,
)
from tests.convert.reference import drafted, ours
from tests.convert.reference_chain import drafted_chain


@pytest.mark.parametrize("family", ["dspark", "dflash"])
@pytest.mark.parametrize("reduced", [True, False])
def test_before_the_layout_could_be_chosen(family: str, reduced: bool, verifier: str, tmp_path: Path) -> None:
    source, tensors = old_speculators_checkpoint(tmp_path / "theirs", family, reduced=reduced)
    report = convert_model(source, verifier, family, tmp_path / "ours", "cpu")
    config, written = read(tmp_path / "ours")
    assert equal(written, tensors)
    check_decoder(config)
    check_record(config, family, 4, verifier)
    assert config["sample_from_anchor"] is False
    assert config["aux_hidden_state_layer_ids"] == IDS
    expected = {"sample_from_anchor": False, "sliding_window_non_causal": False}
    if family == "dspark":
        heads = {"markov_rank": 6, "markov_head_type": "vanilla", "enable_confidence_head": True}
        expected |= heads | {"confidence_head_with_markov": True}
        assert {key: config[key] for key in heads} == heads
    assert assumed(report) == expected
    assert "note: keys of the config that were left out: auto_map, has_no_defaults_at_init" in report.lines()
    facts: dict[str, Any] = {"foreign_ids": [layer - 1 for layer in IDS], "mask_token_id": MASK, "block_size": 5}
    tokens = [drafted(qwen3_keys(), tensors, verifier, *round_, anchor_first=False, **facts) for round_ in ROUNDS]
    assert ours(tmp_path / "ours", verifier, ROUNDS) == tokens
    assert len({token for row in tokens for token in row}) > 4


@pytest.mark.parametrize("family", ["eagle3", "peagle"])
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_chains_of_older_trees(family: str, kind: str, verifier: str, tmp_path: Path) -> None:
    source, tensors = eagle3_checkpoint(tmp_path / "theirs", kind)
    if family == "peagle":
        tensors |= {"mask_hidden": Random(7).weight(1, 1, 3 * HIDDEN), "embed_tokens.weight": Random(8).weight(VOCAB, HIDDEN)}
    old, _ = read(old_speculators_checkpoint(tmp_path / "blocks")[0])
    record = old["speculators_config"] | {"algorithm": family}
    config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": family,
        "speculators_version": "0.3.0",
        "speculators_config": record,
        "transformer_layer_config": qwen3_keys(1) | {"model_type": kind},
        "draft_vocab_size": KEPT,
        "eagle_aux_hidden_state_layer_ids": [2, 3, 5],
        "auto_map": {"": "config.Eagle3SpeculatorConfig"},
    }
    if family == "peagle":
        config["mask_token_id"] = MASK
    training = {"verifier_lm_head.weight": Random(9).weight(KEPT, HIDDEN), "verifier_norm.weight": Random(9).norm(HIDDEN)}
    write(source, config, tensors | training)
    report = convert_model(source, verifier, output_path=tmp_path / "ours", validate_device="cpu")
    written, kept = read(tmp_path / "ours")
    assert equal(kept, tensors)
    assert written["speculators_model_type"] == family
    norms = dict.fromkeys(("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"), False)
    assert assumed(report) == norms | {"embed_requires_grad": family == "peagle"}
    assert {key: written[key] for key in norms} == norms
    if family == "eagle3":
        facts: dict[str, Any] = {"capture_ids": [2, 3, 5], "steps": 4}
        tokens = [drafted_chain(qwen3_keys(1), tensors, verifier, *round_, **facts) for round_ in ROUNDS]
        assert ours(tmp_path / "ours", verifier, ROUNDS) == tokens


def test_everything_a_config_says_is_kept(verifier: str, tmp_path: Path) -> None:
    values: dict[str, Any] = {
        "sample_from_anchor": True,
        "sliding_window_non_causal": True,
        "markov_rank": 6,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    }
    source, _ = old_speculators_checkpoint(tmp_path / "theirs", **values)
    report = convert_model(source, verifier, output_path=tmp_path / "ours")
    config, tensors = read(tmp_path / "ours")
    assert {key: config[key] for key in values} == values
    assert report.notes.assumed == []
    # What this library writes comes back as it is.
    convert_model(tmp_path / "ours", output_path=tmp_path / "again")
    assert read(tmp_path / "again")[0] == config
    assert equal(read(tmp_path / "again")[1], tensors)


@pytest.mark.parametrize("reduced", [True, False])
def test_files_of_0_9_0_leave_the_verifiers_parts_out(reduced: bool, verifier: str, tmp_path: Path) -> None:
    values: dict[str, Any] = {"sample_from_anchor": True, "sliding_window_non_causal": False, "speculators_version": "0.9.0"}
    source, tensors = old_speculators_checkpoint(tmp_path / "theirs", reduced=reduced, **values)
    borrowed = {"embed_tokens.weight"} if reduced else {"embed_tokens.weight", "lm_head.weight"}
    tensors = {name: tensor for name, tensor in tensors.items() if name not in borrowed}
    write(source, read(source)[0], tensors)
    convert_model(source, verifier, output_path=tmp_path / "ours", speculative_tokens=5)
    assert equal(read(tmp_path / "ours")[1], tensors)
    facts: dict[str, Any] = {"foreign_ids": [layer - 1 for layer in IDS], "mask_token_id": MASK, "block_size": 5}
    tokens = [drafted(qwen3_keys(), tensors, verifier, *round_, anchor_first=True, **facts) for round_ in ROUNDS]
    assert ours(tmp_path / "ours", verifier, ROUNDS) == tokens
    assert len({token for row in tokens for token in row}) > 4


def test_sizes_come_from_the_tensors_and_layers_from_upstreams_default(verifier: str, tmp_path: Path) -> None:
    source, _ = old_speculators_checkpoint(
        tmp_path / "theirs", "dflash", draft_vocab_size=None, block_size=None, aux_hidden_state_layer_ids=None
    )
    # Of 6 verifier layers the default captures [2, 3, 3], made distinct: not the three that fc reads here.
    with pytest.raises(ConfigError, match="names no captured layers and fc reads 3 of them"):
        convert_model(source, verifier, output_path=tmp_path / "ours")
    report = convert_model(source, verifier, output_path=tmp_path / "ours", aux_hidden_state_layer_ids=IDS)
    assert assumed(report)["draft_vocab_size"] == KEPT
    assert assumed(report)["block_size"] == 8


def test_options_take_the_place_of_keys(verifier: str, tmp_path: Path) -> None:
    source, _ = old_speculators_checkpoint(tmp_path / "theirs")
    options: dict[str, Any] = {"sample_from_anchor": True, "mask_token_id": 5, "aux_hidden_state_layer_ids": [1, 2, 3]}
    convert_model(source, verifier, output_path=tmp_path / "ours", speculative_tokens=3, **options)
    config, _ = read(tmp_path / "ours")
    assert {key: config[key] for key in options} == options
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 3


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"speculators_model_type": "eagle"}, r"'eagle' \(which upstream gave up\) cannot be converted"),
        ({"speculators_model_type": "xpress"}, "'xpress' cannot be converted; this library has .*dspark"),
        ({"speculators_config": None}, "has no 'speculators_config'"),
        ({"transformer_layer_config": None}, "has no 'transformer_layer_config'"),
        ({"mask_token_id": None}, "mask_token_id"),
        ({"markov_rank": 7}, r"is \[.*, but its config asks for"),
    ],
)
def test_refusals(changes: dict[str, Any], sentence: str, verifier: str, tmp_path: Path) -> None:
    source, _ = old_speculators_checkpoint(tmp_path / "theirs", **changes)
    with pytest.raises(ConfigError, match=sentence):
        convert_model(source, verifier, output_path=tmp_path / "ours")
    assert not (tmp_path / "ours").exists()


def test_the_verifier_named_in_the_file_is_used(verifier: str, tmp_path: Path) -> None:
    source, _ = old_speculators_checkpoint(tmp_path / "theirs")
    with pytest.raises(VerifierError, match="someone/elsewhere"):
        convert_model(source, output_path=tmp_path / "ours")
    config, tensors = read(source)
    config["speculators_config"]["verifier"]["name_or_path"] = verifier
    write(source, config, tensors)
    convert_model(source, output_path=tmp_path / "ours")
    assert SpeculatorModel.from_pretrained(tmp_path / "ours").config.sample_from_anchor is False


def test_maybe_convert_external_checkpoint(verifier: str, tmp_path: Path) -> None:
    ours_already, _ = old_speculators_checkpoint(tmp_path / "speculators")
    assert maybe_convert_external_checkpoint(ours_already) == str(ours_already)
    foreign, tensors = zlab_checkpoint(tmp_path / "theirs")
    with pytest.raises(ConfigError, match="needs its verifier"):
        maybe_convert_external_checkpoint(foreign)
    converted = Path(maybe_convert_external_checkpoint(foreign, verifier))
    assert equal(read(converted)[1], tensors)
    placed = maybe_convert_external_checkpoint(foreign, verifier, output_path=tmp_path / "placed", config_dict={})
    assert placed == str(tmp_path / "placed")
    with pytest.raises(NotImplementedError, match="it is none of"):
        maybe_convert_external_checkpoint(verifier, verifier)
