"""Decoder configs out of flat Hugging Face configs, in which the draft's own keys stand beside those of its layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from transformers import CONFIG_MAPPING, PretrainedConfig

from speculators.convert.notes import FlatConfig
from speculators.errors import ConfigError
from speculators.models.family import check_decoder_values

__all__ = ["DecoderKind", "non_causal_sliding", "decoder_config", "flat_decoder"]

DecoderKind = Literal["qwen3", "llama", "deepseek_v3"]

#: Keys without which no format's reader builds a layer.
_REQUIRED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")

#: Keys whose absence means the config class's own default to every reader, which is recorded.
_SHARED = ("hidden_act", "max_position_embeddings", "rms_norm_eps", "attention_bias")
_OWN: dict[str, tuple[str, ...]] = {
    "qwen3": ("head_dim",),
    "llama": ("mlp_bias",),
    "deepseek_v3": ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
}

#: Of DeepSeek's config class, about mixtures of experts, which no draft has.
_EXPERT_KEYS = (
    "aux_loss_alpha",
    "ep_size",
    "first_k_dense_replace",
    "moe_intermediate_size",
    "moe_layer_freq",
    "n_group",
    "n_routed_experts",
    "n_shared_experts",
    "norm_topk_prob",
    "num_experts_per_tok",
    "num_nextn_predict_layers",
    "output_router_logits",
    "routed_scaling_factor",
    "scoring_func",
    "seq_aux",
    "topk_group",
    "topk_method",
)

#: Keys that may be left out silently: they do not change inference.
_QUIET = ("initializer_range", "attention_dropout")


def decoder_config(flat: FlatConfig, kind: DecoderKind, *, rope_theta: float = 10000.0) -> PretrainedConfig:
    """The decoder of a flat config, built by the class ``kind`` that the format's reader builds.

    :param rope_theta: what that reader assumes when the file names no base of the rotary embedding.
    :raises ConfigError: a size is missing, the weights are quantised, or rotary settings differ by layer type.
    """
    flat.refuse_other("quantization_config", ({},), "quantised weights")
    defaults = CONFIG_MAPPING[kind]()
    values: dict[str, Any] = {key: flat.required(key) for key in _REQUIRED}
    reason = f"{flat.form} reads the config as transformers' {kind}, whose default this is"
    for key in (*_SHARED, *_OWN[kind]):
        values[key] = flat.get(key, getattr(defaults, key, False), reason)
    for key in _QUIET:
        if flat.has(key):
            values[key] = flat.optional(key)
    values.update(_heads(flat, kind, values))
    values.update(_attention(flat, kind))
    values["rope_parameters"] = _rope_parameters(flat, rope_theta)
    flat.skip("tie_word_embeddings", "model_type")  # a draft's head is never tied to its embedding
    try:
        check_decoder_values(values)
        return CONFIG_MAPPING[kind](**(values | {"tie_word_embeddings": False}))
    except Exception as error:  # transformers validates with exceptions of several kinds
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(
            f"transformers cannot build the {flat.form} draft's decoder ({reason}); correct its config"
        ) from error


def _heads(flat: FlatConfig, kind: DecoderKind, values: dict[str, Any]) -> dict[str, Any]:
    heads = values["num_attention_heads"]
    if kind == "deepseek_v3":
        flat.skip("num_key_value_heads", "head_dim", "qk_head_dim", *_EXPERT_KEYS)  # no grouped heads, a dense MLP
        q_lora_rank = flat.optional("q_lora_rank")  # null is a value: queries are projected directly
        return {"num_key_value_heads": heads, "q_lora_rank": q_lora_rank}
    reason = f"as many as num_attention_heads, as {flat.form} reads it"
    found: dict[str, Any] = {"num_key_value_heads": flat.get("num_key_value_heads", heads, reason)}
    if kind == "llama" and flat.has("head_dim"):
        found["head_dim"] = flat.optional("head_dim")
    elif kind == "llama":
        size = values["hidden_size"] // heads
        found["head_dim"] = flat.notes.assume("head_dim", size, f"hidden_size / num_attention_heads, as {flat.form} reads it")
    return found


def _attention(flat: FlatConfig, kind: DecoderKind) -> dict[str, Any]:
    """Windows by layer (Qwen3), pairing of rotated entries (DeepSeek)."""
    if kind == "deepseek_v3":
        interleave = flat.get("rope_interleave", True, "DeepSeek's pairing of rotated entries")
        return {"rope_interleave": interleave}
    if kind == "llama":
        flat.refuse_other("sliding_window", (0,), "layers that see a part of the context")
        flat.skip("use_sliding_window", "max_window_layers", "layer_types")
        return {}
    keys = ("use_sliding_window", "sliding_window", "max_window_layers", "layer_types")
    return {key: value for key in keys if (value := flat.optional(key)) is not None}


def _rope_parameters(flat: FlatConfig, rope_theta: float) -> dict[str, Any]:
    """One set of rotary settings in transformers' present form, from that form or from ``rope_theta`` and ``rope_scaling``."""
    scaling = flat.optional("rope_scaling")
    found = dict(flat.optional("rope_parameters") or (scaling if isinstance(scaling, Mapping) else {}))
    if any(isinstance(value, Mapping) for value in found.values()):
        raise ConfigError(
            f"the {flat.form} config has rotary settings by layer type ({', '.join(found)}), which this library's drafts do "
            "not have; such a draft cannot be converted"
        )
    found["rope_type"] = found.get("rope_type") or found.pop("type", None) or "default"
    found.pop("type", None)
    if found["rope_type"] == "mrope" or "mrope_section" in found:
        # Of text the three positions are the same, so the sections change nothing.
        found = {key: value for key, value in found.items() if key not in ("mrope_section", "mrope_interleaved")}
        found["rope_type"] = "default" if found["rope_type"] == "mrope" else found["rope_type"]
    theta = found.get("rope_theta") or flat.optional("rope_theta")
    found["rope_theta"] = (
        flat.notes.assume("rope_theta", rope_theta, f"what {flat.form} assumes") if theta is None else float(theta)
    )
    flat.skip("rope_theta")
    part = flat.optional("partial_rotary_factor")
    if part is not None:
        found.setdefault("partial_rotary_factor", part)
    return found


def non_causal_sliding(flat: FlatConfig, *, layer_types: list[str]) -> bool:
    """``sliding_window_non_causal`` of a block draft that follows vLLM's and z-lab's rule: ``is_causal``, else
    ``dflash_config.causal``, decides for all layers, else sliding layers are causal inside the block and full ones are not.

    :raises ConfigError: full layers are causal, which no block draft here is.
    """
    nested = flat.nested("dflash_config")
    causal = flat.optional("is_causal")
    causal = nested.optional("causal") if causal is None else causal
    if causal is None:
        return False
    if causal and "full_attention" in layer_types:
        raise ConfigError(
            f"the {flat.form} config makes full-attention layers causal inside the block, which this library's drafts never "
            "are; such a draft cannot be converted"
        )
    return not causal


def flat_decoder(decoder: PretrainedConfig) -> dict[str, Any]:
    """Decoder keys of a flat config as an engine reads them, rotary settings in the old and the present form."""
    values = decoder.to_diff_dict()
    values.pop("transformers_version", None)
    values["model_type"] = decoder.model_type
    rope = dict(values.get("rope_parameters") or {})
    values["rope_parameters"] = rope
    values["rope_theta"] = rope.get("rope_theta", 10000.0)
    return values
