"""Attention of the verifier over grouped key-value heads, without copying keys.

Stock attention repeats every key-value head for its group of query heads whenever a mask is given, once per layer and
step; on a CPU that copy costs more than the attention. Here the query heads of a group become further query rows of
their key-value head, or the kernel is told about the groups. Registered with transformers as
:data:`GROUPED_ATTENTION`, so that the models' own modules call it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from speculators.models.verifier_weights import text_config

__all__ = ["GROUPED_ATTENTION", "grouped_attention", "use_grouped_attention"]

#: Name in transformers' registries of attention functions and of mask functions.
GROUPED_ATTENTION = "speculators_grouped"

# Up to here the group is folded into the query rows: keys are then read once for the whole group. Above it (prefill),
# the folded mask would outweigh the gain.
_MAX_FOLDED_QUERIES = 16

# Arguments that change what attention means; models that pass them are left to transformers' own function.
_SPECIAL_ARGUMENTS = ("position_bias", "softcap", "s_aux", "head_mask")


def grouped_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Scaled dot-product attention with transformers' calling convention.

    :param query: ``[batch, query heads, queries, head dim]``.
    :param key: ``[batch, key-value heads, keys, head dim]``; a strided view is fine.
    :param attention_mask: additive ``[batch or 1, 1, queries, keys]``, or None: every query sees every key when there is
        one query, else causal over equally many keys.
    :returns: ``[batch, queries, query heads, head dim]`` and no weights.
    """
    if any(kwargs.get(name) is not None for name in _SPECIAL_ARGUMENTS):
        return ALL_ATTENTION_FUNCTIONS["sdpa"](
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, is_causal=is_causal, **kwargs
        )
    batch, heads, queries, head_dim = query.shape
    groups = heads // key.shape[1]
    if groups > 1 and (queries == 1 or (queries <= _MAX_FOLDED_QUERIES and attention_mask is not None)):
        if attention_mask is not None and queries > 1:
            attention_mask = attention_mask.repeat(1, 1, groups, 1)
        folded = query.reshape(batch, key.shape[1], groups * queries, head_dim)
        output = scaled_dot_product_attention(folded, key, value, attn_mask=attention_mask, dropout_p=dropout, scale=scaling)
        return output.reshape(batch, heads, queries, value.shape[-1]).transpose(1, 2), None
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    output = scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=attention_mask,
        dropout_p=dropout,
        is_causal=bool(causal) and attention_mask is None and queries > 1,
        scale=scaling,
        enable_gqa=groups > 1,
    )
    return output.transpose(1, 2), None


def _additive_mask(*args: Any, dtype: torch.dtype = torch.float32, **kwargs: Any) -> Tensor | None:
    """transformers' SDPA mask as numbers to add, made once a pass: the kernel would convert a bool mask in every layer.

    Hidden keys get the smallest finite number, not -inf: their weight is exactly 0 either way, and a padding query that
    sees nothing gets some finite state instead of NaN, which would spread through its keys.
    """
    mask = sdpa_mask(*args, **kwargs)
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, torch.finfo(dtype).min)


AttentionInterface.register(GROUPED_ATTENTION, grouped_attention)
AttentionMaskInterface.register(GROUPED_ATTENTION, _additive_mask)


def use_grouped_attention(model: PreTrainedModel) -> bool:
    """Let ``model`` attend by :func:`grouped_attention` where that computes the same; say whether it does.

    Kept as they are: models that transformers does not run through SDPA (attention sinks: gpt-oss), that cap attention
    logits (Gemma 2), with latent attention (MLA: DeepSeek, Kimi), which groups nothing, and models whose attention is
    code of their own that takes no registered function. Sliding windows are in the masks, which the model makes.
    """
    config = text_config(model.config)
    fits = (
        getattr(config, "_attn_implementation", None) == "sdpa"
        and getattr(model, "_supports_attention_backend", False)
        and getattr(config, "attn_logit_softcapping", None) is None
        and getattr(config, "kv_lora_rank", None) is None
    )
    if fits:
        model.set_attn_implementation(GROUPED_ATTENTION)
    return fits
