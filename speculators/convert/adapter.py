"""What an adapter is: the one place that knows a foreign format's names."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from speculators.config import SpeculatorModelConfig
from speculators.convert.notes import ConversionNotes, FlatConfig
from speculators.convert.options import ConversionOptions
from speculators.convert.source import ForeignCheckpoint
from speculators.convert.verifier import VerifierFacts
from speculators.errors import ConfigError, VerifierError

__all__ = [
    "Adapter",
    "Conversion",
    "capture_ids",
    "check_default_layers",
    "check_fit",
    "check_layer_count",
    "float_dtype",
    "foreign_ids",
    "refuse_final_layer",
]

#: In foreign configs a layer id i means the output of decoder layer i, -1 the embeddings; here it is i + 1.
_OUTPUT_OF_LAYER = 1


@dataclass(slots=True)
class Conversion:
    """A draft in this library's terms: its config, its tensors by checkpoint name, and what was assumed."""

    config: Any
    tensors: dict[str, Tensor]
    notes: ConversionNotes


class Adapter(ABC):
    """Reads one foreign format. An adapter holds no state."""

    #: Value of ``--format``.
    name: ClassVar[str]
    #: For sentences.
    title: ClassVar[str]
    #: Values of ``--algorithm`` that the format can give; the first one that fits is taken when none was asked for.
    algorithms: ClassVar[tuple[str, ...]]
    #: Options that :meth:`read` uses, beyond those of all formats.
    options: ClassVar[frozenset[str]] = frozenset()

    @abstractmethod
    def recognises(self, source: ForeignCheckpoint) -> bool:
        """Whether the checkpoint is in this format."""

    def default_verifier(self, source: ForeignCheckpoint) -> str | None:
        """The verifier where none was given: what the file names, None for formats that name none."""
        return None

    @abstractmethod
    def read(
        self, source: ForeignCheckpoint, verifier: VerifierFacts, algorithm: str | None, options: ConversionOptions
    ) -> Conversion:
        """The draft.

        :param algorithm: one of :attr:`algorithms`; None lets the file decide.
        :raises ConfigError: the file contradicts itself or holds something that has no counterpart.
        :raises VerifierError: the draft was made for another verifier.
        """


def capture_ids(ids: list[int]) -> list[int]:
    """Layer ids "after k layers" from ids "output of decoder layer i"."""
    return [int(layer) + _OUTPUT_OF_LAYER for layer in ids]


def foreign_ids(ids: list[int]) -> list[int]:
    """The inverse of :func:`capture_ids`."""
    return [layer - _OUTPUT_OF_LAYER for layer in ids]


def check_fit(config: SpeculatorModelConfig, layer_ids: list[int], verifier: VerifierFacts) -> None:
    """Refuse a draft of another verifier.

    :raises VerifierError: hidden size, vocabulary or captured layers do not fit.
    """
    decoder: Any = config.transformer_layer_config
    name = verifier.record.name_or_path
    hidden = getattr(config, "target_hidden_size", None) or decoder.hidden_size
    if hidden != verifier.hidden_size:
        raise VerifierError(
            f"the draft reads states of size {hidden}, but the verifier {name!r} has {verifier.hidden_size}; give the verifier "
            "that the draft was made for"
        )
    if decoder.vocab_size != verifier.vocab_size:
        raise VerifierError(
            f"the draft has a vocabulary of {decoder.vocab_size}, but the verifier {name!r} one of {verifier.vocab_size}; give "
            "the verifier that the draft was made for"
        )
    outside = [layer for layer in layer_ids if not 0 <= layer <= verifier.num_hidden_layers]
    if outside:
        raise VerifierError(
            f"the draft captures the state after {outside[0]} layers, but the verifier {name!r} has "
            f"{verifier.num_hidden_layers}; give the verifier that the draft was made for"
        )


def check_layer_count(flat: FlatConfig, verifier: VerifierFacts) -> None:
    """Refuse a verifier with another number of layers than ``num_target_layers``, where a format keeps that.

    :raises VerifierError: then.
    """
    count = flat.optional("num_target_layers")
    if count is not None and int(count) != verifier.num_hidden_layers:
        raise VerifierError(
            f"the draft was made for a verifier of {count} layers, but {verifier.record.name_or_path!r} has "
            f"{verifier.num_hidden_layers}; give the verifier that the draft was made for"
        )


def refuse_final_layer(ids: list[int], verifier: VerifierFacts, remedy: str) -> None:
    """Refuse the verifier's last layer in formats whose reader takes its state from transformers, after the final norm.

    :param ids: in this library's convention.
    :param remedy: what to do, for the sentence.
    :raises ConfigError: then.
    """
    if verifier.num_hidden_layers in ids:
        raise ConfigError(
            f"the draft reads the verifier's last layer ({verifier.num_hidden_layers - 1}) after the final norm, which no "
            f"engine captures; {remedy}"
        )


def check_default_layers(ids: list[int], fc: Tensor, verifier: VerifierFacts, option: str) -> None:
    """Refuse default layers where ``fc`` reads another number of them.

    :param fc: ``[H, M * H]``.
    :param option: the option that names layers.
    :raises ConfigError: then.
    """
    found = fc.shape[1] // verifier.hidden_size
    if found != len(ids):
        raise ConfigError(
            f"the config names no captured layers and fc reads {found} of them; name them with --algorithm-kwargs "
            f"'{{\"{option}\": [...]}}'"
        )


def float_dtype(tensors: dict[str, Tensor]) -> torch.dtype:
    """The dtype of most floating-point entries, which the config records.

    :raises ConfigError: there are none.
    """
    sizes: dict[torch.dtype, int] = {}
    for tensor in tensors.values():
        if tensor.is_floating_point():
            sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.numel()
    if not sizes:
        raise ConfigError("the checkpoint holds no floating-point weights; it is quantised or incomplete")
    return max(sizes, key=lambda dtype: sizes[dtype])
