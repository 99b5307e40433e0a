"""Where a transformers model keeps its parts: found by structure, in this one place, not by model name."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

from torch import nn

from speculators.errors import VerifierError

__all__ = ["DecoderParts", "cache_argument", "decoder_parts"]

# Wrappers around the decoder, outermost first: "" is the model itself. Vision-language models nest the text decoder.
_PATHS = (
    "model.language_model.model",
    "model.language_model",
    "language_model.model",
    "language_model",
    "model.text_model",
    "model.decoder",
    "model",
    "transformer",
    "gpt_neox",
    "backbone",
    "",
)
_LAYERS = ("layers", "h", "blocks")
_NORMS = ("norm", "final_layernorm", "final_layer_norm", "ln_f", "norm_f", "embedding_norm", "final_norm")


@dataclass(frozen=True)
class DecoderParts:
    """The text decoder of a causal language model.

    ``base`` maps token ids to post-norm states; ``norm`` is its last module; ``layers`` are its decoder layers in order.
    """

    base: nn.Module
    layers: nn.ModuleList
    norm: nn.Module


def cache_argument(model: nn.Module) -> str:
    """The name under which a model's ``forward`` takes a cache: it changed within transformers 5."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def decoder_parts(model: nn.Module) -> DecoderParts:
    """Decoder layers, final norm and base model of a decoder-only transformers model.

    :raises VerifierError: when the model is not built as one stack of layers with a norm after it.
    """
    for path in _PATHS:
        base = _submodule(model, path)
        if base is None:
            continue
        layers = next((found for name in _LAYERS if isinstance(found := getattr(base, name, None), nn.ModuleList)), None)
        norm = next((found for name in _NORMS if isinstance(found := getattr(base, name, None), nn.Module)), None)
        if layers is not None and len(layers) and norm is not None:
            return DecoderParts(base, layers, norm)
    raise VerifierError(
        f"{type(model).__name__} has no stack of decoder layers with a final norm that could be found; "
        "use a decoder-only language model of transformers"
    )


def _submodule(model: nn.Module, path: str) -> nn.Module | None:
    current: Any = model
    for name in path.split(".") if path else ():
        current = getattr(current, name, None)
        if not isinstance(current, nn.Module):
            return None
    return current
