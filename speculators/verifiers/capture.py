"""Reading states out of a verifier's pass with forward hooks, the asked-for layers only.

Layer id k is the residual stream after k decoder layers (0: the embeddings), so k = number of layers is what the final
norm reads, the *pre-norm* final state, and the next id is what it gives, the *post-norm* one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from speculators.errors import VerifierError
from speculators.layout import final_layer_id
from speculators.verifiers.structure import DecoderParts

__all__ = ["StateCapture", "check_layer_ids"]


def check_layer_ids(layer_ids: Sequence[int], num_layers: int) -> tuple[int, ...]:
    """``layer_ids`` as a tuple.

    :raises VerifierError: when one is not a layer of the verifier, or is given twice.
    """
    last = final_layer_id(num_layers, after_norm=True)
    outside = [layer_id for layer_id in layer_ids if not 0 <= layer_id <= last]
    if outside or len(set(layer_ids)) != len(layer_ids):
        raise VerifierError(
            f"cannot capture layers {list(layer_ids)} of a verifier with {num_layers} layers; "
            f"give different ids from 0 (embeddings) to {num_layers} (before the final norm) and {last} (after it)"
        )
    return tuple(layer_ids)


class StateCapture:
    """Captures the residual stream after chosen decoder layers, or after the final norm, during passes inside
    :meth:`recording`."""

    def __init__(self, parts: DecoderParts, layer_ids: Sequence[int]) -> None:
        self._parts = parts
        self._layer_ids = check_layer_ids(layer_ids, len(parts.layers))
        self._states: dict[int, Tensor] = {}

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Hooks are in place inside this context only, so that other passes of the model cost and change nothing."""
        handles = []
        self._states.clear()
        try:
            for layer_id in self._layer_ids:
                if layer_id == 0:
                    handles.append(self._parts.layers[0].register_forward_pre_hook(self._before_first, with_kwargs=True))
                else:
                    handles.append(self._module(layer_id).register_forward_hook(self._after(layer_id)))
            yield
        finally:
            for handle in handles:
                handle.remove()

    def take(self) -> list[Tensor]:
        """States of the last pass in the order of the layer ids, ``[B, T, H]`` each; they are forgotten here."""
        states = [self._states[layer_id] for layer_id in self._layer_ids]
        self._states.clear()
        return states

    def stacked(self) -> Tensor:
        """:meth:`take` as one tensor ``[B, T, M, H]``."""
        return torch.stack(self.take(), dim=2)

    def _module(self, layer_id: int) -> nn.Module:
        """The module whose output the state of an id above 0 is."""
        layers = self._parts.layers
        return self._parts.norm if layer_id == final_layer_id(len(layers), after_norm=True) else layers[layer_id - 1]

    def _before_first(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._states[0] = args[0] if args else kwargs["hidden_states"]

    def _after(self, layer_id: int) -> Any:
        def keep(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            self._states[layer_id] = output[0] if isinstance(output, tuple) else output

        return keep
