"""The verifier's frozen head against the verifier itself, and finding its tensors under other names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    GraniteConfig,
    LlamaConfig,
    NanoChatConfig,
    Qwen3Config,
    Qwen3NextConfig,
)

from speculators.errors import VerifierError
from speculators.models.verifier_weights import VerifierHead, norm_adds_one, read_verifier_weights
from tests.tiny import tiny_verifier

SHAPE: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "initializer_range": 0.5,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
NEXT = {
    "layer_types": ["full_attention"],
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 1,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "num_experts": 2,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 8,
    "shared_expert_intermediate_size": 8,
}
CONFIGS = {
    "llama": lambda: LlamaConfig(**SHAPE, rms_norm_eps=1e-2),
    "tied": lambda: LlamaConfig(**SHAPE, tie_word_embeddings=True),
    "qwen3": lambda: Qwen3Config(**SHAPE),
    "gemma2": lambda: Gemma2Config(**SHAPE, query_pre_attn_scalar=8, final_logit_softcapping=3.0),
    "granite": lambda: GraniteConfig(**{key: value for key, value in SHAPE.items() if key != "head_dim"}, logits_scaling=3.0),
    "qwen3_next": lambda: Qwen3NextConfig(**SHAPE, **NEXT),
}


def written(config: Any, folder: Path) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.uniform_(0.2, 1.5)
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_are_the_verifiers_own(name: str, tmp_path: Path) -> None:
    """From the state before the final norm and from the one after it; norm variant, scale and soft cap included."""
    model = written(CONFIGS[name](), tmp_path)
    states: dict[str, torch.Tensor] = {}
    model.model.norm.register_forward_hook(lambda _, inputs, output: states.update(pre=inputs[0], post=output))
    with torch.no_grad():
        logits = model(torch.tensor([[3, 9, 27, 31]])).logits[0]
    t2d = torch.zeros(50, dtype=torch.bool)
    t2d[[0, 3, 20, 49]] = True
    head = VerifierHead.from_folder(tmp_path, t2d)
    normed = head.normalize(states["pre"][0])
    torch.testing.assert_close(normed, states["post"][0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(head.full_logits(normed), logits, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(head.draft_logits(normed), logits[:, t2d], rtol=1e-4, atol=1e-4)
    assert not head.state_dict()
    assert not list(head.parameters())


def test_scaled_logits_of_a_layer_norm_verifier(tmp_path: Path) -> None:
    config = CohereConfig(**{**SHAPE, "tie_word_embeddings": True}, logit_scale=0.25)
    model = written(config, tmp_path)
    states: dict[str, torch.Tensor] = {}
    model.model.norm.register_forward_hook(lambda _, inputs, output: states.update(post=output))
    with torch.no_grad():
        logits = model(torch.tensor([[3, 9, 27]])).logits[0]
    head = VerifierHead.from_folder(tmp_path, with_norm=False)
    torch.testing.assert_close(head.full_logits(states["post"][0]), logits, rtol=1e-4, atol=1e-4)
    with pytest.raises(VerifierError, match="read without it"):
        head.normalize(states["post"][0])
    with pytest.raises(VerifierError, match="LayerNorm"):
        VerifierHead.from_folder(tmp_path)


def test_norm_variant_follows_the_model_type() -> None:
    assert norm_adds_one(Gemma2Config())
    assert norm_adds_one(Qwen3NextConfig())
    assert not norm_adds_one(Qwen3Config())


def renamed(folder: Path, prefixes: dict[str, str], drop: tuple[str, ...] = ()) -> Path:
    tensors = load_file(folder / "model.safetensors")
    result = {}
    for name, tensor in tensors.items():
        if name in drop:
            continue
        for old, new in prefixes.items():
            name = name.replace(old, new)
        result[name] = tensor
    save_file(result, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    "prefixes",
    [
        {"model.": "language_model.model."},
        {"model.": "model.language_model."},
        {"model.": "language_model.model.", "lm_head": "language_model.lm_head"},
        {"model.embed_tokens": "backbone.embeddings", "model.norm": "backbone.norm_f"},
        {"model.embed_tokens": "tok_embeddings", "lm_head": "output", "model.norm": "norm"},
        {"model.embed_tokens": "llm.embed", "lm_head": "llm.unembed", "model.norm": "llm.norm"},
    ],
)
def test_other_names(prefixes: dict[str, str], tmp_path: Path) -> None:
    folder = tiny_verifier(tmp_path)
    expected = read_verifier_weights(folder, ("embed_tokens", "lm_head", "norm"))
    found = read_verifier_weights(renamed(folder, prefixes), ("embed_tokens", "lm_head", "norm"))
    for part, tensor in expected.items():
        assert torch.equal(found[part], tensor)


QUANTISED = {
    "fp8 with scale": {"lm_head.weight": torch.zeros(64, 32).to(torch.float8_e4m3fn), "lm_head.weight_scale": torch.ones(1)},
    "nvfp4": {
        "lm_head.weight": torch.zeros(64, 16, dtype=torch.uint8),
        "lm_head.weight_scale": torch.zeros(64, 2).to(torch.float8_e4m3fn),
        "lm_head.weight_scale_2": torch.ones(1),
    },
    "compressed tensors": {
        "lm_head.weight_packed": torch.zeros(64, 4, dtype=torch.int32),
        "lm_head.weight_scale": torch.ones(64, 1),
    },
    "gptq": {"lm_head.qweight": torch.zeros(4, 64, dtype=torch.int32), "lm_head.scales": torch.ones(1, 64)},
    "block scales beside wide weights": {"lm_head.weight": torch.zeros(64, 32), "lm_head.weight_scale_inv": torch.ones(1, 1)},
}


@pytest.mark.parametrize("kind", QUANTISED)
@pytest.mark.parametrize("prefix", ["", "language_model."])
def test_quantised_heads_are_refused(kind: str, prefix: str, tmp_path: Path) -> None:
    """Also those under other names: the embedding must not be taken for the head then."""
    folder = tiny_verifier(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    del tensors["lm_head.weight"]
    tensors |= QUANTISED[kind]
    save_file({prefix + name: tensor for name, tensor in tensors.items()}, folder / "model.safetensors")
    with pytest.raises(VerifierError, match=r"is quantised \(.*\); point to an unquantised copy of the verifier"):
        read_verifier_weights(folder, ("lm_head",))
    assert read_verifier_weights(folder, ("norm", "embed_tokens"))["norm"].shape == (32,)


def test_minicpms_own_code_scales_by_its_base_width() -> None:
    config = LlamaConfig(**SHAPE, dim_model_base=4)
    head = VerifierHead(torch.eye(16), config)
    assert torch.equal(head.full_logits(torch.ones(1, 16)), torch.full((1, 16), 0.25))


def test_a_norm_without_weight_is_rebuilt(tmp_path: Path) -> None:
    config = NanoChatConfig(**{key: value for key, value in SHAPE.items() if key != "head_dim"})
    model = written(config, tmp_path)
    states: dict[str, torch.Tensor] = {}
    model.model.norm.register_forward_hook(lambda _, inputs, output: states.update(pre=inputs[0], post=output))
    with torch.no_grad():
        logits = model(torch.tensor([[3, 9, 27]])).logits[0]
    head = VerifierHead.from_folder(tmp_path)
    torch.testing.assert_close(head.normalize(states["pre"][0]), states["post"][0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(head.full_logits(states["post"][0]), logits, rtol=1e-4, atol=1e-4)


def test_the_text_model_of_an_omni_model_is_found(tmp_path: Path) -> None:
    """Not the model that speaks, whose names are alike and shorter."""
    folder = tiny_verifier(tmp_path)
    expected = read_verifier_weights(folder, ("embed_tokens", "lm_head", "norm"))
    tensors = load_file(folder / "model.safetensors")
    both = {"thinker." + name: tensor for name, tensor in tensors.items()}
    both |= {"talker." + name: torch.zeros(3) for name in tensors}
    save_file(both, folder / "model.safetensors")
    found = read_verifier_weights(folder, ("embed_tokens", "lm_head", "norm"))
    assert all(torch.equal(found[part], expected[part]) for part in expected)


def test_parts_of_a_vision_tower_are_passed_over(tmp_path: Path) -> None:
    folder = tiny_verifier(tmp_path)
    expected = read_verifier_weights(folder, ("norm",))["norm"]
    renamed(folder, {"model.": "model.language_model."})
    tensors = load_file(folder / "model.safetensors")
    tensors["visual.norm.weight"] = torch.zeros(3)
    save_file(tensors, folder / "model.safetensors")
    assert torch.equal(read_verifier_weights(folder, ("norm",))["norm"], expected)


def test_tied_embeddings_serve_as_head(tmp_path: Path) -> None:
    folder = tiny_verifier(tmp_path, tie=True)
    found = read_verifier_weights(folder, ("embed_tokens", "lm_head"))
    assert torch.equal(found["lm_head"], found["embed_tokens"])


def test_sharded_and_pickled_weights(tmp_path: Path) -> None:
    folder = tiny_verifier(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(tensors, folder / "pytorch_model.bin")
    pickled = read_verifier_weights(folder, ("lm_head",))["lm_head"]
    assert torch.equal(pickled, tensors["lm_head.weight"])
    shards = {"a.safetensors": {"lm_head.weight"}, "b.safetensors": set(tensors) - {"lm_head.weight"}}
    for filename, names in shards.items():
        save_file({name: tensors[name] for name in names}, folder / filename)
    weight_map = {name: filename for filename, names in shards.items() for name in names}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    found = read_verifier_weights(folder, ("lm_head", "norm"))
    assert torch.equal(found["norm"], tensors["model.norm.weight"])
    (folder / "a.safetensors").unlink()
    with pytest.raises(VerifierError, match=r"lacks its weight file a.safetensors"):
        read_verifier_weights(folder, ("lm_head",))


def test_unusable_verifiers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(VerifierError, match="no verifier weights at"):
        read_verifier_weights(tmp_path / "nowhere", ("lm_head",))
    with pytest.raises(VerifierError, match="no readable model config"):
        VerifierHead.from_folder(tmp_path / "nowhere")
    folder = tiny_verifier(tmp_path)
    with pytest.raises(VerifierError, match="covers 10 ids, but the verifier's head has 64 rows"):
        VerifierHead.from_folder(folder, torch.ones(10, dtype=torch.bool))
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["lm_head.weight"].to(torch.int8)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(VerifierError, match=r"lm_head.weight is quantised \(int8\)"):
        read_verifier_weights(folder, ("lm_head",))
    del tensors["model.norm.weight"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(VerifierError, match="no tensor that looks like its norm"):
        read_verifier_weights(folder, ("norm",))
    (folder / "model.safetensors").write_bytes(b"no tensors")
    with pytest.raises(VerifierError, match="torn or foreign, fetch it again"):
        read_verifier_weights(folder, ("lm_head",))
