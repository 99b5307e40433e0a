"""Rolling back recurrent layers (linear attention, Mamba): every pass overwrites their states, so they are copied before it,
put back, and the pass is run again over the tokens that stay.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import Cache
from transformers.cache_utils import DynamicLayer, LinearAttentionCacheLayerMixin

__all__ = ["RecurrentStates", "forget_convolved"]


@dataclass(slots=True)
class RecurrentStates:
    """What the recurrent layers of one cache held after ``length`` tokens."""

    length: int
    layers: list[tuple[Any, dict[int, Tensor], dict[int, Tensor]]]  #: layer, convolution states, recurrent states

    @classmethod
    def of(cls, cache: Cache, length: int) -> RecurrentStates | None:
        """A copy; None for a cache that can be cropped, or that neither cropping nor this can roll back."""
        if getattr(cache, "is_croppable", True):
            return None
        recurrent = list(_recurrent(cache))
        if any(not layer.is_croppable and layer not in recurrent for layer in cache.layers):
            return None
        return cls(length, [(layer, _copies(layer.conv_states), _copies(layer.recurrent_states)) for layer in recurrent])

    def put_back(self, cache: Cache, removed: int) -> None:
        """Bring the cache, of ``length + removed`` tokens, back to ``length``."""
        for layer, convolved, recurrent in self.layers:
            layer.conv_states.update(_copies(convolved))
            layer.recurrent_states.update(_copies(recurrent))
        layers: list[Any] = cache.layers
        for layer in layers:
            if not isinstance(layer, LinearAttentionCacheLayerMixin):
                layer.crop(-removed)
            elif isinstance(layer, DynamicLayer):  # attention beside the recurrence
                DynamicLayer.crop(layer, -removed)


def forget_convolved(cache: Cache) -> None:
    """Drop the inputs of convolutions that no later pass needs, which a cache that records its past keeps."""
    for layer in _recurrent(cache):
        if layer.record_past and all(layer.is_conv_states_initialized.values()):
            for index, size in layer.conv_kernel_size.items():
                layer.conv_states[index] = layer.conv_states[index][..., -size:]


def _recurrent(cache: Cache) -> Iterator[Any]:
    return (layer for layer in cache.layers if isinstance(layer, LinearAttentionCacheLayerMixin))


def _copies(states: Mapping[int, Tensor | None]) -> dict[int, Tensor]:
    return {index: state.clone() for index, state in states.items() if state is not None}
