"""The parity cases, generated from the config classes: every field takes every value of its type, or two of a number.

A family's *base* case sets every field. Each further case changes one field, with the changes of :data:`TOGETHER` that make
the value legal or give it an effect, and :data:`COMBINED` crosses the fields that meet in one computation. A field that is in
neither :data:`VALUES` nor :data:`EXEMPT`, and whose type does not list its values, has no case: a test fails.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin

from speculators.config import SpeculatorModelConfig

__all__ = ["Case", "cases_of", "families", "fields_without_case", "varied_fields"]

VOCAB, HIDDEN, VERIFIER_LAYERS = 64, 32, 8
MASK_TOKEN = 63

#: Reasons why a field has no parity case.
EXEMPT = {
    # Of the common part of the file.
    "architectures": "always the registered class's name; the configs' comparison reads it",
    "dtype": "the case `bfloat16` of every family",
    "speculators_config": "the same for every case; the configs' comparison reads it",
    "speculators_model_type": "names the family",
    "speculators_version": "names the writer",
    "tie_word_embeddings": "always false: both sides force it",
    "transformers_version": "names the writer",
    # Of Hugging Face's base config, not written to the file.
    "chunk_size_feed_forward": "not a draft's",
    "id2label": "not a draft's",
    "is_encoder_decoder": "not a draft's",
    "label2id": "not a draft's",
    "output_hidden_states": "not a draft's",
    "problem_type": "not a draft's",
    "return_dict": "not a draft's",
    # Read by neither side's computation.
    "num_nextn_predict_layers": "1 is the only value of the format",
    "target_hidden_size": "null is the only value that training writes, and no forward pass reads it",
    # Keys of this library alone.
    "confidence_detach": "about gradients only",
    "hidden_state_input": "says which state is fed in; the test feeds both sides the same",
    "confidence_target": "about the loss only",
    "final_state": "about the data only",
    "sliding_window_reference": "at what the peer's forward pass does: upstream's each family's own, vLLM's the slot",
    "training_answers": "about the data only",
}

#: Decoders by name: changes to :func:`decoder`'s.
QWEN3_DECODERS: dict[str, dict[str, Any]] = {
    "one layer": {"num_hidden_layers": 1, "layer_types": ["full_attention"]},
    "sliding": {"layer_types": ["sliding_attention"] * 2, "sliding_window": 4, "use_sliding_window": True},
    "mixed": {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 3, "use_sliding_window": True},
    "attention bias": {"attention_bias": True},
    "wide heads": {"head_dim": 16, "num_key_value_heads": 4},
    "other epsilon and activation": {"rms_norm_eps": 1e-2, "hidden_act": "gelu_pytorch_tanh"},
    "yarn": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 50000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 16,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
        },
        "max_position_embeddings": 64,
    },
}
LLAMA = {"model_type": "llama"}
LLAMA_DECODERS = {
    "llama": LLAMA,
    "llama, attention bias": LLAMA | {"attention_bias": True},
    "llama3 rope": LLAMA
    | {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    },
}
EXPERTS = {"moe_intermediate_size": 8, "shared_expert_intermediate_size": 12, "num_experts": 4, "num_experts_per_tok": 2}
PART_ROTARY = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
QWEN3_5 = {
    "model_type": "qwen3_5_text",
    "rope_parameters": PART_ROTARY | {"mrope_section": [1, 1, 0], "mrope_interleaved": True},
}
MTP_DECODERS = {
    **{name: QWEN3_DECODERS[name] for name in ("attention bias", "wide heads", "other epsilon and activation", "yarn")},
    "qwen3_next": {"model_type": "qwen3_next", "rope_parameters": PART_ROTARY} | EXPERTS,
    "qwen3_next, dense": {"model_type": "qwen3_next", "rope_parameters": PART_ROTARY, "mlp_only_layers": [7]} | EXPERTS,
    "qwen3_next, probabilities of experts as they are": {
        "model_type": "qwen3_next",
        "rope_parameters": PART_ROTARY,
        "norm_topk_prob": False,
    }
    | EXPERTS,
    "qwen3_5": QWEN3_5,
    "qwen3_5_moe": QWEN3_5 | {"model_type": "qwen3_5_moe_text"} | EXPERTS,
}
DECODERS = {
    "dflash": QWEN3_DECODERS,
    "dspark": QWEN3_DECODERS,
    "eagle3": QWEN3_DECODERS | LLAMA_DECODERS,
    "peagle": QWEN3_DECODERS | LLAMA_DECODERS,
    "mtp": MTP_DECODERS,
}

SLIDING = {"transformer_layer_config": "sliding"}

#: Values of the fields whose types do not list them; the first is the base case's.
VALUES: dict[str, tuple[Any, ...]] = {
    "aux_hidden_state_layer_ids": ([2, 4, 5], [3, 1], [1, 3, 5, 7]),
    "block_size": (4, 5),
    "draft_vocab_size": (VOCAB, 40),
    "eagle_aux_hidden_state_layer_ids": ([2, 4, 5], [3, 1], [1, 3, 5, 7], None),
    "markov_rank": (8, 0),
    "mask_token_id": (MASK_TOKEN, 7),
}

#: What else must change with a field's value (as text).
TOGETHER: dict[tuple[str, str], dict[str, Any]] = {
    ("markov_rank", "0"): {"confidence_head_with_markov": False},
    ("fc_norm", "True"): {"norm_before_fc": False},
    ("norm_before_fc", "True"): {"fc_norm": False},
    ("sliding_window_non_causal", "True"): SLIDING,
    ("sliding_window_non_causal", "False"): SLIDING,
}

BLOCK_SETS: list[dict[str, tuple[Any, ...]]] = [
    {"sample_from_anchor": (True, False), "draft_vocab_size": (VOCAB, 40)},
    {
        "sliding_window_non_causal": (True, False),
        "sample_from_anchor": (True, False),
        "transformer_layer_config": ("mixed",),
    },
]
NORM_SETS: list[dict[str, tuple[Any, ...]]] = [
    {
        "norm_before_residual": (True, False),
        "norm_before_fc": (True, False),
        "fc_norm": (True, False),
        "norm_output": (True, False),
        "draft_vocab_size": (40,),
    },
]

#: Fields that are crossed, by family: every combination that the config class accepts is a case.
COMBINED: dict[str, list[dict[str, tuple[Any, ...]]]] = {
    "dflash": BLOCK_SETS,
    "dspark": [
        {
            "sample_from_anchor": (True, False),
            "markov_head_type": ("vanilla", "gated", "rnn"),
            "draft_vocab_size": (VOCAB, 40),
        },
        {"enable_confidence_head": (True, False), "confidence_head_with_markov": (True, False), "markov_rank": (8, 0)},
        *BLOCK_SETS,
    ],
    "eagle3": NORM_SETS,
    "peagle": NORM_SETS,
    "mtp": [],
}

#: Tokens that a family's proposal method names.
SPECULATIVE_TOKENS = 3


@dataclass(frozen=True)
class Case:
    """One checkpoint to compare; ``field`` is what it is about."""

    family: str
    field: str
    name: str
    options: dict[str, Any]
    dtype: str = "float32"
    include_embeddings: bool = False


def families() -> dict[str, type[SpeculatorModelConfig]]:
    """Registered config classes by family."""
    return {family_of(config): config for config in SpeculatorModelConfig.registered_classes()}


def family_of(config: type[SpeculatorModelConfig]) -> str:
    return str(config.model_fields["speculators_model_type"].default)


def decoder(family: str, name: str) -> dict[str, Any]:
    """A decoder's config: the base one for ``""``."""
    layers = VERIFIER_LAYERS if family == "mtp" else 2
    values = {
        "model_type": "qwen3",
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": 48,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "hidden_act": "silu",
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "layer_types": ["full_attention"] * layers,
        "sliding_window": None,
        "use_sliding_window": False,
    }
    values |= DECODERS[family][name] if name else {}
    if values["model_type"] != "qwen3":
        for key in ("layer_types", "sliding_window", "use_sliding_window"):
            values.pop(key)
    return values


def values_of(config: type[SpeculatorModelConfig], field: str) -> tuple[Any, ...]:
    """The values that a field's cases take: those its type lists, or those of :data:`VALUES`; none if neither says."""
    annotation = config.model_fields[field].annotation
    listed = get_args(annotation) if get_origin(annotation) is Literal else (True, False) if annotation is bool else ()
    if listed:
        first = config.model_fields[field].default
        return (first, *(value for value in listed if value != first))
    if field == "transformer_layer_config":
        return ("", *DECODERS.get(family_of(config), {}))
    return VALUES.get(field, ())


def varied_fields(config: type[SpeculatorModelConfig]) -> list[str]:
    return [field for field in config.model_fields if field not in EXEMPT]


def base_options(config: type[SpeculatorModelConfig]) -> dict[str, Any]:
    """Every field that is not exempt, at its first value."""
    return {field: values[0] for field in varied_fields(config) if (values := values_of(config, field))}


def accepted(config: type[SpeculatorModelConfig], options: dict[str, Any]) -> bool:
    try:
        config(**written(family_of(config), options))
    except ValueError:
        return False
    return True


def written(family: str, options: dict[str, Any], verifier: str | None = None) -> dict[str, Any]:
    """Options as the config class takes them: the decoder as a dictionary, and the common part."""
    speculators_config = {
        "algorithm": family,
        "proposal_methods": [
            {
                "proposal_type": "greedy",
                "speculative_tokens": SPECULATIVE_TOKENS,
                "verifier_accept_k": 1,
                "accept_tolerance": 0.0,
            }
        ],
        "default_proposal_method": "greedy",
        "verifier": {"name_or_path": verifier, "architectures": ["LlamaForCausalLM"]},
    }
    values = {"speculators_model_type": family, "speculators_config": speculators_config, **options}
    return values | {"transformer_layer_config": decoder(family, options["transformer_layer_config"])}


def cases_of(config: type[SpeculatorModelConfig]) -> list[Case]:
    """All cases of a family."""
    family = family_of(config)
    base = base_options(config)
    cases = [Case(family, "base", "base", base)]
    for field in varied_fields(config):
        for value in values_of(config, field):
            options = {**base, field: value, **TOGETHER.get((field, str(value)), {})}
            cases.append(Case(family, field, spoken({field: value}), options))
    for crossed in COMBINED.get(family, []):
        for combination in itertools.product(*crossed.values()):
            changes = dict(zip(crossed, combination, strict=True))
            if accepted(config, base | changes):
                cases.append(Case(family, " x ".join(crossed), spoken(changes), base | changes))
    distinct: dict[str, Case] = {}
    for case in cases:
        distinct.setdefault(repr(sorted(case.options.items())), case)
    return [
        *distinct.values(),
        Case(family, "file", "bfloat16", base, dtype="bfloat16"),
        Case(family, "file", "embeddings and head included", base, include_embeddings=True),
    ]


def spoken(options: dict[str, Any]) -> str:
    """Options as a case's name."""
    return ", ".join(f"{field} {value}" for field, value in options.items() if value != "")


def fields_without_case(config: type[SpeculatorModelConfig]) -> list[str]:
    """Fields that are not exempt and do not take every listed value, or two values, in some case."""
    cases = cases_of(config)
    lacking = []
    for field in varied_fields(config):
        wanted = {repr(value) for value in values_of(config, field)}
        taken = {repr(case.options.get(field)) for case in cases}
        if len(wanted) < 2 or not wanted <= taken:
            lacking.append(field)
    return lacking
