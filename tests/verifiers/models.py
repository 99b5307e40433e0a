"""Tiny random models of several families, and a loaded verifier in float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from speculators.verifiers.loading import Verifier, load_verifier
from tests.tiny import tiny_tokenizer, tiny_verifier

COMMON = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
SLIDING = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
LATENT = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}
EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 16}

#: Family -> what its config needs beside COMMON.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {},
    "mistral": {"sliding_window": 6},
    "qwen2": {"use_sliding_window": True, **SLIDING},
    "gemma2": {"query_pre_attn_scalar": 8, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0, **SLIDING},
    "granite": {"logits_scaling": 2.0},
    "gpt2": {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 256},
    "gpt_neox": {},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, **SLIDING},
    "deepseek_v3": {"first_k_dense_replace": 1, **LATENT, **EXPERTS, "num_key_value_heads": 4, "head_dim": 4},
    "qwen3_5_text": {
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    },
    "lfm2": {"layer_types": ["conv", "full_attention", "conv"], "conv_L_cache": 3, "block_multiple_of": 8},
}


def tiny_model(family: str, seed: int = 0) -> PreTrainedModel:
    config = AutoConfig.for_model(family, **{**COMMON, **FAMILIES[family]})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(config).eval()


def family_verifier(family: str, folder: Path, dtype: torch.dtype = torch.float64) -> Verifier:
    path = folder / family
    tiny_model(family).save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return load_verifier(path, dtype=dtype)


def float64_verifier(folder: Path, **options: Any) -> Verifier:
    return load_verifier(tiny_verifier(folder, **options), dtype=torch.float64)


def plain_model(verifier: Verifier) -> PreTrainedModel:
    """The same weights, loaded by transformers alone, with its own attention and cache."""
    model = AutoModelForCausalLM.from_pretrained(verifier.name, dtype=verifier.dtype).eval()
    model.set_experts_implementation("eager")
    return model


def random_ids(count: int, seed: int, vocab: int = 64) -> torch.Tensor:
    return torch.randint(5, vocab, (count,), generator=torch.Generator().manual_seed(seed))
