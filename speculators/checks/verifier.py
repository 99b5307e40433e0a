"""What the checks know of a verifier: its config's values, and its embedding and head on demand."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PretrainedConfig
from transformers.utils import cached_file

from speculators.errors import VerifierError
from speculators.models.verifier_weights import VerifierPart, read_verifier_config, read_verifier_weights, text_config

__all__ = ["VerifierFacts", "find_verifier", "is_at_hand"]


@dataclass
class VerifierFacts:
    """A verifier's config, and its frozen parts when asked for."""

    name: str
    config: PretrainedConfig
    read_weights: bool = True  #: off for a hub id that nobody asked to download
    _parts: dict[VerifierPart, Tensor | None] = field(default_factory=dict, repr=False)

    @property
    def text(self) -> PretrainedConfig:
        """The language model's part of the config."""
        return text_config(self.config)

    def setting(self, key: str) -> Any:
        return getattr(self.text, key, None)

    @property
    def num_layers(self) -> int:
        return int(self.text.num_hidden_layers)

    @property
    def special_ids(self) -> dict[int, str]:
        """Ids with a meaning of their own, and which."""
        named: dict[int, str] = {}
        for holder in (self.text, self.config):
            for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
                ids = getattr(holder, name, None)
                for token in ids if isinstance(ids, (list, tuple)) else [ids]:
                    if isinstance(token, int):
                        named.setdefault(token, name)
        return named

    def part(self, part: VerifierPart) -> Tensor | None:
        """``embed_tokens`` or ``lm_head`` ``[V, H]``; None if the verifier's weights are not at hand or quantised."""
        if part not in self._parts:
            self._parts[part] = None
            if not self.read_weights:
                return None
            with suppress(VerifierError):
                self._parts[part] = read_verifier_weights(self.name, [part])[part]
        return self._parts[part]


def find_verifier(name: str, *, read_weights: bool = True) -> VerifierFacts:
    """The verifier of that name.

    :raises VerifierError: it cannot be read.
    """
    return VerifierFacts(name, read_verifier_config(name), read_weights)


def is_at_hand(name: str) -> bool:
    """Whether the verifier's config can be read without a download."""
    if Path(name).is_dir():
        return (Path(name) / "config.json").is_file()
    try:
        return cached_file(name, "config.json", local_files_only=True, _raise_exceptions_for_missing_entries=False) is not None
    except (OSError, ValueError):
        return False
