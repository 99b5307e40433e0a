"""Configs: what is written, what is read, and what is refused with one sentence."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, PretrainedConfig

import speculators
from speculators.config import (
    SpeculatorModelConfig,
    SpeculatorsConfig,
    UnsupportedCheckpointError,
    VerifierConfig,
    reload_schemas,
)
from speculators.errors import ConfigError
from speculators.models.dflash import DFlashSpeculatorConfig
from speculators.models.dspark import DSparkSpeculatorConfig
from speculators.proposals import GreedyTokenProposalConfig, TokenProposalConfig
from tests.models.small import draft_config

#: Every key of a DFlash config.json; the last three are this library's own.
DFLASH_KEYS = {
    "architectures",
    "aux_hidden_state_layer_ids",
    "block_size",
    "draft_vocab_size",
    "dtype",
    "mask_token_id",
    "sample_from_anchor",
    "sliding_window_non_causal",
    "speculators_config",
    "speculators_model_type",
    "speculators_version",
    "target_hidden_size",
    "tie_word_embeddings",
    "transformer_layer_config",
    "transformers_version",
    "final_state",
    "sliding_window_reference",
    "training_answers",
}
DSPARK_KEYS = DFLASH_KEYS | {
    "confidence_detach",
    "confidence_head_with_markov",
    "confidence_target",
    "enable_confidence_head",
    "markov_head_type",
    "markov_rank",
}


@pytest.mark.parametrize(("family", "keys"), [("dflash", DFLASH_KEYS), ("dspark", DSPARK_KEYS)])
def test_every_key_is_written(family: str, keys: set[str], tmp_path: Path) -> None:
    draft_config(family, verifier="some/verifier").save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert set(written) == keys
    assert written["speculators_config"] == {
        "algorithm": family,
        "default_proposal_method": "greedy",
        "proposal_methods": [
            {
                "proposal_type": "greedy",
                "speculative_tokens": 4 if family == "dspark" else 3,
                "verifier_accept_k": 1,
                "accept_tolerance": 0.0,
            }
        ],
        "verifier": {"name_or_path": "some/verifier", "architectures": ["Qwen3ForCausalLM"]},
    }
    decoder = written["transformer_layer_config"]
    assert decoder["model_type"] == "qwen3"
    assert {
        "hidden_size",
        "vocab_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "intermediate_size",
        "hidden_act",
        "rms_norm_eps",
        "rope_parameters",
        "layer_types",
        "sliding_window",
        "use_sliding_window",
        "attention_bias",
        "max_position_embeddings",
        "tie_word_embeddings",
    } <= set(decoder)
    assert decoder["tie_word_embeddings"] is False
    assert list(tmp_path.iterdir()) == [tmp_path / "config.json"]


@pytest.mark.parametrize("family", ["dflash", "dspark"])
def test_round_trip_through_the_file(family: str, tmp_path: Path) -> None:
    config = draft_config(family, decoder={"sliding_window": 5, "full_attention_indices": [0]}, training_answers={"t": 0.5})
    config.save_pretrained(tmp_path)
    read = SpeculatorModelConfig.from_pretrained(tmp_path)
    assert type(read) is type(config)
    assert read == config
    assert isinstance(read, PretrainedConfig)
    assert read.transformer_layer_config.sliding_window == 5
    assert read.transformer_layer_config.layer_types == ["full_attention", "sliding_attention"]
    assert copy.deepcopy(read) == read
    assert SpeculatorModelConfig.from_pretrained(tmp_path, block_size=7).block_size == 7


def test_foreign_keys_of_other_writers_are_tolerated(tmp_path: Path) -> None:
    """Their files carry an ``auto_map`` for a stray config.py, spell dtype the old way, and know nothing of our keys."""
    values = draft_config().to_dict()
    for key in ("final_state", "sliding_window_reference", "training_answers", "confidence_target", "confidence_detach"):
        del values[key]
    del values["dtype"]
    values |= {"auto_map": {"": "config.DSparkSpeculatorConfig"}, "torch_dtype": "bfloat16", "something_new": [1]}
    (tmp_path / "config.json").write_text(json.dumps(values))
    read = SpeculatorModelConfig.from_pretrained(tmp_path)
    assert read.dtype == torch.bfloat16
    assert read.something_new == [1]
    written = read.to_dict()
    assert written["something_new"] == [1]
    assert "auto_map" not in written
    assert written["dtype"] == "bfloat16"
    assert written["final_state"] == "post_norm"


def test_family_defaults() -> None:
    values: dict[str, Any] = {"aux_hidden_state_layer_ids": [1], "mask_token_id": 3}
    dflash, dspark = DFlashSpeculatorConfig(**values), DSparkSpeculatorConfig(**values)
    assert (dflash.sample_from_anchor, dspark.sample_from_anchor) == (False, True)
    assert (dflash.block_size, dflash.draft_vocab_size, dspark.markov_rank) == (8, 32000, 256)
    assert (dflash.architectures, dspark.architectures) == (["DFlashSpeculator"], ["DSparkSpeculator"])
    assert (dflash.layout.max_draft_tokens, dspark.layout.max_draft_tokens) == (7, 8)


def test_full_attention_dflash_says_non_causal_for_engines() -> None:
    """vLLM reads the key for full layers too; they are bidirectional here."""
    assert draft_config("dflash").sliding_window_non_causal is True
    assert draft_config("dflash", decoder={"sliding_window": 4}).sliding_window_non_causal is False
    assert draft_config("dspark").sliding_window_non_causal is False


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"mask_token_id": 40}, "mask_token_id 40 is outside the verifier's embedding of 40 rows"),
    ({"mask_token_id": -1}, "mask_token_id -1 is outside"),
    ({"draft_vocab_size": 41}, "draft_vocab_size 41 exceeds the verifier's vocabulary of 40"),
    ({"block_size": 0}, "block_size: Input should be greater than or equal to 1"),
    ({"block_size": 1, "sample_from_anchor": False}, "predicts no token in this layout; use at least 2"),
    ({"aux_hidden_state_layer_ids": [1, 1]}, "must be distinct"),
    ({"aux_hidden_state_layer_ids": [-1, 1]}, "must lie within"),
    ({"aux_hidden_state_layer_ids": []}, "at least one target layer id"),
    ({"markov_rank": 0}, "confidence_head_with_markov needs a Markov head"),
    ({"markov_head_type": "lstm"}, "markov_head_type"),
    ({"sliding_window_reference": "row"}, "sliding_window_reference"),
]


@pytest.mark.parametrize(("values", "sentence"), WRONG)
def test_contradictions_are_refused_with_one_sentence(values: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence) as caught:
        draft_config("dspark", **values)
    assert "\n" not in str(caught.value)


def test_layer_ids_beyond_the_verifier_are_refused() -> None:
    good = draft_config(aux_hidden_state_layer_ids=[0, 6])
    with pytest.raises(ConfigError, match=r"\[7\] must lie within \[0, 6\]"):
        DSparkSpeculatorConfig.build(
            good.transformer_layer_config,
            good.speculators_config.verifier,
            num_verifier_layers=6,
            aux_hidden_state_layer_ids=[7],
            mask_token_id=0,
        )


def test_other_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no readable config.json"):
        SpeculatorModelConfig.from_pretrained(tmp_path / "nowhere")
    LlamaConfig().save_pretrained(tmp_path)
    with pytest.raises(UnsupportedCheckpointError, match="Loading a non-speculator model config"):
        SpeculatorModelConfig.from_pretrained(tmp_path)
    with pytest.raises(NotImplementedError):
        SpeculatorModelConfig.from_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="unknown speculators_model_type 'nothing'; this version reads: dflash, dspark"):
        SpeculatorModelConfig.from_dict({"speculators_model_type": "nothing"})
    with pytest.raises(ConfigError, match="has no 'speculators_model_type'"):
        SpeculatorModelConfig.from_dict({})
    values = draft_config().to_dict()
    values["transformer_layer_config"]["model_type"] = "unheard_of"
    with pytest.raises(ConfigError, match="unheard_of"):
        SpeculatorModelConfig.from_dict(values)


def test_registries() -> None:
    reload_schemas()
    assert {DFlashSpeculatorConfig, DSparkSpeculatorConfig} <= set(SpeculatorModelConfig.registered_classes())
    assert SpeculatorModelConfig.registry["dspark"] is DSparkSpeculatorConfig
    with pytest.raises(ValueError, match="already registered"):
        SpeculatorModelConfig.register("dspark")(DFlashSpeculatorConfig)

    @SpeculatorModelConfig.register("of_my_own")
    class OfMyOwnConfig(SpeculatorModelConfig):
        speculators_model_type: str = "of_my_own"
        width: int = 3

    try:
        read = SpeculatorModelConfig.from_dict({"speculators_model_type": "of_my_own", "width": 5})
        assert isinstance(read, OfMyOwnConfig)
        assert read.width == 5
    finally:
        del SpeculatorModelConfig.registry["of_my_own"]


def test_verifier_config(tmp_path: Path) -> None:
    config = LlamaConfig(architectures=["LlamaForCausalLM"])
    config.save_pretrained(tmp_path)
    assert VerifierConfig.from_config(config, "here") == VerifierConfig(name_or_path="here", architectures=["LlamaForCausalLM"])
    assert VerifierConfig.from_config(config).name_or_path is None
    assert VerifierConfig.from_config(LlamaConfig(), None).architectures == []
    read = VerifierConfig.from_pretrained(tmp_path)
    assert (read.name_or_path, read.architectures) == (str(tmp_path), ["LlamaForCausalLM"])


def test_proposals() -> None:
    verifier = VerifierConfig(name_or_path=None, architectures=[])
    values: dict[str, Any] = {"algorithm": "x", "verifier": verifier, "default_proposal_method": "greedy"}
    config = SpeculatorsConfig(proposal_methods=[{"proposal_type": "greedy", "speculative_tokens": 3}], **values)
    assert config.proposal_methods == [GreedyTokenProposalConfig(speculative_tokens=3)]
    assert config.model_dump()["proposal_methods"][0]["speculative_tokens"] == 3
    assert TokenProposalConfig.registry["greedy"] is GreedyTokenProposalConfig
    with pytest.raises(ValueError, match="must match the proposal_type"):
        SpeculatorsConfig(proposal_methods=[GreedyTokenProposalConfig()], **(values | {"default_proposal_method": "other"}))
    with pytest.raises(ValueError, match="no known proposal_type"):
        SpeculatorsConfig(proposal_methods=[{"proposal_type": "other"}], **values)
    with pytest.raises(ValueError, match="greater than or equal to 1"):
        GreedyTokenProposalConfig(speculative_tokens=0)


def test_public_names() -> None:
    assert speculators.DSparkSpeculator is speculators.DSparkDraftModel
    assert speculators.DSparkDraftModel.__name__ == "DSparkDraftModel"
    for name in speculators.__all__:
        assert getattr(speculators, name) is not None
    assert set(speculators.__all__) <= set(dir(speculators))
    from speculators.model import SpeculatorModel
    from speculators.proposals.greedy import GreedyTokenProposalConfig as Greedy

    assert SpeculatorModel is speculators.SpeculatorModel
    assert Greedy is GreedyTokenProposalConfig
    with pytest.raises(AttributeError, match="no attribute 'Eagle9'"):
        _ = speculators.Eagle9  # type: ignore[attr-defined]


def test_importing_the_package_imports_no_torch() -> None:
    code = "import sys, speculators; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_checkpoint_that_does_not_say_its_layout_is_refused(tmp_path: Path) -> None:
    config = draft_config("dspark")
    config.save_pretrained(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    del values["sample_from_anchor"]
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(ConfigError, match="does not say sample_from_anchor"):
        SpeculatorModelConfig.from_pretrained(tmp_path)
    assert SpeculatorModelConfig.from_pretrained(tmp_path, sample_from_anchor=False).sample_from_anchor is False
