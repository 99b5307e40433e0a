from __future__ import annotations

import json

import pytest
import torch
from speculators_vllm_connector.states import (
    HIDDEN_STATES,
    SCALES,
    StatesRecord,
    copy_to_host,
    encode_fp8,
    gather_states,
    tensor_shapes,
    verifier_hash,
)

RECORD = StatesRecord("folder", (1, 2, 4), 4, 8, "float32", "plain", "0123456789abcdef", "0.32.0")


def cache_of(states: torch.Tensor, blocks: list[int], block_size: int, inner: int, layers_first: bool) -> torch.Tensor:
    """A cache that holds ``states [T, n, H]`` in ``blocks``, as vLLM lays it out; the rest is rubbish."""
    _, count, hidden = states.shape
    cells = torch.full(((max(blocks) + 1) * block_size, count, hidden), -1.0)
    for position, row in enumerate(states):
        cells[blocks[position // block_size] * block_size + position % block_size] = row
    cache = cells.reshape(-1, inner, count, hidden)
    return cache.transpose(1, 2).contiguous() if layers_first else cache


@pytest.mark.parametrize("layers_first", [True, False])
@pytest.mark.parametrize("inner", [8, 4, 2])
def test_states_are_found_in_blocks_of_any_order_and_layout(layers_first, inner):
    states = torch.randn(21, 3, 8)
    blocks = [5, 2, 7]
    cache = cache_of(states, blocks, 8, inner, layers_first)
    assert torch.equal(gather_states(cache, blocks, 8, 21, 3), states)
    assert torch.equal(gather_states(cache, [*blocks, 0], 8, 9, 3), states[:9])
    copy = copy_to_host(cache, blocks, 8, 21, 3, False, None)
    cache.zero_()  # the copy is one
    assert copy.done()
    assert torch.equal(copy.tensors[HIDDEN_STATES], states)
    assert copy.nbytes == 21 * 3 * 8 * 4


def test_states_that_are_not_in_the_cache_are_refused():
    cache = torch.zeros(4, 3, 8, 2)
    for blocks, tokens in (([1], 9), ([1, 0], 9), ([], 1)):
        with pytest.raises(ValueError, match="no states for some of the"):
            gather_states(cache, blocks, 8, tokens, 3)
    with pytest.raises(ValueError, match="cannot hold 5 states"):
        gather_states(cache, [1], 8, 3, 5)


def test_eight_bits_are_those_of_the_library():
    from speculators.verifiers.state_dtypes import decode, encode

    states = torch.randn(7, 3, 16) * torch.logspace(-6, 6, 7)[:, None, None]
    states[3] = 0
    for dtype in (torch.float32, torch.bfloat16):
        ours, theirs = encode_fp8(states.to(dtype)), encode(states.to(dtype), "fp8")
        assert torch.equal(ours[SCALES], theirs[SCALES])
        assert torch.equal(ours[HIDDEN_STATES].view(torch.uint8), theirs[HIDDEN_STATES].view(torch.uint8))
    assert torch.allclose(decode(ours, torch.float32), states, rtol=0.07, atol=1e-9 * states.abs().max())


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_is_not_hidden_by_eight_bits(bad):
    states = torch.ones(2, 3, 4)
    states[1, 0, 0] = bad
    encoded = encode_fp8(states)
    product = encoded[HIDDEN_STATES].float() * encoded[SCALES]
    assert torch.isfinite(product[0]).all()
    assert not torch.isfinite(product[1]).all()


def test_the_record_of_a_file():
    header = RECORD.header()
    assert json.loads(header["layer_ids"]) == [1, 2, 4]
    assert header["final_state"] == "pre_norm"
    assert header["verifier_hash"] == "0123456789abcdef"
    assert all(isinstance(value, str) for value in header.values())
    without = StatesRecord("folder", (1, 2), 4, 8, "float32", "plain", None, "0.32.0").header()
    assert "final_state" not in without
    assert "verifier_hash" not in without


@pytest.mark.parametrize("encoding", ["plain", "fp8_e4m3"])
def test_announced_shapes_are_those_of_the_tensors(encoding):
    record = StatesRecord("folder", (1, 2, 4), 4, 8, "bfloat16", encoding, None, "0.32.0")
    states = torch.randn(5, 3, 8).bfloat16()
    tensors = {HIDDEN_STATES: states} if encoding == "plain" else encode_fp8(states)
    tensors["token_ids"] = torch.zeros(5, dtype=torch.int64)
    made = {name: (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)) for name, tensor in tensors.items()}
    assert tensor_shapes(record, 5) == made


def test_the_verifiers_hash_is_the_librarys(tmp_path):
    from transformers import LlamaConfig

    from speculators.verifiers import loading

    config = LlamaConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, vocab_size=16)
    config.save_pretrained(tmp_path)
    (tmp_path / "b.safetensors").write_bytes(b"123")
    (tmp_path / "a.safetensors").write_bytes(b"1")
    assert verifier_hash(str(tmp_path)) == loading.verifier_hash(str(tmp_path), config)
    assert verifier_hash("org/model") is None
