import math

import pytest
import torch
from torch import nn
from transformers import DynamicCache

from speculators.verifiers.attention import GROUPED_ATTENTION, grouped_attention
from speculators.verifiers.cache import PreallocatedCache
from speculators.verifiers.structure import cache_argument
from tests.verifiers.models import random_ids, tiny_model

HEADS, KV_HEADS, HEAD_DIM = 6, 2, 8
SMALLEST = torch.finfo(torch.float64).min


def reference(query, key, value, mask):
    """Softmax attention written out, keys repeated for their group; ``mask`` additive."""
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    scores = query @ key.transpose(2, 3) / math.sqrt(query.shape[-1]) + mask
    return (scores.softmax(dim=-1) @ value).transpose(1, 2)


def tensors(batch, queries, keys, seed=0):
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(batch, queries, HEADS, HEAD_DIM, generator=generator, dtype=torch.float64).transpose(1, 2)
    buffers = torch.randn(2, batch, KV_HEADS, keys + 9, HEAD_DIM, generator=generator, dtype=torch.float64)
    return query, buffers[0][:, :, 3 : 3 + keys], buffers[1][:, :, 3 : 3 + keys]


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (1, 20), (4, 20), (16, 16), (17, 40), (40, 40)])
def test_masked_attention_over_groups_is_exact(batch, queries, keys):
    query, key, value = tensors(batch, queries, keys)
    hidden = ~torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries).expand(batch, 1, -1, -1).clone()
    if batch > 1 and keys > queries:
        hidden[1, :, :, :3] = True  # padding on the left of one row
    mask = torch.zeros(hidden.shape, dtype=torch.float64).masked_fill(hidden, SMALLEST)
    output, _ = grouped_attention(nn.Module(), query, key, value, mask)
    torch.testing.assert_close(output, reference(query, key, value, mask), atol=1e-13, rtol=0)


@pytest.mark.parametrize(("queries", "keys"), [(1, 20), (5, 5), (30, 30)])
def test_without_a_mask_it_is_causal(queries, keys):
    query, key, value = tensors(2, queries, keys)
    hidden = ~torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
    mask = torch.zeros(hidden.shape, dtype=torch.float64).masked_fill(hidden, SMALLEST)
    output, _ = grouped_attention(nn.Module(), query, key, value, None)
    torch.testing.assert_close(output, reference(query, key, value, mask), atol=1e-13, rtol=0)


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "qwen2", "granite", "gpt2", "gpt_neox"])
def test_models_compute_the_same_with_it(family):
    """One pass, and a padded batch with a cache, against transformers' own attention and cache."""
    model = tiny_model(family).double()
    ids = torch.stack([random_ids(20, 1), random_ids(20, 2)])
    mask = torch.ones(2, 20, dtype=torch.long)
    mask[1, :5] = 0
    positions = (mask.cumsum(dim=1) - 1).clamp(min=0)

    @torch.no_grad()
    def outputs(cache):
        whole = model(input_ids=ids[:1]).logits
        past = {cache_argument(model): cache}
        parts = [
            model(input_ids=ids[:, i:j], attention_mask=mask[:, :j], position_ids=positions[:, i:j], **past).logits
            for i, j in ((0, 12), (12, 13), (13, 17), (17, 20))
        ]
        return whole, torch.cat(parts[1:], dim=1)

    stock = outputs(DynamicCache(config=model.config))
    model.set_attn_implementation(GROUPED_ATTENTION)
    ours = outputs(PreallocatedCache(3, capacity=8))
    for expected, found in zip(stock, ours):
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)  # norms are float32 in transformers
        assert torch.isfinite(found).all()


def test_arguments_it_does_not_know_go_to_transformers():
    query, key, value = tensors(1, 3, 3)
    module = nn.Module()
    module.num_key_value_groups = HEADS // KV_HEADS
    bias = torch.randn(1, HEADS, 3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    output, _ = grouped_attention(module, query, key, value, None, position_bias=bias)
    causal = torch.zeros(3, 3, dtype=torch.float64).masked_fill(~torch.ones(3, 3, dtype=torch.bool).tril(), SMALLEST)
    torch.testing.assert_close(output, reference(query, key, value, bias + causal))
