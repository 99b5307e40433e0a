"""A workaround for vLLM versions that cannot serve a DSpark or DFlash draft on FlashAttention 3.

Their FlashAttention metadata builder plans ahead of time with the verifier's numbers of heads, also for the draft's layers.
Where the draft's ratio of heads differs, the kernel refuses the plan: ``scheduler_metadata must have shape (metadata_size)``.
Built fast (``fast_build=True``) the metadata has no plan, and the kernel makes its own. vLLM loads :func:`register` in every
process, as an entry point of the group ``vllm.general_plugins``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from importlib import import_module
from typing import Any

__all__ = ["build_drafts_fast", "has_fault", "register"]

#: Builds that are known to have the fault: the development builds towards 0.23.1 from 700 on; it was reported for 786. In later
#: versions a builder takes the numbers of heads from its own layers. One that lies between and fails alike needs the switch.
_FAULTY = re.compile(r"0\.23\.1(rc\d+)?\.dev(?P<build>\d+)(\+.*)?")
_FIRST_BUILD = 700

#: "1" applies the workaround to other versions too, "0" to none.
SWITCH = "SPECULATORS_VLLM_FAST_BUILD"

_BUILDER = ("vllm.v1.attention.backends.flash_attn", "FlashAttentionMetadataBuilder")
_METHODS = {"dspark", "dflash"}
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


def has_fault(version: str) -> bool:
    """Whether a vLLM version is known to have it."""
    match = _FAULTY.fullmatch(version)
    return match is not None and int(match["build"]) >= _FIRST_BUILD


def register() -> None:
    """vLLM's hook: apply the workaround where it is needed. May be called more than once."""
    switch = os.environ.get(SWITCH, "")
    if switch == "0":
        return
    import vllm

    if switch != "1" and not has_fault(str(vllm.__version__)):
        return
    module, name = _BUILDER
    try:
        builder = getattr(import_module(module), name)
    except (ImportError, AttributeError):  # a platform without FlashAttention has no fault either
        return
    build_drafts_fast(builder)


def build_drafts_fast(builder: type[Any]) -> None:
    """Make a class of metadata builders build fast for the layers of a draft, whatever its caller says."""
    plain: Callable[..., Any] = builder.build
    if getattr(plain, "builds_drafts_fast", False):
        return

    def build(self: Any, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        return plain(self, common_prefix_len, common_attn_metadata, fast_build=fast_build or _is_drafts(self))

    build.builds_drafts_fast = True  # type: ignore[attr-defined]
    builder.build = build


def _is_drafts(builder: Any) -> bool:
    """Whether a builder is a block draft's: the draft's layers count on behind the verifier's."""
    config = builder.vllm_config
    if getattr(config.speculative_config, "method", None) not in _METHODS:
        return False
    first = int(config.model_config.get_total_num_hidden_layers())
    numbers = [int(match[1]) for name in builder.layer_names if (match := _LAYER.search(name))]
    return bool(numbers) and min(numbers) >= first
