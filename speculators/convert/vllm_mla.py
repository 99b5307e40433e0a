"""EAGLE-3 with latent attention in vLLM's native form, which is the only one it serves such drafts from; to and fro.

A flat DeepSeek config, ``Eagle3DeepseekV2ForCausalLM`` (or V3), with a dense MLP always. Everything but the attention is as in
:mod:`speculators.convert.eagle3`. vLLM pairs rotated entries as neighbours, gives no projection a bias, wants a query latent,
and takes every scaled rotary embedding for DeepSeek's YaRN. Source: vLLM 0.32, ``deepseek_eagle3.py`` and ``deepseek_v2.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from speculators.convert.adapter import Adapter, Conversion
from speculators.convert.eagle3 import EAGLE3_OPTIONS, read_eagle3, write_flat_eagle3
from speculators.convert.options import ConversionOptions
from speculators.convert.source import ForeignCheckpoint
from speculators.convert.verifier import VerifierFacts
from speculators.errors import ConfigError

__all__ = ["VllmMlaEagle3", "absent_in_vllm", "write_vllm_mla"]

ARCHITECTURE = "Eagle3DeepseekV2ForCausalLM"

#: vLLM takes drafts of ``model_type`` ``deepseek_v3`` for MTP layers; published drafts for Kimi-K2 say this.
MODEL_TYPE = "kimi_k2"


class VllmMlaEagle3(Adapter):
    name = "vllm-mla-eagle3"
    title = "EAGLE-3 with latent attention (Eagle3DeepseekV2ForCausalLM)"
    algorithms = ("eagle3",)
    options = EAGLE3_OPTIONS

    def recognises(self, source: ForeignCheckpoint) -> bool:
        return source.has("self_attn.kv_a_proj_with_mqa.", ".hidden_norm.")

    def read(
        self, source: ForeignCheckpoint, verifier: VerifierFacts, algorithm: str | None, options: ConversionOptions
    ) -> Conversion:
        return read_eagle3(source, verifier, options, "deepseek_v3", "MLA EAGLE-3")


def absent_in_vllm(decoder: Mapping[str, Any], norm_before_fc: bool) -> list[str]:
    """What a draft with this decoder's config has that vLLM's class has not, in the words of its config.

    :param decoder: as in ``transformer_layer_config``; a missing key means transformers' default.
    """
    rope_type = (decoder.get("rope_parameters") or {}).get("rope_type", "default")
    unknown = {
        "norm_before_fc": norm_before_fc,
        "rope_interleave: false": not decoder.get("rope_interleave", True),
        "attention_bias": bool(decoder.get("attention_bias")),
        "q_lora_rank: null": not decoder.get("q_lora_rank", True),
        f"rope_type {rope_type!r}": rope_type not in ("default", "yarn"),
    }
    return [name for name, present in unknown.items() if present]


def write_vllm_mla(conversion: Conversion) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Config and tensors of the native form; tensor names are the same.

    :raises ConfigError: the draft has something that vLLM's class has not.
    """
    config = conversion.config
    found = absent_in_vllm(config.transformer_layer_config.to_dict(), config.norm_before_fc)
    if found:
        raise ConfigError(f"vLLM's EAGLE-3 with latent attention does not have {found[0]}, which this draft was trained with")
    flat, tensors = write_flat_eagle3(conversion, ARCHITECTURE)
    return flat | {"model_type": MODEL_TYPE}, tensors
