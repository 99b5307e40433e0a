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
from speculators.verifiers.source import HiddenStateSource

__all__ = ["SelfCheck", "check_source", "check_states"]

#: Largest accepted difference of a probability. Rounding of float32 states gives about 1e-5, of bfloat16 about 1e-2.
TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-3}
COARSE_TOLERANCE = 5e-2

#: The same for float32 states that were stored in fewer bytes: about ten times and three times what SmolLM2's rounding gives.
#: A norm or a layer that is wrong changes a probability by nearly 1.
STORED_TOLERANCES = {"float16": 1e-2, "fp8": 0.25}

#: Positions compared; their logits over the whole vocabulary are held at once.
MAX_POSITIONS = 32


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


@torch.no_grad()
def check_source(source: HiddenStateSource, head: FullHead, verifier: Verifier, rows: Sequence[Row]) -> SelfCheck:
    """Check the first row that has at least two tokens, asked of the source in a call of its own.

    :raises VerifierError: the rebuilt distribution is not the verifier's; the sentence says which reading would be.
    """
    row = next((row for row in rows if len(row) > 1), None)
    if row is None:
        raise VerifierError("no row has two tokens, so hidden states cannot be checked; prepare the data again")
    length = min(len(row), 512 if verifier.context_length is None else verifier.context_length)
    row = Row(row.row_id, row.input_ids[:length], row.loss_mask[:length])
    final = source.fetch([row])[0].final
    found = source.description
    return check_states(final, row, head, verifier, pre_norm=found.final_state == "pre_norm", precision=found.precision)


@torch.no_grad()
def check_states(
    final: Tensor, row: Row, head: FullHead, verifier: Verifier, *, pre_norm: bool, precision: str | None = None
) -> SelfCheck:
    """Check final states ``[T, H]`` of a row.

    :param pre_norm: whether they were taken before the verifier's final norm.
    :param precision: as of :class:`~speculators.verifiers.source.StatesDescription`.
    :raises VerifierError: see :func:`check_source`.
    """
    # Spread over the row: a wrong norm shows at any position, wrong tokens only after the first of them.
    positions = torch.linspace(0, len(row) - 1, min(MAX_POSITIONS, len(row))).long().unique()
    ids = torch.tensor(row.input_ids, device=verifier.device).view(1, -1)
    with verifier.lock:
        own = verifier.logits(ids, keep=positions.to(verifier.device))[0]
    expected = own.double().softmax(dim=-1).cpu()
    weight_device = next(iter(head.buffers()), final).device if isinstance(head, torch.nn.Module) else final.device
    states = final[positions.to(final.device)].to(weight_device)

    def difference(candidate: Tensor) -> float:
        rebuilt = head.full_logits(candidate).double().softmax(dim=-1).cpu()
        return float((rebuilt - expected).abs().max())

    tolerance = TOLERANCES.get(final.dtype, COARSE_TOLERANCE) if final.dtype == verifier.dtype else COARSE_TOLERANCE
    tolerance = max(tolerance, STORED_TOLERANCES.get(precision or "", 0.0))
    found = difference(head.normalize(states) if pre_norm else states)
    if found <= tolerance:
        return SelfCheck(row.row_id, len(positions), found, tolerance)
    can_compare = pre_norm or head.can_normalize
    if can_compare and difference(states if pre_norm else head.normalize(states)) <= tolerance:
        truth = "after" if pre_norm else "before"
        hint = f"they were taken {truth} the final norm: set --final-state {'post_norm' if pre_norm else 'pre_norm'}"
    else:
        hint = "they come from another verifier or another layer: capture them again with this one"
    raise VerifierError(
        f"the hidden states of row {row.row_id} do not rebuild the verifier's next-token probabilities "
        f"(largest difference {found:.2g}, allowed {tolerance:.2g}); {hint}"
    )
