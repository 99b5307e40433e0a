"""Names of an MTP layer in a verifier's checkpoint (Qwen3-Next, Qwen3.5) and in a draft's, and the shape of its experts.

A verifier keeps its multi-token prediction layer under ``mtp.``; its experts one by one, or stacked as a draft's always are:
``experts.gate_up_proj [E, 2I, H]``, gate rows before up rows, and ``experts.down_proj [E, H, I]``. Shape letters: E experts, I
intermediate size, H hidden size.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from speculators.errors import ConfigError

__all__ = ["MTP_PREFIX", "draft_tensors", "verifier_tensors"]

MTP_PREFIX = "mtp."

#: Beginnings of names, the verifier's and the draft's.
_PREFIXES = (
    ("mtp.fc.", "mtp_layers.0.input_proj."),
    ("mtp.norm.", "mtp_layers.0.final_layernorm."),
    ("mtp.pre_fc_norm_hidden.", "mtp_layers.0.hidden_layernorm."),
    ("mtp.pre_fc_norm_embedding.", "mtp_layers.0.token_layernorm."),
    ("mtp.layers.0.", "mtp_layers.0."),
)
_EXPERT = re.compile(r"(?P<experts>.+\.experts)\.(?P<index>\d+)\.(?P<part>gate_proj|up_proj|down_proj)\.weight")
_PARTS = ("gate_proj", "up_proj", "down_proj")


def draft_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A draft's tensors of a verifier's ``mtp.*``, experts stacked.

    :raises ConfigError: a name is unknown (a second MTP layer, for one), or experts are missing.
    """
    stacked: dict[str, Tensor] = {}
    experts: dict[str, dict[int, dict[str, Tensor]]] = {}
    for name, tensor in tensors.items():
        match = _EXPERT.fullmatch(name)
        if match is None:
            stacked[name] = tensor
        else:
            experts.setdefault(match["experts"], {}).setdefault(int(match["index"]), {})[match["part"]] = tensor
    for prefix, by_index in experts.items():
        rows = [by_index.get(index, {}) for index in range(max(by_index) + 1)]
        for index, parts in enumerate(rows):
            missing = [part for part in _PARTS if part not in parts]
            if missing:
                raise ConfigError(f"the verifier has no {prefix}.{index}.{missing[0]}.weight; its files are incomplete")
        stacked[f"{prefix}.gate_up_proj"] = torch.stack([torch.cat([row["gate_proj"], row["up_proj"]]) for row in rows])
        stacked[f"{prefix}.down_proj"] = torch.stack([row["down_proj"] for row in rows])
    return {_renamed(name, 0, 1): tensor for name, tensor in stacked.items()}


def verifier_tensors(tensors: Mapping[str, Tensor], names: Collection[str]) -> dict[str, Tensor]:
    """The verifier's ``mtp.*`` of a draft's tensors, experts stacked or one by one as the verifier has them.

    :param names: of the verifier's tensors.
    :raises ConfigError: a name is unknown.
    """
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        theirs = _renamed(name, 1, 0)
        if theirs in names or not theirs.endswith((".experts.gate_up_proj", ".experts.down_proj")):
            found[theirs] = tensor
            continue
        prefix = theirs.rpartition(".")[0]
        for index, expert in enumerate(tensor):
            if theirs.endswith(".down_proj"):
                found[f"{prefix}.{index}.down_proj.weight"] = expert
            else:
                gate, up = expert.chunk(2)
                found[f"{prefix}.{index}.gate_proj.weight"], found[f"{prefix}.{index}.up_proj.weight"] = gate, up
    return found


def _renamed(name: str, source: int, target: int) -> str:
    for pair in _PREFIXES:
        if name.startswith(pair[source]):
            return pair[target] + name.removeprefix(pair[source])
    raise ConfigError(f"{name} has no place in an MTP draft, which has one layer; the checkpoint is of another kind")
