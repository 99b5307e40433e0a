"""Replayed rows added up: the acceptance to expect from the decoder, before it has run."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from speculators.decoding.replay import ReplayedRow, ReplayModel, replay_row, require_own_answers
from speculators.sampling import SamplingParams

if TYPE_CHECKING:
    from speculators.data.rows import AnswerRecord, Row
    from speculators.losses import TeacherHead
    from speculators.verifiers.source import HiddenStateSource

__all__ = ["AcceptancePrediction", "predict_acceptance"]

#: Rows whose states are asked for at a time.
ROWS_PER_FETCH = 8


def _ratio(numerator: float, denominator: float) -> float | None:
    return numerator / denominator if denominator else None


@dataclass(slots=True)
class AcceptancePrediction:
    """Sums over replayed rows; add rows with :meth:`add`, other sums with ``+``. Two averages that must not be mixed:

    - :attr:`tau_uniform` is taken over all anchors alike, as trainers log it. It counts a block for every token of the answers,
      and so many blocks in easy text that the decoder, which takes long steps there, never has.
    - :attr:`predicted_acceptance_length` is taken over the decoder's own rounds: mean tokens over mean number of rounds, each
      estimated without bias, so that it tends to what the decoder's own ratio tends to. Greedy, it is that ratio.

    Rounds that a limit on the answer may have cut are left out of the second, as rounds with ``complete=False`` should be left
    out of the decoder's statistics when the two are compared closely.
    """

    anchors: int = 0
    uniform: float = 0.0  #: sum over anchors of 1 + sum_k S_k
    uniform_of_rates: float = 0.0  #: the same of products of acceptance rates, which is biased
    rounds: float = 0.0  #: expected number of (complete) rounds
    emitted: float = 0.0  #: expected number of their tokens
    accepted_at: list[float] = field(default_factory=list)  #: expected number of them that accept their k-th token
    mass: float = 0.0  #: sum over answer tokens of p's mass inside the draft vocabulary
    tokens: int = 0  #: number of these tokens
    surprises: int = 0  #: of these tokens, how many the verifier would not have written under this sampling

    def add(self, row: ReplayedRow) -> None:
        """Add one row."""
        self.anchors += row.anchors.shape[0]
        self.uniform += row.anchors.shape[0] + float(row.prefixes().sum())
        self.uniform_of_rates += row.anchors.shape[0] + float(row.overlap.cumprod(dim=1).sum())
        visits: Tensor = row.visits * row.complete
        self.rounds += float(visits.sum())
        self.emitted += float((visits * row.expected_tokens()).sum())
        self._add_positions((visits[:, None] * row.expected_accepted()).sum(dim=0).tolist())
        self.mass += row.mass
        self.tokens += row.tokens
        self.surprises += row.surprises

    def _add_positions(self, counts: list[float]) -> None:
        self.accepted_at.extend([0.0] * (len(counts) - len(self.accepted_at)))
        for k, count in enumerate(counts):
            self.accepted_at[k] += count

    def __add__(self, other: AcceptancePrediction) -> AcceptancePrediction:
        total = AcceptancePrediction()
        for part in (self, other):
            for name in ("anchors", "uniform", "uniform_of_rates", "rounds", "emitted", "mass", "tokens", "surprises"):
                setattr(total, name, getattr(total, name) + getattr(part, name))
            total._add_positions(part.accepted_at)
        return total

    @property
    def predicted_acceptance_length(self) -> float | None:
        """Expected tokens per round of the decoder, bonus token included; None without rounds."""
        return _ratio(self.emitted, self.rounds)

    @property
    def predicted_acceptance_by_position(self) -> list[float]:
        """Expected share of the decoder's rounds that accept their tokens 0..k."""
        return [count / self.rounds for count in self.accepted_at] if self.rounds else []

    @property
    def tau_uniform(self) -> float | None:
        """Mean over all anchors of 1 + sum_k S_k, a training metric; None without anchors."""
        return _ratio(self.uniform, self.anchors)

    @property
    def tau_uniform_of_rates(self) -> float | None:
        """The same from products of teacher-forced acceptance rates, as trainers log it; biased when sampling."""
        return _ratio(self.uniform_of_rates, self.anchors)

    @property
    def verifier_mass_in_draft_vocabulary(self) -> float | None:
        """Mean probability that the verifier's next token is one the draft can propose; None without tokens.

        Under the row's sampling: greedy, it is the share of the verifier's tokens.
        """
        return _ratio(self.mass, self.tokens)


def predict_acceptance(
    model: ReplayModel,
    teacher: TeacherHead,
    rows: Iterable[Row],
    source: HiddenStateSource,
    *,
    answers: AnswerRecord | None,
    num_draft_tokens: int,
    sampling: SamplingParams,
    eos_ids: Collection[int] = (),
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
) -> AcceptancePrediction:
    """Replay a data set's rows and add them up.

    :param model: the draft; ``teacher``: the verifier's output head; both on ``device``.
    :param source: gives the verifier's states of the draft's layers.
    :param answers: the manifest's record of how the rows' answers came about.
    :param num_draft_tokens: n; ``sampling``: how the decoder would sample; ``eos_ids``: tokens that ended the answers.
    :param dtype: of the states; the source's own when None.
    :raises DataError: when the rows are not the verifier's own answers under ``sampling``.
    """
    require_own_answers(answers, sampling)
    limit = answers.max_new_tokens if answers is not None else None
    total = AcceptancePrediction()
    for part in _parts(rows, ROWS_PER_FETCH):
        answered = {states.row_id: states for states in source.fetch(part)}
        # A source may leave out rows; the prediction is then that of the others.
        for row, states in ((row, answered[row.row_id]) for row in part if row.row_id in answered):
            final = states.final.to(device=device, dtype=dtype)
            if source.description.final_state == "pre_norm":
                final = cast(Any, teacher).normalize(final)
            replayed = replay_row(
                model,
                teacher,
                input_ids=torch.tensor(row.input_ids, dtype=torch.long, device=device),
                loss_mask=torch.tensor(row.loss_mask, dtype=torch.bool, device=device),
                features=states.features.to(device=device, dtype=dtype),
                final_states=final,
                num_draft_tokens=num_draft_tokens,
                sampling=sampling,
                eos_ids=eos_ids,
                max_new_tokens=limit,
            )
            total.add(replayed)
    return total


def _parts(rows: Iterable[Row], size: int) -> Iterator[list[Row]]:
    part: list[Row] = []
    for row in rows:
        part.append(row)
        if len(part) == size:
            yield part
            part = []
    if part:
        yield part
