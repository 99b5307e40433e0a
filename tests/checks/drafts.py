"""A good tiny checkpoint of each family, and ways to change one on disk."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from speculators import SpeculatorModel, SpeculatorModelConfig
from speculators.config import VerifierConfig
from speculators.models.draft_config import build_draft_config
from speculators.models.mtp import build_mtp_decoder
from tests.verifiers.models import COMMON
from tests.verifiers.models import FAMILIES as VERIFIERS

#: Families with the fields that a good checkpoint of each gets beside those of :data:`OF_BLOCKS` or :data:`OF_CHAINS`.
FAMILIES: dict[str, dict[str, Any]] = {
    "dspark": {"markov_rank": 8},
    "dflash": {},
    "eagle3": {"norm_before_residual": True, "norm_before_fc": True, "norm_output": True},
    "mtp": {"speculative_tokens": 3},
    "peagle": {"norm_before_residual": True, "mask_token_id": 3},
}
OF_BLOCKS = {"block_size": 8, "aux_hidden_state_layer_ids": [2, 4, 5], "mask_token_id": 3}
OF_CHAINS = {"eagle_aux_hidden_state_layer_ids": [2, 4, 5], "speculative_tokens": 4}
VOCAB, KEPT, HIDDEN = 64, 40, 32


def kept_ids(seed: int = 0) -> Tensor:
    """Mask ``[V]`` of :data:`KEPT` ids, gaps and neighbours among them."""
    t2d = torch.zeros(VOCAB, dtype=torch.bool)
    t2d[torch.randperm(VOCAB, generator=torch.Generator().manual_seed(seed))[:KEPT]] = True
    return t2d


def good_checkpoint(
    verifier: Path,
    folder: Path,
    family: str = "dspark",
    *,
    reduced: bool = True,
    tables: bool = False,
    decoder: dict[str, Any] | None = None,
    change_decoder: dict[str, Any] | None = None,
    **values: Any,
) -> Path:
    """Write a random draft for a tiny verifier in bfloat16, embedding included, and return its folder.

    :param tables: write vocabulary tables although the vocabulary is whole.
    :param decoder: arguments of :func:`build_draft_config`; ``change_decoder``: values of what it returns.
    """
    SpeculatorModelConfig.registered_classes()
    config_class: Any = SpeculatorModelConfig.registry[family]
    common = OF_BLOCKS if family in ("dspark", "dflash") else OF_CHAINS
    common = {} if family == "mtp" else common | {"draft_vocab_size": KEPT if reduced else VOCAB}
    shape = {"num_layers": 2, "sliding_window": 0, **(decoder or {})}
    verifier_config = AutoConfig.from_pretrained(verifier)
    built = build_mtp_decoder(verifier_config) if family == "mtp" else build_draft_config(verifier_config, **shape)
    built.update(change_decoder or {})
    config = config_class.build(
        built,
        VerifierConfig.from_pretrained(verifier),
        **(common | FAMILIES[family] | values),
    )
    t2d = kept_ids()
    d2t = t2d.nonzero().squeeze(-1) - torch.arange(KEPT)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: Any = SpeculatorModel.from_verifier(config, t2d=t2d, d2t=d2t, verifier=verifier)
    model.save_pretrained(folder, dtype=torch.bfloat16, include_embeddings=True)
    if tables:
        whole = torch.zeros(VOCAB, dtype=torch.long)
        change_tensors(folder, lambda tensors: tensors.update(d2t=whole, t2d=torch.ones(VOCAB, dtype=torch.bool)))
    return folder


def latent_verifier(folder: Path) -> Path:
    """Write a tiny verifier with latent attention and experts, of eight layers."""
    sizes = COMMON | VERIFIERS["deepseek_v3"] | {"num_hidden_layers": 8}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(AutoConfig.for_model("deepseek_v3", **sizes)).save_pretrained(folder)
    return folder


@contextmanager
def config_of(folder: Path) -> Iterator[dict[str, Any]]:
    """The checkpoint's config, written back afterwards."""
    path = folder / "config.json"
    values = json.loads(path.read_text())
    yield values
    path.write_text(json.dumps(values))


def change_config(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    with config_of(folder) as values:
        change(values)


def change_tensors(folder: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
