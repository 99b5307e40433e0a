"""What an MTP training starts from: the verifier's own MTP layer, or random values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from speculators.data import Row, RowDataset
from speculators.decoding import Decoder
from speculators.errors import ConfigError, VerifierError
from speculators.models import SpeculatorModel
from speculators.train import train
from speculators.train.drafts import DraftInputs, build_draft, checkpoint_config
from speculators.verifiers.loading import load_verifier
from speculators.verifiers.session import TransformersSession
from tests.models.test_mtp import EXPERTS
from tests.tiny import tiny_tokenizer, tiny_verifier
from tests.train.helpers import settings

HIDDEN, VOCAB = 16, 64
MTP: dict[str, Any] = {
    "speculator_type": "mtp",
    **dict.fromkeys(("num_layers", "block_size", "markov_rank", "target_layer_ids", "mask_token_id", "max_anchors"), ...),
}


def verifier_with_mtp(folder: Path) -> dict[str, torch.Tensor]:
    """Write a tiny Qwen3.5 mixture of experts with an MTP layer as published files have it; its ``mtp.*``."""
    config = CONFIG_MAPPING["qwen3_5_moe_text"](
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        num_hidden_layers=2,
        layer_types=["linear_attention", "full_attention"],
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        initializer_range=0.3,
        **EXPERTS,
    )
    torch.manual_seed(0)
    path = folder / "verifier"
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    experts, width = EXPERTS["num_experts"], EXPERTS["moe_intermediate_size"]
    shared = EXPERTS["shared_expert_intermediate_size"]
    shapes: dict[str, tuple[int, ...]] = {
        "fc": (HIDDEN, 2 * HIDDEN),
        "norm": (HIDDEN,),
        "pre_fc_norm_hidden": (HIDDEN,),
        "pre_fc_norm_embedding": (HIDDEN,),
        "layers.0.input_layernorm": (HIDDEN,),
        "layers.0.post_attention_layernorm": (HIDDEN,),
        "layers.0.self_attn.q_proj": (64, HIDDEN),
        "layers.0.self_attn.k_proj": (16, HIDDEN),
        "layers.0.self_attn.v_proj": (16, HIDDEN),
        "layers.0.self_attn.o_proj": (HIDDEN, 32),
        "layers.0.self_attn.q_norm": (8,),
        "layers.0.self_attn.k_norm": (8,),
        "layers.0.mlp.gate": (experts, HIDDEN),
        "layers.0.mlp.shared_expert_gate": (1, HIDDEN),
    }
    for part, wide in [("shared_expert", shared), *((f"experts.{index}", width) for index in range(experts))]:
        for projection in ("gate_proj", "up_proj", "down_proj"):
            shape = (HIDDEN, wide) if projection == "down_proj" else (wide, HIDDEN)
            shapes[f"layers.0.mlp.{part}.{projection}"] = shape
    tensors = {f"mtp.{name}.weight": 0.3 * torch.randn(shape) for name, shape in shapes.items()}
    file = path / "model.safetensors"
    save_file(load_file(file) | tensors, file, metadata={"format": "pt"})
    return tensors


def fresh(folder: Path, start: Any = None, **changes: Any) -> Any:
    from transformers import AutoConfig

    config = settings(folder, **(MTP | changes))
    inputs = DraftInputs(str(folder / "verifier"), AutoConfig.from_pretrained(folder / "verifier"), None, "post_norm")
    return build_draft(config, inputs, None, start)


def test_the_verifiers_own_layer_is_the_start_unless_random_values_are_asked_for(tmp_path: Path) -> None:
    theirs = verifier_with_mtp(tmp_path)
    draft = fresh(tmp_path)
    layer = draft.layers[0]
    assert draft.config.layer_ids == [3]
    assert torch.equal(layer.input_proj.weight, theirs["mtp.fc.weight"])
    assert torch.equal(layer.final_layernorm.weight, theirs["mtp.norm.weight"])
    assert torch.equal(layer.token_layernorm.weight, theirs["mtp.pre_fc_norm_embedding.weight"])
    assert torch.equal(layer.self_attn.q_proj.weight, theirs["mtp.layers.0.self_attn.q_proj.weight"])
    gate, up = layer.mlp.experts.gate_up_proj[3].chunk(2)
    assert torch.equal(gate, theirs["mtp.layers.0.mlp.experts.3.gate_proj.weight"])
    assert torch.equal(up, theirs["mtp.layers.0.mlp.experts.3.up_proj.weight"])
    assert all(parameter.requires_grad for parameter in layer.parameters())
    random = fresh(tmp_path, draft_init="random")
    assert not torch.equal(random.layers[0].input_proj.weight, theirs["mtp.fc.weight"])


def test_a_mixture_of_experts_trains_and_decodes_for_a_verifier_with_linear_attention(tmp_path: Path) -> None:
    verifier_with_mtp(tmp_path)
    verifier = load_verifier(tmp_path / "verifier")
    prompt, length = [7, 23, 41, 12, 33, 9, 58, 20], 24
    answer = Decoder(lambda: TransformersSession(verifier)).decode(prompt, length).tokens
    assert len(set(answer)) > 12, "the verifier's answer is too plain to test anything"
    ids = np.array([*prompt, *answer])
    dataset = RowDataset.from_rows([Row(0, ids, np.arange(len(ids)) >= len(prompt))])
    config = settings(tmp_path, **(MTP | {"epochs": 40, "checkpoint_freq": 1000, "log_freq": 1, "checkpoint_dtype": "float32"}))
    losses: list[float] = []
    result = train(
        config,
        dataset=dataset,
        train_ids=np.array([0]),
        val_ids=np.array([], int),
        verifier=verifier,
        progress=False,
        on_step=lambda step: losses.append(step.metrics["loss"]),
    )
    assert losses[-1] < 0.6 * losses[0]
    drafter = SpeculatorModel.from_pretrained(result.checkpoint).drafter()
    decoded = Decoder(lambda: TransformersSession(verifier, drafter.layer_ids), drafter, 3).decode(prompt, length)
    assert decoded.tokens == answer
    assert sum(round_.accepted for round_ in decoded.rounds) > 0


def test_a_layer_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    verifier_with_mtp(tmp_path)
    file = tmp_path / "verifier" / "model.safetensors"
    tensors = load_file(file)
    tensors["mtp.fc.weight"] = torch.zeros(HIDDEN, HIDDEN)
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(VerifierError, match=r"does not fit its config \(mtp_layers.0.input_proj.weight\)"):
        fresh(tmp_path)
    del tensors["mtp.fc.weight"]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(VerifierError, match=r"does not fit its config \(mtp_layers.0.input_proj.weight\)"):
        fresh(tmp_path)


def test_a_verifier_without_one_gives_random_values_and_says_so(tmp_path: Path) -> None:
    tiny_verifier(tmp_path)
    with pytest.warns(UserWarning, match="comes without an MTP layer: the draft starts from random values"):
        draft = fresh(tmp_path)
    assert draft.config.transformer_layer_config.model_type == "qwen3"
    with pytest.raises(ConfigError, match="--draft-init verifier: the verifier comes without an MTP layer"):
        fresh(tmp_path, draft_init="verifier")


def test_going_on_with_another_number_of_verifier_layers_is_refused(tmp_path: Path) -> None:
    """The id of the last state would be another layer's."""
    tiny_verifier(tmp_path, layers=3)
    with pytest.warns(UserWarning, match="random values"):
        fresh(tmp_path).save_pretrained(tmp_path / "draft")
    tiny_verifier(tmp_path, layers=4)
    start = checkpoint_config(settings(tmp_path, **(MTP | {"from_pretrained": str(tmp_path / "draft")})))
    with pytest.raises(ConfigError, match="num_hidden_layers 3, but the verifier has 4"):
        fresh(tmp_path, start, from_pretrained=str(tmp_path / "draft"))


def test_shape_is_ignored_and_pruning_refused(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="'mtp' does not use --num-layers"):
        settings(tmp_path, **(MTP | {"num_layers": 2}))
    with pytest.raises(ConfigError, match="whole vocabulary; drop --draft-vocab-size"):
        settings(tmp_path, **(MTP | {"draft_vocab_size": 20}))
