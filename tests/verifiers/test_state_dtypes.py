"""Hidden states in fewer bytes: what comes back, and what is refused."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from speculators.errors import ConfigError, DataError
from speculators.verifiers.state_dtypes import SCALES, STATES, decode, encode, stored_bytes_per_token

#: Magnitudes of a token's states: zero, those that no scale of normal numbers reaches, and the largest ones.
EXPONENTS = st.sampled_from([None, -140, -126, -40, -9, 0, 9, 30, 120])


@st.composite
def states(draw: st.DrawFn) -> Tensor:
    tokens, layers, hidden = draw(st.integers(0, 4)), draw(st.integers(1, 3)), draw(st.integers(1, 6))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    values = torch.randn(tokens, layers, hidden, generator=generator, dtype=torch.float64)
    # Within a token, too, values of very different size, as the outliers of real models are.
    values *= 2.0 ** torch.randint(-14, 1, values.shape, generator=generator)
    for token in range(tokens):
        exponent = draw(EXPONENTS)
        values[token] *= 0.0 if exponent is None else 2.0**exponent
    return values.float()


@given(states())
def test_error_of_fp8(values: Tensor) -> None:
    tensors = encode(values, "fp8")
    assert (tensors[STATES].dtype, tensors[SCALES].dtype) == (torch.float8_e4m3fn, torch.float32)
    assert tensors[SCALES].shape == (len(values), 1, 1)
    scales = tensors[SCALES].double()
    error = (decode(tensors, torch.float32).double() - values.double()).abs()
    bound = torch.maximum(values.double().abs() / 16, scales * 2.0**-10) * (1 + 1e-6)
    assert bool((error <= bound + 2.0**-149).all())
    # The scale is the largest magnitude / 448, so that no range is given away.
    amax = values.abs().amax(dim=(1, 2), keepdim=True) if values.numel() else torch.zeros_like(tensors[SCALES])
    ordinary = amax > 448 * torch.finfo(torch.float32).tiny
    assert torch.equal(tensors[SCALES][ordinary], (amax / 448)[ordinary])
    assert bool((decode(tensors, torch.float32)[values == 0] == 0).all())


@given(states())
def test_float32_comes_back_as_it_is(values: Tensor) -> None:
    tensors = encode(values, "float32")
    found = decode(tensors, torch.float32)
    assert torch.equal(found, values)
    assert found.data_ptr() == tensors[STATES].data_ptr()
    for dtype, relative in (("bfloat16", 2.0**-8), ("float16", 2.0**-11)):
        small = values.clamp(-60000, 60000)
        error = (decode(encode(small, dtype), torch.float32) - small).double().abs()
        assert bool((error <= small.double().abs() * relative + 2.0**-25).all())


@pytest.mark.parametrize(
    ("value", "dtype", "problem"),
    [
        (float("nan"), "float32", "not finite"),
        (float("inf"), "fp8", "not finite"),
        (float("-inf"), "bfloat16", "not finite"),
        (70000.0, "float16", "70000 is out of the range of float16; store them as bfloat16"),
        (-70000.0, "float16", "out of the range"),
        (3.4e38, "bfloat16", "out of the range of bfloat16"),
    ],
)
def test_values_that_cannot_be_stored(value: float, dtype: str, problem: str) -> None:
    values = torch.zeros(2, 1, 3)
    values[1, 0, 2] = value
    with pytest.raises(DataError, match=problem):
        encode(values, dtype)


def test_records_that_do_not_fit() -> None:
    with pytest.raises(ConfigError, match="float32, bfloat16, float16, fp8"):
        encode(torch.zeros(1, 1, 1), "int4")
    tensors = encode(torch.ones(2, 1, 3), "fp8")
    for scales in (None, torch.ones(2), torch.ones(2, 1, 1, dtype=torch.float64)):
        with pytest.raises(DataError, match="need float32 scales"):
            decode({STATES: tensors[STATES]} | ({} if scales is None else {SCALES: scales}), torch.float32)
    with pytest.raises(DataError, match="not finite"):
        decode(tensors | {SCALES: torch.tensor([1.0, float("nan")]).view(2, 1, 1)}, torch.float32)


def test_every_value_of_fp8() -> None:
    stored = torch.arange(256, dtype=torch.int16).to(torch.uint8).view(torch.float8_e4m3fn).view(1, 1, 256)
    numbers = ~stored.float().isnan()
    for some in (stored[numbers].view(1, 1, -1), stored):
        found = decode({STATES: some, SCALES: torch.full((1, 1, 1), 0.5)}, torch.float32)
        assert torch.equal(found.nan_to_num(nan=7.0), (some.float() * 0.5).nan_to_num(nan=7.0))


def test_bytes() -> None:
    for dtype in ("float32", "bfloat16", "float16", "fp8"):
        tensors = encode(torch.randn(5, 3, 8), dtype)
        assert sum(tensor.nbytes for tensor in tensors.values()) == 5 * stored_bytes_per_token(3, 8, dtype)
