"""What is known about verifiers by their model type, against every model type that transformers has.

A type that a new release of transformers adds is checked like the others; one that cannot be must be named here, with why.
"""

from __future__ import annotations

import importlib
import re
from typing import Any

import pytest
import torch
from torch import nn
from transformers import CONFIG_MAPPING
from transformers.core_model_loading import revert_weight_conversion

from speculators.errors import VerifierError
from speculators.models.verifier_weights import (
    _NORM_ADDS_ONE,
    VerifierHead,
    _find,
    has_rms_norm,
    norm_adds_one,
    text_config,
)
from speculators.verifiers.structure import DecoderParts, decoder_parts
from tests.models.model_types import CAUSAL, COMPOSITE, VOCAB, build, logits_of, name_of

#: No small default model of theirs can be built: their default configs lack values, or they need other packages.
UNBUILT = {
    "chameleon", "cohere_compass", "cohere_compass_text", "dbrx", "deepseek_ocr2", "diffusion_gemma", "evolla", "fast_vlm",
    "gemma3n", "gemma4_assistant", "granite4_vision", "musicgen", "musicgen_melody", "perception_lm", "reformer",
}  # fmt: skip

#: Not one stack of decoder layers under one final norm: refused as verifiers, with a sentence.
NO_DECODER = {
    "bart", "bert", "bert-generation", "big_bird", "bigbird_pegasus", "biogpt", "blenderbot", "blenderbot-small", "blip",
    "blip-2", "blt", "camembert", "cpmant", "ctrl", "data2vec-text", "electra", "ernie", "git", "gpt_neox_japanese", "hrm_text",
    "instructblip", "instructblipvideo", "kosmos-2", "kosmos-2.5", "marian", "mbart", "megatron-bert", "mvp", "openai-gpt",
    "pegasus", "pi0", "plbart", "prophetnet", "qwen4_exp", "qwen4_exp_text", "rembert", "roberta", "roberta-prelayernorm",
    "roc_bert", "roformer", "rwkv", "trocr", "whisper", "xglm", "xlm", "xlm-roberta", "xlm-roberta-xl", "xlnet", "xlstm",
    "xmod",
}  # fmt: skip

#: Their logits are not their head's alone: a layer between (modernbert-decoder, opt), a model that drafts for another (the
#: assistant), or a head inside another model (nemotron_h_omni).
OTHER_HEADS = {"gemma4_unified_assistant", "modernbert-decoder", "nemotron_h_omni", "opt"}


#: Their files hold the embedding in two tensors (molmo2), or cannot be named for a small model (inkling2).
OTHER_FILES = {"inkling2", "inkling2_loop", "inkling2_loop_text", "inkling2_text", "molmo2"}


def check_names_on_disk(model: Any, parts: DecoderParts) -> None:
    """The parts are found under the names that published files have, which may differ from the modules'."""
    names = {"embed_tokens": model.get_input_embeddings(), "lm_head": model.get_output_embeddings(), "norm": parts.norm}
    if names["lm_head"].weight is names["embed_tokens"].weight:
        del names["lm_head"]
    state = {name: value for name, value in model.state_dict().items() if not re.search(r"(layers|h|blocks)\.\d", name)}
    on_disk = dict.fromkeys(revert_weight_conversion(model, dict(state)), "file")
    for part, module in names.items():
        name = name_of(model, module) + ".weight"
        if name in state:
            (expected,) = revert_weight_conversion(model, {name: state[name]})
            assert _find(on_disk, part) == expected


def checked(model_type: str, parts: DecoderParts) -> nn.Module:
    """The final norm with numbers in it."""
    torch.manual_seed(0)
    norm = parts.norm.to_empty(device="cpu").float()
    for name, parameter in norm.named_parameters():
        nn.init.zeros_(parameter) if name == "bias" else nn.init.uniform_(parameter, 0.2, 1.5)
    return norm


@pytest.mark.parametrize("model_type", [*CAUSAL, *COMPOSITE])
def test_norm_head_and_names(model_type: str) -> None:
    try:
        config, model = build(model_type, unusual=True)
    except Exception as error:
        if model_type in UNBUILT:
            return
        raise AssertionError(f"{model_type} could not be built; mend its config in model_types.py") from error
    if config.is_encoder_decoder:
        return
    try:
        parts = decoder_parts(model)
    except VerifierError:
        if model_type in NO_DECODER:
            return
        raise
    hidden_size = text_config(config).hidden_size
    norm = checked(model_type, parts)
    weight = getattr(norm, "weight", None)

    # States as small as the epsilon's root, so that a wrong epsilon shows.
    states = torch.randn(2, 3, hidden_size) * 3e-3
    head = VerifierHead(torch.randn(VOCAB, hidden_size) * 0.05, config, None, torch.ones(()) if weight is None else weight.data)
    with torch.no_grad():
        same = torch.allclose(head.normalize(states), norm(states), rtol=1e-4, atol=1e-5)
    assert has_rms_norm(config) is same, (
        f"{model_type}: {type(norm).__name__}, 1 + weight: {norm_adds_one(config)}, eps {head.eps}"
    )

    index = dict.fromkeys(model.state_dict(), "file")
    if model_type not in OTHER_HEADS:
        embedding, output = model.get_input_embeddings(), model.get_output_embeddings()
        assert _find(index, "embed_tokens") == name_of(model, embedding) + ".weight"
        assert _find(index, "lm_head") in (
            name_of(model, output) + ".weight",
            None if output.weight is embedding.weight else "",
        )
        if weight is not None:
            assert _find(index, "norm") == name_of(model, parts.norm) + ".weight"
        if model_type not in OTHER_FILES:
            check_names_on_disk(model, parts)
        states = torch.randn(1, 3, hidden_size)
        logits = logits_of(model, parts.base, head.weight, states)
        torch.testing.assert_close(head.full_logits(states), logits.float(), rtol=1e-3, atol=1e-3)


def rms_norm_class(model_type: str) -> type[nn.Module] | None:
    """The plain RMSNorm, with a weight, in a type's modelling code; None if it has none, or cannot be imported here."""
    try:
        config_class = CONFIG_MAPPING[model_type]
        module = importlib.import_module(config_class.__module__.replace("configuration_", "modeling_"))
    except (KeyError, ImportError):
        return None
    found = [value for name, value in vars(module).items() if name.endswith("RMSNorm") and value.__module__ == module.__name__]
    plain = min(found, key=lambda value: len(value.__name__), default=None)
    return plain if plain is not None and plain(8).state_dict() else None


def multiplier(norm_class: type[nn.Module], weight: float) -> float:
    """What an RMSNorm whose weights are all ``weight`` multiplies a state of size 1 by."""
    norm = norm_class(8)
    nn.init.constant_(norm.weight, weight)
    with torch.no_grad():
        return float(norm(torch.ones(1, 8))[0, 0])


NOT_BUILT = sorted(name for name in UNBUILT | NO_DECODER | _NORM_ADDS_ONE if rms_norm_class(name) is not None)


@pytest.mark.parametrize("model_type", NOT_BUILT)
def test_norms_of_types_without_a_small_model(model_type: str) -> None:
    """The RMSNorm of their code, and nothing stale in the list."""
    try:
        adds_one = norm_adds_one(CONFIG_MAPPING[model_type]())
    except ValueError:  # no default config
        adds_one = model_type in _NORM_ADDS_ONE
    expected = 1.0 + 0.75 if adds_one else 0.75
    assert multiplier(rms_norm_class(model_type), 0.75) == pytest.approx(expected, rel=1e-3)
