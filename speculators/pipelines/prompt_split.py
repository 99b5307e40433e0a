"""Which prompts are trained on and which are held out, decided by the text of a prompt alone."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from speculators.data.prompts import Prompt
from speculators.errors import DataError

__all__ = ["SplitPrompts", "interleave", "split_prompts"]

Message = dict[str, str]


@dataclass(frozen=True)
class SplitPrompts:
    """Prompts by domain, as message lists, each in the order of its hash."""

    train: dict[str, list[list[Message]]]
    held_out: dict[str, list[list[Message]]]


def split_prompts(domains: Mapping[str, Sequence[Prompt]], *, held_out_share: float, seed: int) -> SplitPrompts:
    """Split every domain by the hash of its prompts, so that the split does not depend on order or on other prompts' presence.

    Prompts with the same words are one prompt: they can never stand on both sides. Each domain holds out at least one.

    :raises DataError: when a domain has fewer than two different prompts.
    """
    train: dict[str, list[list[Message]]] = {}
    held_out: dict[str, list[list[Message]]] = {}
    seen: set[str] = set()
    for domain, prompts in domains.items():
        keyed: dict[str, list[Message]] = {}
        for prompt in prompts:
            key = _hash(prompt.messages, seed)
            if key not in seen:
                seen.add(key)
                keyed[key] = list(prompt.messages)
        if len(keyed) < 2:
            raise DataError(f"the prompt file '{domain}' has {len(keyed)} prompts; at least 2 are needed to hold one out")
        ordered = sorted(keyed)
        out = {key for key in ordered if int(key[:13], 16) / 16**13 < held_out_share} or {ordered[0]}
        if len(out) == len(ordered):
            out.discard(ordered[-1])
        held_out[domain] = [keyed[key] for key in ordered if key in out]
        train[domain] = [keyed[key] for key in ordered if key not in out]
    return SplitPrompts(train, held_out)


def interleave(domains: dict[str, list[list[Message]]], limit: int | None = None) -> list[tuple[str, list[Message]]]:
    """Prompts of all domains in turn, so that any head of the list is mixed in proportion to the domains' sizes."""
    placed = [
        ((index + 0.5) / len(prompts), domain, messages)
        for domain, prompts in domains.items()
        for index, messages in enumerate(prompts)
    ]
    placed.sort(key=lambda item: item[:2])
    return [(domain, messages) for _, domain, messages in placed[:limit]]


def _hash(messages: Sequence[Message], seed: int) -> str:
    """Hash of the words of a prompt; case and spacing do not make another prompt."""
    words = [[message["role"], " ".join(str(message["content"]).lower().split())] for message in messages]
    return hashlib.sha256(json.dumps([seed, words], ensure_ascii=False).encode()).hexdigest()
