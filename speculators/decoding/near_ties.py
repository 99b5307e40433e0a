"""Greedy outputs of drafting and of plain decoding, compared token by token.

They are equal in exact arithmetic. In float32 passes over n + 1 tokens and over one are rounded differently (by about
5e-5 in the logits), so where the verifier's two best tokens are as good as equal either may come out, and everything after
it differs. Such a *near tie* is no fault of the decoder, anything else is one. So at the first difference the verifier's
logits are computed again one token at a time; when both tokens are within the margin of the best, the place is recorded
and the comparison starts again from the baseline's text behind it. In float64 nothing is forgiven.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from speculators.decoding.decoder import Decoder
    from speculators.verifiers.session import VerifierSession

__all__ = ["NEAR_TIE_MARGIN", "GreedyComparison", "GreedyDifference", "NearTie", "compare_greedy"]

#: Two logits closer than this may change places between passes of different width.
NEAR_TIE_MARGIN = 1e-3


@dataclass(frozen=True, slots=True)
class NearTie:
    """Where greedy outputs may part: prompt index, place among the generated tokens (from 0), gap of the two best logits."""

    prompt: int
    position: int
    margin: float

    def to_dict(self) -> dict[str, int | float]:
        return {"prompt": self.prompt, "position": self.position, "margin": self.margin}


@dataclass(frozen=True, slots=True)
class GreedyDifference:
    """A difference that is no near tie: place among the generated tokens, both tokens (None: output ended), and the gap."""

    prompt: int
    position: int
    baseline: int | None
    candidate: int | None
    margin: float


@dataclass(slots=True)
class GreedyComparison:
    near_ties: list[NearTie] = field(default_factory=list)
    difference: GreedyDifference | None = None

    @property
    def identical_to_baseline(self) -> bool:
        """Whether the outputs are the same except for near ties."""
        return self.difference is None


class _OneTokenLogits:
    """The verifier's logits before each token of a text, computed one token at a time; asked for ascending places."""

    def __init__(self, session_factory: Callable[[], VerifierSession], prompt: Sequence[int], text: Sequence[int]) -> None:
        self._session = session_factory()
        self._text = text
        self._seen = 0
        self._logits = self._session.prefill([torch.as_tensor(prompt, dtype=torch.long)])[0].logits[-1]

    def before(self, place: int) -> Tensor:
        """Logits ``[V]`` of token ``place`` of the text."""
        while self._seen < place:
            token = torch.tensor([self._text[self._seen]], dtype=torch.long)
            self._logits = self._session.verify([token])[0].logits[-1]
            self._seen += 1
        return self._logits


def compare_greedy(
    decoder: Decoder,
    prompt: Sequence[int],
    baseline: Sequence[int],
    candidate: Sequence[int],
    max_new_tokens: int,
    *,
    eos_ids: Collection[int] = (),
    prompt_index: int = 0,
    margin: float = NEAR_TIE_MARGIN,
) -> GreedyComparison:
    """Compare a drafted greedy output with plain decoding's.

    :param decoder: made ``candidate``, and goes on with it behind a near tie (outside any timing).
    :param prompt: the prompt's token ids.
    :param baseline: tokens that plain decoding generated for the prompt.
    :param candidate: tokens that ``decoder`` generated for it.
    :param max_new_tokens: the limit both ran under.
    :param margin: logits closer than this are a near tie; taken as 0 for a float64 verifier.
    """
    result = GreedyComparison()
    logits: _OneTokenLogits | None = None
    start = 0
    while True:
        place = _first_difference(baseline[start:], candidate)
        if place is None:
            return result
        position = start + place
        expected = baseline[position] if position < len(baseline) else None
        actual = candidate[place] if place < len(candidate) else None
        if logits is None:
            logits = _OneTokenLogits(decoder.session_factory, prompt, baseline)
        row = logits.before(position)
        best, second = (float(value) for value in row.topk(2).values)
        allowed = 0.0 if row.dtype == torch.float64 else margin
        if expected is None or actual is None or best - float(row[[expected, actual]].min()) >= allowed:
            result.difference = GreedyDifference(prompt_index, position, expected, actual, best - second)
            return result
        result.near_ties.append(NearTie(prompt_index, position, best - second))
        start = position + 1
        if start >= len(baseline):
            return result
        candidate = decoder.decode([*prompt, *baseline[:start]], max_new_tokens - start, eos_ids, index=prompt_index).tokens


def _first_difference(left: Sequence[int], right: Sequence[int]) -> int | None:
    """First place where two sequences differ, which may be the end of the shorter one; None when they are equal."""
    for place, (one, other) in enumerate(zip(left, right, strict=False)):
        if one != other:
            return place
    return None if len(left) == len(right) else min(len(left), len(right))
