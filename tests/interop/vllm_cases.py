"""Drafts with every option that reaches vLLM, and what vLLM is known to make of each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import LlamaConfig

from speculators.config import VerifierConfig
from speculators.models import SpeculatorModel
from speculators.models.dflash import DFlashSpeculatorConfig
from speculators.models.draft_config import build_draft_config
from speculators.models.dspark import DSparkSpeculatorConfig
from speculators.models.vocabulary import d2t_from_t2d
from tests.tiny import tiny_verifier

VOCAB, DRAFT_VOCAB, HIDDEN, WINDOW = 96, 40, 64, 16
LAYER_IDS = (1, 3, 5)
#: Mask token of the tiny tokenizer.
MASK = 3

#: ``equal``: same drafts; ``differs``: vLLM reads the checkpoint in another way; ``refused``: vLLM does not load it;
#: ``crashes``: loading ends the process.
Verdict = Literal["equal", "differs", "refused", "crashes"]


@dataclass(frozen=True)
class Case:
    """One draft as written by us."""

    name: str
    family: str
    values: dict[str, Any] = field(default_factory=dict)  #: config fields
    decoder: dict[str, Any] = field(default_factory=dict)  #: fields of the decoder's config
    reduced: bool = False  #: reduced vocabulary
    include_embeddings: bool = False
    num_layers: int = 2
    cpu_key_norm: bool = False  #: context keys are normed by vLLM's CPU kernel, not by each layer's weight
    verdict: Verdict = "equal"


def vllm_verifier(folder: Path) -> Path:
    """A tiny Llama verifier with a head size that vLLM's CPU attention knows."""
    return tiny_verifier(folder, vocab=VOCAB, layers=6, hidden=HIDDEN, heads=2, kv_heads=1, intermediate=96, initializer_range=0.1, seed=11)


def build_draft(case: Case, verifier: Path, seed: int = 0) -> Any:
    """The draft of a case with random weights, all of them far from what a fresh one has."""
    llama = LlamaConfig.from_pretrained(verifier)
    decoder = build_draft_config(llama, num_layers=case.num_layers, sliding_window=0)
    decoder.update(case.decoder)
    config_class: Any = {"dspark": DSparkSpeculatorConfig, "dflash": DFlashSpeculatorConfig}[case.family]
    values: dict[str, Any] = {
        "aux_hidden_state_layer_ids": list(LAYER_IDS),
        "mask_token_id": MASK,
        "draft_vocab_size": DRAFT_VOCAB if case.reduced else VOCAB,
        "block_size": 6,
    }
    if case.family == "dspark":
        values["markov_rank"] = 8
    record = VerifierConfig.from_pretrained(str(verifier))
    config = config_class.build(decoder, record, **(values | case.values))
    generator = torch.Generator().manual_seed(seed)
    t2d = d2t = None
    if case.reduced:
        t2d = torch.zeros(VOCAB, dtype=torch.bool)
        t2d[torch.randperm(VOCAB, generator=generator)[:DRAFT_VOCAB]] = True
        d2t = d2t_from_t2d(t2d)
    model = SpeculatorModel.from_verifier(config, t2d=t2d, d2t=d2t, verifier=verifier)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            parameter.data = _weights(name, parameter, generator)
    return model.eval()


def _weights(name: str, parameter: Tensor, generator: torch.Generator) -> Tensor:
    if "norm" in name:
        return torch.rand(parameter.shape, generator=generator) + 0.5
    scale = 0.1 if name.startswith("confidence_head") else 2 / parameter.shape[-1] ** 0.5
    return torch.randn(parameter.shape, generator=generator) * scale


def cases() -> Iterator[Case]:
    """All of them; names are unique."""
    for from_anchor, reduced in product((True, False), (False, True)):
        layout = "anchor-first" if from_anchor else "fill-in"
        name = f"{layout}, {'reduced' if reduced else 'full'} vocabulary"
        yield Case(name, "dspark", {"sample_from_anchor": from_anchor}, reduced=reduced)
    yield Case("confidence without Markov", "dspark", {"confidence_head_with_markov": False})
    yield Case("no confidence head", "dspark", {"enable_confidence_head": False})
    yield Case("no Markov head", "dspark", {"markov_rank": 0, "confidence_head_with_markov": False}, verdict="crashes")
    yield Case("gated Markov", "dspark", {"markov_head_type": "gated"}, verdict="refused")
    yield Case("rnn Markov", "dspark", {"markov_head_type": "rnn"}, verdict="refused")
    yield Case("embeddings in the file", "dspark", include_embeddings=True)
    yield Case("embeddings in the file, reduced vocabulary", "dspark", reduced=True, include_embeddings=True)
    yield Case("attention bias", "dspark", decoder={"attention_bias": True})
    yield Case("gelu", "dspark", decoder={"hidden_act": "gelu_pytorch_tanh"}, verdict="refused")
    for name, rope in ROPES.items():
        yield Case(f"rope {name}", "dspark", decoder={"rope_parameters": rope})
    for kind, types in WINDOWED.items():
        for reference in ("slot", "anchor"):
            yield Case(
                f"{kind}, window from {reference}",
                "dspark",
                {"sliding_window_reference": reference},
                _windowed(types),
                verdict="equal" if reference == "slot" else "differs",
            )
    for layers in (1, 2):
        verdict: Verdict = "equal" if layers == 1 else "differs"
        yield Case(f"{layers} layers, key norm of the CPU kernel", "dspark", num_layers=layers, cpu_key_norm=True, verdict=verdict)
    yield from _dflash_cases()


def _dflash_cases() -> Iterator[Case]:
    for reduced, embeddings in product((False, True), (False, True)):
        name = f"{'reduced' if reduced else 'full'} vocabulary{', embeddings in the file' if embeddings else ''}"
        yield Case(name, "dflash", reduced=reduced, include_embeddings=embeddings)
    yield Case("anchor-first", "dflash", {"sample_from_anchor": True}, verdict="differs")
    for kind, types in WINDOWED.items():
        for non_causal in (True, False):
            yield Case(
                f"{kind}, sliding {'non-causal' if non_causal else 'causal'}, window from slot",
                "dflash",
                {"sliding_window_reference": "slot", "sliding_window_non_causal": non_causal},
                _windowed(types),
                verdict="equal" if non_causal or kind == "sliding layers" else "differs",
            )


ROPES: dict[str, dict[str, Any]] = {
    "theta 50000": {"rope_type": "default", "rope_theta": 50000.0},
    "half of each head": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 128,
    },
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}

WINDOWED = {
    "sliding layers": ["sliding_attention", "sliding_attention"],
    "mixed layers": ["full_attention", "sliding_attention"],
}


def _windowed(types: list[str]) -> dict[str, Any]:
    return {"layer_types": types, "sliding_window": WINDOW, "use_sliding_window": True}
