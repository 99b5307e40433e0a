"""Opening a verifier: model, tokenizer and the facts about it that the rest of the library asks for."""

from __future__ import annotations

import hashlib
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from threading import RLock
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Cache,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from speculators.data.tokenizers import load_tokenizer
from speculators.errors import ConfigError, VerifierError
from speculators.models.verifier_weights import text_config
from speculators.verifiers.attention import use_grouped_attention
from speculators.verifiers.packed_linear import pack_linears
from speculators.verifiers.structure import DecoderParts, cache_argument, decoder_parts

__all__ = ["Verifier", "load_verifier"]

_WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
_CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length")


@dataclass(eq=False)
class Verifier:
    """A frozen causal language model of transformers, ready for inference.

    The model's own modules compute everything; ``cache_argument`` is the name under which they take a cache.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    config: PretrainedConfig
    name: str  #: folder or hub id it was loaded from
    vocab_size: int  #: V
    hidden_size: int  #: H
    num_layers: int
    eos_ids: tuple[int, ...]  #: ids that end an answer
    context_length: int | None  #: most tokens of prompt and answer; None when the config does not say
    hash: str  #: of the config and the names and sizes of the weight files
    parts: DecoderParts
    cache_argument: str
    #: Held during a pass: two threads (prefetching and decoding, say) must not read each other's captured states.
    lock: Any = field(default_factory=RLock, repr=False)

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        return next(self.model.parameters()).dtype

    def logits(self, input_ids: Tensor, *, keep: int | Tensor = 0, cache: Cache | None = None, **inputs: Any) -> Tensor:
        """One pass of the whole model.

        :param input_ids: ``[B, T]``.
        :param keep: how many positions at the end to compute logits for, or which positions; 0 for all.
        :param cache: past tokens; the pass appends to it.
        :returns: ``[B, kept positions, V]``.
        """
        with_cache = {self.cache_argument: cache} if cache is not None else {}
        return self.model(
            input_ids=input_ids, use_cache=cache is not None, logits_to_keep=keep, return_dict=True, **with_cache, **inputs
        ).logits

    def states(self, input_ids: Tensor, *, cache: Cache | None = None, **inputs: Any) -> Tensor:
        """One pass without the output head: post-norm states ``[B, T, H]``."""
        with_cache = {self.cache_argument: cache} if cache is not None else {}
        return self.parts.base(
            input_ids=input_ids, use_cache=cache is not None, return_dict=True, **with_cache, **inputs
        ).last_hidden_state


def load_verifier(
    path: str | os.PathLike[str],
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
    trust_remote_code: bool = False,
) -> Verifier:
    """Load a verifier for inference.

    On a CPU a float32 model gets its linear layers packed (:mod:`speculators.verifiers.packed_linear`).

    :param path: Hugging Face folder with safetensors, or a hub id.
    :param dtype: by default the checkpoint's own on an accelerator and float32 on a CPU.
    :param device: by default the accelerator if there is one.
    :raises VerifierError: when there is nothing to load, or nothing that this library can drive.
    """
    name = os.fspath(path)
    _check_exists(name)
    device = _device(device)
    if dtype is None:
        dtype = torch.float32 if device.type == "cpu" else "auto"
    try:
        config = AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)
        model = _model_class(config).from_pretrained(name, dtype=dtype, trust_remote_code=trust_remote_code)
    except Exception as error:  # whatever a broken or foreign checkpoint makes transformers raise
        hint = (
            "check the folder's files" if Path(name).is_dir() else f"there is no folder {name} either, so give a model folder"
        )
        raise VerifierError(f"the verifier {name} cannot be loaded ({_first_line(error)}); {hint}") from error
    try:
        model.requires_grad_(False).eval().to(device)
    except (RuntimeError, AssertionError) as error:  # no such accelerator, or no room on it
        raise VerifierError(
            f"the verifier {name} cannot be put on the device {device} ({_first_line(error)}); choose another --device"
        ) from error
    parts = decoder_parts(model)
    use_grouped_attention(model)
    if model.dtype == torch.float64 and hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # the grouped product of experts has no float64
    if device.type == "cpu":
        pack_linears(model)
    text = text_config(config)
    return Verifier(
        model=model,
        tokenizer=tokenizer_of(name, trust_remote_code),
        config=config,
        name=name,
        vocab_size=text.vocab_size,
        hidden_size=text.hidden_size,
        num_layers=len(parts.layers),
        eos_ids=eos_ids_of(getattr(model, "generation_config", None), text),
        context_length=context_length_of(text),
        hash=verifier_hash(name, config),
        parts=parts,
        cache_argument=cache_argument(model),
    )


def _check_exists(name: str) -> None:
    folder = Path(name)
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise VerifierError(f"{name} has no config.json; give the folder of a Hugging Face model")
        if not any(file for pattern in _WEIGHTS for file in folder.glob(pattern)):
            raise VerifierError(f"{name} has no safetensors weights; download the whole model or save it with save_pretrained")
    elif not re.fullmatch(r"\w[\w.-]*/[\w.-]+", name) or folder.exists():
        raise VerifierError(f"there is no verifier folder {name}; give the path of a Hugging Face model folder")


def _device(wanted: torch.device | str | None) -> torch.device:
    if wanted is None:
        return torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")
    try:
        device = torch.device(wanted)
    except RuntimeError:
        device = torch.device("meta")
    if device.type == "meta":
        raise ConfigError(f"--device {wanted} is no device to compute on; give cpu, cuda, cuda:1 or the like")
    return device


def _model_class(config: PretrainedConfig) -> Any:
    """The causal language model class; multimodal models only have one for image and text, which takes text alone too."""
    own_code = getattr(config, "auto_map", None) or {}
    if type(config) in AutoModelForCausalLM._model_mapping or "AutoModelForCausalLM" in own_code:
        return AutoModelForCausalLM
    from transformers import AutoModelForImageTextToText

    return AutoModelForImageTextToText if type(config) in AutoModelForImageTextToText._model_mapping else AutoModelForCausalLM


def tokenizer_of(name: str, trust_remote_code: bool) -> PreTrainedTokenizerBase | None:
    """The verifier's tokenizer; None for a folder without one."""
    if Path(name).is_dir() and not any(Path(name).glob("*token*")):
        return None
    return load_tokenizer(name, trust_remote_code).tokenizer


def context_length_of(config: PretrainedConfig) -> int | None:
    """Most tokens of prompt and answer; None when the config of the text model does not say."""
    return next((int(value) for key in _CONTEXT_KEYS if (value := getattr(config, key, None))), None)


def eos_ids_of(generation_config: GenerationConfig | None, config: PretrainedConfig) -> tuple[int, ...]:
    """Ids that end an answer: the generation config's, which knows end-of-turn tokens, else the model config's."""
    for holder in (generation_config, config):
        ids = getattr(holder, "eos_token_id", None)
        if ids is not None:
            return tuple(sorted({ids} if isinstance(ids, int) else set(ids)))
    return ()


def verifier_hash(name: str, config: PretrainedConfig) -> str:
    """Of the config and of the names and sizes of the weight files; of a hub's model, its commit."""
    digest = hashlib.sha256()
    folder = Path(name)
    if folder.is_dir():
        digest.update((folder / "config.json").read_bytes())
        for pattern in _WEIGHTS:
            for file in sorted(folder.glob(pattern)):
                digest.update(f"{file.name}:{file.stat().st_size};".encode())
    else:
        digest.update(f"{name}@{getattr(config, '_commit_hash', None)}".encode())
    return digest.hexdigest()[:16]


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
