"""How conversations are answered. Settings that differ from answer to answer are drawn by weight, as a pure function of seed,
conversation and turn.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from pydantic import ValidationError

from speculators.errors import ConfigError
from speculators.sampling import SamplingParams

__all__ = [
    "Distribution",
    "RegenerateSettings",
    "effort_of",
    "parse_distribution",
    "parse_sampling",
    "seed_of",
    "temperature_of",
    "uniform_of",
]

Value = TypeVar("Value", float, str)


@dataclass(frozen=True, slots=True)
class Distribution(Generic[Value]):
    """Values with their weights, which need not add up to 1."""

    values: tuple[Value, ...]
    weights: tuple[float, ...]

    def draw(self, uniform: float) -> Value:
        """The value that a number in [0, 1) falls on."""
        place = uniform * sum(self.weights)
        for value, weight in zip(self.values, self.weights, strict=True):
            place -= weight
            if place < 0 and weight > 0:
                return value
        return next(value for value, weight in zip(self.values[::-1], self.weights[::-1], strict=True) if weight > 0)

    def record(self) -> dict[str, float]:
        """For JSON: value, as text, to weight."""
        return {str(value): weight for value, weight in zip(self.values, self.weights, strict=True)}


@dataclass(frozen=True, slots=True)
class RegenerateSettings:
    """How conversations are answered."""

    max_tokens: int = 8192  #: of one answer
    sampling: SamplingParams = field(default_factory=SamplingParams)
    further: Mapping[str, Any] = field(default_factory=dict)  #: sampling parameters for servers
    temperature: Distribution[float] | None = None
    reasoning_effort: Distribution[str] | None = None
    seed: int = 0
    drop_cut: bool = False  #: leave out answers that the length limit cut
    language: str | None = None  #: only records whose ``language`` this is
    limit: int | None = None  #: most conversations to answer

    def record(self) -> dict[str, Any]:
        """What answers depend on, for JSON."""
        return {
            "max_tokens": self.max_tokens,
            "sampling_params": {**self.sampling.model_dump(), **self.further},
            "temperature": self.temperature and self.temperature.record(),
            "reasoning_effort": self.reasoning_effort and self.reasoning_effort.record(),
            "seed": self.seed,
            "on_length": "drop" if self.drop_cut else "keep",
            "language_filter": self.language,
        }


#: Weights are added up as floats; of larger ones nobody is in need.
_HEAVIEST = 1e100


def parse_distribution(text: str | None, flag: str, read: Callable[[str], Value]) -> Distribution[Value] | None:
    """``0.7``, ``low`` or JSON such as ``{"0.0": 0.5, "0.7": 0.5}``; None of None.

    :param read: a value out of its text; raises ValueError.
    :raises ConfigError: when it is neither, or a value or weight is none.
    """
    if text is None:
        return None
    wrong = f'{flag} {text} is no distribution; give one value, or JSON with the weight of each, such as {{"VALUE": 0.5, ...}}'
    try:
        parsed = json.loads(text) if text.lstrip().startswith("{") else {text: 1.0}
        values = tuple(read(key) for key in parsed)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{wrong} ({error})") from None
    weights = tuple(parsed.values())
    if not all(type(weight) in (int, float) and 0 <= weight <= _HEAVIEST for weight in weights) or not sum(weights) > 0:
        raise ConfigError(wrong)
    return Distribution(values, tuple(float(weight) for weight in weights))


#: Keys of ``--sampling-params`` that something else decides, and what.
_RESERVED = {
    "max_tokens": "--max-tokens",
    "max_completion_tokens": "--max-tokens",
    "seed": "--seed",
    "model": "--model",
    "reasoning_effort": "--reasoning-effort",
    **dict.fromkeys(
        ("prompt", "messages", "tools", "stream", "n", "best_of", "echo", "return_token_ids", "stop_token_ids", "suffix"),
        "regenerate-responses itself",
    ),
}


def parse_sampling(text: str | None) -> tuple[SamplingParams, dict[str, Any]]:
    """``--sampling-params``: what all engines know, and what is for a server to know.

    :raises ConfigError: for anything but a JSON object, a value out of range, or a key that has a flag of its own.
    """
    if text is None:
        return SamplingParams(), {}
    try:
        given = json.loads(text)
    except (ValueError, RecursionError):
        given = None
    if not isinstance(given, dict):
        raise ConfigError(f'--sampling-params {text} is no JSON object; give one such as {{"temperature": 0.7, "top_p": 0.95}}')
    for key in given:
        if key in _RESERVED:
            raise ConfigError(f"--sampling-params names {key}, which is set by {_RESERVED[key]}; leave it out")
    if given.get("top_k") == -1:  # how serving engines say it
        given["top_k"] = 0
    known = {key: given.pop(key) for key in SamplingParams.model_fields if key in given}
    try:
        return SamplingParams.model_validate(known), given
    except ValidationError as error:
        first = error.errors()[0]
        raise ConfigError(f"--sampling-params has {first['loc'][0]} {first['input']!r}: {_said(first)}") from None


def uniform_of(what: str, seed: int, primary_id: str, turn: int) -> float:
    """A number in [0, 1) that is the same in every run, on every machine and in every order."""
    return _number(what, seed, primary_id, turn) / 2**64


def seed_of(seed: int, primary_id: str, turn: int) -> int:
    """What seeds the draws of one answer's tokens: 0 <= seed < 2**31, as servers want it."""
    return _number("tokens", seed, primary_id, turn) >> 33


def _number(what: str, seed: int, primary_id: str, turn: int) -> int:
    text = json.dumps([what, seed, primary_id, turn])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def temperature_of(text: str) -> float:
    """:raises ValueError: for no temperature."""
    try:
        return SamplingParams(temperature=float(text)).temperature
    except ValidationError as error:
        raise ValueError(_said(error.errors()[0])) from None


def _said(error: Mapping[str, Any]) -> str:
    """What is wrong with a value, without the validator's preface."""
    return str(error["msg"]).removeprefix("Value error, ").lower()


def effort_of(text: str) -> str:
    """:raises ValueError: for an empty text."""
    if not text.strip():
        raise ValueError("an empty value")
    return text
