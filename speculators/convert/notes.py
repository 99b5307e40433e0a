"""What a conversion took from the file, and what it had to assume because the file does not say."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from transformers import PretrainedConfig

from speculators.errors import ConfigError

__all__ = ["Assumption", "ConversionNotes", "FlatConfig"]

#: Keys of Hugging Face's base config (generation settings, tokens, bookkeeping): no adapter reads them, none misses them.
_BOOKKEEPING = frozenset(getattr(PretrainedConfig, "__dataclass_fields__", {})) | {
    "_name_or_path",
    "attn_implementation",
    "auto_map",
    "bos_token_id",
    "eos_token_id",
    "initializer_range",
    "pad_token_id",
    "pretraining_tp",
    "torch_dtype",
    "transformers_version",
    "use_cache",
}


@dataclass(frozen=True, slots=True)
class Assumption:
    """A value that the file does not hold, and why it is this one."""

    key: str
    value: Any
    reason: str

    def __str__(self) -> str:
        return f"{self.key} = {json.dumps(self.value)} ({self.reason})"


@dataclass(slots=True)
class ConversionNotes:
    """Assumptions and remarks, in the order in which they came up."""

    assumed: list[Assumption] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)

    def assume(self, key: str, value: Any, reason: str) -> Any:
        """Record an assumption and return its value."""
        self.assumed.append(Assumption(key, value, reason))
        return value

    def remark(self, text: str) -> None:
        self.remarks.append(text)

    def lines(self) -> list[str]:
        """For people: one line each."""
        return [f"assumed: {assumption}" for assumption in self.assumed] + [f"note: {remark}" for remark in self.remarks]


class FlatConfig:
    """A foreign ``config.json`` that keeps account of what was read from it.

    A key that is absent or null counts as missing. Its value is then that of the format's own reader, never this library's
    default, and is recorded.

    :param form: the format's name in sentences.
    """

    def __init__(self, values: Mapping[str, Any], form: str, notes: ConversionNotes) -> None:
        self._values = dict(values)
        self._read: set[str] = set()
        self.form = form
        self.notes = notes

    def has(self, key: str) -> bool:
        return self._values.get(key) is not None

    def optional(self, key: str) -> Any:
        """The value, or None."""
        self._read.add(key)
        return self._values.get(key)

    def required(self, key: str, remedy: str = "the file is incomplete, fetch it again") -> Any:
        """The value.

        :raises ConfigError: it is missing.
        """
        value = self.optional(key)
        if value is None:
            raise ConfigError(f"the {self.form} config has no {key!r}; {remedy}")
        return value

    def get(self, key: str, default: Any, reason: str) -> Any:
        """The value; ``default``, recorded as assumed, if it is missing."""
        value = self.optional(key)
        return self.notes.assume(key, default, reason) if value is None else value

    def nested(self, key: str) -> FlatConfig:
        """The dictionary under ``key`` (empty if missing), read with the same account of assumptions."""
        value = self.optional(key)
        return FlatConfig(value if isinstance(value, Mapping) else {}, self.form, self.notes)

    def refuse_other(self, key: str, neutral: tuple[Any, ...], meaning: str) -> None:
        """Refuse a key whose value is neither missing nor neutral: it changes the network in a way that is not supported.

        :raises ConfigError: naming the key, its value and its meaning.
        """
        value = self.optional(key)
        if value is not None and value not in neutral:
            raise ConfigError(
                f"the {self.form} config sets {key} to {value!r} ({meaning}), which this library's drafts do not have; "
                "such a draft cannot be converted"
            )

    def skip(self, *keys: str) -> None:
        """Count keys as read that matter to training or to other programs only."""
        self._read.update(keys)

    def remark_unread(self) -> None:
        """Note the keys that nothing asked for, but for bookkeeping."""
        unread = sorted(key for key in self._values if key not in self._read and key not in _BOOKKEEPING)
        if unread:
            self.notes.remark(f"keys of the config that were not read: {', '.join(unread)}")
