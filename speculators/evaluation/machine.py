"""A short description of the machine a figure was measured on."""

from __future__ import annotations

import os
import platform
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

__all__ = ["describe_machine", "engine_name", "peak_memory_gib"]


def describe_machine(device: torch.device | str = "cpu") -> dict[str, Any]:
    """Processor, cores, threads, memory, device and the versions that decide speed."""
    device = torch.device(device)
    accelerator = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_gib": _memory_gib(),
        "device": device.type,
        "accelerator": accelerator,
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": metadata.version("transformers"),
    }


def engine_name() -> str:
    """Name and version of the decoder that made the figures: this library's own."""
    return f"speculators {metadata.version('speculators')}"


def peak_memory_gib() -> float | None:
    """Most memory that this process has held at once, in GiB; None where the system does not say."""
    try:
        import resource
    except ImportError:
        return None
    unit = 1 if sys.platform == "darwin" else 1024  # bytes there, KiB elsewhere
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30, 2)


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _memory_gib() -> float | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (OSError, ValueError):
        return None
