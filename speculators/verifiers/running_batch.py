"""The rows that generate together: their cache, their padding, one token more for each of them per step.

All rows end at the same slot of the cache. A row with fewer tokens than the longest leaves slots in front unused, which a
mask hides; its position ids are its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, cast

import torch
from torch import Tensor
from transformers import Cache, DynamicCache

from speculators.models.verifier_weights import text_config
from speculators.verifiers.cache import PreallocatedCache, fits_preallocated
from speculators.verifiers.grouping import consecutive_groups
from speculators.verifiers.loading import Verifier

__all__ = ["RunningBatch", "running_batch"]

_PREFILL_TOKENS = 1024  # a pass over 150 tokens already runs at full speed on a CPU; more only takes more memory
_TRIM = 32  # slots in front that no row uses any more, before they are dropped


class RunningBatch(Protocol):
    """Rows that are decoded together."""

    @property
    def room(self) -> int:
        """Rows that may join now."""

    def add(self, prompts: Sequence[Sequence[int]]) -> None:
        """Append rows with these tokens (possibly none) in their past, longest first."""

    def step(self, tokens: Sequence[int], positions: Sequence[int]) -> Tensor:
        """Append one token to every row; logits of the next ``[rows, V]``."""

    def remove(self, row: int) -> None:
        """Drop a row; the last one takes its place."""


def running_batch(verifier: Verifier, batch_size: int) -> RunningBatch:
    """An empty batch of at most ``batch_size`` rows."""
    if fits_preallocated(verifier.config):
        return _PreallocatedBatch(verifier, batch_size)
    return _DynamicBatch(verifier, batch_size)


class _PreallocatedBatch:
    def __init__(self, verifier: Verifier, batch_size: int) -> None:
        self._verifier = verifier
        self._batch_size = batch_size
        self._layers = text_config(verifier.config).num_hidden_layers
        self._cache = PreallocatedCache(self._layers, row_capacity=batch_size)
        self._held: list[int] = []  # tokens of each row in the cache

    @property
    def room(self) -> int:
        return self._batch_size - len(self._held)

    @torch.inference_mode()
    def add(self, prompts: Sequence[Sequence[int]]) -> None:
        lengths = [len(prompt) for prompt in prompts]
        for group in consecutive_groups(lengths, _PREFILL_TOKENS):
            members = prompts[group]
            longest = len(members[0])
            # A pass makes the keys' shape known even if these prompts have one token, which the first step will read.
            padded = torch.tensor([[*prompt, *[0] * (max(1, longest) - len(prompt))] for prompt in members])
            past = PreallocatedCache(self._layers, capacity=padded.shape[1])
            with self._verifier.lock:
                # Padding on the right of causal attention is seen by no token of the row: no mask is needed.
                self._verifier.states(padded.to(self._verifier.device), cache=past)
            self._cache.add_rows(past, lengths[group])
        self._held += lengths

    @torch.inference_mode()
    def step(self, tokens: Sequence[int], positions: Sequence[int]) -> Tensor:
        verifier, device = self._verifier, self._verifier.device
        visible = self._cache.get_seq_length()
        unused = visible - max(self._held)
        if unused >= _TRIM:
            self._cache.drop_front(unused)
            visible -= unused
        padding = torch.tensor([visible - held for held in self._held], device=device)
        mask = (torch.arange(visible + 1, device=device) >= padding[:, None]).long() if min(self._held) < visible else None
        with verifier.lock:
            logits = verifier.logits(
                torch.tensor(tokens, device=device)[:, None],
                keep=1,
                cache=self._cache,
                attention_mask=mask,
                position_ids=torch.tensor(positions, device=device)[:, None],
            )
        self._held = [held + 1 for held in self._held]
        return logits[:, -1]

    def remove(self, row: int) -> None:
        with torch.inference_mode():
            self._cache.remove_row(row)
        self._held[row] = self._held[-1]
        self._held.pop()


class _DynamicBatch:
    """The same on transformers' own cache, for models whose past is more than keys and values; rows join an empty batch."""

    def __init__(self, verifier: Verifier, batch_size: int) -> None:
        self._verifier = verifier
        self._batch_size = batch_size
        self._cache: Cache | None = None
        self._mask = torch.zeros(0, 0, dtype=torch.long, device=verifier.device)

    @property
    def room(self) -> int:
        return self._batch_size if not self._mask.shape[0] else 0

    @torch.inference_mode()
    def add(self, prompts: Sequence[Sequence[int]]) -> None:
        device, longest = self._verifier.device, len(prompts[0])
        self._cache = DynamicCache(config=text_config(self._verifier.config))
        padded = torch.tensor([[*[0] * (longest - len(prompt)), *prompt] for prompt in prompts], device=device)
        starts = torch.tensor([longest - len(prompt) for prompt in prompts], device=device)
        self._mask = (torch.arange(longest, device=device) >= starts[:, None]).long()
        if longest:
            positions = (torch.arange(longest, device=device) - starts[:, None]).clamp(min=0)
            with self._verifier.lock:
                self._verifier.states(padded, cache=self._cache, attention_mask=self._mask, position_ids=positions)

    @torch.inference_mode()
    def step(self, tokens: Sequence[int], positions: Sequence[int]) -> Tensor:
        device = self._verifier.device
        self._mask = torch.cat([self._mask, self._mask.new_ones(len(tokens), 1)], dim=1)
        with self._verifier.lock:
            logits = self._verifier.logits(
                torch.tensor(tokens, device=device)[:, None],
                keep=1,
                cache=self._cache,
                attention_mask=self._mask,
                position_ids=torch.tensor(positions, device=device)[:, None],
            )
        return logits[:, -1]

    def remove(self, row: int) -> None:
        assert self._cache is not None
        rows = self._mask.shape[0]
        keep = [*range(row), *([rows - 1] if row != rows - 1 else []), *range(row + 1, rows - 1)]
        with torch.inference_mode():
            self._mask = self._mask[keep]
            if keep:
                # Every kind of layer can reorder; not every kind can select.
                self._cache.reorder_cache(cast(torch.LongTensor, torch.tensor(keep, device=self._mask.device)))
