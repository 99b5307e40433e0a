"""Checkpoint folders: what they hold, both forms of them, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from speculators import DSparkSpeculator, SpeculatorModel, SpeculatorModelConfig
from speculators.errors import ConfigError, VerifierError
from speculators.models.dflash import DFlashDraftModel
from tests.models.small import HIDDEN, VOCAB, draft_config, packed_row
from tests.tiny import tiny_verifier

KEPT = 30


@pytest.fixture(scope="module")
def verifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_verifier(tmp_path_factory.mktemp("verifier"), hidden=HIDDEN)


def mapping(vocab: int, kept: int) -> tuple[torch.Tensor, torch.Tensor]:
    t2d = torch.zeros(vocab, dtype=torch.bool)
    t2d[torch.randperm(vocab, generator=torch.Generator().manual_seed(0))[:kept]] = True
    return t2d, t2d.nonzero().squeeze(-1) - torch.arange(kept)


def draft(verifier: Path | str | None, *, kept: int = KEPT, family: str = "dspark", **values: Any) -> Any:
    """A draft for the tiny verifier of 64 ids, its frozen parts read from it."""
    torch.manual_seed(0)
    config = draft_config(family, verifier=None if verifier is None else str(verifier))
    record = config.to_dict()
    record["transformer_layer_config"]["vocab_size"] = 64
    config = SpeculatorModelConfig.from_dict(record, draft_vocab_size=kept, **values)
    t2d, d2t = mapping(64, kept)
    if verifier is None:
        model: Any = SpeculatorModel.registered_model_class_from_config(config)(config)
        model.load_vocab_mappings(t2d, d2t)
        return model
    return SpeculatorModel.from_verifier(config, t2d=t2d, d2t=d2t)


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def same_state(first: Any, second: Any) -> bool:
    ours, theirs = first.state_dict(), second.state_dict()
    return list(ours) == list(theirs) and all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("family", ["dflash", "dspark"])
@pytest.mark.parametrize("kept", [KEPT, 64])
@pytest.mark.parametrize("include_embeddings", [True, False])
def test_round_trip(family: str, kept: int, include_embeddings: bool, verifier: Path, tmp_path: Path) -> None:
    model = draft(verifier, family=family, kept=kept)
    model.save_pretrained(tmp_path, include_embeddings=include_embeddings)
    assert files(tmp_path) == ["config.json", "model.safetensors"]
    tensors = load_file(tmp_path / "model.safetensors")
    assert ("embed_tokens.weight" in tensors) is include_embeddings
    assert ("lm_head.weight" in tensors) is (include_embeddings or kept < 64)
    assert ({"d2t", "t2d"} <= set(tensors)) is (kept < 64)
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == [type(model).__name__]
    assert config["dtype"] == "float32"

    read = SpeculatorModel.from_pretrained(tmp_path)
    assert type(read) is type(model)
    assert not read.training
    assert same_state(model, read)
    assert {name for name, value in read.named_parameters() if not value.requires_grad} == {
        "embed_tokens.weight",
        "lm_head.weight",
    }
    row = packed_row([12], [3, 8])
    row.features = row.features.float()
    torch.testing.assert_close(read.draft_hidden(row), model.draft_hidden(row))
    assert torch.equal(read.verifier_to_draft(row.input_ids), model.verifier_to_draft(row.input_ids))


def test_tensor_names_are_flat(verifier: Path, tmp_path: Path) -> None:
    draft(verifier).save_pretrained(tmp_path, include_embeddings=True, dtype=torch.bfloat16)
    tensors = load_file(tmp_path / "model.safetensors")
    layer = {
        "input_layernorm",
        "post_attention_layernorm",
        *(f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")),
        *(f"mlp.{name}" for name in ("gate_proj", "up_proj", "down_proj")),
    }
    expected = {f"layers.{index}.{name}.weight" for index in range(2) for name in layer}
    expected |= {f"{name}.weight" for name in ("fc", "hidden_norm", "norm", "embed_tokens", "lm_head")}
    expected |= {"markov_head.markov_w1.weight", "markov_head.markov_w2.weight"}
    expected |= {"confidence_head.proj.weight", "confidence_head.proj.bias", "d2t", "t2d"}
    assert set(tensors) == expected
    assert tensors["d2t"].dtype == torch.int64
    assert tensors["t2d"].dtype == torch.bool
    assert {value.dtype for name, value in tensors.items() if name not in ("d2t", "t2d")} == {torch.bfloat16}
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    assert SpeculatorModel.from_pretrained(tmp_path).dtype == torch.float32


@pytest.mark.parametrize(("head", "names"), [("gated", "gate_proj"), ("rnn", "joint_proj")])
def test_names_of_the_other_markov_heads(head: str, names: str, verifier: Path) -> None:
    model = draft(verifier, markov_head_type=head)
    assert {f"markov_head.{names}.weight", f"markov_head.{names}.bias"} <= set(model.checkpoint_tensors())


def test_reads_in_the_dtype_asked_for(verifier: Path, tmp_path: Path) -> None:
    model = draft(verifier)
    model.save_pretrained(tmp_path)
    read = DSparkSpeculator.from_pretrained(tmp_path, dtype=torch.float64)
    assert {value.dtype for value in read.parameters()} == {torch.float64}
    torch.testing.assert_close(read.fc.weight, model.fc.weight.double())
    assert SpeculatorModel.from_pretrained(tmp_path, dtype="bfloat16").dtype == torch.bfloat16
    assert SpeculatorModel.from_pretrained(tmp_path, dtype="auto").dtype == torch.float32
    for wrong in ("half-float", "int8", torch.int8):
        with pytest.raises(ConfigError, match="is no floating-point type of torch"):
            SpeculatorModel.from_pretrained(tmp_path, dtype=wrong)
        with pytest.raises(ConfigError, match="is no floating-point type of torch"):
            model.save_pretrained(tmp_path, dtype=wrong)
    assert {entry.dtype for entry in model.checkpoint_listing(dtype="float16")} == {"float16", "int64", "bool"}
    model.save_pretrained(tmp_path, dtype="bfloat16")
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    assert SpeculatorModel.from_pretrained(tmp_path, dtype="auto").dtype == torch.bfloat16
    with pytest.raises(ConfigError, match="holds a DSparkDraftModel, not a"):
        type("Other", (DFlashDraftModel,), {"config_class": None}).from_pretrained(tmp_path)


def test_frozen_parts_are_the_verifiers(verifier: Path) -> None:
    model = draft(verifier)
    tensors = load_file(verifier / "model.safetensors")
    assert torch.equal(model.embed_tokens.weight, tensors["model.embed_tokens.weight"])
    assert torch.equal(model.lm_head.weight, tensors["lm_head.weight"][model.t2d])


def test_the_verifier_is_read_only_for_what_is_absent(tmp_path: Path) -> None:
    """A verifier that is gone matters only if the file lacks the embedding."""
    model = draft(None)
    model.config.speculators_config.verifier.name_or_path = str(tmp_path / "gone")
    model.save_pretrained(tmp_path / "whole", include_embeddings=True)
    assert same_state(SpeculatorModel.from_pretrained(tmp_path / "whole"), model)
    model.save_pretrained(tmp_path / "lean")
    with pytest.raises(VerifierError, match=r"no verifier weights at .*gone"):
        SpeculatorModel.from_pretrained(tmp_path / "lean")
    model.config.speculators_config.verifier.name_or_path = None
    model.save_pretrained(tmp_path / "nameless")
    with pytest.raises(VerifierError, match="the config names none; give its folder"):
        SpeculatorModel.from_pretrained(tmp_path / "nameless")


def test_another_verifier_can_be_given(verifier: Path, tmp_path: Path) -> None:
    model = draft(verifier)
    model.config.speculators_config.verifier.name_or_path = None
    model.save_pretrained(tmp_path / "draft")
    assert same_state(SpeculatorModel.from_pretrained(tmp_path / "draft", verifier=verifier), model)
    wide = tiny_verifier(tmp_path, hidden=32)
    with pytest.raises(VerifierError, match=r"embed_tokens is \[64, 32\], but the draft's config asks for \[64, 16\]"):
        SpeculatorModel.from_pretrained(tmp_path / "draft", verifier=wide)


def rewritten(model: Any, folder: Path, change: Any) -> Path:
    model.save_pretrained(folder, include_embeddings=True)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_either_table_is_enough(tmp_path: Path) -> None:
    model = draft(None)
    for name in ("d2t", "t2d"):
        folder = rewritten(model, tmp_path / name, lambda tensors, name=name: tensors.pop(name))
        assert same_state(SpeculatorModel.from_pretrained(folder), model)

    def drop_both(tensors: dict) -> None:
        del tensors["d2t"], tensors["t2d"]

    folder = rewritten(model, tmp_path / "none", drop_both)
    with pytest.raises(ConfigError, match="neither d2t nor t2d"):
        SpeculatorModel.from_pretrained(folder)
    assert same_state(SpeculatorModel.from_pretrained(folder, t2d=model.t2d, d2t=model.d2t), model)


def test_a_missing_confidence_bias_is_zero(tmp_path: Path) -> None:
    model = draft(None)
    folder = rewritten(model, tmp_path, lambda tensors: tensors.pop("confidence_head.proj.bias"))
    read: Any = SpeculatorModel.from_pretrained(folder)
    assert torch.equal(read.confidence_head.proj.bias, torch.zeros(1))
    assert read.confidence_head.proj.bias.requires_grad


def test_tensors_of_other_writers_are_ignored(tmp_path: Path) -> None:
    def add(tensors: dict) -> None:
        tensors["verifier_lm_head.weight"] = torch.zeros(2)
        tensors["verifier_norm.weight"] = torch.zeros(2)

    model = draft(None)
    assert same_state(SpeculatorModel.from_pretrained(rewritten(model, tmp_path, add)), model)


def test_unfit_files_are_refused(tmp_path: Path) -> None:
    model = draft(None)
    folder = rewritten(model, tmp_path / "a", lambda tensors: tensors.pop("fc.weight"))
    with pytest.raises(ConfigError, match=r"missing \['fc.weight'\], unexpected nothing"):
        SpeculatorModel.from_pretrained(folder)
    folder = rewritten(model, tmp_path / "b", lambda tensors: tensors.update(midlayer=torch.zeros(2)))
    with pytest.raises(ConfigError, match=r"unexpected \['midlayer'\]"):
        SpeculatorModel.from_pretrained(folder)
    folder = rewritten(model, tmp_path / "c", lambda tensors: tensors.update({"norm.weight": torch.zeros(3)}))
    with pytest.raises(ConfigError, match=r"norm.weight in .* is \[3\], but its config asks for \[16\]"):
        SpeculatorModel.from_pretrained(folder)
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ConfigError, match="the file is torn"):
        SpeculatorModel.from_pretrained(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"no draft weights at .*model.safetensors"):
        SpeculatorModel.from_pretrained(folder)


def test_saving_over_an_earlier_checkpoint_leaves_no_half_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = draft(None)
    model.save_pretrained(tmp_path, include_embeddings=True)
    before = (tmp_path / "model.safetensors").read_bytes()

    def full_disk(tensors: Any, path: Path, metadata: Any = None) -> None:
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("speculators.models.checkpoint_files.save_file", full_disk)
    with pytest.raises(OSError, match="No space left"):
        model.save_pretrained(tmp_path)
    assert files(tmp_path) == ["config.json", "model.safetensors"]
    assert (tmp_path / "model.safetensors").read_bytes() == before


def test_a_given_state_dict_is_written(tmp_path: Path) -> None:
    model = draft(None)
    changed = {name: value + 1 for name, value in model.state_dict().items() if name == "norm.weight"}
    model.save_pretrained(tmp_path, state_dict=changed)
    tensors = load_file(tmp_path / "model.safetensors")
    assert torch.equal(tensors["norm.weight"], torch.full((HIDDEN,), 2.0))
    assert torch.equal(tensors["lm_head.weight"], model.lm_head.weight)


def test_fresh_drafts_need_their_mapping(verifier: Path) -> None:
    config = draft(None).config
    with pytest.raises(ConfigError, match="a vocabulary mapping is needed"):
        SpeculatorModel.from_verifier(config, verifier=verifier)


def test_vocabulary_tables() -> None:
    model = draft(None)
    ids = torch.arange(64)
    inside = model.t2d[ids]
    draft_ids = model.verifier_to_draft(ids)
    assert torch.equal(draft_ids == -1, ~inside)
    assert torch.equal(model.draft_to_verifier(draft_ids[inside]), ids[inside])
    whole = draft(None, kept=64)
    assert (whole.d2t, whole.t2d) == (None, None)
    assert torch.equal(whole.verifier_to_draft(ids), ids)
    assert torch.equal(whole.draft_to_verifier(ids), ids)
    fresh: Any = DSparkSpeculator(model.config)
    assert torch.equal(fresh.verifier_to_draft(ids), torch.where(ids < KEPT, ids, -1))


@pytest.mark.parametrize(
    ("t2d", "d2t", "sentence"),
    [
        (mapping(64, KEPT)[0], None, "both t2d and d2t"),
        (mapping(60, KEPT)[0], mapping(64, KEPT)[1], r"t2d has shape \(60,\)"),
        (mapping(64, 20)[0], mapping(64, KEPT)[1], "keeps 20 ids"),
        (mapping(64, KEPT)[0], mapping(64, 20)[1], r"d2t has shape \(20,\)"),
        (mapping(64, KEPT)[0], mapping(64, KEPT)[1] + torch.arange(KEPT), "contradict each other"),
    ],
)
def test_wrong_tables_are_refused(t2d: torch.Tensor, d2t: torch.Tensor | None, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        draft(None).load_vocab_mappings(t2d, d2t)


def test_a_constructor_needs_a_config() -> None:
    with pytest.raises(ValueError, match="needs a config"):
        DSparkSpeculator(None)
    with pytest.raises(TypeError, match="not dict"):
        DSparkSpeculator({"block_size": 3})
    with pytest.raises(ValueError, match="needs a checkpoint folder"):
        SpeculatorModel.from_pretrained(None)
    assert VOCAB < 64
