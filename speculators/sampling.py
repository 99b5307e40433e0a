"""Sampling settings and the distribution they make of logits, shared by verifier and draft.

Greedy decoding is the one-hot limit of the same code, so that one acceptance rule serves every temperature.
"""

from __future__ import annotations

import torch
from pydantic import BaseModel, ConfigDict, Field, field_validator
from torch import Tensor

__all__ = ["SamplingParams", "probabilities", "sample"]

#: Logits divided by less would leave float32's range.
LEAST_TEMPERATURE = 1e-6


class SamplingParams(BaseModel):
    """How the verifier samples. ``temperature`` 0 is greedy; ``top_k`` 0 and ``top_p`` 1 switch the filters off."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    temperature: float = Field(default=0.0, ge=0.0)
    top_k: int = Field(default=0, ge=0)
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)

    @field_validator("temperature")
    @classmethod
    def _divides(cls, value: float) -> float:
        if 0.0 < value < LEAST_TEMPERATURE:
            raise ValueError(f"Temperatures between 0 and {LEAST_TEMPERATURE} overflow; give 0 for greedy decoding")
        return value

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    def without_filters(self) -> SamplingParams:
        """The same temperature with top-k and top-p off: what a draft samples from, as serving engines do."""
        return SamplingParams(temperature=self.temperature)


def probabilities(logits: Tensor, params: SamplingParams) -> Tensor:
    """Distribution that ``params`` makes of logits ``[..., V]``; one-hot at the argmax when greedy.

    float64 logits stay float64, all others are computed in float32. Top-k is applied before top-p; both keep the most
    probable tokens (top-p: the smallest set whose mass reaches ``top_p``, at least one token) and renormalise.
    """
    scores = logits if logits.dtype == torch.float64 else logits.float()
    if params.greedy:
        return torch.zeros_like(scores).scatter_(-1, scores.argmax(dim=-1, keepdim=True), 1.0)
    scores = scores / params.temperature
    if 0 < params.top_k < scores.shape[-1]:
        # Exactly k tokens, ties broken by topk's order: `scores < kth` would keep every tie.
        kept = torch.topk(scores, params.top_k, dim=-1).indices
        scores = torch.full_like(scores, float("-inf")).scatter_(-1, kept, scores.gather(-1, kept))
    result = scores.softmax(dim=-1)
    if params.top_p < 1.0:
        ordered, order = result.sort(dim=-1, descending=True, stable=True)
        mass_before = ordered.cumsum(dim=-1) - ordered
        ordered = ordered.masked_fill(mass_before >= params.top_p, 0.0)
        result = torch.zeros_like(result).scatter_(-1, order, ordered)
        result = result / result.sum(dim=-1, keepdim=True)
    return result


def sample(distribution: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Draw one index per row of ``distribution`` ``[..., V]``; the argmax of a one-hot row needs no random number."""
    flat = distribution.reshape(-1, distribution.shape[-1])
    drawn = torch.multinomial(flat, 1, generator=generator)
    return drawn.reshape(distribution.shape[:-1])
