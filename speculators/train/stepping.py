"""One optimiser step: its gradient, summed over micro-batches and processes, its update; and the measuring of one batch."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor, nn

from speculators.batch import PackedBatch
from speculators.data import PackedRow
from speculators.losses import batch_denominators
from speculators.train.config.model import TrainConfig
from speculators.train.drafts import build_loss_config
from speculators.train.feeder import Answers, Feeder
from speculators.train.implementations import attention_impl, loss_impl
from speculators.train.metrics import MetricSums, loss_names
from speculators.train.optimizers import Optimizers
from speculators.train.planning import PlannedStep, Recipe
from speculators.train.precision import Precision
from speculators.train.sharding import average_gradients, clip_gradients
from speculators.train.validation import Sums, validation_sums
from speculators.verifiers.source import HiddenStates

__all__ = ["StepOutcome", "Stepper"]


@dataclass(slots=True)
class StepOutcome:
    """What became of one optimiser step."""

    tokens: int  #: of this process's packed rows
    waited: float = 0.0  #: seconds until states were there
    stop: bool = False  #: some process wants to stop after the step
    left_out: set[int] = field(default_factory=set)  #: rows of all processes without states
    trained: bool = True  #: False when no process had a row: there is no gradient


class Stepper:
    """Computes steps; which ones, and when to log, validate and save, is the trainer's.

    :param wrapped: the draft as processes share it.
    :param wants_stop: asked once a step, on every process; all stop when one wants to.
    """

    def __init__(
        self,
        config: TrainConfig,
        *,
        draft: Any,
        wrapped: Any,
        teacher: nn.Module,
        recipe: Recipe,
        feeder: Feeder,
        optimizers: Optimizers,
        accelerator: Accelerator,
        precision: Precision,
        wants_stop: Callable[[], bool],
    ) -> None:
        self.draft, self.wrapped, self.teacher = draft, wrapped, teacher
        self.trainable = [parameter for parameter in draft.parameters() if parameter.requires_grad]
        self.optimizers = optimizers
        self.metrics = MetricSums(accelerator.device)
        self.loss_config = build_loss_config(config)
        self._how: Any = {"impl": loss_impl(config), "attn_impl": attention_impl(config)}
        self._max_grad_norm = config.trainer.max_grad_norm
        self._recipe, self._feeder = recipe, feeder
        self._filler = feeder.filler(draft.layout.block_size)
        self._accelerator = accelerator
        self._autocast = precision.autocast
        self._wants_stop = wants_stop

    def accumulate(self, step: PlannedStep, answers: Answers) -> StepOutcome:
        """Add up one optimiser step's gradient."""
        begun = time.monotonic()
        # The denominators follow from the rows alone, unless some may be without states: then these are awaited first.
        ready = [self._feeder.next(packed, answers) for packed in step.mine] if self._feeder.leaves_out else None
        left_out = self._missing(step, ready) if ready is not None else set()
        waited = time.monotonic() - begun if ready is not None else 0.0
        batches = [self._recipe.batch(packed, step.draw, left_out) for packed in step.mine]
        denominators, stop = self._agree(batches)
        outcome = StepOutcome(sum(batch.num_tokens for batch in batches), waited, stop, left_out)
        outcome.trained = len(left_out) < len(step.row_ids)
        if not outcome.trained:
            return outcome
        for index, (packed, batch) in enumerate(zip(step.mine, batches, strict=True)):
            if not batch.row_ids and self._accelerator.num_processes == 1:
                continue
            begun = time.monotonic()
            answer = ready[index] if ready is not None else self._feeder.next(packed, answers)
            full = self._feeder.attach(batch, answer, step.draw)
            outcome.waited += time.monotonic() - begun
            self._forward_backward(full, denominators, last=index == len(batches) - 1)
        return outcome

    def apply_gradient(self) -> None:
        """Clip, update, forget the gradient."""
        norm = clip_gradients(self.trainable, self._max_grad_norm)
        # The same number on every process; the sums' reduction divides it out again.
        self.metrics.add({"grad_norm": (norm.detach(), 1)})
        self.optimizers.step()
        self.optimizers.zero_grad()

    def measure(self, packed: PackedRow, answers: Answers) -> Sums:
        """Validation sums of one packed row; weights are gathered for it where they are sharded."""
        answer = self._feeder.next(packed, answers)
        there = {states.row_id for states in answer}
        if self._feeder.leaves_out:
            packed = tuple(row_id for row_id in packed if row_id in there)
        # The same anchors every time, so that epochs can be compared.
        batch = self._feeder.attach(self._recipe.whole_blocks(packed, 0), answer)
        measure = partial(validation_sums, self.draft, batch, self.teacher, self.loss_config, **self._how)
        with self._autocasting():
            found: Sums = self.draft.with_weights(measure)
        return loss_names(found, self.loss_config)

    def _missing(self, step: PlannedStep, ready: Sequence[Sequence[HiddenStates]]) -> set[int]:
        """Rows of the step, of all processes, that came without states."""
        missing = [
            row_id
            for packed, answer in zip(step.mine, ready, strict=True)
            for row_id in set(packed) - {states.row_id for states in answer}
        ]
        return set(gather_object(missing) if self._accelerator.num_processes > 1 else missing)

    def _forward_backward(self, batch: PackedBatch, denominators: dict[str, float], *, last: bool) -> None:
        """Add one micro-batch's gradient; processes exchange gradients with the last one only."""
        # Every process must bring a gradient of every weight, if only zero: one without anchors takes a made-up row times 0.
        silent = not batch.anchors.numel()
        with average_gradients(self.wrapped, self._accelerator, now=last):
            with self._autocasting():
                output = self.wrapped(
                    self._filler if silent else batch,
                    teacher=self.teacher,
                    loss_config=self.loss_config,
                    denominators=denominators,
                    **self._how,
                )
            # Gradients are averaged over processes; the denominators are of all of them already.
            loss = output.loss * (0.0 if silent else self._accelerator.num_processes)
            loss.backward()
        sums = dict.fromkeys(output.sums, (0.0, 0.0)) if silent else output.sums
        self.metrics.add(loss_names(sums, self.loss_config))
        # Short blocks have fewer depths, and every process must hold the same names.
        self.metrics.add({f"position_{depth + 1}_accuracy": (0, 0) for depth in range(self.draft.layout.max_draft_tokens)})
        self.metrics.add({"anchor_coverage": (batch.covered, batch.supervised)})

    def _autocasting(self) -> torch.autocast:
        enabled = self._autocast is not None
        return torch.autocast(self._accelerator.device.type, dtype=self._autocast or torch.bfloat16, enabled=enabled)

    def _agree(self, batches: Sequence[PackedBatch]) -> tuple[dict[str, float], bool]:
        """The step's denominators over all processes, and whether any of them wants to stop after it."""
        totals: dict[str, float] = {}
        for batch in batches:
            depths = batch.num_depths or self.draft.layout.max_draft_tokens
            found = batch_denominators(batch, depths, self.draft.verifier_to_draft, self.loss_config)
            for name, value in found.items():
                totals[name] = totals.get(name, 0.0) + value
        stop = self._wants_stop()
        if self._accelerator.num_processes == 1:
            return totals, stop
        names = sorted(totals)
        vector = torch.tensor([*(totals[name] for name in names), float(stop)], dtype=torch.float64)
        summed: Tensor = self._accelerator.reduce(vector.to(self._accelerator.device), reduction="sum")
        *values, stops = summed.tolist()
        return dict(zip(names, values)), stops > 0
