"""Hidden states for packed rows, made ahead of the draft that reads them."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence

import torch

from speculators.batch import PackedBatch
from speculators.data import PackedRow, attach_states
from speculators.train.config.model import TrainConfig
from speculators.train.planning import Recipe, add_noise
from speculators.train.precision import Precision
from speculators.train.replay import ReplayBuffer
from speculators.verifiers.flow import FlowMeter
from speculators.verifiers.prefetching import fetch_in_turn, prefetch
from speculators.verifiers.source import HiddenStates, HiddenStateSource

__all__ = ["GIB", "Answers", "Feeder"]

GIB = 1024**3

#: What a source answered for one packed row after another; closing it ends the threads behind it.
Answers = Generator[list[HiddenStates], None, None]


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
        self.meter = FlowMeter()
        #: States of packed rows that are used again; None where the source has all states at hand in any case.
        self.replay = None if getattr(source, "keeps_states", False) else ReplayBuffer()
        #: Whether the source may have no states for a row, instead of failing.
        self.leaves_out = config.generation.on_missing in ("skip", "warn")
        self._shape = state_shape
        self._device = device
        # Without autocast the weights' type rules.
        self.dtype = precision.states if precision.autocast is not None else torch.float32
        data = config.data
        self._workers = min(data.num_workers, max(1, getattr(source, "concurrency", 1)))
        # So many answers ahead, and a request under way for every worker.
        self._depth = data.prefetch_factor + self._workers
        self._max_bytes = data.in_flight_gib * GIB
        self._noise = data.noise_std
        self._seed = config.seed

    def stream(self, packed_rows: Sequence[PackedRow]) -> Answers:
        """The source's answers for the packed rows that are not empty, in order; one that comes again is replayed."""
        plan = [packed for packed in packed_rows if packed]
        if self.replay is None:
            fetched = self._fetched(plan)
            yield from fetched
            return
        fetched = self._fetched(self.replay.requests(plan))
        try:
            yield from self.replay.answers(plan, fetched)
        finally:
            fetched.close()

    def _fetched(self, packed_rows: Sequence[PackedRow]) -> Answers:
        requests = (self.recipe.rows(packed) for packed in packed_rows)
        if self._workers == 0:
            return fetch_in_turn(self.source, requests, self.meter)
        return prefetch(
            self.source,
            requests,
            depth=self._depth,
            max_bytes=self._max_bytes,
            workers=self._workers,
            meter=self.meter,
        )

    def filler(self, block_size: int) -> PackedBatch:
        """:meth:`PackedBatch.filler` on the device."""
        return PackedBatch.filler(block_size, *self._shape).to(self._device, dtype=self.dtype)

    def next(self, packed: PackedRow, answers: Iterator[list[HiddenStates]]) -> list[HiddenStates]:
        """The next answer, which is that of ``packed``; nothing for an empty slot."""
        return next(answers) if packed else []

    def attach(self, batch: PackedBatch, answer: Sequence[HiddenStates], noise_draw: int | None = None) -> PackedBatch:
        """The batch with its rows' states, on the device.

        :param answer: of the source for the batch's rows, if it has any.
        :param noise_draw: draw of the noise while training; None for none.
        """
        batch = attach_states(batch, answer, self._shape)
        if noise_draw is not None:
            batch = add_noise(batch, self._noise, self._seed, noise_draw)
        return batch.to(self._device, dtype=self.dtype)
