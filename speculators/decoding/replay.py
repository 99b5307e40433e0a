"""What the decoder would do on a row, computed from the row: teacher-forced prediction, exact by construction.

The row must be the verifier's own answer under the same sampling. Then its tokens x are a draw from the verifier, and so from
the decoder, whose output has the same distribution. With p the verifier's distribution over its whole vocabulary, q the
draft's (0 outside the draft vocabulary), both given the row's own tokens, and n drafted tokens:

*Given that the decoder's output is x*, a block at anchor a accepts its token of depth d, if it accepted those before, with
probability r_d = min(1, q_d(x_d) / p_d(x_d)). (Accepting writes x_d with probability min(p_d, q_d)(x_d), rejecting with
(p_d - q_d)+(x_d); they add up to p_d(x_d).) So the next anchor is k + 1 tokens further on with probability
r_0 ... r_{k-1} (1 - r_k), and following these steps from the answer's first token gives v_a, the exact probability that a
round began at a, given x. Over rows the mean of sum_a v_a is the mean number of rounds.

*Before its outcome is known*, a block at a accepts its first k + 1 tokens with a probability that
S_k = r_0 ... r_{k-1} * sum_v min(p_k(v), q_k(v)) estimates without bias: summed over x, the p's cancel. (The plain product of
the acceptance rates sum_v min(p_d, q_d) does not: it weighs prefixes as the verifier draws them, not as blocks accept
them.) Since v_a depends on tokens up to a only, v_a (1 + sum_k S_k) is an unbiased estimate of the tokens of the round at a.

Greedy decoding is the limit in which r and S are 0 or 1 and v_a marks the decoder's own walk.

Shape letters: T tokens of the row, A anchors, n drafted tokens, K slots, H hidden, M captured layers, D draft and V verifier
vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from speculators.batch import PackedBatch
from speculators.decoding.statistics import Round
from speculators.decoding.walk import complete_blocks, expected_visits
from speculators.errors import DataError
from speculators.layout import (
    DraftLayout,
    anchor_candidates,
    counted_predictions,
    label_position,
    previous_position,
)
from speculators.sampling import SamplingParams, probabilities

if TYPE_CHECKING:
    from speculators.data.rows import AnswerRecord
    from speculators.losses import TeacherHead

__all__ = ["ReplayModel", "ReplayedRow", "replay_row", "require_own_answers"]

#: Blocks that go through the draft's layers, and through both output heads, at a time.
BLOCKS_PER_PASS, BLOCKS_PER_HEAD = 512, 64


class ReplayHeads(Protocol):
    """Output heads of some blocks."""

    def rows(self, blocks: slice) -> ReplayHeads:
        """The heads of some of them."""
        ...

    def logits(self, hidden: Tensor, previous_ids: Tensor) -> Tensor:
        """``[A, N, D]`` of states ``[A, N, H]`` and previous verifier ids ``[A, N]``."""
        ...


class ReplayModel(Protocol):
    """What a block draft offers to be replayed."""

    draft_vocab_size: int

    @property
    def layout(self) -> DraftLayout: ...

    def heads_of(self, hidden: Tensor, anchor_ids: Tensor) -> ReplayHeads:
        """The heads for blocks with these states of all slots ``[A, K, H]`` and anchors ``[A]``."""
        ...

    def draft_hidden(self, batch: PackedBatch, num_slots: int | None = None) -> Tensor:
        """Post-norm states of the blocks' slots ``[A, K, H]``."""
        ...

    def draft_to_verifier(self, draft_ids: Tensor) -> Tensor:
        """Verifier ids of draft ids, any shape."""
        ...

    def verifier_to_draft(self, verifier_ids: Tensor) -> Tensor:
        """Draft ids of verifier ids, any shape; -1 outside the draft vocabulary."""
        ...


def require_own_answers(answers: AnswerRecord | None, sampling: SamplingParams) -> None:
    """Refuse rows that are not the verifier's own answers under ``sampling``.

    :param answers: the rows' manifest's record of how their answers came about.
    :raises DataError: when they are not, or nothing is recorded about them.
    """
    if answers is None or not answers.on_policy:
        raise DataError(
            "these rows are not recorded as the verifier's own answers, so they cannot predict acceptance; "
            "let the verifier answer the prompts first"
        )
    made = SamplingParams(temperature=answers.temperature, top_k=answers.top_k, top_p=answers.top_p)
    if made != sampling and not (made.greedy and sampling.greedy):
        raise DataError(
            f"these rows were answered at {_describe(made)}, which predicts nothing about decoding at {_describe(sampling)}; "
            "answer the prompts again with the same sampling"
        )


def _describe(sampling: SamplingParams) -> str:
    if sampling.greedy:
        return "temperature 0"
    return f"temperature {sampling.temperature:g}, top-k {sampling.top_k}, top-p {sampling.top_p:g}"


@dataclass(slots=True)
class ReplayedRow:
    """One row's blocks. Column d is depth d; entries that do not count are 0."""

    anchors: Tensor  #: int64 ``[A]``: every position that may start a block, ascending
    counts: Tensor  #: bool ``[A, n]``: whether the predicted token lies in the row's answer
    kept: Tensor  #: float64 ``[A, n]``: r, the probability that the row's token is an accepted draft token
    overlap: Tensor  #: float64 ``[A, n]``: sum_v min(p, q); the chance to accept a token of this depth after the row's prefix
    overlap_going_on: Tensor  #: float64 ``[A, n]``: the same without end-of-sequence tokens: a round goes on
    visits: Tensor  #: float64 ``[A]``: v, the probability that the decoder has a round here, given that it writes this row
    complete: Tensor  #: bool ``[A]``: whether all that a round here may draft lies within the token budget
    ends: Tensor  #: bool ``[A, n]``: whether the row's token of this depth is an end-of-sequence token
    mass: float  #: sum over the answer's tokens of p's mass inside the draft vocabulary
    tokens: int  #: number of these tokens
    surprises: int  #: of these tokens, how many the verifier would not have written; near ties and rounding, else wrong rows

    def prefixes(self) -> Tensor:
        """S ``[A, n]``: unbiased estimates of the probability that a block here accepts its first d + 1 tokens."""
        return self._before(self.kept) * self.overlap

    def expected_tokens(self) -> Tensor:
        """Unbiased estimates ``[A]`` of a round's tokens, bonus token included; there is none after an accepted end."""
        return 1.0 + (self._before(torch.where(self.ends, 0.0, self.kept)) * self.overlap_going_on).sum(dim=1)

    def expected_accepted(self) -> Tensor:
        """Unbiased estimates ``[A, n]`` of the probability that a round accepts its tokens 0..d, none before d being an end."""
        return self._before(torch.where(self.ends, 0.0, self.kept)) * self.overlap

    def greedy_rounds(self) -> list[Round]:
        """The rounds of greedy decoding. A round that is not complete may accept more than the row shows."""
        rounds = []
        for place in self.visits.nonzero().flatten().tolist():
            accepted = int(self.kept[place].cumprod(dim=0).sum())
            ended = accepted > 0 and bool(self.ends[place, accepted - 1])
            emitted = accepted if ended else accepted + 1
            n = self.kept.shape[1]
            rounds.append(
                Round(int(self.anchors[place]), n, accepted, emitted, emitted, ended, complete=bool(self.complete[place]))
            )
        return rounds

    @staticmethod
    def _before(factors: Tensor) -> Tensor:
        """Product of the factors of smaller depth ``[A, n]``, 1 at depth 0."""
        return torch.cat([torch.ones_like(factors[:, :1]), factors[:, :-1]], dim=1).cumprod(dim=1)


@torch.no_grad()
def replay_row(
    model: ReplayModel,
    teacher: TeacherHead,
    *,
    input_ids: Tensor,
    loss_mask: Tensor,
    features: Tensor,
    final_states: Tensor,
    num_draft_tokens: int,
    sampling: SamplingParams,
    eos_ids: Collection[int] = (),
    max_new_tokens: int | None = None,
) -> ReplayedRow:
    """Replay one row, on the device of its tensors.

    :param model: the draft; queried at the slots that drafting n tokens queries.
    :param teacher: the verifier's output head.
    :param input_ids: ``[T]``, a prompt and the verifier's own answer (:func:`require_own_answers`).
    :param loss_mask: bool ``[T]``, true on the answer (or answers).
    :param features: ``[T, M, H]``, the verifier's states of the captured layers.
    :param final_states: ``[T, H]``, ready for the verifier's head (post-norm).
    :param num_draft_tokens: n.
    :param sampling: how the verifier sampled the answer.
    :param eos_ids: the tokens that ended an answer.
    :param max_new_tokens: the limit the answers were made under; with it, which rounds count is decided by position alone,
        which keeps the prediction unbiased where answers were cut.
    :raises ValueError: when n is not one the layout can draft.
    """
    n = num_draft_tokens
    slots = model.layout.query_slots(n)
    device = input_ids.device
    loss_mask = loss_mask.bool()
    document_ids = torch.zeros_like(input_ids)
    anchors = anchor_candidates(loss_mask, document_ids, model.layout.first_anchor).nonzero().flatten()
    positions = torch.arange(input_ids.shape[0], device=device)
    batch = PackedBatch(input_ids, loss_mask, document_ids, positions, (0,), anchors, features, final_states)
    depths = torch.arange(n, device=device)
    labels = input_ids[label_position(anchors[:, None], depths).clamp(max=input_ids.shape[0] - 1)]
    counts = counted_predictions(anchors, n, loss_mask, document_ids)
    stops = torch.tensor(sorted(eos_ids), dtype=torch.long, device=device)
    compared = _Comparison.empty(anchors.shape[0], n, device)
    for first in range(0, anchors.shape[0], BLOCKS_PER_PASS):
        part = dataclasses.replace(batch, anchors=anchors[first : first + BLOCKS_PER_PASS])
        slot_states = model.draft_hidden(part, num_slots=slots)
        heads = model.heads_of(slot_states, part.anchor_ids)
        hidden = slot_states[:, model.layout.slot_of_depth(0) :]  # [A, n, H]
        for start in range(0, hidden.shape[0], BLOCKS_PER_HEAD):
            rows = slice(first + start, first + min(start + BLOCKS_PER_HEAD, hidden.shape[0]))
            previous = input_ids[previous_position(anchors[rows, None], depths).clamp(max=input_ids.shape[0] - 1)]
            blocks = slice(start, start + BLOCKS_PER_HEAD)
            draft_logits = heads.rows(blocks).logits(hidden[blocks], previous)
            # Every counted prediction's state lies at a position that may be an anchor, so the blocks' states are theirs
            # and those of the next n - 1 anchors: each row of p is computed about once, however many blocks use it.
            verifier_logits = teacher.full_logits(final_states[anchors[rows.start : rows.stop + n - 1]])
            compared.fill(rows, model, draft_logits, verifier_logits, labels[rows], sampling=sampling, stops=stops)
    counts = counts.cpu()
    ends = (torch.isin(labels, stops) & counts.to(device)).cpu()
    kept, overlap, going_on = (values.masked_fill(~counts, 0.0) for values in compared.probabilities())
    anchors, loss_mask = anchors.cpu(), loss_mask.cpu()
    return ReplayedRow(
        anchors=anchors,
        counts=counts,
        kept=kept,
        overlap=overlap,
        overlap_going_on=going_on,
        visits=expected_visits(anchors, counts, kept, loss_mask),
        complete=complete_blocks(anchors, n, loss_mask, torch.isin(input_ids, stops).cpu(), max_new_tokens),
        ends=ends,
        mass=float(compared.mass.sum()),
        tokens=anchors.shape[0],
        surprises=int(compared.surprises.sum()),
    )


@dataclass(slots=True)
class _Comparison:
    """Draft against verifier, block by block; ``[A, n]`` and ``[A]``, before what does not count is taken out."""

    kept: Tensor
    overlap: Tensor
    going_on: Tensor
    mass: Tensor  #: ``[A]``, of the distribution after the anchor
    surprises: Tensor  #: bool ``[A]``

    @classmethod
    def empty(cls, num_anchors: int, n: int, device: torch.device) -> _Comparison:
        table, column = (torch.zeros(shape, dtype=torch.float64, device=device) for shape in ((num_anchors, n), (num_anchors,)))
        return cls(table, table.clone(), table.clone(), column, column.bool())

    def probabilities(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.kept.cpu(), self.overlap.cpu(), self.going_on.cpu()

    def fill(
        self,
        rows: slice,
        model: ReplayModel,
        draft_logits: Tensor,
        verifier_logits: Tensor,
        labels: Tensor,
        *,
        sampling: SamplingParams,
        stops: Tensor,
    ) -> None:
        """Compare some blocks.

        :param draft_logits: ``[a, n, D]``.
        :param verifier_logits: ``[s, V]``, of the blocks' anchors and up to n - 1 anchors behind them.
        :param labels: the row's tokens ``[a, n]``, verifier ids.
        """
        blocks, n = labels.shape
        kept_ids = model.draft_to_verifier(torch.arange(model.draft_vocab_size, device=labels.device))
        # Row of verifier_logits per block and depth; beyond the answer's end, where nothing counts, the last one.
        place = (torch.arange(blocks, device=labels.device)[:, None] + torch.arange(n, device=labels.device)).clamp(
            max=verifier_logits.shape[0] - 1
        )
        if sampling.greedy:
            best = verifier_logits.argmax(dim=-1)
            accepted = model.draft_to_verifier(draft_logits.argmax(dim=-1)) == best[place]
            self.kept[rows] = self.overlap[rows] = accepted.double()
            self.going_on[rows] = (accepted & ~torch.isin(best[place], stops)).double()
            self.mass[rows] = torch.isin(best[:blocks], kept_ids).double()
            self.surprises[rows] = best[:blocks] != labels[:, 0]
            return
        p = probabilities(verifier_logits, sampling)
        p_kept = p[:, kept_ids]
        q = probabilities(draft_logits, sampling.without_filters()).to(p.dtype)
        draft_labels = model.verifier_to_draft(labels)
        q_label = q.gather(2, draft_labels.clamp(min=0)[..., None]).squeeze(2).masked_fill(draft_labels < 0, 0.0)
        p_label = p[place, labels]
        self.kept[rows] = (q_label / p_label.clamp_min(torch.finfo(p.dtype).tiny)).clamp(max=1.0).double()
        draft_stops = model.verifier_to_draft(stops)
        draft_stops = draft_stops[draft_stops >= 0]
        for depth in range(n):  # one depth at a time: [a, D] instead of [a, n, D]
            shared = torch.minimum(p_kept[place[:, depth]], q[:, depth])
            self.overlap[rows, depth] = shared.sum(dim=-1).double()
            self.going_on[rows, depth] = (shared.sum(dim=-1) - shared[:, draft_stops].sum(dim=-1)).double()
        self.mass[rows] = p_kept[:blocks].sum(dim=-1).double()
        self.surprises[rows] = p_label[:, 0] == 0
