"""What the decoder is to expect of the draft in training: the exact teacher-forced replay of some validation rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch

from speculators.decoding.prediction import AcceptancePrediction, predict_acceptance
from speculators.sampling import SamplingParams
from speculators.train.sharding import is_sharded

if TYPE_CHECKING:
    from speculators.train.trainer import Trainer

__all__ = ["predicted_acceptance"]

#: Rows replayed by each process: a replay makes a block of every token of an answer.
PREDICTED_ROWS = 16


def predicted_acceptance(trainer: Trainer) -> dict[str, float]:
    """``predicted_acceptance_length``: tokens a round of decoding would yield at the most draft tokens of the layout, under
    the sampling that the validation rows were answered with, over all processes.

    Rows that training cuts are left out: where an answer ends decides where its rounds do.

    :returns: empty where the rows are not recorded as the verifier's own answers, none has a whole round, or the draft is
        sharded over the processes.
    """
    recipe, feeder, accelerator = trainer.planner.recipe, trainer.feeder, trainer.accelerator
    answers = recipe.dataset.manifest.answers
    # Sharded layers gather their weights together, and processes replay different numbers of blocks.
    if answers is None or not answers.on_policy or any(is_sharded(weight) for weight in trainer.stepper.trainable):
        return {}
    ids = [row_id for packed in trainer.validation_rows for row_id in packed]
    whole = [int(row_id) for row_id in ids if recipe.dataset.lengths[row_id] <= recipe.seq_len]
    sums = AcceptancePrediction()
    if whole:
        sums = predict_acceptance(
            trainer.draft,
            cast(Any, trainer.teacher),
            (recipe.dataset.row(row_id) for row_id in whole[:PREDICTED_ROWS]),
            feeder.source,
            answers=answers,
            num_draft_tokens=trainer.draft.layout.max_draft_tokens,
            sampling=SamplingParams(temperature=answers.temperature, top_k=answers.top_k, top_p=answers.top_p),
            eos_ids=trainer.eos_ids,
            device=accelerator.device,
            dtype=feeder.dtype,
        )
    pair = torch.tensor([sums.emitted, sums.rounds], device=accelerator.device)
    emitted, rounds = accelerator.reduce(pair, reduction="sum").tolist()
    return {"predicted_acceptance_length": emitted / rounds} if rounds else {}
