""":func:`train`: from settings to a trained draft in a run folder."""

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator

from speculators.data import CutRows, Row, RowDataset, split_rows
from speculators.data.provenance import require_tokenizer
from speculators.errors import ConfigError, DataError, SpeculatorsError
from speculators.models.verifier_weights import VerifierHead, has_rms_norm, text_config
from speculators.progress import bar
from speculators.train.config.derived import check_runnable
from speculators.train.config.model import TrainConfig
from speculators.train.config.resolution import require_verifier
from speculators.train.distributed import expand_placeholders, main_first, make_accelerator, noticing_lost_processes
from speculators.train.drafts import DraftInputs, build_draft, checkpoint_config, save_draft, wanted_final_state
from speculators.train.families import family_of
from speculators.train.feeder import GIB
from speculators.train.precision import Precision, choose_precision
from speculators.train.results import OnStep, TrainResult
from speculators.train.run_folder import TrainingFolder
from speculators.train.sources import SourceOpener
from speculators.train.trainer import Trainer
from speculators.train.vocabulary import choose_mapping, choose_mask_token
from speculators.verifiers.facts import VerifierFacts, describe_verifier
from speculators.verifiers.flow import FlowMeter
from speculators.verifiers.loading import Verifier, load_verifier
from speculators.verifiers.prefetching import prefetch
from speculators.verifiers.query_keys import query_key_scales
from speculators.verifiers.self_check import check_source, witness_of
from speculators.verifiers.source import CachedSource, HiddenStateSource

__all__ = ["train"]

logger = logging.getLogger("speculators.train")


@dataclass(slots=True)
class _Split:
    """Rows to train on and rows to validate on."""

    dataset: RowDataset
    cut: CutRows  #: its rows as long as a packed row can be
    train_ids: np.ndarray
    val_ids: np.ndarray


@noticing_lost_processes()
def train(
    config: TrainConfig,
    *,
    dataset: RowDataset | None = None,
    train_ids: np.ndarray | None = None,
    val_ids: np.ndarray | None = None,
    verifier: Verifier | None = None,
    source: HiddenStateSource | None = None,
    progress: bool = True,
    on_step: OnStep | None = None,
) -> TrainResult:
    """Train a draft, or go on with the training that the run folder (``--save-path``) holds.

    :param dataset: rows; read from ``--data-path`` when None.
    :param train_ids: row ids to train on; with ``val_ids`` (may be empty) they take the place of ``--train-data-ratio``.
    :param verifier: a loaded :class:`~speculators.verifiers.loading.Verifier`; loaded when None and needed.
    :param source: hidden states of this verifier for the draft's layers; the one of ``--hidden-states`` when None.
    :param progress: show progress bars.
    :param on_step: called after every logged step, on the main process.
    :raises SpeculatorsError: with one sentence for whatever the user can mend; nothing already written is lost.
    """
    started = time.monotonic()
    require_verifier(config)
    check_runnable(config)
    accelerator = make_accelerator(config)
    precision = choose_precision(config.trainer.mixed_precision, config.data.hidden_states_dtype, accelerator.device)
    if config.deterministic_cuda:
        _make_deterministic()
    folder = TrainingFolder(Path(config.trainer.save_path))
    with ExitStack() as stack:
        main_first(accelerator, lambda: _open_folder(folder, config, stack))
        split = _split(config, dataset, train_ids, val_ids)
        path, trust = config.verifier.verifier_name_or_path, config.verifier.trust_remote_code
        load: Callable[[], Verifier] = partial(load_verifier, path, device=accelerator.device, trust_remote_code=trust)
        in_process = config.data.hidden_states == "transformers" if source is None else witness_of(source) is None
        if verifier is None and in_process:
            verifier = load()
        if verifier is not None:
            load = partial(_given, verifier)
        # States from elsewhere need no weights of the verifier here but those of its norm and head.
        facts = describe_verifier(path, trust) if verifier is None else verifier
        draft = _draft(config, split, facts, load)
        if config.dry_run:
            embeddings = config.trainer.checkpoint_embeddings
            main_first(accelerator, lambda: save_draft(draft, folder.path, torch.bfloat16, embeddings))
            return TrainResult("finished", 0, 0, checkpoint=folder.path)
        if source is None:
            if config.data.hidden_states == "ray" and config.ray.ray_address is None and accelerator.num_processes > 1:
                raise ConfigError("several processes of a training share a Ray cluster: start one and pass --ray-address auto")
            source = SourceOpener(config, split.dataset, split.cut, facts, tuple(draft.target_layer_ids), load).open()
            stack.callback(source.close)
        _check_source(config, source, draft, facts)
        # With the norm where it can be rebuilt: the check then says whether states of the other kind would fit.
        with_norm = source.description.final_state == "pre_norm" or has_rms_norm(facts.config)
        teacher = VerifierHead.from_folder(path, draft.t2d, config=facts.config, with_norm=with_norm)
        found = check_source(source, teacher, verifier, _rows_to_check(split, source), facts.context_length)
        if accelerator.is_main_process:
            logger.info("hidden states rebuild the verifier's predictions to %.1g", found.max_difference)
        identity = _identity(split, draft, source, accelerator, precision, config)
        main_first(accelerator, lambda: folder.check_identity(identity))
        main_first(accelerator, lambda: folder.write_artifacts(config))
        _announce(accelerator, precision, split, draft)
        _start_trackers(accelerator, config)
        _capture(source, split, config, progress and accelerator.is_main_process)
        trainer = Trainer(
            config,
            model=draft,
            teacher=teacher,
            source=source,
            dataset=split.dataset,
            train_ids=split.train_ids,
            val_ids=split.val_ids,
            folder=folder,
            accelerator=accelerator,
            precision=precision,
            eos_ids=facts.eos_ids,
            progress=progress,
            on_step=on_step,
            started=started,
        )
        try:
            with noticing_lost_processes():  # before the process group is let go
                result = trainer.run()
                trainer.close()
        finally:
            accelerator.end_training()
        return result


def _given(verifier: Verifier) -> Verifier:
    return verifier


def _open_folder(folder: TrainingFolder, config: TrainConfig, stack: ExitStack) -> None:
    """Lock the run folder and see whose run it holds; main process only."""
    stack.enter_context(folder.locked())
    if config.dry_run:
        return
    if config.trainer.no_resume_from_checkpoint:
        moved = folder.move_aside()
        if moved is not None:
            logger.info("the earlier run was moved to %s", moved)
    folder.check_config(config)


def _split(config: TrainConfig, dataset: RowDataset | None, train_ids: np.ndarray | None, val_ids: np.ndarray | None) -> _Split:
    if dataset is None:
        dataset = RowDataset.load(config.data.data_path)
    if train_ids is None:
        train_ids, split_val = split_rows(dataset, config.data.train_data_ratio)
        val_ids = split_val if val_ids is None else val_ids
    cut = CutRows(dataset, config.data.total_seq_len)
    masks = (cut[int(row)].loss_mask for row in train_ids)
    if not any((mask[:-1] & mask[1:]).any() for mask in masks):  # an anchor needs a supervised successor
        raise DataError(
            f"no training row has two supervised tokens in succession within --total-seq-len {config.data.total_seq_len}, so "
            "there is nothing to learn; raise it, or check the rows' loss masks"
        )
    return _Split(dataset, cut, train_ids, val_ids if val_ids is not None else np.zeros(0, dtype=np.int64))


def _draft(config: TrainConfig, split: _Split, verifier: Verifier | VerifierFacts, load: Callable[[], Verifier]) -> Any:
    """The draft to train, checked against rows and verifier.

    :param load: gives the verifier with its weights; called only where the draft is to start from them.
    """
    start = checkpoint_config(config)
    vocab_size = text_config(verifier.config).vocab_size
    require_tokenizer(
        split.dataset.manifest, verifier.tokenizer, verifier.name, f"the rows in {split.dataset.path or 'memory'}"
    )
    split.dataset.check_vocabulary(vocab_size)
    mask_token = None
    if family_of(config).masked:
        given = config.draft.mask_token_id if start is None else getattr(start, "mask_token_id", None)
        mask_token = choose_mask_token(given, verifier.tokenizer, vocab_size)
    mapping = choose_mapping(
        config,
        vocab_size=vocab_size,
        eos_ids=verifier.eos_ids,
        dataset=split.dataset,
        train_ids=split.train_ids,
        start=start,
    )
    answers = split.dataset.manifest.answers
    sample = torch.tensor(split.cut[int(split.train_ids[0])].input_ids, dtype=torch.long)
    inputs = DraftInputs(
        config.verifier.verifier_name_or_path,
        verifier.config,
        mask_token,
        wanted_final_state(config) or "post_norm",
        answers.model_dump() if answers is not None else None,
        lambda layers, head_dim: query_key_scales(load(), sample[: verifier.context_length], layers, head_dim),
    )
    return build_draft(config, inputs, mapping, start)


def _rows_to_check(split: _Split, source: HiddenStateSource) -> list[Row]:
    """Rows for the check at the start: those that a store has something to say about, else the first to train on."""
    ids = [int(row) for row in getattr(source, "probed_rows", ()) if int(row) < len(split.cut)]
    return [split.cut[row] for row in [*ids, *map(int, split.train_ids[:16])]]


def _check_source(config: TrainConfig, source: HiddenStateSource, draft: Any, facts: Verifier | VerifierFacts) -> None:
    """Refuse a source whose states are not what the draft is to be trained on."""
    found = source.description
    wanted = wanted_final_state(config)
    if wanted is not None and found.final_state != wanted:
        given = (
            f"--final-state {wanted}"
            if config.data.final_state
            else ("--apply-verifier-norm" if config.data.apply_verifier_norm else "--no-apply-verifier-norm")
        )
        raise ConfigError(
            f"{given} contradicts the hidden-states source, whose last states are {found.final_state}; drop the flag"
        )
    draft.config.final_state = found.final_state
    if found.verifier_hash and found.verifier_hash != facts.hash:
        raise ConfigError(
            f"the hidden states are of another verifier ({found.verifier}, hash {found.verifier_hash}) than {facts.name} (hash "
            f"{facts.hash}); capture them again, or correct --verifier-name-or-path"
        )
    if found.hidden_size != facts.hidden_size:
        raise ConfigError(
            f"the hidden-states source gives states of {found.hidden_size} numbers, but the verifier's have "
            f"{facts.hidden_size}; capture them again with this verifier"
        )
    if tuple(found.layer_ids) != tuple(draft.target_layer_ids):
        raise ConfigError(
            f"the hidden-states source captures layers {list(found.layer_ids)}, but the draft reads {draft.target_layer_ids}; "
            "capture again or change --target-layer-ids"
        )


def _capture(source: HiddenStateSource, split: _Split, config: TrainConfig, shown: bool) -> None:
    """Fill a caching source before the first step, in the groups it captures anyway, with a bar that shows the time left."""
    if not isinstance(source, CachedSource) or not source.caching:
        return
    groups = source.missing_groups
    requests = ([split.cut[row_id] for row_id in group] for group in groups)
    workers = min(source.source_concurrency, config.data.num_workers or 1)
    answers = prefetch(
        source.source,
        requests,
        depth=2 * workers,
        max_bytes=config.data.in_flight_gib * GIB,
        workers=workers,
        meter=FlowMeter(),
    )
    with bar("Capturing hidden states", int(split.cut.lengths.sum()), shown=shown) as done:
        tokens = 0
        for group, answer in zip(groups, answers):
            source.keep(group, answer)
            tokens += sum(int(split.cut.lengths[row_id]) for row_id in group)
            done.update(tokens)


def _identity(
    split: _Split, draft: Any, source: HiddenStateSource, accelerator: Accelerator, precision: Precision, config: TrainConfig
) -> dict[str, Any]:
    """What a resumed run must share beside its settings."""
    return {
        "rows": split.dataset.fingerprint,
        "draft vocabulary": None if draft.t2d is None else hashlib.sha256(draft.t2d.cpu().numpy().tobytes()).hexdigest()[:16],
        "training rows": len(split.train_ids),
        "verifier": source.description.verifier_hash,
        "packed rows per step": accelerator.num_processes * config.trainer.gradient_accumulation_steps,
        "arithmetic": str(precision.autocast or torch.float32).removeprefix("torch."),
    }


def _announce(accelerator: Accelerator, precision: Precision, split: _Split, draft: Any) -> None:
    if accelerator.is_main_process:
        logger.info("%s on %s, %d process(es)", precision.note, accelerator.device, accelerator.num_processes)
        counts = draft.parameter_counts()
        logger.info("draft: %.1fM trainable and %.1fM frozen parameters", counts["trainable"] / 1e6, counts["frozen"] / 1e6)
        logger.info("rows: %d to train on, %d to validate on", len(split.train_ids), len(split.val_ids))


def _start_trackers(accelerator: Accelerator, config: TrainConfig) -> None:
    if not accelerator.log_with:
        return
    values = {
        name: value if isinstance(value, (int, float, str, bool)) else str(value) for name, value in config.flatten().items()
    }
    try:
        accelerator.init_trackers(expand_placeholders(config.logging.run_name or "speculators"), config=values)
    except OSError as error:
        raise SpeculatorsError(f"--logger {config.logging.logger} cannot start ({error}); check --log-dir") from error


def _make_deterministic() -> None:
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
