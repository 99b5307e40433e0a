"""The training loop: one optimiser step after another, each a pure function of what the last checkpoint holds."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Collection
from contextlib import closing
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from torch import nn

from speculators.data import RowDataset
from speculators.errors import SpeculatorsError
from speculators.progress import Bar, bar
from speculators.train.account import Account
from speculators.train.budget import step_budget
from speculators.train.config.artifacts import command_record
from speculators.train.config.model import TrainConfig
from speculators.train.distributed import StopSignals, main_first
from speculators.train.feeder import Answers, Feeder
from speculators.train.flow import FlowReport, FlowView
from speculators.train.metrics import MetricSums, check_finite, flatten_record
from speculators.train.optimizers import build_optimizers
from speculators.train.planning import PlannedStep, Recipe, StepPlanner, plan_validation
from speculators.train.position import CapturedState, Position, capture_state, captured_weights, restore_state
from speculators.train.precision import Precision
from speculators.train.prediction import predicted_acceptance
from speculators.train.results import OnStep, StepInfo, StopReason, TrainResult
from speculators.train.run_folder import MetricsFile, TrainingFolder
from speculators.train.schedules import build_schedule
from speculators.train.sharding import release, spread
from speculators.train.stepping import StepOutcome, Stepper
from speculators.verifiers.source import HiddenStateSource

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

        world, rank, device = accelerator.num_processes, accelerator.process_index, accelerator.device
        recipe = Recipe.from_config(config, dataset, model.layout)
        rows_per_step = world * config.trainer.gradient_accumulation_steps
        replay, window = config.data.replay, config.data.replay_window
        self.planner = StepPlanner(recipe, train_ids, rows_per_step, world, rank, replay=replay, window=window)
        self.validation_rows = plan_validation(recipe, val_ids, world, rank) if len(val_ids) else []
        hidden_size = model.config.transformer_layer_config.hidden_size
        shape = (len(model.target_layer_ids), hidden_size)
        self.feeder = Feeder(config, recipe, source=source, state_shape=shape, device=device, precision=precision)

        self.draft = model.to(device)
        self.draft.gradient_checkpointing = config.trainer.gradient_checkpointing
        self.teacher = teacher.to(device)
        # Before anything takes hold of the parameters, which sharding replaces.
        wrapped = spread(self.draft, accelerator, config.trainer.fsdp_shard)
        self.optimizers = build_optimizers(self.draft, config, bf16=precision.native_bf16)
        self.stepper = Stepper(
            config,
            draft=self.draft,
            wrapped=wrapped,
            teacher=self.teacher,
            recipe=recipe,
            feeder=self.feeder,
            optimizers=self.optimizers,
            accelerator=accelerator,
            precision=precision,
            wants_stop=self._wants_stop,
        )
        self.metrics = self.stepper.metrics

        self.position = Position()
        self._earlier = 0.0
        self.metrics_file = MetricsFile(folder.path / "metrics.jsonl")
        self.account = Account(folder.path, replay, window)
        self.flow, self.view = FlowReport(self.feeder, accelerator, config.data.hidden_states), FlowView()
        self._logged = (0, time.monotonic())  # step and time of the last log
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
            self._logged = (self.position.global_step, time.monotonic())
            self.feeder.meter.take()  # what came before was not training
            with bar("Training", total, shown=self._shown, below=self.view) as steps:
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
        del self.stepper
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
        plan = self.planner.steps(position.epoch, position.local_step)[: total - position.global_step]
        every = max(1, round(trainer.checkpoint_freq * per_epoch)) if trainer.checkpoint_freq < 1 else None
        with closing(self.feeder.stream([packed for step in plan for packed in step.mine])) as answers:
            for step in plan:
                reason = self._step(step, answers, steps)
                if reason is not None:
                    # Before the answers are closed: a server that hangs may hold up their threads for minutes.
                    if self._last_saved != position.global_step:
                        self._save({})
                    return reason
                within = position.local_step < per_epoch and position.global_step < total
                by_steps = trainer.checkpoint_steps is not None and position.global_step % trainer.checkpoint_steps == 0
                if within and (by_steps or (every is not None and position.local_step % every == 0)):
                    self._save({})
        return "finished"

    def _step(self, step: PlannedStep, answers: Answers, steps: Bar) -> StopReason | None:
        """One optimiser step; a reason when the run must stop after it."""
        begun, position = time.monotonic(), self.position
        rates = self.optimizers.set_factor(self.schedule.factor(position.global_step))
        outcome = self.stepper.accumulate(step, answers)
        if outcome.trained:
            self.stepper.apply_gradient()
        position.global_step += 1
        position.local_step += 1
        self._account(step, outcome)
        if position.global_step % self.config.trainer.log_freq == 0 or position.global_step == self.result.total_steps:
            self._log(rates, time.monotonic() - begun, outcome, steps)
        # Behind the last step nothing is left but its validation, which is done in any case.
        if outcome.stop and position.global_step < self.result.total_steps:
            return "interrupted" if self.signals.received is not None else "time limit"
        return None

    def _wants_stop(self) -> bool:
        limit = self.config.trainer.time_limit_minutes
        return self.signals.received is not None or (limit is not None and self.seconds() > 60 * limit)

    def _account(self, step: PlannedStep, outcome: StepOutcome) -> None:
        position = self.position
        self.flow.left_out(len(outcome.left_out))
        if not self.accelerator.is_main_process:
            return
        self.account.append(
            global_step=position.global_step,
            epoch=position.epoch,
            step=step.index,
            use=step.use,
            rows=step.row_ids,
            left_out=outcome.left_out,
        )
        if outcome.left_out:
            some = "all" if not outcome.trained else f"{len(outcome.left_out)} of {len(step.row_ids)}"
            logger.warning(
                "step %d went without %s rows, whose states the source did not have: %s",
                position.global_step,
                some,
                ", ".join(map(str, sorted(outcome.left_out)[:10])) + (", ..." if len(outcome.left_out) > 10 else ""),
            )

    # -- validation and logging --------------------------------------------------------------------------------------------

    def validate(self, record: bool = True, predict: bool = False) -> dict[str, float]:
        """Means over the validation rows, and with ``predict`` of a replay of some of them; empty without any."""
        if not self.validation_rows:
            return {}
        self.draft.eval()
        sums = MetricSums(self.accelerator.device)
        with (
            closing(self.feeder.stream(self.validation_rows)) as answers,
            bar("Validation", len(self.validation_rows), shown=self._shown and record, passing=True) as done,
        ):
            for index, packed in enumerate(self.validation_rows):
                sums.add(self.stepper.measure(packed, answers))
                done.update(index + 1)
        release(self.stepper.wrapped)
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

    def _log(self, rates: dict[str, float], seconds: float, outcome: StepOutcome, steps: Bar) -> None:
        position = self.position
        means = MetricSums.means(check_finite(self.metrics.reduced(self.accelerator), position.global_step))
        self.result.metrics = means
        profile = {
            "step_ms": 1000 * seconds,
            "fetch_ms": 1000 * outcome.waited,
            "fetch_frac": outcome.waited / seconds,
            "tokens_per_s": outcome.tokens * self.accelerator.num_processes / seconds,
        }
        source = self.flow.record()
        rate = next(iter(rates.values())) if len(rates) == 1 else rates
        place = {"epoch": position.epoch, "lr": rate, "global_step": position.global_step}
        self._write({"train": means, "profile": profile, "source": source, **place})
        (before, then), now = self._logged, time.monotonic()
        self.view.update(means.get("loss"), (position.global_step - before) / max(now - then, 1e-9), source)
        self._logged = (position.global_step, now)
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
        position.replayed = self._held_rows()
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
        states = json.dumps(self.feeder.source.description.to_json(), indent=1)
        extra = {"train_command.txt": command_record(self.config), "hidden_states.json": states}
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

    def _held_rows(self) -> tuple[int, ...]:
        """Rows whose states a run that stands here keeps for another use."""
        return self.planner.held_rows(self.position.epoch, self.position.local_step) if self.feeder.replay is not None else ()

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
            if self.position.replayed != self._held_rows():
                raise SpeculatorsError(
                    f"{latest.path} keeps states of other rows for another use than this run would; go on with the version "
                    "that wrote it, or train in another --save-path"
                )
            if self.accelerator.is_main_process:
                self.folder.checkpoints.restore_best(self.position.best_number)
            self._earlier = self.position.seconds
            self._restore_pending()
            self.result.resumed_from, self._last_saved = latest.path, self.position.global_step
        if self.accelerator.is_main_process:
            self.metrics_file.rewind(self.position.global_step)
            self.account.rewind(self.position.global_step)
            for record in self.metrics_file.records():
                self.result.metrics = record.get("train", self.result.metrics)
                self.result.validation = record.get("val", self.result.validation)
            if latest is not None:
                logger.info("resumed from %s at step %d", latest.path, self.position.global_step)
