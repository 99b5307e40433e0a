"""The checkpoint format, for every registered family: a new one fails here until it has samples."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import PretrainedConfig, Qwen3ForCausalLM

from speculators import SpeculatorModel, SpeculatorModelConfig
from speculators.config import VerifierConfig
from speculators.errors import VerifierError
from speculators.models import base
from speculators.models.checkpoint_files import WeightFiles
from speculators.models.draft_config import build_draft_config
from speculators.models.mtp import build_mtp_decoder
from speculators.models.verifier_weights import VerifierPart
from tests.models.small import LAYER_IDS, verifier_config
from tests.models.test_checkpoints import files, mapping, same_state

VOCAB, KEPT = 64, 40
BLOCK: dict[str, Any] = {"aux_hidden_state_layer_ids": list(LAYER_IDS), "mask_token_id": 63, "block_size": 4}
CHAIN: dict[str, Any] = {"eagle_aux_hidden_state_layer_ids": list(LAYER_IDS), "speculative_tokens": 3}

#: (family, fields); whether its vocabulary can be a part of the verifier's.
SAMPLES: list[tuple[str, dict[str, Any]]] = [
    ("dflash", BLOCK),
    ("dflash", BLOCK | {"draft_vocab_size": KEPT}),
    ("dspark", BLOCK | {"markov_rank": 6}),
    ("dspark", BLOCK | {"markov_rank": 6, "draft_vocab_size": KEPT}),
    ("eagle3", CHAIN),
    ("eagle3", CHAIN | {"draft_vocab_size": KEPT}),
    ("eagle3", CHAIN | {"embed_requires_grad": True}),
    ("peagle", CHAIN | {"mask_token_id": 63, "draft_vocab_size": KEPT}),
    ("peagle", CHAIN | {"mask_token_id": 63, "embed_requires_grad": False}),
    ("mtp", {"speculative_tokens": 3}),
]
NAMES = [
    f"{family}{''.join(f' {key}' for key in set(fields) & {'draft_vocab_size', 'embed_requires_grad'})}"
    for family, fields in SAMPLES
]


@pytest.fixture(scope="module")
def verifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(7)
    folder = tmp_path_factory.mktemp("families") / "verifier"
    Qwen3ForCausalLM(verifier_config(vocab_size=VOCAB)).save_pretrained(folder)
    return folder


def sample(family: str, fields: dict[str, Any], verifier: Path) -> Any:
    """A draft of the tiny verifier."""
    text = verifier_config(vocab_size=VOCAB)
    decoder = build_mtp_decoder(text) if family == "mtp" else build_draft_config(text, num_layers=2, sliding_window=0)
    SpeculatorModelConfig.registered_classes()
    config_class: Any = SpeculatorModelConfig.registry[family]
    record = VerifierConfig(name_or_path=str(verifier), architectures=["Qwen3ForCausalLM"])
    config = config_class.build(decoder, record, **fields)
    t2d, d2t = mapping(VOCAB, KEPT) if fields.get("draft_vocab_size") else (None, None)
    torch.manual_seed(0)
    return SpeculatorModel.from_verifier(config, t2d=t2d, d2t=d2t)


def test_every_family_has_samples() -> None:
    SpeculatorModelConfig.registered_classes()
    assert set(SpeculatorModelConfig.registry) == {family for family, _ in SAMPLES}


@pytest.mark.parametrize(("family", "fields"), SAMPLES, ids=NAMES)
def test_config_file(family: str, fields: dict[str, Any], verifier: Path, tmp_path: Path) -> None:
    """Every key of the class is there, nothing of a stray ``config.py``, and either spelling of the architecture is read."""
    model = sample(family, fields, verifier)
    model.save_pretrained(tmp_path)
    assert files(tmp_path) == ["config.json", "model.safetensors"]
    path = tmp_path / "config.json"
    written = json.loads(path.read_text())
    own = set(type(model.config).model_fields) - set(PretrainedConfig.__dataclass_fields__)
    assert own | {"architectures", "dtype", "tie_word_embeddings", "transformers_version"} <= set(written)
    assert "auto_map" not in written
    assert "auto_map" not in written["transformer_layer_config"]
    decoder = model.config.transformer_layer_config
    shape = set(type(decoder).__dataclass_fields__) - set(PretrainedConfig.__dataclass_fields__) - set(decoder.attribute_map)
    assert shape | {"model_type", "tie_word_embeddings"} <= set(written["transformer_layer_config"])
    assert written["architectures"] == [type(model).__name__]
    expected = SpeculatorModelConfig.from_pretrained(tmp_path)
    spellings = {type(model).__name__, *type(model.config).model_fields["architectures"].get_default(call_default_factory=True)}
    for spelling in (*spellings, "AsAnEngineNamesIt"):
        path.write_text(json.dumps(written | {"architectures": [spelling], "auto_map": {"": "config.SomeConfig"}}))
        (tmp_path / "config.py").write_text("raise RuntimeError('this file must not be run')")
        read: Any = SpeculatorModel.from_pretrained(tmp_path)
        assert type(read) is type(model)
        assert {**read.config.to_dict(), "architectures": None} == {**expected.to_dict(), "architectures": None}
        assert same_state(read, model)
        assert read.checkpoint_config().architectures == [type(model).__name__]


@pytest.mark.parametrize("include_embeddings", [True, False])
@pytest.mark.parametrize(("family", "fields"), SAMPLES, ids=NAMES)
def test_the_verifier_is_read_only_for_what_is_absent(
    family: str,
    fields: dict[str, Any],
    include_embeddings: bool,
    verifier: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = sample(family, fields, verifier)
    listing = model.checkpoint_listing(dtype=torch.float32, include_embeddings=include_embeddings)
    model.save_pretrained(tmp_path, include_embeddings=include_embeddings, max_shard_size=3000)
    assert "model.safetensors.index.json" in files(tmp_path)
    assert WeightFiles(tmp_path).entries() == listing
    inside = {entry.name for entry in listing}
    parts: dict[str, VerifierPart] = {"embed_tokens.weight": "embed_tokens", "lm_head.weight": "lm_head"}
    absent = [part for name, part in parts.items() if name not in inside]
    # Upstream reads uninitialised memory where an EAGLE file lacks a part, so these are always complete.
    assert model.always_complete == (family in ("eagle3", "peagle"))
    assert not (absent and model.always_complete)
    assert absent or include_embeddings or model.always_complete or fields.get("draft_vocab_size")
    asked: list[VerifierPart] = []
    read_parts = base.read_verifier_weights

    def reading(source: Any, wanted: Sequence[VerifierPart]) -> Any:
        asked.extend(wanted)
        return read_parts(source, wanted)

    monkeypatch.setattr(base, "read_verifier_weights", reading)
    read: Any = SpeculatorModel.from_pretrained(tmp_path)
    assert asked == absent
    assert same_state(read, model)
    assert {name: value.requires_grad for name, value in read.named_parameters()} == {
        name: value.requires_grad for name, value in model.named_parameters()
    }
    config = json.loads((tmp_path / "config.json").read_text())
    config["speculators_config"]["verifier"]["name_or_path"] = str(tmp_path / "gone")
    (tmp_path / "config.json").write_text(json.dumps(config))
    if absent:
        with pytest.raises(VerifierError, match=r"no verifier weights at .*gone"):
            SpeculatorModel.from_pretrained(tmp_path)
        read = SpeculatorModel.from_pretrained(tmp_path, verifier=verifier)
    else:
        read = SpeculatorModel.from_pretrained(tmp_path)
    assert same_state(read, model)


@pytest.mark.parametrize(("family", "fields"), SAMPLES, ids=NAMES)
def test_in_bfloat16_the_file_is_half_as_large(family: str, fields: dict[str, Any], verifier: Path, tmp_path: Path) -> None:
    model = sample(family, fields, verifier)
    model.save_pretrained(tmp_path, dtype=torch.bfloat16)
    tensors = load_file(tmp_path / "model.safetensors")
    assert WeightFiles(tmp_path).entries() == model.checkpoint_listing()
    for name, tensor in tensors.items():
        assert tensor.dtype == {"d2t": torch.int64, "t2d": torch.bool}.get(name, torch.bfloat16)
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
