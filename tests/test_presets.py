"""The settings in ``examples/``: what they say, and the drafts they make, on the meta device and as a file."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from speculators.cli.app import run
from speculators.config import SpeculatorModelConfig
from speculators.convert import convert_model
from speculators.errors import ConfigError
from speculators.models import SpeculatorModel
from speculators.models.checkpoint_files import TensorEntry, WeightFiles
from speculators.models.verifier_weights import read_verifier_config
from speculators.train.config import TrainConfig
from speculators.train.config.derived import check_runnable, derive
from speculators.train.config.resolution import flags_of
from speculators.train.drafts import planned_config
from speculators.train.shape import shape_of, write_fresh
from tests.models.test_checkpoints import draft, files
from tests.presets import EXAMPLES, VERIFIERS, verifier_folder

KIMI = ("kimi-k2.6", "kimi-k2.7-code")
#: Trained and frozen parameters.
COUNTS = {
    "kimi-k2.6": (1_745_747_969, 1_403_781_120),
    "kimi-k2.7-code": (1_745_747_969, 1_403_781_120),
    "dspark-qwen3-4b": (615_221_249, 777_912_320),
    "dspark-qwen3-8b": (1_126_422_017, 1_244_659_712),
    "dspark-qwen3-14b": (1_860_438_529, 1_555_824_640),
    "dspark-gemma-4-12b": (1_328_664_065, 2_013_265_920),
}


def settings(name: str) -> TrainConfig:
    """As ``speculators train --config`` reads them; a warning fails."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return TrainConfig.resolve(["--config", str(EXAMPLES / f"{name}.yaml")])


def preset(name: str, folder: Path) -> Any:
    return shape_of(str(EXAMPLES / f"{name}.yaml"), str(verifier_folder(name, folder))).config


def counted(config: Any) -> tuple[int, int]:
    """Parameters by hand: three norms and a projection, the layers, the two heads; embedding and output rows."""
    decoder = config.transformer_layer_config
    hidden, ffn, size = decoder.hidden_size, decoder.intermediate_size, decoder.head_dim
    queries, keys = decoder.num_attention_heads * size, decoder.num_key_value_heads * size
    layer = 2 * hidden * queries + 2 * hidden * keys + 2 * size + 3 * hidden * ffn + 2 * hidden
    shared = len(config.aux_hidden_state_layer_ids) * hidden * hidden + 2 * hidden
    markov = config.markov_rank * (decoder.vocab_size + config.draft_vocab_size)
    confidence = hidden + config.markov_rank + 1
    trained = decoder.num_hidden_layers * layer + shared + markov + confidence
    return trained, hidden * (decoder.vocab_size + config.draft_vocab_size)


def test_every_example_is_here() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.yaml")} == set(COUNTS) == set(VERIFIERS)


@pytest.mark.parametrize("name", COUNTS)
def test_each_builds_with_its_parameter_counts(name: str, tmp_path: Path) -> None:
    check_runnable(settings(name))
    config = preset(name, tmp_path)
    model: Any = SpeculatorModel.without_weights(config)
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    assert tuple(model.parameter_counts().values()) == COUNTS[name] == counted(config)
    verifier = config.speculators_config.verifier
    assert verifier.name_or_path == settings(name).verifier.verifier_name_or_path
    assert verifier.architectures == VERIFIERS[name]["architectures"]


@pytest.mark.parametrize("name", COUNTS)
def test_each_survives_the_run_folder_and_the_command_line(name: str, tmp_path: Path) -> None:
    """``run.yaml`` and the flags say the same, the decoder's config in the file included."""
    config = settings(name)
    config.save(tmp_path)
    assert TrainConfig.from_sources(config_path=tmp_path / "run.yaml") == config
    assert TrainConfig.resolve(flags_of(config)) == config


@pytest.mark.parametrize("name", KIMI)
def test_what_the_kimi_presets_write(name: str, tmp_path: Path) -> None:
    config = preset(name, tmp_path)
    SpeculatorModel.without_weights(config).checkpoint_config(torch.bfloat16).save_pretrained(tmp_path / "draft")
    written = json.loads((tmp_path / "draft" / "config.json").read_text())
    assert written["speculators_model_type"] == "dspark"
    assert written["block_size"] == 8
    assert written["sample_from_anchor"] is False
    assert written["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 7
    assert written["mask_token_id"] == 163608
    assert written["draft_vocab_size"] == 32000
    assert written["aux_hidden_state_layer_ids"] == [2, 30, 58]
    assert written["final_state"] == "post_norm"
    assert (written["markov_rank"], written["markov_head_type"]) == (256, "vanilla")
    assert written["enable_confidence_head"] is written["confidence_head_with_markov"] is True
    decoder = written["transformer_layer_config"]
    assert decoder["rope_parameters"] == {"rope_type": "default", "rope_theta": 50000.0}
    assert decoder["layer_types"] == ["full_attention"] * 3
    assert (decoder["use_sliding_window"], decoder["sliding_window"]) == (False, None)
    assert (decoder["num_attention_heads"], decoder["num_key_value_heads"], decoder["head_dim"]) == (56, 8, 128)
    assert (decoder["hidden_size"], decoder["intermediate_size"], decoder["vocab_size"]) == (7168, 18432, 163840)


@pytest.mark.parametrize("name", KIMI)
def test_training_settings_of_the_kimi_presets(name: str) -> None:
    config = settings(name)
    assert (config.optimizer.lr, config.scheduler.scheduler_type, config.scheduler.scheduler_warmup_steps) == (
        3e-4,
        "cosine",
        300,
    )
    assert (config.trainer.max_steps, config.trainer.gradient_accumulation_steps) == (20000, 2)
    assert (config.data.total_seq_len, config.data.max_anchors, config.dflash.dflash_decay_gamma) == (20000, 3072, 4.0)
    assert derive(config).loss_fn == {"ce": 0.1, "tv": 0.9}


#: What Novita's model cards print, beside the names; the rest is inferred.
ON_THE_CARD = {
    "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size",
    "rope_theta", "draft_vocab_size", "mask_token_id", "total_seq_len", "max_anchors", "apply_verifier_norm", "block_size",
    "dflash_decay_gamma", "markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov", "loss_fn",
    "lr", "scheduler_type", "scheduler_warmup_steps", "max_steps", "gradient_accumulation_steps", "checkpoint_embeddings",
    "speculator_type", "verifier_name_or_path", "model_type",
}  # fmt: skip


@pytest.mark.parametrize("name", KIMI)
def test_inferred_values_are_marked_with_a_reason(name: str) -> None:
    lines = [line for line in (EXAMPLES / f"{name}.yaml").read_text().splitlines() if line and not line.startswith("#")]
    values = [line.strip().partition(": ") for line in lines if not line.split(" #")[0].rstrip().endswith(":")]
    unmarked = {key for key, _, value in values if "# inferred: " not in value}
    assert unmarked == ON_THE_CARD
    assert all(len(value.split("# inferred: ")[1]) > 5 for _, _, value in values if "# inferred" in value)


@pytest.mark.parametrize(("name", "layers"), [("qwen3-4b", 36), ("qwen3-8b", 36), ("qwen3-14b", 40), ("gemma-4-12b", 48)])
def test_deepspec_settings(name: str, layers: int, tmp_path: Path) -> None:
    """Its layer ids count outputs of layers from 0, and a final layer is none of them."""
    theirs = {"qwen3-14b": [1, 10, 19, 28, 37], "gemma-4-12b": [5, 17, 29, 41, 46]}.get(name, [1, 9, 17, 25, 33])
    config, train = preset(f"dspark-{name}", tmp_path), settings(f"dspark-{name}")
    assert config.aux_hidden_state_layer_ids == [layer + 1 for layer in theirs]
    assert max(config.aux_hidden_state_layer_ids) < layers
    assert config.mask_token_id == (4 if "gemma" in name else 151669)
    assert (config.block_size, config.sample_from_anchor, config.layout.max_draft_tokens) == (7, True, 7)
    assert (config.draft_vocab_size, config.transformer_layer_config.num_hidden_layers) == (
        config.transformer_layer_config.vocab_size,
        5,
    )
    assert config.transformer_layer_config.layer_types == ["full_attention"] * 5
    assert (train.optimizer.optimizer, train.optimizer.lr, train.optimizer.weight_decay) == ("adamw", 6e-4, 0.0)
    assert (train.scheduler.scheduler_type, train.scheduler.scheduler_warmup_ratio) == ("cosine", 0.04)
    assert (train.data.max_anchors, train.data.total_seq_len, train.trainer.epochs) == (512, 4096, 10)


def kimi_entries(decoder: Any, vocab: int, kept: int, rank: int) -> set[TensorEntry]:
    """The published file's 44 tensors, for a draft of this shape."""
    hidden, ffn, size = decoder.hidden_size, decoder.intermediate_size, decoder.head_dim
    queries, keys = decoder.num_attention_heads * size, decoder.num_key_value_heads * size
    shapes: dict[str, tuple[int, ...]] = {}
    for layer in range(3):
        inside = {
            "self_attn.q_proj": (queries, hidden),
            "self_attn.k_proj": (keys, hidden),
            "self_attn.v_proj": (keys, hidden),
            "self_attn.o_proj": (hidden, queries),
            "self_attn.q_norm": (size,),
            "self_attn.k_norm": (size,),
            "mlp.gate_proj": (ffn, hidden),
            "mlp.up_proj": (ffn, hidden),
            "mlp.down_proj": (hidden, ffn),
            "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
        }
        shapes |= {f"layers.{layer}.{name}.weight": shape for name, shape in inside.items()}
    shapes |= {
        "embed_tokens.weight": (vocab, hidden),
        "lm_head.weight": (kept, hidden),
        "fc.weight": (hidden, 3 * hidden),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
        "markov_head.markov_w1.weight": (vocab, rank),
        "markov_head.markov_w2.weight": (kept, rank),
        "confidence_head.proj.weight": (1, hidden + rank),
        "confidence_head.proj.bias": (1,),
    }
    entries = {TensorEntry(name, shape, "bfloat16", 2 * torch.Size(shape).numel()) for name, shape in shapes.items()}
    return entries | {TensorEntry("d2t", (kept,), "int64", 8 * kept), TensorEntry("t2d", (vocab,), "bool", vocab)}


def test_the_listing_of_the_kimi_draft_is_the_published_files(tmp_path: Path) -> None:
    model: Any = SpeculatorModel.without_weights(preset("kimi-k2.6", tmp_path))
    whole = model.checkpoint_listing(include_embeddings=True)
    assert set(whole) == kimi_entries(model.config.transformer_layer_config, 163840, 32000, 256)
    assert len(whole) == 44
    assert sum(entry.nbytes for entry in whole) == 6_299_478_018
    assert sum(entry.nbytes for entry in whole if entry.name.startswith("layers.0.")) == 1_027_633_664
    lean = model.checkpoint_listing()
    assert {entry.name for entry in whole} - {entry.name for entry in lean} == {"embed_tokens.weight"}
    assert len(lean) == 43
    assert sum(entry.nbytes for entry in lean) == 6_299_478_018 - 2_348_810_240


def narrow_kimi(folder: Path) -> tuple[Path, Path]:
    """The preset and its verifier at 1/16 of every width, vocabularies included."""
    values = json.loads(json.dumps(VERIFIERS["kimi-k2.6"]))
    values["text_config"] |= {"vocab_size": 10240, "hidden_size": 448, "intermediate_size": 1152}
    (folder / "narrow").mkdir()
    (folder / "narrow" / "config.json").write_text(json.dumps(values))
    file = yaml.safe_load((EXAMPLES / "kimi-k2.6.yaml").read_text())
    train = file["train"]
    train["draft"]["draft_config"] |= {"hidden_size": 448, "head_dim": 8, "intermediate_size": 1152}
    train["draft"] |= {"draft_vocab_size": 2000, "mask_token_id": 10239}
    train["dspark"]["markov_rank"] = 16
    (folder / "narrow.yaml").write_text(yaml.safe_dump(file))
    return folder / "narrow.yaml", folder / "narrow"


@pytest.mark.parametrize("include_embeddings", [True, False])
def test_a_narrow_kimi_file_holds_what_its_listing_says(include_embeddings: bool, tmp_path: Path) -> None:
    path, verifier = narrow_kimi(tmp_path)
    config = shape_of(str(path), str(verifier)).config
    model: Any = SpeculatorModel.without_weights(config)
    listing = model.checkpoint_listing(include_embeddings=include_embeddings)
    expected = kimi_entries(config.transformer_layer_config, 10240, 2000, 16)
    assert set(listing) == {entry for entry in expected if include_embeddings or entry.name != "embed_tokens.weight"}
    write_fresh(config, tmp_path / "draft", include_embeddings=include_embeddings)
    assert files(tmp_path / "draft") == ["config.json", "model.safetensors"]
    assert WeightFiles(tmp_path / "draft").entries() == listing
    header = int.from_bytes((tmp_path / "draft" / "model.safetensors").read_bytes()[:8], "little")
    size = (tmp_path / "draft" / "model.safetensors").stat().st_size
    assert size - 8 - header == sum(entry.nbytes for entry in listing)
    if include_embeddings:
        read: Any = SpeculatorModel.from_pretrained(tmp_path / "draft", dtype=torch.bfloat16)
        assert float(read.fc.weight.detach().float().std()) == pytest.approx(0.02, rel=0.05)
        assert read.config == SpeculatorModelConfig.from_pretrained(tmp_path / "draft")


def test_the_native_form_of_the_kimi_draft(tmp_path: Path) -> None:
    """vLLM's own config counts outputs of layers from 0, as the card does."""
    path, verifier = narrow_kimi(tmp_path)
    write_fresh(shape_of(str(path), str(verifier)).config, tmp_path / "draft", include_embeddings=True)
    convert_model(str(tmp_path / "draft"), str(verifier), output_path=str(tmp_path / "native"), to="vllm-native")
    native = json.loads((tmp_path / "native" / "config.json").read_text())
    assert native["target_layer_ids"] == [1, 29, 57]
    assert (native["sample_from_anchor"], native["block_size"], native["rope_theta"]) == (False, 8, 50000.0)
    assert (native["layer_types"], native["sliding_window"]) == (["full_attention"] * 3, None)


@pytest.mark.parametrize("size", [1, "1MB"])
def test_a_full_shape_is_written_when_asked(size: int | str, tmp_path: Path) -> None:
    """Small here; shards of any size hold the same tensors."""
    config = draft(None).config
    write_fresh(config, tmp_path, dtype=torch.float32, include_embeddings=True, max_shard_size=size)
    model = SpeculatorModel.without_weights(config)
    assert WeightFiles(tmp_path).entries() == model.checkpoint_listing(dtype=torch.float32, include_embeddings=True)
    assert ("model.safetensors" in files(tmp_path)) is (size != 1)


def test_the_command_lists_and_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, verifier = narrow_kimi(tmp_path)
    arguments = ["tensors", str(path), "--verifier-config", str(verifier)]
    assert run(arguments) == 0
    text = capsys.readouterr().out
    assert "embed_tokens.weight" in text
    assert text.splitlines()[-1].startswith("44 tensors, ")
    assert run([*arguments, "--no-include-embeddings", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["tensors"]) == 43
    assert run([*arguments, "--json", "--write", str(tmp_path / "draft")]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert len(listed["tensors"]) == 44
    assert listed["bytes"] == sum(entry.nbytes for entry in WeightFiles(tmp_path / "draft").entries())
    for source in (tmp_path / "draft", tmp_path / "draft" / "config.json"):
        assert run(["tensors", str(source), "--json"]) == 0
        assert json.loads(capsys.readouterr().out) == listed


def test_the_command_says_what_it_lacks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["tensors", str(tmp_path)]) == 2
    assert "no readable config.json" in capsys.readouterr().err
    path = tmp_path / "run.yaml"
    path.write_text("train: {speculator_type: dspark}")
    assert run(["tensors", str(path)]) == 2
    assert "names no verifier; give the folder of one with --verifier-config" in capsys.readouterr().err
    assert run(["tensors", str(path), "--verifier-config", str(verifier_folder("dspark-qwen3-4b", tmp_path))]) == 2
    assert "give --mask-token-id" in capsys.readouterr().err
    path.write_text(f"train: {{speculator_type: dspark, verifier: {{verifier_name_or_path: {tmp_path}/none}}}}")
    assert run(["tensors", str(path)]) == 1
    assert "give the verifier's folder or hub id, with --verifier-config; its config.json is enough" in capsys.readouterr().err
    path.write_text("train: {speculator_type: dspark, draft: {from_pretrained: earlier}}")
    assert run(["tensors", str(path)]) == 2
    assert "goes on from the draft earlier" in capsys.readouterr().err
    wide = {"model_type": "qwen3", "hidden_size": 64}
    config = TrainConfig.from_flat(
        speculator_type="dspark", draft_config=wide, mask_token_id=4, target_layer_ids=[1], verifier_name_or_path="x"
    )
    verifier = read_verifier_config(tmp_path / "dspark-qwen3-4b")
    with pytest.raises(ConfigError, match="--draft-config itself has hidden_size 64, but the verifier's is 2560"):
        planned_config(config, verifier)
