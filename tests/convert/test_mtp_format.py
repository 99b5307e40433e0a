"""The MTP layer taken out of a verifier: tensors bit by bit, drafts as transformers' own layer drafts them, and back."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, PretrainedConfig

from speculators import SpeculatorModel
from speculators.convert import convert_model, stitch_mtp
from speculators.errors import ConfigError, VerifierError
from speculators.sampling import SamplingParams
from tests.convert.checks import assumed
from tests.convert.foreign import HIDDEN, VOCAB, Random, equal, read, write
from tests.convert.mtp import EXPERT_SIZE, EXPERTS
from tests.convert.test_stitch import all_tensors

#: Model type of the verifier -> transformers' module, prefix of its classes, and how its files hold experts.
KINDS = {
    "qwen3_next": ("qwen3_next", "Qwen3Next", "single"),
    "qwen3_5": ("qwen3_5", "Qwen3_5", None),
    "qwen3_5_moe": ("qwen3_5_moe", "Qwen3_5Moe", "stacked"),
}
LAYERS, FULL_ATTENTION = 4, 3


def text_config(kind: str) -> PretrainedConfig:
    shape: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": 24,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    }
    if KINDS[kind][2]:
        sizes = {"moe_intermediate_size": EXPERT_SIZE, "shared_expert_intermediate_size": 12}
        shape |= sizes | {"num_experts": EXPERTS, "num_experts_per_tok": 2}
    if kind != "qwen3_next":
        shape["rope_parameters"] |= {"mrope_section": [1, 1, 0], "mrope_interleaved": True}
    return CONFIG_MAPPING[kind if kind == "qwen3_next" else f"{kind}_text"](**shape)


def modelling(kind: str) -> tuple[Any, str]:
    module, prefix, _ = KINDS[kind]
    return importlib.import_module(f"transformers.models.{module}.modeling_{module}"), prefix


def verifier_with_mtp(folder: Path, kind: str, *, shards: int = 2, seed: int = 0) -> tuple[Path, dict[str, Tensor]]:
    """A verifier's folder (composite for Qwen3.5) whose MTP layer has the shapes of transformers' decoder layer."""
    random = Random(seed)
    module, prefix = modelling(kind)
    text = text_config(kind)
    layer = getattr(module, f"{prefix}DecoderLayer")(text, FULL_ATTENTION)
    prefix_of_body = "model." if kind == "qwen3_next" else "model.language_model."
    tensors = {
        f"{prefix_of_body}embed_tokens.weight": random.weight(VOCAB, HIDDEN),
        f"{prefix_of_body}norm.weight": random.norm(HIDDEN),
        "lm_head.weight": random.weight(VOCAB, HIDDEN),
        "mtp.fc.weight": random.weight(HIDDEN, 2 * HIDDEN),
    }
    tensors |= {f"mtp.{name}.weight": random.norm(HIDDEN) for name in ("norm", "pre_fc_norm_hidden", "pre_fc_norm_embedding")}
    for name, value in layer.state_dict().items():
        drawn = random.norm(*value.shape) if value.ndim == 1 else random.weight(*value.shape)
        if KINDS[kind][2] == "single" and name.endswith("experts.gate_up_proj"):
            gate, up = drawn.chunk(2, 1)
            for index in range(EXPERTS):
                tensors[f"mtp.layers.0.mlp.experts.{index}.gate_proj.weight"] = gate[index]
                tensors[f"mtp.layers.0.mlp.experts.{index}.up_proj.weight"] = up[index]
        elif KINDS[kind][2] == "single" and name.endswith("experts.down_proj"):
            tensors |= {f"mtp.layers.0.mlp.experts.{index}.down_proj.weight": drawn[index] for index in range(EXPERTS)}
        else:
            tensors[f"mtp.layers.0.{name}"] = drawn
    config = text.to_dict() if kind == "qwen3_next" else CONFIG_MAPPING[kind](text_config=text.to_dict()).to_dict()
    config["architectures"] = [f"{prefix}ForConditionalGeneration"]
    config = json.loads(json.dumps(config, default=str))
    return write(folder, config, tensors, shards=shards), tensors


def native_tokens(kind: str, tensors: dict[str, Tensor], prompt: Tensor, anchor: int, states: Tensor, steps: int) -> list[int]:
    """What the verifier's own layer drafts, run by transformers over all pairs, step by step."""
    module, prefix = modelling(kind)
    text = text_config(kind)
    text._attn_implementation = "eager"
    layer = getattr(module, f"{prefix}DecoderLayer")(text, FULL_ATTENTION).double().eval()
    own = {name: tensor.double() for name, tensor in tensors.items()}
    stacked = {name.removeprefix("mtp.layers.0."): tensor for name, tensor in own.items() if name.startswith("mtp.layers.0.")}
    if KINDS[kind][2] == "single":
        rows = [f"mlp.experts.{index}." for index in range(EXPERTS)]
        both = [torch.cat([stacked.pop(f"{row}gate_proj.weight"), stacked.pop(f"{row}up_proj.weight")]) for row in rows]
        stacked["mlp.experts.gate_up_proj"] = torch.stack(both)
        stacked["mlp.experts.down_proj"] = torch.stack([stacked.pop(f"{row}down_proj.weight") for row in rows])
    layer.load_state_dict(stacked)

    def norm(name: str, rows: Tensor) -> Tensor:
        made = getattr(module, f"{prefix}RMSNorm")(HIDDEN, eps=text.rms_norm_eps).double()
        made.weight.data = own[f"mtp.{name}.weight"]
        return made(rows)

    embedding = next(tensor for name, tensor in own.items() if name.endswith("embed_tokens.weight"))
    rotary_name = "RotaryEmbedding" if hasattr(module, f"{prefix}RotaryEmbedding") else "TextRotaryEmbedding"
    rotary = getattr(module, prefix + rotary_name)(text)
    embeds, inputs = embedding[torch.cat([prompt[1:], torch.tensor([anchor])])], states
    tokens: list[int] = []
    for _ in range(steps):
        count = len(embeds)
        rows = torch.cat([norm("pre_fc_norm_embedding", embeds), norm("pre_fc_norm_hidden", inputs)], -1)
        rows = (rows @ own["mtp.fc.weight"].T)[None]
        positions = torch.arange(count)
        positions = positions[None] if rotary_name == "RotaryEmbedding" else positions.expand(3, 1, -1)
        mask = torch.full((count, count), float("-inf"), dtype=torch.float64).triu(1)[None, None]
        output = norm("norm", layer(rows, attention_mask=mask, position_embeddings=rotary(rows, positions))[0])
        tokens.append(int((own["lm_head.weight"] @ output[-1]).argmax()))
        embeds = torch.cat([embeds, embedding[tokens[-1]][None]])
        inputs = torch.cat([inputs, output[-1:]])
    return tokens


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_extract_and_stitch(kind: str, tmp_path: Path) -> None:
    verifier, tensors = verifier_with_mtp(tmp_path / "verifier", kind)
    report = convert_model(verifier, str(verifier), "mtp", tmp_path / "draft", "cpu")
    config, written = read(tmp_path / "draft")
    assert report.format == "mtp"
    assert assumed(report) == {"num_speculative_steps": 3, "hidden_state_input": "post_norm"}
    assert config["speculators_model_type"] == "mtp"
    assert config["num_nextn_predict_layers"] == 1
    assert config["hidden_state_input"] == "post_norm"
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 3
    assert config["speculators_config"]["verifier"]["name_or_path"] == str(verifier)
    decoder = config["transformer_layer_config"]
    assert decoder["model_type"] == (kind if kind == "qwen3_next" else f"{kind}_text")
    assert (decoder["num_hidden_layers"], decoder["hidden_size"], decoder["vocab_size"]) == (LAYERS, HIDDEN, VOCAB)
    assert not any(name.startswith(("embed_tokens", "lm_head")) for name in written)
    assert all(name.startswith("mtp_layers.0.") for name in written)

    model: Any = SpeculatorModel.from_pretrained(tmp_path / "draft", dtype=torch.float64)
    generator = torch.Generator().manual_seed(3)
    seen = set()
    for length, anchor in ((7, 12), (20, 60), (3, 1)):
        prompt = torch.randint(0, VOCAB, (length,), generator=generator)
        states = torch.randn(length, HIDDEN, generator=generator, dtype=torch.float64)
        drafter = model.drafter()
        drafter.start(1)
        drafter.extend([prompt], [states[:, None]])
        tokens = drafter.propose([anchor], 3, SamplingParams(temperature=0.0))[0].tokens.tolist()
        assert tokens == native_tokens(kind, tensors, prompt, anchor, states, 3)
        seen.update(tokens)
    assert len(seen) > 2

    # Untrained, it goes back as it came; the files' bytes are the same.
    stitched = stitch_mtp(tmp_path / "draft", verifier, tmp_path / "stitched")
    assert equal(all_tensors(stitched), tensors)
    for path in verifier.iterdir():
        assert (stitched / path.name).read_bytes() == path.read_bytes()


def test_steps_and_the_verifier_itself(tmp_path: Path) -> None:
    verifier, _ = verifier_with_mtp(tmp_path / "verifier", "qwen3_next", shards=1)
    # Nobody names a verifier: the checkpoint is one.
    convert_model(verifier, output_path=tmp_path / "draft", num_speculative_steps=5)
    config, _ = read(tmp_path / "draft")
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 5
    assert config["speculators_config"]["verifier"]["name_or_path"] == str(verifier)


def test_refusals(tmp_path: Path) -> None:
    verifier, tensors = verifier_with_mtp(tmp_path / "verifier", "qwen3_next", shards=1)
    with pytest.raises(ConfigError, match="put it there with `speculators stitch-mtp`"):
        convert_model(verifier, algorithm="mtp", output_path=tmp_path / "draft", to="vllm-native")
    config, _ = read(verifier)
    other = write(tmp_path / "other", config | {"hidden_size": 16}, {"lm_head.weight": torch.ones(VOCAB, 16)})
    with pytest.raises(VerifierError, match="give the verifier that the draft was made for"):
        convert_model(verifier, str(other), "mtp", tmp_path / "draft")
    write(verifier, config | {"model_type": "qwen2"}, tensors)
    with pytest.raises(ConfigError, match="MTP layer of a qwen2 verifier cannot be taken out"):
        convert_model(verifier, algorithm="mtp", output_path=tmp_path / "draft")
    plain = write(tmp_path / "plain", config, {"lm_head.weight": torch.ones(VOCAB, HIDDEN)})
    with pytest.raises(ConfigError, match="is in no format that can be converted"):
        convert_model(plain, algorithm="mtp", output_path=tmp_path / "draft")
    assert not (tmp_path / "draft").exists()


def test_upstreams_mtp_drafts_read_states_before_the_norm(tmp_path: Path) -> None:
    verifier, _ = verifier_with_mtp(tmp_path / "verifier", "qwen3_next")
    convert_model(verifier, output_path=tmp_path / "draft")
    config, tensors = read(tmp_path / "draft")
    del config["hidden_state_input"]
    write(tmp_path / "upstream", config, tensors)
    report = convert_model(tmp_path / "upstream", output_path=tmp_path / "again")
    assert assumed(report) == {"hidden_state_input": "pre_norm"}
    assert read(tmp_path / "again")[0] == config | {"hidden_state_input": "pre_norm"}
