"""Drafts with every option that reaches vLLM, and what vLLM is known to make of each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import AutoConfig, DeepseekV3Config, DeepseekV3ForCausalLM

from speculators.config import SpeculatorModelConfig, VerifierConfig
from speculators.convert import convert_model
from speculators.models import SpeculatorModel
from speculators.models.draft_config import build_draft_config
from speculators.models.vocabulary import d2t_from_t2d
from tests.tiny import tiny_tokenizer, tiny_verifier

VOCAB, DRAFT_VOCAB, HIDDEN, WINDOW = 96, 40, 64, 16
LAYER_IDS = (1, 3, 5)
#: Mask token of the tiny tokenizer.
MASK = 3

#: ``equal``: same drafts; ``differs``: vLLM reads the checkpoint in another way; ``refused``: vLLM does not load it;
#: ``crashes``: loading ends the process; ``reorders``: vLLM hands captured states on in ascending order of their layers.
Verdict = Literal["equal", "differs", "refused", "crashes", "reorders"]

#: Captured layers out of order.
UNORDERED = (5, 1, 3)


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
    draft_arch: str | None = None
    native: bool = False  #: written as vLLM's own flat config (drafts with latent attention have no other)
    cpu_key_norm: bool = False  #: context keys are normed by vLLM's CPU kernel, not by each layer's weight
    verdict: Verdict = "equal"


def vllm_verifier(folder: Path, latent: bool = False) -> Path:
    """A tiny verifier whose head sizes vLLM's CPU kernels know: Llama, or a dense DeepSeek-V3 for drafts of latent attention,
    which vLLM runs beside a verifier of latent attention only."""
    if not latent:
        shape = {"vocab": VOCAB, "layers": 6, "hidden": HIDDEN, "heads": 2, "kv_heads": 1, "intermediate": 96}
        return tiny_verifier(folder, **shape, initializer_range=0.1, seed=11)
    config = DeepseekV3Config(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=96,
        num_hidden_layers=6,
        num_attention_heads=2,
        num_key_value_heads=2,
        q_lora_rank=24,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        max_position_embeddings=512,
        first_k_dense_replace=6,
        rope_parameters=LATENT_YARN,
        initializer_range=0.1,
        bos_token_id=None,
        eos_token_id=2,
        pad_token_id=0,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(11)
        DeepseekV3ForCausalLM(config).save_pretrained(folder / "latent")
    tiny_tokenizer().save_pretrained(folder / "latent")
    return folder / "latent"


def build_draft(case: Case, verifier: Path, seed: int = 0) -> Any:
    """The draft of a case with random weights, all of them far from what a fresh one has."""
    config = AutoConfig.from_pretrained(verifier)
    decoder: Any = build_draft_config(config, num_layers=case.num_layers, draft_arch=case.draft_arch, sliding_window=0)
    decoder.update(case.decoder)
    values: dict[str, Any] = {"draft_vocab_size": DRAFT_VOCAB if case.reduced else VOCAB}
    if case.family in ("dspark", "dflash"):
        values |= {"aux_hidden_state_layer_ids": list(LAYER_IDS), "block_size": 6}
    else:
        values |= {"eagle_aux_hidden_state_layer_ids": list(LAYER_IDS), "speculative_tokens": 5}
    if case.family != "eagle3":
        values["mask_token_id"] = MASK
    if case.family == "dspark":
        values["markov_rank"] = 8
    config_class: Any = SpeculatorModelConfig.registry[case.family]
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
            parameter.data = _weights(name, parameter, generator, sharp=case.family in ("dspark", "dflash"))
    return model.eval()


def save_draft(case: Case, model: Any, path: Path, verifier: Path) -> None:
    """Write a case's checkpoint as vLLM is to read it."""
    model.save_pretrained(path, include_embeddings=case.include_embeddings)
    if not case.native:
        return
    written = path.with_name(f"{path.name}-speculators")
    path.rename(written)
    convert_model(str(written), str(verifier), case.family, str(path), to="vllm-native")


def _weights(name: str, parameter: Tensor, generator: torch.Generator, sharp: bool) -> Tensor:
    if sharp and ("q_norm" in name or "k_norm" in name):
        # Sharp attention, so that slots of a block, which see the same rows from other positions, differ.
        return torch.rand(parameter.shape, generator=generator) * 2 + 1.5
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
    ids = {"aux_hidden_state_layer_ids": list(UNORDERED)}
    yield Case(f"captured layers {', '.join(map(str, UNORDERED))}", "dspark", ids, verdict="reorders")
    yield Case("confidence without Markov", "dspark", {"confidence_head_with_markov": False})
    yield Case("no confidence head", "dspark", {"enable_confidence_head": False})
    yield Case("no Markov head", "dspark", {"markov_rank": 0, "confidence_head_with_markov": False}, verdict="crashes")
    yield Case("gated Markov", "dspark", {"markov_head_type": "gated"}, verdict="refused")
    yield Case("rnn Markov", "dspark", {"markov_head_type": "rnn"}, verdict="refused")
    for reduced in (False, True):
        name = f"vLLM's native form, {'reduced' if reduced else 'full'} vocabulary"
        yield Case(name, "dspark", reduced=reduced, native=True)
    yield Case("vLLM's native form, fill-in", "dspark", {"sample_from_anchor": False}, native=True)
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
        yield Case(
            f"{layers} draft layers, keys normed by the CPU kernel",
            "dspark",
            num_layers=layers,
            cpu_key_norm=True,
            verdict=verdict,
        )
    yield from _dflash_cases()
    yield from _chain_cases()


def _chain_cases() -> Iterator[Case]:
    for family, arch, reduced in product(("eagle3", "peagle"), ("llama", "qwen3"), (False, True)):
        name = f"{arch}, {'reduced' if reduced else 'full'} vocabulary"
        yield Case(name, family, draft_arch=arch, reduced=reduced, num_layers=1)
        if not reduced:
            yield Case(f"{arch}, 2 layers", family, draft_arch=arch)
    for arch, (name, values) in product(("llama", "qwen3"), NORMS.items()):
        yield Case(f"{arch}, {name}", "eagle3", values, draft_arch=arch, num_layers=1)
    for name, values in NORMS.items():
        ignored = "norm_output" in values
        verdict: Verdict = "refused" if "fc_norm" in values else "equal"
        if not ignored:
            yield Case(f"llama, {name}", "peagle", values, draft_arch="llama", num_layers=1, verdict=verdict)
    own = {"embed_requires_grad": True}
    yield Case("llama, embeddings of its own", "eagle3", own, draft_arch="llama", include_embeddings=True, num_layers=1)
    for arch, count in product(("llama", "qwen3"), (2, 4)):
        ids = {"eagle_aux_hidden_state_layer_ids": [1, 2, 4, 5][:count]}
        verdict = "equal" if arch == "qwen3" else "refused"
        yield Case(f"{arch}, {count} captured layers", "eagle3", ids, draft_arch=arch, num_layers=1, verdict=verdict)
    for arch in ("llama", "qwen3"):
        yield Case(f"{arch}, flat form", "eagle3", draft_arch=arch, num_layers=1, reduced=True, native=True)
        windowed = {"layer_types": ["sliding_attention"], "sliding_window": WINDOW}
        yield Case(f"{arch}, sliding layer", "eagle3", decoder=windowed, draft_arch=arch, num_layers=1)
        # vLLM's Qwen3 attention has no bias on its output.
        verdict = "equal" if arch == "llama" else "differs"
        bias = {"attention_bias": True}
        yield Case(f"{arch}, attention bias", "eagle3", decoder=bias, draft_arch=arch, num_layers=1, verdict=verdict)
    yield from _latent_cases()


def _latent_cases() -> Iterator[Case]:
    latent = partial(Case, family="eagle3", draft_arch="deepseek_v3", native=True, num_layers=1)
    for reduced in (False, True):
        yield latent(f"latent attention, {'reduced' if reduced else 'full'} vocabulary", reduced=reduced)
    for name in ("fc_norm and norm_output", "norm_before_residual"):
        yield latent(f"latent attention, {name}", values=NORMS[name])
    # vLLM's CPU kernel does not rotate interleaved heads rightly; other implementations are used for YaRN.
    plain = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
    yield latent("latent attention, rope without YaRN by the CPU kernel", decoder=plain, verdict="differs")
    yield Case("latent attention, speculators format", "eagle3", draft_arch="deepseek_v3", verdict="refused")


#: Norm options of EAGLE-3 that are set together.
NORMS: dict[str, dict[str, bool]] = {
    "norm_before_residual": {"norm_before_residual": True},
    "norm_before_fc": {"norm_before_fc": True},
    "fc_norm": {"fc_norm": True},
    "norm_output": {"norm_output": True},
    "fc_norm and norm_output": {"fc_norm": True, "norm_output": True},
    "norm_before_residual, norm_before_fc and norm_output": {
        "norm_before_residual": True,
        "norm_before_fc": True,
        "norm_output": True,
    },
}


def _dflash_cases() -> Iterator[Case]:
    for reduced, embeddings in product((False, True), (False, True)):
        name = f"{'reduced' if reduced else 'full'} vocabulary{', embeddings in the file' if embeddings else ''}"
        yield Case(name, "dflash", reduced=reduced, include_embeddings=embeddings)
    yield Case("z-lab's native form", "dflash", native=True)
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

LATENT_YARN = ROPES["yarn"] | {"mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 32.0, "beta_slow": 1.0}

WINDOWED = {
    "sliding layers": ["sliding_attention", "sliding_attention"],
    "mixed layers": ["full_attention", "sliding_attention"],
}


def _windowed(types: list[str]) -> dict[str, Any]:
    return {"layer_types": types, "sliding_window": WINDOW, "use_sliding_window": True}
