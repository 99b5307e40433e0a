"""Is config.json complete, of a known type, and at one with itself? Missing keys come with what each engine would assume."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from speculators.checks.facts import CheckpointFacts, integer, rope_of
from speculators.checks.findings import Finding, Kind
from speculators.config import SpeculatorModelConfig
from speculators.errors import ConfigError
from speculators.models.base import SpeculatorModel
from speculators.models.mtp import DECODER_KINDS as MTP_DECODERS

__all__ = ["KINDS", "check_config", "check_whole_config"]

TYPE_MISSING = Kind(
    "type-missing",
    "error",
    "The config names no `speculators_model_type`: it is not in the speculators format.",
    "Upstream and this library refuse it; vLLM reads it only if it knows the architecture from elsewhere.",
    "Convert it with `speculators convert`, or write the type into config.json.",
)
TYPE_UNKNOWN = Kind(
    "type-unknown",
    "error",
    "`speculators_model_type` is none that this version knows.",
    "This library refuses the checkpoint; other readers may too.",
    "Correct the name, or update the library.",
)
REQUIRED_MISSING = Kind(
    "required-key-missing",
    "error",
    "A key without which vLLM or upstream refuses the checkpoint is absent or null.",
    "Loading fails.",
    "Write the key; its value is what the draft was trained with.",
)
ENGINES_DIFFER = Kind(
    "key-missing-engines-differ",
    "error",
    "A key is absent for which engines assume different values.",
    "At least one engine runs another network than was trained, without a word.",
    "Write the key explicitly.",
)
LAYOUT_MISSING = Kind(
    "layout-flag-missing",
    "error",
    "`sample_from_anchor` is absent from a DSpark config.",
    "vLLM reads a speculators checkpoint without it as fill-in, upstream as anchor-first; in the wrong layout acceptance "
    "falls to about 1 token a round.",
    "Write `sample_from_anchor` explicitly.",
)
KEY_MISSING = Kind(
    "key-missing",
    "warning",
    "A key is absent that has a default.",
    "Readers assume a value, today the same one as far as known.",
    "Write the key explicitly.",
)
CONFIG_INVALID = Kind(
    "config-invalid",
    "error",
    "The config class refuses the values.",
    "Upstream and this library cannot load the checkpoint.",
    "Correct what the sentence names.",
)
LAYOUT_CONTRADICTS = Kind(
    "layout-contradicts-tokens",
    "error",
    "More speculative tokens than a block of this layout predicts.",
    "Engines draft past what was trained, or the layout flag is wrong (a fill-in block of K slots predicts K - 1 tokens).",
    "Set `speculative_tokens` to K (anchor-first) or K - 1 (fill-in), or correct `sample_from_anchor`: see `--verifier`.",
)
LAYOUT_SUSPICIOUS = Kind(
    "layout-suspicious-tokens",
    "warning",
    "An anchor-first block of K slots with K - 1 speculative tokens, which is the number of a fill-in block.",
    "If the flag is wrong, acceptance falls to about 1 token a round; if it is right, a token a round is given away.",
    "Run with `--verifier` to see which layout was trained, then correct the flag or the number.",
)
BLOCK_TOO_SMALL = Kind(
    "block-size-too-small",
    "error",
    "The block has no slot that predicts a token.",
    "Nothing can be drafted.",
    "Write the block size of the training.",
)
ALGORITHM_DIFFERS = Kind(
    "algorithm-contradicts-type",
    "warning",
    "`speculators_config.algorithm` is not `speculators_model_type`.",
    "Readers that go by the algorithm take the checkpoint for another family.",
    "Write the type's name into both.",
)
TIED = Kind(
    "tied-embeddings",
    "warning",
    "`tie_word_embeddings` is true.",
    "A reader that ties the output head to the embedding replaces the draft's `lm_head`, and cannot with a reduced one.",
    "Set it to false, at the top and in `transformer_layer_config`.",
)
STRAY_CODE = Kind(
    "stray-config-code",
    "warning",
    "The folder holds a `config.py`, or config.json an `auto_map`.",
    "Hugging Face readers ask for `trust_remote_code` and then run that file.",
    "Delete config.py and the `auto_map` key; readers go by `speculators_model_type`.",
)
DECODER_TYPE = Kind(
    "decoder-type-unsupported",
    "error",
    "The decoder's `model_type` is not one of the family's.",
    "Readers refuse the draft, or build other layers than were trained.",
    "Write the type of the training.",
)
HEADS_UNEVEN = Kind(
    "heads-contradict",
    "error",
    "Query heads are no multiple of key/value heads, or the head size is odd.",
    "The attention layers cannot be built.",
    "Write the numbers of the training.",
)
KINDS = (
    TYPE_MISSING,
    TYPE_UNKNOWN,
    REQUIRED_MISSING,
    ENGINES_DIFFER,
    LAYOUT_MISSING,
    KEY_MISSING,
    CONFIG_INVALID,
    LAYOUT_CONTRADICTS,
    LAYOUT_SUSPICIOUS,
    BLOCK_TOO_SMALL,
    ALGORITHM_DIFFERS,
    TIED,
    STRAY_CODE,
    DECODER_TYPE,
    HEADS_UNEVEN,
)

#: Keys that vLLM's speculators loader demands of each family, beside those it demands of all.
_REQUIRED = {
    "dflash": ("mask_token_id", "aux_hidden_state_layer_ids"),
    "dspark": ("mask_token_id", "aux_hidden_state_layer_ids"),
    "peagle": ("mask_token_id",),
}

_OF_EAGLE: dict[str, str | None] = {
    "draft_vocab_size": None,
    "norm_before_residual": "true",
    "norm_before_fc": None,
    "fc_norm": None,
    "norm_output": None,
    "embed_requires_grad": None,
}

#: Keys with a default, and what vLLM assumes where it is known to differ from the default; None: not known to differ.
_DEFAULTED: dict[str, dict[str, str | None]] = {
    "dflash": {
        "draft_vocab_size": None,
        "block_size": None,
        "sample_from_anchor": None,
        "sliding_window_non_causal": "true (bidirectional)",
    },
    "dspark": {
        "draft_vocab_size": None,
        "block_size": None,
        "sliding_window_non_causal": None,
        "markov_rank": None,
        "markov_head_type": None,
        "enable_confidence_head": "false (no confidence head)",
        "confidence_head_with_markov": "false (a confidence head that reads no Markov embedding)",
    },
    "eagle3": _OF_EAGLE,
    "peagle": _OF_EAGLE,
    "mtp": {"num_nextn_predict_layers": None},
}

#: Keys that say nothing without a confidence head.
_OF_CONFIDENCE = frozenset({"confidence_head_with_markov"})

_DECODER_KEYS = (
    "hidden_size",
    "vocab_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
)

#: Decoder types of each family.
_DECODER_TYPES = {
    "dflash": ("qwen3",),
    "dspark": ("qwen3",),
    "eagle3": ("llama", "qwen3", "deepseek_v3"),
    "peagle": ("llama", "qwen3", "deepseek_v3"),
    "mtp": MTP_DECODERS,
}


def check_config(facts: CheckpointFacts) -> Iterator[Finding]:
    """Everything that config.json alone shows."""
    if facts.raw.config is None:
        return
    yield from _stray_code(facts)
    name = facts.config.get("speculators_model_type")
    if not name:
        native = facts.config.get("architectures")
        yield TYPE_MISSING.found(f"config.json has no speculators_model_type (architectures: {native})")
        return
    if facts.family is None:
        known = ", ".join(sorted(SpeculatorModelConfig.registry))
        yield TYPE_UNKNOWN.found(f"speculators_model_type is {name!r}; known are {known}")
        return
    yield from _missing(facts)
    yield from _decoder(facts)
    yield from _layout(facts)
    algorithm = facts.speculators.get("algorithm")
    if algorithm is not None and algorithm != facts.family:
        yield ALGORITHM_DIFFERS.found(f"algorithm is {algorithm!r}, speculators_model_type {facts.family!r}")
    tied = [
        place
        for place, values in (("the top", facts.config), ("transformer_layer_config", facts.decoder))
        if values.get("tie_word_embeddings") is True
    ]
    if tied:
        yield TIED.found(f"tie_word_embeddings is true at {' and in '.join(tied)}")


def check_whole_config(facts: CheckpointFacts) -> Iterator[Finding]:
    """Whether the config and model classes take the values: the last resort, for faults that no other check names."""
    if facts.family is None:
        return
    try:
        SpeculatorModel.without_weights(SpeculatorModelConfig.from_dict(facts.config))
    except ConfigError as error:
        yield CONFIG_INVALID.found(str(error))
    except Exception as error:  # a decoder config of transformers may raise anything
        yield CONFIG_INVALID.found(f"{type(error).__name__}: {error}")


def _stray_code(facts: CheckpointFacts) -> Iterator[Finding]:
    found = ["config.py in the folder"] if (facts.raw.folder / "config.py").is_file() else []
    found += ["auto_map in config.json"] if "auto_map" in facts.config else []
    if found:
        yield STRAY_CODE.found(" and ".join(found))


def _missing(facts: CheckpointFacts) -> Iterator[Finding]:
    absent = [key for key in _REQUIRED.get(facts.family or "", ()) if facts.config.get(key) is None]
    absent = [key for key in absent if not (key == "aux_hidden_state_layer_ids" and "target_layer_ids" in facts.config)]
    if facts.decoder:
        sizes = [key for key in _DECODER_KEYS if integer(facts.decoder.get(key)) is None]
        absent += [f"transformer_layer_config.{key}" for key in sizes]
    else:
        absent.append("transformer_layer_config")
    if facts.speculative_tokens is None:
        absent.append("speculators_config.proposal_methods[0].speculative_tokens")
    if facts.verifier_name is None:
        absent.append("speculators_config.verifier.name_or_path")
    if absent:
        yield REQUIRED_MISSING.found(f"absent or null: {', '.join(absent)}")
    if facts.family == "dspark" and facts.config.get("sample_from_anchor") is None:
        yield LAYOUT_MISSING.found("no sample_from_anchor: vLLM assumes false, upstream true")
    for key, in_vllm in _DEFAULTED.get(facts.family or "", {}).items():
        if facts.config.get(key) is not None or (key in _OF_CONFIDENCE and facts.config.get("enable_confidence_head") is False):
            continue
        upstream = _shown(facts.default(key))
        if in_vllm is None:
            yield KEY_MISSING.found(f"no {key}: upstream and this library assume {upstream}")
        else:
            yield ENGINES_DIFFER.found(f"no {key}: vLLM assumes {in_vllm}, upstream and this library {upstream}")
    if facts.decoder:
        rope = rope_of(facts.decoder)
        if rope is None or "rope_theta" not in rope:
            text = "no rope_theta in transformer_layer_config: vLLM assumes 1000000, upstream and this library 10000"
            yield ENGINES_DIFFER.found(text)
        for key in ("head_dim", "rms_norm_eps", "max_position_embeddings"):
            if facts.decoder.get(key) is None:
                yield KEY_MISSING.found(f"no {key} in transformer_layer_config: readers assume their decoder's default")


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _decoder(facts: CheckpointFacts) -> Iterator[Finding]:
    decoder = facts.decoder
    known = _DECODER_TYPES.get(facts.family or "")
    model_type = decoder.get("model_type")
    if decoder and known and model_type not in known:
        yield DECODER_TYPE.found(f"model_type is {model_type!r}; {facts.family} drafts are {', '.join(known)}")
    heads, kv_heads = integer(decoder.get("num_attention_heads")), integer(decoder.get("num_key_value_heads"))
    head_dim = integer(decoder.get("head_dim"))
    if heads and kv_heads and heads % kv_heads:
        yield HEADS_UNEVEN.found(f"{heads} query heads over {kv_heads} key/value heads")
    if head_dim is not None and head_dim % 2:
        yield HEADS_UNEVEN.found(f"head_dim is {head_dim}; rotary pairs need an even number")


def _layout(facts: CheckpointFacts) -> Iterator[Finding]:
    if not facts.drafts_blocks or facts.block_size is None:
        return
    layout, tokens = facts.layout, facts.speculative_tokens
    if layout is None:
        if isinstance(facts.value("sample_from_anchor"), bool):
            text = f"block_size {facts.block_size} with sample_from_anchor {_shown(facts.value('sample_from_anchor'))}"
            yield BLOCK_TOO_SMALL.found(text)
        return
    if tokens is None or facts.config.get("sample_from_anchor") is None:
        return
    text = f"{tokens} speculative tokens from {layout.name} blocks of {layout.block_size} slots"
    if tokens > layout.max_draft_tokens:
        yield LAYOUT_CONTRADICTS.found(f"{text}, which predict {layout.max_draft_tokens}")
    elif layout.sample_from_anchor and tokens == layout.block_size - 1:
        yield LAYOUT_SUSPICIOUS.found(text)
