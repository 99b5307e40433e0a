"""All formats: which adapter reads a checkpoint, and which native form an engine serves a draft from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from speculators.convert.adapter import Adapter, Conversion
from speculators.convert.deepspec import DeepSpecBlocks
from speculators.convert.deepspec_eagle3 import DeepSpecEagle3
from speculators.convert.eagle3 import Eagle3Repository, write_flat_eagle3
from speculators.convert.mtp import VerifierMtp
from speculators.convert.source import ForeignCheckpoint
from speculators.convert.speculators_trees import OlderSpeculators
from speculators.convert.vllm_dspark import VllmDSpark, write_vllm_dspark
from speculators.convert.vllm_mla import VllmMlaEagle3, write_vllm_mla
from speculators.convert.zlab import ZLabDFlash, write_zlab_dflash
from speculators.errors import ConfigError

__all__ = ["ADAPTERS", "adapter_for", "native_writer"]

#: In the order in which they are asked: a more particular format stands before one whose marks it shares.
ADAPTERS: tuple[Adapter, ...] = (
    OlderSpeculators(),
    DeepSpecBlocks(),
    VllmDSpark(),
    ZLabDFlash(),
    DeepSpecEagle3(),
    VllmMlaEagle3(),
    Eagle3Repository(),
    VerifierMtp(),
)

#: Config and tensors of a native checkpoint.
NativeWriter = Callable[[Conversion], tuple[dict[str, Any], dict[str, Tensor]]]


def adapter_for(source: ForeignCheckpoint, form: str | None, algorithm: str | None) -> Adapter:
    """The adapter named ``form``, or the one that recognises the checkpoint.

    :param algorithm: what the draft shall become; None leaves it to the adapter.
    :raises ConfigError: no such format, none recognises the checkpoint, or it cannot give ``algorithm``.
    """
    known = {adapter.name: adapter for adapter in ADAPTERS}
    if form is not None and form not in known:
        raise ConfigError(f"there is no format {form!r}; choose one of {', '.join(known)}")
    candidates = [known[form]] if form is not None else [adapter for adapter in ADAPTERS if adapter.recognises(source)]
    if not candidates:
        titles = "; ".join(f"{adapter.name}: {adapter.title}" for adapter in ADAPTERS)
        raise ConfigError(f"{source.name!r} is in no format that can be converted ({titles}); name the right one with --format")
    fitting = [adapter for adapter in candidates if algorithm is None or algorithm in adapter.algorithms]
    if not fitting:
        raise ConfigError(
            f"{source.name!r} is {candidates[0].title}, which gives {' or '.join(candidates[0].algorithms)} drafts, not "
            f"{algorithm}; leave out --algorithm or correct it"
        )
    return fitting[0]


def native_writer(conversion: Conversion) -> NativeWriter:
    """What writes the native form of a draft.

    :raises ConfigError: engines have none for its family.
    """
    family = conversion.config.speculators_model_type
    latent = getattr(conversion.config.transformer_layer_config, "kv_lora_rank", None)
    writers: dict[str, NativeWriter] = {
        "dspark": write_vllm_dspark,
        "dflash": write_zlab_dflash,
        "eagle3": write_vllm_mla if latent else write_flat_eagle3,
    }
    if family == "mtp":
        raise ConfigError("engines read an MTP layer out of its verifier; put it there with `speculators stitch-mtp`")
    if family not in writers:
        raise ConfigError(f"vLLM has no native form of {family} drafts; serve the speculators form")
    return writers[family]
