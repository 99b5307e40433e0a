"""What a conversion needs to know of the verifier: its sizes and its name, from ``config.json`` as written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

from transformers import PretrainedConfig

from speculators.config import VerifierConfig
from speculators.errors import VerifierError

__all__ = ["VerifierFacts"]


@dataclass(frozen=True, slots=True)
class VerifierFacts:
    """Sizes of the verifier's language model, and the record of it that a checkpoint keeps."""

    record: VerifierConfig
    hidden_size: int
    num_hidden_layers: int
    vocab_size: int
    #: The language model's part of the config, as written.
    text: dict[str, Any]

    @classmethod
    def read(cls, name_or_path: str, cache_dir: str | None = None) -> Self:
        """From a folder or hub id. The model itself need not be known to transformers.

        :raises VerifierError: there is no config, or it names no sizes.
        """
        try:
            values, _ = PretrainedConfig.get_config_dict(name_or_path, cache_dir=cache_dir)
        except (OSError, ValueError):
            values = {}  # which it also is for a folder without the file
        if not values:
            raise VerifierError(f"no readable config.json at {name_or_path!r}; give the verifier's folder or hub id")
        text = _language_part(values)
        try:
            sizes = {key: int(text[key]) for key in ("hidden_size", "num_hidden_layers", "vocab_size")}
        except (KeyError, TypeError, ValueError) as error:
            raise VerifierError(
                f"the config of {name_or_path!r} does not say {error}; give the folder of the verifier, not of a draft"
            ) from error
        record = VerifierConfig(name_or_path=name_or_path, architectures=values.get("architectures") or [])
        return cls(record=record, text=text, **sizes)


def _language_part(values: dict[str, Any]) -> dict[str, Any]:
    """The part of a composite config that describes the language model: the first with a vocabulary, outermost first."""
    level = [values]
    while level:
        for candidate in level:
            if "vocab_size" in candidate and "num_hidden_layers" in candidate:
                return candidate
        level = [part for candidate in level for part in candidate.values() if isinstance(part, dict)]
    return values
