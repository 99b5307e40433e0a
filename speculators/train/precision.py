"""Which number types a training computes in, and why."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from typing import Literal

import torch

from speculators.errors import ConfigError

__all__ = ["Precision", "choose_precision", "has_native_bf16"]


@dataclass(frozen=True, slots=True)
class Precision:
    """Weights and optimiser states are float32 always; this is about the rest.

    :param autocast: type of autocast in the draft's forward, None for none.
    :param states: type of the hidden states.
    :param note: one sentence for the log.
    :param native_bf16: the device multiplies bfloat16 in hardware.
    """

    autocast: torch.dtype | None
    states: torch.dtype
    note: str
    native_bf16: bool = False


def has_native_bf16(device: torch.device) -> bool:
    """Whether the device multiplies bfloat16 in hardware; a CPU without the instructions is about 100 times slower at it."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    if device.type != "cpu":
        return False
    if platform.machine().lower() in ("x86_64", "amd64", "i386", "i686"):
        # torch's own "bf16 supported" is true wherever AVX-512 can emulate it.
        probes = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
        return any(bool(getattr(torch.cpu, probe, bool)()) for probe in probes)
    return bool(torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def choose_precision(
    mixed_precision: Literal["auto", "no", "bf16"], states_dtype: Literal["bfloat16", "float32"], device: torch.device
) -> Precision:
    """Precision for ``--mixed-precision`` and ``--hidden-states-dtype`` on a device.

    :raises ConfigError: when bf16 is demanded of a device without it.
    """
    native = has_native_bf16(device)
    if mixed_precision == "bf16" and not native:
        raise ConfigError(f"--mixed-precision bf16: this {device.type} has no bfloat16 instructions; use auto or no")
    wanted = torch.bfloat16 if states_dtype == "bfloat16" else torch.float32
    if not native:
        asked = wanted is torch.bfloat16 and mixed_precision == "auto"
        note = f"computing in float32: this {device.type} has no bfloat16 instructions" if asked else "computing in float32"
        return Precision(None, torch.float32, note)
    if mixed_precision == "bf16" or (mixed_precision == "auto" and wanted is torch.bfloat16):
        note = f"computing in bfloat16 autocast over float32 weights, {states_dtype} states"
        return Precision(torch.bfloat16, wanted, note, True)
    return Precision(None, wanted, f"computing in float32, {states_dtype} states", True)
