"""Which packed rows make an optimiser step, and this process's part of them as batches."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch

from speculators.batch import PackedBatch
from speculators.data import (
    DepthDrop,
    PackedRow,
    Row,
    RowDataset,
    batch_rows,
    build_batch,
    deal,
    drop_depths,
    plan_epoch,
    plan_steps,
)
from speculators.errors import ConfigError
from speculators.layout import BlockLayout, DraftLayout
from speculators.train.config.model import TrainConfig
from speculators.train.families import family_of
from speculators.train.replay import held_steps, use_order

__all__ = ["PlannedStep", "Recipe", "StepPlanner", "add_noise", "plan_validation"]

#: First word of the random stream of noise; see :mod:`speculators.data.packing`.
NOISE_STREAM = 0x401E
#: The same, of the choice which packed rows train short blocks.
SHORT_STREAM = 0x5407


@dataclass(frozen=True, slots=True)
class Recipe:
    """How rows become batches; a batch is a pure function of it, the draw and the packed row.

    A draw numbers the uses of a row through all epochs: epoch * k + use, where every row is used k times in an epoch.
    """

    dataset: RowDataset
    seq_len: int
    max_anchors: int
    per: Literal["row", "document"]
    seed: int
    layout: DraftLayout
    short: BlockLayout | None = None  #: layout of the short blocks; None without any
    short_share: float = 0.0  #: of the packed rows, to train on short blocks
    drop: DepthDrop | None = None  #: how deep slots are thinned out while training; None keeps all

    @classmethod
    def from_config(cls, config: TrainConfig, dataset: RowDataset, layout: DraftLayout) -> Recipe:
        """:raises ConfigError: when the short blocks are not shorter than the draft's."""
        data, family = config.data, family_of(config)
        short = None
        if data.short_block_size is not None and isinstance(layout, BlockLayout):
            short = BlockLayout(data.short_block_size, layout.sample_from_anchor)
            if short.block_size >= layout.block_size:
                raise ConfigError(
                    f"--short-block-size {short.block_size} is not below the draft's block size {layout.block_size}; lower it"
                )
        share = data.short_block_share if short is not None else 0.0
        every = family.every_anchor and not config.given("max_anchors")
        drop = None
        if family.drops_depths:
            drop = DepthDrop(config.peagle.down_sample_ratio, config.peagle.down_sample_ratio_min)
        return cls(
            dataset,
            data.total_seq_len,
            data.total_seq_len if every else data.max_anchors,
            data.max_anchors_per,
            config.seed,
            layout,
            short,
            share,
            drop,
        )

    def batch(self, packed: PackedRow, draw: int, left_out: Collection[int] = ()) -> PackedBatch:
        """The packed row with this draw's anchors, without verifier states.

        A packed row of short blocks has as many anchors more as its blocks have slots less: the same arithmetic.

        :param left_out: rows of it to do without, as they have no states.
        """
        there = tuple(row_id for row_id in packed if row_id not in left_out)
        if not self._trains_short(packed, draw):
            batch = self.whole_blocks(there, draw)
            return batch if self.drop is None else drop_depths(batch, self.drop, self.seed, draw)
        assert self.short is not None
        max_anchors = self.max_anchors * self.layout.block_size // self.short.block_size
        return self._build(there, draw, max_anchors, self.short)

    def whole_blocks(self, packed: PackedRow, draw: int) -> PackedBatch:
        """The packed row with whole blocks only, as validation measures them."""
        return self._build(packed, draw, self.max_anchors, self.layout)

    def _build(self, packed: PackedRow, draw: int, max_anchors: int, layout: DraftLayout) -> PackedBatch:
        depths = layout.max_draft_tokens
        return build_batch(
            self.dataset,
            packed,
            self.seq_len,
            max_anchors,
            self.per,
            self.seed,
            draw,
            depths,
            first_anchor=layout.first_anchor,
        )

    def _trains_short(self, packed: PackedRow, draw: int) -> bool:
        if self.short is None or not packed:
            return False
        return bool(np.random.default_rng([SHORT_STREAM, self.seed, draw, packed[0]]).random() < self.short_share)

    def rows(self, packed: PackedRow) -> list[Row]:
        """What a hidden-states source is asked for."""
        return batch_rows(self.dataset, packed, self.seq_len)


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """One optimiser step."""

    index: int  #: which of the epoch's different steps
    use: int  #: the how-manieth use of its rows in the epoch, from 0 on
    draw: int  #: of anchors, noise and short blocks
    mine: list[PackedRow]  #: this process's packed rows; ``()`` is an empty slot
    row_ids: tuple[int, ...]  #: of all processes


class StepPlanner:
    """The job's optimiser steps, dealt to one of its processes. The steps do not depend on how many processes there are.

    Every step is run ``replay`` times in an epoch with anchors drawn anew; see :func:`~speculators.train.replay.use_order`.
    """

    def __init__(
        self,
        recipe: Recipe,
        row_ids: np.ndarray,
        rows_per_step: int,
        world_size: int = 1,
        rank: int = 0,
        *,
        replay: int = 1,
        window: int = 1,
    ) -> None:
        """:param rows_per_step: packed rows per optimiser step, of all processes together.
        :param replay: k, uses of a step in an epoch; ``window``: different steps that are run k times before the next ones.
        """
        self.recipe = recipe
        self.row_ids = row_ids
        self.rows_per_step = rows_per_step
        self.world_size = world_size
        self.rank = rank
        self.replay = replay
        self._order = use_order(len(self._steps(0)), replay, window)
        self.steps_per_epoch = len(self._order)

    def steps(self, epoch: int, start: int = 0) -> list[PlannedStep]:
        """The steps of ``epoch`` from its ``start``-th on."""
        steps = self._steps(epoch)
        return [
            PlannedStep(
                index,
                use,
                epoch * self.replay + use,
                deal(steps[index], self.rank, self.world_size, self.rows_per_step),
                tuple(row_id for packed in steps[index] for row_id in packed),
            )
            for index, use in self._order[start:]
        ]

    def held_rows(self, epoch: int, done: int) -> tuple[int, ...]:
        """Row ids whose states were used within the first ``done`` steps of ``epoch`` and will be again."""
        held = held_steps(self._order, done)
        steps = self._steps(epoch) if held else []
        return tuple(sorted(row_id for index in held for packed in steps[index] for row_id in packed))

    def _steps(self, epoch: int) -> list[list[PackedRow]]:
        packed = plan_epoch(self.recipe.dataset.lengths, self.recipe.seq_len, self.recipe.seed, epoch, self.row_ids)
        return plan_steps(packed, self.rows_per_step)


def plan_validation(recipe: Recipe, row_ids: np.ndarray, world_size: int = 1, rank: int = 0) -> list[PackedRow]:
    """This process's packed rows of the validation split, the same in every epoch; all processes get as many."""
    packed = plan_epoch(recipe.dataset.lengths, recipe.seq_len, 0, 0, row_ids, shuffle=False)
    return deal(packed, rank, world_size)


def add_noise(batch: PackedBatch, std: float, seed: int, draw: int) -> PackedBatch:
    """Uniform noise in [-std, std] on the captured states, a pure function of (seed, draw, row id)."""
    if std == 0.0 or batch.features is None or not batch.row_ids:
        return batch
    features = batch.features.clone()
    for document, row_id in enumerate(batch.row_ids):
        place = batch.document_ids == document
        shape = (int(place.sum()), *features.shape[1:])
        draws = np.random.default_rng([NOISE_STREAM, seed, draw, row_id]).uniform(-std, std, shape)
        features[place] += torch.from_numpy(draws).to(features.dtype)
    return replace(batch, features=features)
