"""A key-value cache for transformers models that is written in place.

transformers' dynamic cache concatenates the whole past once per layer and token. Here keys and values live in buffers that
grow by chunks; a pass writes its tokens behind the ones that are there, and attention gets views. Forgetting tokens at
the end (rollback) or at the front is setting a number.

Rows of a batch share one write position, so a row with fewer tokens than the others leaves its first slots unused; the
caller masks them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache
from transformers.cache_utils import CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer

from speculators.errors import VerifierError
from speculators.models.verifier_weights import text_config
from speculators.verifiers.recurrent import forget_convolved

__all__ = ["PreallocatedCache", "PreallocatedLayer", "fits_preallocated", "new_cache", "truncate"]

_CHUNK = 256  # slots


class PreallocatedLayer(CacheLayerMixin):
    """One layer's keys and values, ``[row capacity, heads, slot capacity, head dim]``, of which rows ``[0, rows)`` and
    slots ``[start, end)`` are in use.

    :param capacity: slots to allocate at first; more are added when needed.
    :param row_capacity: rows to allocate at least; by default as many as the first pass has.
    """

    is_croppable = True
    is_sliding = False

    def __init__(self, capacity: int = _CHUNK, row_capacity: int = 0) -> None:
        super().__init__()
        self.start = 0
        self.end = 0
        self.rows = 0
        self._capacity = capacity
        self._row_capacity = row_capacity
        # The parts of the buffers that are in use, so that a step of decoding slices them once and not twice.
        self._rows_in_use: tuple[Tensor, Tensor] | None = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.keys = self._allocate(key_states, self._capacity)
        self.values = self._allocate(value_states, self._capacity)
        self.is_initialized = True
        self.set_rows(key_states.shape[0])

    def _allocate(self, like: Tensor, slots: int) -> Tensor:
        rows, heads, _, head_dim = like.shape
        # Zeros, not empty: slots that are masked must still hold numbers, because 0 * NaN is NaN.
        return like.new_zeros(max(rows, self._row_capacity), heads, slots, head_dim)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if self._rows_in_use is None:
            self.lazy_initialization(key_states, value_states)
        tokens = key_states.shape[-2]
        self.make_room(tokens)
        keys, values = self._rows_in_use or self.buffers()
        keys.narrow(2, self.end, tokens).copy_(key_states)
        values.narrow(2, self.end, tokens).copy_(value_states)
        self.end += tokens
        visible = self.end - self.start
        return keys.narrow(2, self.start, visible), values.narrow(2, self.start, visible)

    def buffers(self) -> tuple[Tensor, Tensor]:
        """All of the memory for keys and for values."""
        if self.keys is None or self.values is None:
            raise ValueError("the cache holds nothing yet; run a pass first")
        return self.keys, self.values

    def make_room(self, tokens: int) -> None:
        """Provide slots for ``tokens`` more, by moving the slots in use to the front or by growing."""
        if self.keys is None:
            self._capacity = max(self._capacity, self.end + tokens)
            return
        capacity = self.keys.shape[2]
        if self.end + tokens <= capacity:
            return
        visible = self.end - self.start
        if visible + tokens <= capacity - _CHUNK // 2:  # enough is free in front that this will not recur soon
            for buffer in self.buffers():
                buffer[:, :, :visible] = buffer[:, :, self.start : self.end].clone()
        else:
            wanted = visible + max(tokens, _CHUNK, capacity // 4)
            slots = -(-wanted // _CHUNK) * _CHUNK
            grown = []
            for buffer in self.buffers():
                larger = buffer.new_zeros(*buffer.shape[:2], slots, buffer.shape[3])
                larger[:, :, :visible] = buffer[:, :, self.start : self.end]
                grown.append(larger)
            self.keys, self.values = grown
        self.start, self.end = 0, visible
        self.set_rows(self.rows)

    def show_front(self, slots: int) -> None:
        """Show ``slots`` more in front of every row: numbers without meaning, for the caller to mask."""
        missing = slots - self.start
        if missing > 0:
            missing = -(-missing // _CHUNK) * _CHUNK
            grown = []
            for buffer in self.buffers():
                larger = buffer.new_zeros(*buffer.shape[:2], buffer.shape[2] + missing, buffer.shape[3])
                larger[:, :, missing:] = buffer
                grown.append(larger)
            self.keys, self.values = grown
            self.start, self.end = self.start + missing, self.end + missing
            self.set_rows(self.rows)
        self.start -= slots

    def set_rows(self, rows: int) -> None:
        """Use the first ``rows`` rows from now on."""
        self.rows = rows
        keys, values = self.buffers()
        self._rows_in_use = keys[:rows], values[:rows]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        return self.end - self.start

    def get_max_length(self) -> int:
        return -1

    def get_max_cache_shape(self) -> int:
        """The name of ``get_max_length`` in transformers before 5.20."""
        return -1

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last ``-tokens_to_remove`` tokens; a positive number is the length to keep, as older releases call it."""
        keep = self.get_seq_length() + tokens_to_remove if tokens_to_remove <= 0 else tokens_to_remove
        self.end = self.start + max(0, min(keep, self.get_seq_length()))

    def reset(self) -> None:
        self.start = self.end = 0

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        if self.rows:
            keys, values = self.buffers()
            indices = indices.to(keys.device)
            self.keys, self.values = keys[:, :, : self.end][indices], values[:, :, : self.end][indices]
            self.set_rows(len(indices))

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.rows:
            self.batch_select_indices(torch.arange(self.rows).repeat_interleave(repeats))


class PreallocatedCache(Cache):
    """The cache of a whole model, one :class:`PreallocatedLayer` a decoder layer."""

    def __init__(self, num_layers: int, capacity: int = _CHUNK, row_capacity: int = 0) -> None:
        #: ``layers`` by their own type.
        self.own_layers = [PreallocatedLayer(capacity, row_capacity) for _ in range(num_layers)]
        super().__init__(layers=[*self.own_layers])

    def truncate(self, length: int) -> None:
        """Keep the first ``length`` of the visible tokens."""
        for layer in self.own_layers:
            layer.end = layer.start + min(length, layer.get_seq_length())

    def drop_front(self, slots: int) -> None:
        """Forget the first ``slots`` visible slots of every row."""
        for layer in self.own_layers:
            layer.start += slots

    def add_rows(self, source: PreallocatedCache, lengths: list[int]) -> None:
        """Append the rows of ``source``; of row r, the first ``lengths[r]`` tokens, placed so that they end where this
        cache's rows end.

        Rows that are longer than what this cache shows make it show more, in front; its own rows do not use those slots.
        """
        for layer, other in zip(self.own_layers, source.own_layers, strict=True):
            layer_length = layer.get_seq_length()
            longest = max(lengths)
            if longest > layer_length:
                if layer.rows:
                    layer.show_front(longest - layer_length)
                else:
                    layer.reset()
                    layer.make_room(longest)
                    layer.end = longest
            added = other.buffers()
            if layer.keys is None:
                layer.lazy_initialization(*added)
                layer.set_rows(0)
            buffers = layer.buffers()
            for row, length in enumerate(lengths):
                here = slice(layer.end - length, layer.end)
                for buffer, source_buffer in zip(buffers, added):
                    buffer[layer.rows + row, :, here] = source_buffer[row, :, other.start : other.start + length]
            layer.set_rows(layer.rows + len(lengths))

    def remove_row(self, row: int) -> None:
        """Drop one row; the last row takes its place."""
        for layer in self.own_layers:
            last = layer.rows - 1
            if row != last:
                for buffer in layer.buffers():
                    buffer[row, :, layer.start : layer.end] = buffer[last, :, layer.start : layer.end]
            layer.set_rows(last)


def fits_preallocated(config: Any) -> bool:
    """Whether a model's past is plain keys and values in every layer; sliding windows, which masks express, included.

    Models with recurrent or compressed states, or layers that share or lack keys, keep transformers' own cache.
    """
    plain = (DynamicLayer, DynamicSlidingWindowLayer)
    return all(type(layer) in plain for layer in DynamicCache(config=text_config(config)).layers)


def new_cache(config: Any, capacity: int = _CHUNK) -> Cache:
    """An empty cache for one request, which :func:`truncate` rolls back if the model's past can be."""
    config = text_config(config)
    if fits_preallocated(config):
        return PreallocatedCache(config.num_hidden_layers, capacity)
    cache = DynamicCache(config=config)
    if hasattr(cache, "activate_past_recording"):
        cache.activate_past_recording()  # keeps what a window or a convolution would forget until the next truncate
    return cache


def truncate(cache: Cache, length: int) -> None:
    """Keep the first ``length`` tokens of either kind of cache; to be called after every pass, also to keep all.

    :raises VerifierError: when the model keeps recurrent states, which only a copy made before the pass
        (:mod:`speculators.verifiers.recurrent`) brings back.
    """
    if isinstance(cache, PreallocatedCache):
        cache.truncate(length)
        return
    removed = cache.get_seq_length() - length
    if getattr(cache, "is_croppable", True):
        cache.crop(-removed)
    elif removed:
        raise VerifierError(
            "the verifier keeps states that cannot be rolled back so far; decode without a draft, or use a verifier with "
            "attention in every layer"
        )
    else:
        forget_convolved(cache)
