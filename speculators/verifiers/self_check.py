"""The check at the start of every training: do the states and the head rebuild the verifier's own predictions?

A wrong layer, a final norm applied twice or not at all, or another model's head do not crash a training; they cost the
acceptance. One real row shows them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from speculators.data.rows import Row
from speculators.errors import VerifierError
from speculators.verifiers.loading import Verifier
from speculators.verifiers.source import CachedSource, HiddenStates, HiddenStateSource, TellsNextTokens

__all__ = ["SelfCheck", "check_source", "check_states", "witness_of"]

#: Largest accepted difference of a probability. Rounding of float32 states gives about 1e-5, of bfloat16 about 1e-2.
TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-3}
COARSE_TOLERANCE = 5e-2

#: The same for float32 states that were stored in fewer bytes: about ten times and three times what SmolLM2's rounding gives.
#: A norm or a layer that is wrong changes a probability by nearly 1.
STORED_TOLERANCES = {"float16": 1e-2, "fp8": 0.25}

#: Positions compared; their logits over the whole vocabulary are held at once.
MAX_POSITIONS = 32

#: Most tokens of the row, and most probable ids per position that a source is asked for; vLLM tells at most 20.
MAX_TOKENS, WITNESSED_IDS = 512, 20


class FullHead(Protocol):
    """What is needed of the verifier's head, as :class:`speculators.models.verifier_weights.VerifierHead` gives it."""

    @property
    def can_normalize(self) -> bool: ...

    def normalize(self, states: Tensor) -> Tensor: ...

    def full_logits(self, states: Tensor) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class SelfCheck:
    """What the check measured."""

    row_id: int
    positions: int
    max_difference: float  #: largest difference of a next-token probability
    tolerance: float


@dataclass(frozen=True, slots=True)
class _Witnessed:
    """Probabilities that are known to be the verifier's.

    ``ids`` is ``[P, k]``, or None where ``probabilities`` are of the whole vocabulary, ``[P, V]``.
    """

    positions: Tensor
    ids: Tensor | None
    probabilities: Tensor

    def difference(self, logits: Tensor) -> float:
        """Largest difference to the probabilities that ``logits`` ``[P, V]`` give."""
        found = logits.double().softmax(dim=-1).cpu()
        if self.ids is not None:
            found = found.gather(1, self.ids)
        return float((found - self.probabilities).abs().max())


@torch.no_grad()
def check_source(
    source: HiddenStateSource,
    head: FullHead,
    verifier: Verifier | None,
    rows: Sequence[Row],
    context_length: int | None = None,
) -> SelfCheck:
    """Check the first row that has at least two tokens, asked of the source in a call of its own.

    :param verifier: compared with in full where it is loaded; None: the source itself tells what its verifier predicts, which
        shows what lies between the verifier and here (layers, norm, order, transport, head), though not that it is the right
        verifier.
    :param context_length: most tokens that may be asked for, if ``verifier`` is None.
    :raises VerifierError: the rebuilt distribution is not the verifier's; the sentence says which reading would be.
    """
    limit = min(MAX_TOKENS, (context_length if verifier is None else verifier.context_length) or MAX_TOKENS)
    row, states = _first_states(source, rows, limit)
    found = source.description
    pre_norm = found.final_state == "pre_norm"
    if verifier is not None:
        return check_states(states.final, row, head, verifier, pre_norm=pre_norm, precision=found.precision)
    witness = witness_of(source)
    if witness is None:
        raise VerifierError("the hidden-states source does not tell what its verifier predicts; load the verifier to check it")
    told = witness.next_tokens(row, _positions(len(row)).tolist(), WITNESSED_IDS)
    if not len(told.positions):
        raise VerifierError(
            f"the hidden-states source tells nothing of what its verifier predicts for row {row.row_id}; start its server "
            "with a longer --max-model-len, or fill the store again"
        )
    witnessed = _Witnessed(told.positions, told.ids, told.logprobs.double().exp())
    tolerance = _tolerance(states.final, found.precision)
    return _compare(states.final, row.row_id, head, witnessed, pre_norm=pre_norm, tolerance=tolerance)


@torch.no_grad()
def check_states(
    final: Tensor, row: Row, head: FullHead, verifier: Verifier, *, pre_norm: bool, precision: str | None = None
) -> SelfCheck:
    """Check final states ``[T, H]`` of a row.

    :param pre_norm: whether they were taken before the verifier's final norm.
    :param precision: as of :class:`~speculators.verifiers.source.StatesDescription`.
    :raises VerifierError: see :func:`check_source`.
    """
    positions = _positions(len(row))
    ids = torch.tensor(row.input_ids, device=verifier.device).view(1, -1)
    with verifier.lock:
        own = verifier.logits(ids, keep=positions.to(verifier.device))[0]
    witnessed = _Witnessed(positions, None, own.double().softmax(dim=-1).cpu())
    tolerance = _tolerance(final, precision) if final.dtype == verifier.dtype else COARSE_TOLERANCE
    return _compare(final, row.row_id, head, witnessed, pre_norm=pre_norm, tolerance=tolerance)


def witness_of(source: HiddenStateSource) -> TellsNextTokens | None:
    """What tells the predictions of the source's verifier, if anything does."""
    while isinstance(source, CachedSource):
        source = source.source
    return source if isinstance(source, TellsNextTokens) else None


def _first_states(source: HiddenStateSource, rows: Sequence[Row], limit: int) -> tuple[Row, HiddenStates]:
    """The first row that can be checked, cut to ``limit`` tokens, and its states."""
    told = getattr(source, "probed_rows", None)
    if told is not None:  # a store can be checked by the rows whose predictions were recorded
        rows = [row for row in rows if row.row_id in told] or rows
    checkable = [row for row in rows if len(row) > 1]
    if not checkable:
        raise VerifierError("no row has two tokens, so hidden states cannot be checked; prepare the data again")
    for row in checkable:
        cut = Row(row.row_id, row.input_ids[:limit], row.loss_mask[:limit])
        answer = source.fetch([cut])
        if answer:
            return cut, answer[0]
    raise VerifierError(f"the hidden-states source has no states for any of {len(checkable)} rows; make them first")


def _positions(length: int) -> Tensor:
    """Spread over the row: a wrong norm shows at any position, wrong tokens only after the first of them."""
    return torch.linspace(0, length - 1, min(MAX_POSITIONS, length)).long().unique()


def _tolerance(final: Tensor, precision: str | None) -> float:
    return max(TOLERANCES.get(final.dtype, COARSE_TOLERANCE), STORED_TOLERANCES.get(precision or "", 0.0))


def _compare(
    final: Tensor, row_id: int, head: FullHead, witnessed: _Witnessed, *, pre_norm: bool, tolerance: float
) -> SelfCheck:
    weight_device = next(iter(head.buffers()), final).device if isinstance(head, torch.nn.Module) else final.device
    states = final[witnessed.positions.to(final.device)].to(weight_device)

    def difference(candidate: Tensor) -> float:
        return witnessed.difference(head.full_logits(candidate))

    found = difference(head.normalize(states) if pre_norm else states)
    if found <= tolerance:
        return SelfCheck(row_id, len(witnessed.positions), found, tolerance)
    can_compare = pre_norm or head.can_normalize
    if can_compare and difference(states if pre_norm else head.normalize(states)) <= tolerance:
        truth = "after" if pre_norm else "before"
        hint = f"they were taken {truth} the final norm: set --final-state {'post_norm' if pre_norm else 'pre_norm'}"
    else:
        hint = "they come from another verifier or another layer: capture them again with this one"
    raise VerifierError(
        f"the hidden states of row {row_id} do not rebuild the verifier's next-token probabilities "
        f"(largest difference {found:.2g}, allowed {tolerance:.2g}); {hint}"
    )
