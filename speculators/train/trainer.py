"""The training loop: one optimiser step after another, each a pure function of what the last checkpoint holds."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Collection, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor, nn

from speculators.batch import PackedBatch
from speculators.data import PackedRow, RowDataset
from speculators.losses import batch_denominators
from speculators.progress import Bar, bar
from speculators.train.budget import step_budget
from speculators.train.config.artifacts import command_record
from speculators.train.config.model import TrainConfig
from speculators.train.distributed import StopSignals, main_first
from speculators.train.drafts import build_loss_config
from speculators.train.feeder import Feeder
from speculators.train.implementations import attention_impl, loss_impl
from speculators.train.metrics import MetricSums, check_finite, flatten_record, loss_names
from speculators.train.optimizers import build_optimizers
from speculators.train.planning import Recipe, StepPlanner, plan_validation
from speculators.train.position import CapturedState, Position, capture_state, captured_weights, restore_state
from speculators.train.precision import Precision
from speculators.train.prediction import predicted_acceptance
from speculators.train.results import OnStep, StepInfo, StopReason, TrainResult
from speculators.train.run_folder import MetricsFile, TrainingFolder
from speculators.train.schedules import build_schedule
from speculators.train.sharding import average_gradients, clip_gradients, release, spread
from speculators.train.validation import validation_sums
from speculators.verifiers.source import HiddenStates, HiddenStateSource

__all__ = ["Trainer"]

logger = logging.getLogger("speculators.train")
metrics_logger = logging.getLogger("speculators.metrics")


class Trainer:
    """Trains one draft. Everything is handed in, so that a test or a pipeline can train from memory.

    :param model: a block draft in float32, on any device.
    :param teacher: the verifier's head.
    :param source: a hidden-states source (``fetch(rows)``), the same on every process.
    :param dataset: rows; ``train_ids`` and ``val_ids`` are row ids of it, ``val_ids`` may be empty.
    :param folder: the run folder, locked by its user.
    :param accelerator: as :func:`~speculators.train.distributed.make_accelerator` makes it.
    :param eos_ids: the verifier's, which end answers.
    :param progress: show bars on the main process.
    :param on_step: called on the main process after every logged step.
    :param started: ``time.monotonic()`` from which the time limit counts; now when None.
    """

    def __init__(
        self,
        config: TrainConfig,
        *,
        model: Any,
        teacher: nn.Module,
        source: HiddenStateSource,
        dataset: RowDataset,
        train_ids: np.ndarray,
        val_ids: np.ndarray,
        folder: TrainingFolder,
        accelerator: Accelerator,
        precision: Precision,
        eos_ids: Collection[int] = (),
        progress: bool = True,
        on_step: OnStep | None = None,
        started: float | None = None,
    ) -> None:
        self._began = time.monotonic() if started is None else started
        self.config = config
        self.accelerator = accelerator
        self.folder = folder
        self.on_step = on_step
        self.eos_ids = eos_ids
        self._shown = progress and accelerator.is_main_process
        self._autocast = precision.autocast
        self.loss_config = build_loss_config(config)
        self._impl, self._attn_impl = loss_impl(config), attention_impl(config)

        world, rank, device = accelerator.num_processes, accelerator.process_index, accelerator.device
        recipe = Recipe.from_config(config, dataset, model.layout)
        self.planner = StepPlanner(recipe, train_ids, world * config.trainer.gradient_accumulation_steps, world, rank)
        self.validation_rows = plan_validation(recipe, val_ids, world, rank) if len(val_ids) else []
        hidden_size = model.config.transformer_layer_config.hidden_size
        shape = (len(model.target_layer_ids), hidden_size)
        self.feeder = Feeder(config, recipe, source=source, state_shape=shape, device=device, precision=precision)

        self.draft = model.to(device)
        self.draft.gradient_checkpointing = config.trainer.gradient_checkpointing
        self.teacher = teacher.to(device)
        # Before anything takes hold of the parameters, which sharding replaces.
        self._wrapped = spread(self.draft, accelerator, config.trainer.fsdp_shard)
        self.trainable = [parameter for parameter in self.draft.parameters() if parameter.requires_grad]
        self.optimizers = build_optimizers(self.draft, config, bf16=precision.native_bf16)
        self._filler = self.feeder.filler(self.draft.layout.block_size)

        self.position = Position()
        self._earlier = 0.0
        self.metrics = MetricSums(device)
        self.metrics_file = MetricsFile(folder.path / "metrics.jsonl")
        self.signals = StopSignals()
        self.result = TrainResult("finished", 0, 0)
        self._last_saved = -1

    # -- the run -----------------------------------------------------------------------------------------------------------

    def run(self) -> TrainResult:
        """Train to the end, from the latest complete checkpoint if there is one."""
        self._resume()
        self.draft.train()
        with self.signals.installed():
            total = self.result.total_steps = self._total_steps()
            self.schedule = build_schedule(self.config.scheduler, total)
            with bar("Training", total, shown=self._shown) as steps:
                steps.update(self.position.global_step)
                self.result.reason = self._epochs(total, steps)
        self.result.signal = self.signals.received
        self.result.global_step = self.position.global_step
        self.result.seconds = self.seconds()
        self.result.best = self.folder.checkpoints.best()
        latest = self.folder.checkpoints.latest()
        self.result.checkpoint = latest.path if latest is not None else None
        return self.result

    def close(self) -> None:
        """Let go of the other processes, together: a group that is torn down at different times can hang."""
        del self._wrapped
        self.accelerator.free_memory()
        self.accelerator.wait_for_everyone()

    def seconds(self) -> float:
        """Wall-clock of the run, its earlier parts included."""
        return time.monotonic() - self._began + self._earlier

    def _epochs(self, total: int, steps: Bar) -> StopReason:
        position, trainer = self.position, self.config.trainer
        if trainer.time_limit_minutes is not None and position.seconds > 60 * trainer.time_limit_minutes:
            return "time limit"
        while position.global_step < total:
            reason = self._epoch(total, steps)
            if reason != "finished":
                if self._last_saved != position.global_step:
                    self._save({})
                return reason
            epoch, label, last = position.epoch, None, position.global_step == total
            validation = self.validate(predict=last) if last or (epoch + 1) % trainer.val_freq == 0 else {}
            if position.local_step == self.planner.steps_per_epoch:
                label = f"epoch{epoch}_end"
                position.epoch, position.local_step = epoch + 1, 0
            if last or trainer.checkpoint_freq <= 1 or (epoch + 1) % int(trainer.checkpoint_freq) == 0:
                self._save(validation, self._note_best(validation), label)
        return "finished"

    def _epoch(self, total: int, steps: Bar) -> StopReason:
        """The rest of the current epoch; "finished" when it ended or ``total`` is reached."""
        position, trainer, per_epoch = self.position, self.config.trainer, self.planner.steps_per_epoch
        plan = self.planner.micro_batches(position.epoch, position.local_step)[: total - position.global_step]
        answers = self.feeder.stream([packed for step in plan for packed in step])
        every = max(1, round(trainer.checkpoint_freq * per_epoch)) if trainer.checkpoint_freq < 1 else None
        for step in plan:
            reason = self._step(step, answers, steps)
            if reason is not None:
                return reason
            within = position.local_step < per_epoch and position.global_step < total
            by_steps = trainer.checkpoint_steps is not None and position.global_step % trainer.checkpoint_steps == 0
            if within and (by_steps or (every is not None and position.local_step % every == 0)):
                self._save({})
        return "finished"

    def _step(self, step: Sequence[PackedRow], answers: Iterator[list[HiddenStates]], steps: Bar) -> StopReason | None:
        """One optimiser step; a reason when the run must stop after it."""
        begun, position = time.monotonic(), self.position
        rates = self.optimizers.set_factor(self.schedule.factor(position.global_step))
        batches, waited, stop = self.accumulate(step, answers, position.epoch)
        self.apply_gradient()
        position.global_step += 1
        position.local_step += 1
        if position.global_step % self.config.trainer.log_freq == 0 or position.global_step == self.result.total_steps:
            tokens = sum(batch.num_tokens for batch in batches)
            self._log(rates, time.monotonic() - begun, waited, tokens, steps)
        # Behind the last step nothing is left but its validation, which is done in any case.
        if stop and position.global_step < self.result.total_steps:
            return "interrupted" if self.signals.received is not None else "time limit"
        return None

    def accumulate(
        self, step: Sequence[PackedRow], answers: Iterator[list[HiddenStates]], epoch: int
    ) -> tuple[list[PackedBatch], float, bool]:
        """Add up one optimiser step's gradient.

        :returns: the batches, the seconds spent waiting for states, and whether some process wants to stop.
        """
        batches = [self.planner.recipe.batch(packed, epoch) for packed in step]
        denominators, stop = self._agree(batches)
        waited = 0.0
        for index, batch in enumerate(batches):
            if not batch.row_ids and self.accelerator.num_processes == 1:
                continue
            begun = time.monotonic()
            ready = self.feeder.attach(batch, answers, epoch)
            waited += time.monotonic() - begun
            self._forward_backward(ready, denominators, last=index == len(batches) - 1)
        return batches, waited, stop

    def apply_gradient(self) -> None:
        """Clip, update, forget the gradient."""
        norm = clip_gradients(self.trainable, self.config.trainer.max_grad_norm)
        # The same number on every process; the sums' reduction divides it out again.
        self.metrics.add({"grad_norm": (norm.detach(), 1)})
        self.optimizers.step()
        self.optimizers.zero_grad()

    def _forward_backward(self, batch: PackedBatch, denominators: dict[str, float], *, last: bool) -> None:
        """Add one micro-batch's gradient; processes exchange gradients with the last one only."""
        # Every process must bring a gradient of every weight, if only zero: one without anchors takes a made-up row times 0.
        silent = not batch.anchors.numel()
        with average_gradients(self._wrapped, self.accelerator, now=last):
            with self._autocasting():
                output = self._wrapped(
                    self._filler if silent else batch,
                    teacher=self.teacher,
                    loss_config=self.loss_config,
                    denominators=denominators,
                    impl=self._impl,
                    attn_impl=self._attn_impl,
                )
            # Gradients are averaged over processes; the denominators are of all of them already.
            loss = output.loss * (0.0 if silent else self.accelerator.num_processes)
            loss.backward()
        sums = dict.fromkeys(output.sums, (0.0, 0.0)) if silent else output.sums
        self.metrics.add(loss_names(sums, self.loss_config))
        # Short blocks have fewer depths, and every process must hold the same names.
        self.metrics.add({f"position_{depth + 1}_accuracy": (0, 0) for depth in range(self.draft.layout.max_draft_tokens)})
        self.metrics.add({"anchor_coverage": (batch.covered, batch.supervised)})

    def _autocasting(self) -> torch.autocast:
        enabled = self._autocast is not None
        return torch.autocast(self.accelerator.device.type, dtype=self._autocast or torch.bfloat16, enabled=enabled)

    def _agree(self, batches: Sequence[PackedBatch]) -> tuple[dict[str, float], bool]:
        """The step's denominators over all processes, and whether any of them wants to stop after it."""
        totals: dict[str, float] = {}
        for batch in batches:
            depths = batch.num_depths or self.draft.layout.max_draft_tokens
            found = batch_denominators(batch, depths, self.draft.verifier_to_draft, self.loss_config)
            for name, value in found.items():
                totals[name] = totals.get(name, 0.0) + value
        limit = self.config.trainer.time_limit_minutes
        stop = self.signals.received is not None or (limit is not None and self.seconds() > 60 * limit)
        if self.accelerator.num_processes == 1:
            return totals, stop
        names = sorted(totals)
        vector = torch.tensor([*(totals[name] for name in names), float(stop)], dtype=torch.float64)
        summed: Tensor = self.accelerator.reduce(vector.to(self.accelerator.device), reduction="sum")
        *values, stops = summed.tolist()
        return dict(zip(names, values)), stops > 0

    # -- validation and logging --------------------------------------------------------------------------------------------

    def validate(self, record: bool = True, predict: bool = False) -> dict[str, float]:
        """Means over the validation rows, and with ``predict`` of a replay of some of them; empty without any."""
        if not self.validation_rows:
            return {}
        self.draft.eval()
        sums, answers = MetricSums(self.accelerator.device), self.feeder.stream(self.validation_rows)
        how: Any = {"impl": self._impl, "attn_impl": self._attn_impl}
        measure = partial(validation_sums, self.draft, teacher=self.teacher, config=self.loss_config, **how)
        with bar("Validation", len(self.validation_rows), shown=self._shown and record, passing=True) as done:
            for index, packed in enumerate(self.validation_rows):
                # The same anchors every time, so that epochs can be compared.
                batch = self.feeder.attach(self.planner.recipe.whole_blocks(packed, 0), answers)
                with self._autocasting():
                    found = self.draft.with_weights(partial(measure, batch))
                sums.add(loss_names(found, self.loss_config))
                done.update(index + 1)
        release(self._wrapped)
        means = MetricSums.means(sums.reduced(self.accelerator))
        if predict:
            means |= predicted_acceptance(self)
        self.draft.train()
        if record:
            self.result.validation = means
            self._write({"val": means, "epoch": self.position.epoch, "global_step": self.position.global_step})
        return means

    def _note_best(self, validation: dict[str, float]) -> bool:
        loss = validation.get("loss")
        if loss is None or (self.position.best_loss is not None and loss >= self.position.best_loss):
            return False
        self.position.best_loss = loss
        return True

    def _log(self, rates: dict[str, float], seconds: float, waited: float, tokens: int, steps: Bar) -> None:
        position = self.position
        means = MetricSums.means(check_finite(self.metrics.reduced(self.accelerator), position.global_step))
        self.result.metrics = means
        profile = {
            "step_ms": 1000 * seconds,
            "fetch_ms": 1000 * waited,
            "fetch_frac": waited / seconds,
            "tokens_per_s": tokens * self.accelerator.num_processes / seconds,
        }
        rate = next(iter(rates.values())) if len(rates) == 1 else rates
        self._write(
            {"train": means, "profile": profile, "epoch": position.epoch, "lr": rate, "global_step": position.global_step}
        )
        steps.update(position.global_step, f"loss {means['loss']:.4f}" if "loss" in means else "")
        if self.on_step is not None and self.accelerator.is_main_process:
            total = self.result.total_steps
            self.on_step(StepInfo(position.global_step, total, position.epoch, rates, means, seconds))

    def _write(self, record: dict[str, Any]) -> None:
        if self.accelerator.is_main_process:
            self.metrics_file.append(record)
            metrics_logger.info(json.dumps(record))
        self.accelerator.log(flatten_record(record), step=self.position.global_step)

    # -- length, checkpoints, resuming -------------------------------------------------------------------------------------

    def _total_steps(self) -> int:
        trainer = self.config.trainer
        total = trainer.epochs * self.planner.steps_per_epoch
        if trainer.max_steps is not None:
            total = min(total, trainer.max_steps)
        if trainer.time_limit_minutes is not None:
            total = min(total, step_budget(self, trainer.time_limit_minutes))
        return total

    def _save(self, validation: dict[str, float], improved: bool = False, label: str | None = None) -> None:
        """Write a checkpoint on the main process; the others wait."""
        position = self.position
        label = label or f"epoch{position.epoch}_step{position.local_step}"
        position.pending = check_finite(self.metrics.reduced(self.accelerator), position.global_step)
        self._restore_pending()
        # Gathered by all, for the main process.
        captured = capture_state(self.draft, self.optimizers, keep=self.accelerator.is_main_process)
        number, best = main_first(self.accelerator, lambda: self._write_checkpoint(captured, validation, improved, label))
        position.saved, position.best_number = (*position.saved, number), best
        self._last_saved = position.global_step

    def _write_checkpoint(
        self, captured: CapturedState, validation: dict[str, float], improved: bool, label: str
    ) -> tuple[int, int | None]:
        """:returns: numbers of the new checkpoint and of the best one."""
        store, settings, (tensors, record) = self.folder.checkpoints, self.config.trainer, captured
        number = store.next_number()
        best = number if improved else self.position.best_number
        changes = {"best_number": best, "saved": [*self.position.saved, number], "seconds": self.seconds()}
        extra = {"train_command.txt": command_record(self.config)}
        if validation:
            extra["val_metrics.json"] = json.dumps(validation, indent=1)
        form: Any = {"dtype": getattr(torch, settings.checkpoint_dtype), "include_embeddings": settings.checkpoint_embeddings}
        checkpoint = store.save(
            lambda path: self.draft.save_pretrained(path, state_dict=captured_weights(tensors), **form),
            tensors,
            {**record, **self.position.record(), **changes, "total_steps": self.result.total_steps},
            label=label,
            extra=extra,
        )
        if improved:
            store.mark_best(checkpoint)
        if settings.save_best:
            store.prune(keep={number, *([] if best is None else [best])}, mine=set(self.position.saved))
        return number, best

    def _restore_pending(self) -> None:
        pending = self.position.pending
        self.metrics.restore(pending if self.accelerator.is_main_process else dict.fromkeys(pending, (0.0, 0.0)))

    def _resume(self) -> None:
        """Take the latest complete checkpoint's state."""
        latest = main_first(self.accelerator, self.folder.checkpoints.to_resume)
        torch.manual_seed(self.config.seed)
        if latest is not None:
            restore_state(latest, self.draft, self.optimizers)
            self.position = Position.from_record(latest.state)
            if self.accelerator.is_main_process:
                self.folder.checkpoints.restore_best(self.position.best_number)
            self._earlier = self.position.seconds
            self._restore_pending()
            self.result.resumed_from, self._last_saved = latest.path, self.position.global_step
        if self.accelerator.is_main_process:
            self.metrics_file.rewind(self.position.global_step)
            for record in self.metrics_file.records():
                self.result.metrics = record.get("train", self.result.metrics)
                self.result.validation = record.get("val", self.result.validation)
            if latest is not None:
                logger.info("resumed from %s at step %d", latest.path, self.position.global_step)
