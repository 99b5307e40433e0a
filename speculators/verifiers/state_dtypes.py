"""Hidden states in fewer bytes: float32, bfloat16, float16, and 8-bit floats with one scale per token.

The tensors' names are those of upstream's files: ``hidden_states [T, M, H]``, and for fp8 ``hidden_states_scales [T, 1, 1]``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, get_args

import torch
from torch import Tensor

from speculators.errors import ConfigError, DataError

__all__ = ["SCALES", "STATES", "StateDtype", "decode", "encode", "stored_bytes_per_token", "torch_dtype"]

StateDtype = Literal["float32", "bfloat16", "float16", "fp8"]

STATES = "hidden_states"
SCALES = "hidden_states_scales"

#: Largest value of float8_e4m3fn.
FP8_MAX = 448.0


def torch_dtype(dtype: str) -> torch.dtype:
    """Of the elements of ``hidden_states``.

    :raises ConfigError: for a name that is none of :data:`StateDtype`.
    """
    if dtype not in get_args(StateDtype):
        raise ConfigError(f"hidden states cannot be stored as {dtype!r}; choose one of {', '.join(get_args(StateDtype))}")
    return torch.float8_e4m3fn if dtype == "fp8" else getattr(torch, dtype)


def stored_bytes_per_token(states: int, hidden_size: int, dtype: str) -> int:
    """Bytes of one token with ``states`` states of ``hidden_size``, its scale included."""
    return states * hidden_size * torch_dtype(dtype).itemsize + (torch.float32.itemsize if dtype == "fp8" else 0)


def encode(states: Tensor, dtype: str) -> dict[str, Tensor]:
    """Tensors to store for ``states``.

    fp8 divides each token's states by their largest magnitude / 448. What comes back differs by at most 1/16 of a value,
    or 2**-10 of the token's scale where that is more.

    :param states: ``[T, M, H]``, floating.
    :param dtype: one of :data:`StateDtype`.
    :returns: ``hidden_states [T, M, H]``, contiguous, and with fp8 ``hidden_states_scales [T, 1, 1]`` in float32.
    :raises DataError: when a state is not finite, or out of the range of ``dtype``.
    :raises ConfigError: for an unknown ``dtype``.
    """
    wanted = torch_dtype(dtype)
    if not states.numel():
        scales = {SCALES: torch.ones(states.shape[0], 1, 1)} if dtype == "fp8" else {}
        return {STATES: states.to(wanted), **scales}
    if dtype == "fp8":
        return _encode_fp8(states.float())
    stored = states.to(wanted).contiguous()
    if not _finite(stored):
        _require_finite(states)
        largest = float(states.abs().max())
        raise DataError(
            f"a hidden state of {largest:.6g} is out of the range of {dtype}; store them as bfloat16, fp8 or float32"
        )
    return {STATES: stored}


def _finite(values: Tensor) -> bool:
    """Whether all are; by the extremes, which is ten times as fast as asking each and as true: they keep a NaN."""
    return bool(torch.isfinite(torch.stack(torch.aminmax(values))).all())


def _require_finite(states: Tensor) -> None:
    if not _finite(states):
        raise DataError("a hidden state is not finite; the verifier overflowed, run it in float32 or bfloat16")


def _encode_fp8(values: Tensor) -> dict[str, Tensor]:
    lowest, highest = torch.aminmax(values.reshape(len(values), -1), dim=1)
    largest = torch.maximum(-lowest, highest).view(-1, 1, 1)
    _require_finite(largest)
    # A token of zeros has any scale; a scale below the normal numbers would lose the precision of its own digits.
    scales = (largest / FP8_MAX).clamp_min(torch.finfo(torch.float32).tiny)
    scales = torch.where(largest == 0, torch.ones_like(scales), scales)
    # Clamped: the division may round past the largest value, which the cast would turn into NaN.
    scaled = (values / scales).clamp_(-FP8_MAX, FP8_MAX)
    return {STATES: scaled.to(torch.float8_e4m3fn).contiguous(), SCALES: scales}


def decode(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
    """States of what :func:`encode` gave, or a file of upstream's fp8 backend holds.

    :param dtype: of the answer; states that are stored in it come back as they are, without a copy.
    :returns: ``[T, M, H]``.
    :raises DataError: when fp8 states have no scales, or scales that do not fit them or are not finite.
    """
    stored = tensors[STATES]
    if stored.dtype != torch.float8_e4m3fn:
        return stored.to(dtype)
    scales = tensors.get(SCALES)
    if scales is None or scales.dtype != torch.float32 or tuple(scales.shape) != (stored.shape[0], 1, 1):
        raise DataError(f"8-bit hidden states need float32 scales of shape [{stored.shape[0]}, 1, 1] beside them")
    if not bool(torch.isfinite(scales).all()):
        raise DataError("a scale of 8-bit hidden states is not finite; capture the states again")
    return _widen(stored).mul_(scales).to(dtype)


def _widen(stored: Tensor) -> Tensor:
    """float8_e4m3fn as float32, through float16 on a CPU: twice as fast as torch's own conversion there.

    Both have sign, exponent and mantissa in this order, so shifting the seven bits of magnitude makes a float16 that is
    2**-8 of the value, subnormal ones included; only NaN has to be told.
    """
    if stored.device.type != "cpu":
        return stored.float()
    bits = stored.view(torch.int8).to(torch.int16)  # the sign is carried up to bit 15
    magnitude = bits & 0x7F
    if stored.numel() and int(magnitude.max()) == 0x7F:
        return stored.float()
    return magnitude.bitwise_left_shift_(7).bitwise_or_(bits.bitwise_and_(-0x8000)).view(torch.float16).float().mul_(256.0)
