"""Verifiers with a multi-token prediction layer, as Qwen3-Next and Qwen3.5 have it, and their tensors under both names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.convert.foreign import HIDDEN, VOCAB, Random, qwen3_layer, write

EXPERTS, EXPERT_SIZE = 3, 20


def mtp_tensors(random: Random, experts: str | None) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """An MTP layer under the verifier's names and under a draft's; ``experts``: ``single``, ``stacked`` or none."""
    theirs = {
        "mtp.fc.weight": random.weight(HIDDEN, 2 * HIDDEN),
        "mtp.norm.weight": random.norm(HIDDEN),
        "mtp.pre_fc_norm_hidden.weight": random.norm(HIDDEN),
        "mtp.pre_fc_norm_embedding.weight": random.norm(HIDDEN),
    }
    names = {
        "mtp.fc.weight": "mtp_layers.0.input_proj.weight",
        "mtp.norm.weight": "mtp_layers.0.final_layernorm.weight",
        "mtp.pre_fc_norm_hidden.weight": "mtp_layers.0.hidden_layernorm.weight",
        "mtp.pre_fc_norm_embedding.weight": "mtp_layers.0.token_layernorm.weight",
    }
    ours = {names[name]: tensor for name, tensor in theirs.items()}
    layer = qwen3_layer(random, "layer")
    if experts is not None:
        layer = {name: tensor for name, tensor in layer.items() if ".mlp." not in name}
        layer |= {
            "layer.mlp.gate.weight": random.weight(EXPERTS, HIDDEN),
            "layer.mlp.shared_expert_gate.weight": random.weight(1, HIDDEN),
        }
    theirs |= {name.replace("layer.", "mtp.layers.0.", 1): tensor for name, tensor in layer.items()}
    ours |= {name.replace("layer.", "mtp_layers.0.", 1): tensor for name, tensor in layer.items()}
    if experts is not None:
        gate, up = random.weight(EXPERTS, EXPERT_SIZE, HIDDEN), random.weight(EXPERTS, EXPERT_SIZE, HIDDEN)
        down = random.weight(EXPERTS, HIDDEN, EXPERT_SIZE)
        stacked = {"gate_up_proj": torch.cat([gate, up], 1), "down_proj": down}
        ours |= {f"mtp_layers.0.mlp.experts.{name}": tensor for name, tensor in stacked.items()}
        if experts == "stacked":
            theirs |= {f"mtp.layers.0.mlp.experts.{name}": tensor for name, tensor in stacked.items()}
        else:
            for index in range(EXPERTS):
                parts = {"gate_proj": gate[index], "up_proj": up[index], "down_proj": down[index]}
                theirs |= {f"mtp.layers.0.mlp.experts.{index}.{name}.weight": part for name, part in parts.items()}
    return theirs, ours


def mtp_verifier(
    folder: Path, config: dict[str, Any], *, experts: str | None = None, shards: int = 1, seed: int = 0
) -> tuple[Path, dict[str, Tensor], dict[str, Tensor]]:
    """A verifier folder with a tokenizer file; returns also all its tensors, and its MTP layer under a draft's names."""
    random = Random(seed)
    body = {
        "model.embed_tokens.weight": random.weight(VOCAB, HIDDEN),
        "lm_head.weight": random.weight(VOCAB, HIDDEN),
        "model.norm.weight": random.norm(HIDDEN),
        "model.layers.0.mlp.up_proj.weight": random.weight(16, HIDDEN),
    }
    theirs, ours = mtp_tensors(random, experts)
    write(folder, config, body | theirs, shards=shards)
    (folder / "tokenizer.json").write_text("{}")
    (folder / "extra").mkdir(exist_ok=True)
    (folder / "extra" / "note.txt").write_text("kept")
    return folder, body | theirs, ours
