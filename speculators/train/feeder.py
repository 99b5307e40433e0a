"""Hidden states for packed rows, made ahead of the draft that reads them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from speculators.batch import PackedBatch
from speculators.data import PackedRow, Row, attach_states
from speculators.train.config.model import TrainConfig
from speculators.train.planning import Recipe, add_noise
from speculators.train.precision import Precision
from speculators.verifiers.prefetching import prefetch
from speculators.verifiers.source import HiddenStates, HiddenStateSource

__all__ = ["Feeder"]


class Feeder:
    """Turns packed rows into batches with states on a device.

    :param source: a hidden-states source.
    :param state_shape: (M, H), captured layers and hidden size.
    """

    def __init__(
        self,
        config: TrainConfig,
        recipe: Recipe,
        *,
        source: HiddenStateSource,
        state_shape: tuple[int, int],
        device: torch.device,
        precision: Precision,
    ) -> None:
        self.recipe = recipe
        self.source = source
        self._shape = state_shape
        self._device = device
        # Without autocast the weights' type rules.
        self.dtype = precision.states if precision.autocast is not None else torch.float32
        self._depth = 0 if config.data.num_workers == 0 else config.data.prefetch_factor
        self._noise = config.data.noise_std
        self._seed = config.seed

    def stream(self, packed_rows: Sequence[PackedRow]) -> Iterator[list[HiddenStates]]:
        """The source's answers for the packed rows that are not empty, in order."""
        requests: list[list[Row]] = [self.recipe.rows(packed) for packed in packed_rows if packed]
        if self._depth == 0:
            return (self.source.fetch(rows) for rows in requests)
        return prefetch(self.source, requests, depth=self._depth)

    def filler(self, block_size: int) -> PackedBatch:
        """:meth:`PackedBatch.filler` on the device."""
        return PackedBatch.filler(block_size, *self._shape).to(self._device, dtype=self.dtype)

    def attach(self, batch: PackedBatch, answers: Iterator[list[HiddenStates]], noise_epoch: int | None = None) -> PackedBatch:
        """The batch with the next answer's states, on the device.

        :param noise_epoch: epoch of the noise while training; None for none.
        """
        batch = attach_states(batch, next(answers) if batch.row_ids else [], self._shape)
        if noise_epoch is not None:
            batch = add_noise(batch, self._noise, self._seed, noise_epoch)
        return batch.to(self._device, dtype=self.dtype)
