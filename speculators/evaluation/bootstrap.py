"""Bootstrap interval of an acceptance length over prompts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

__all__ = ["acceptance_interval"]

#: Below this many prompts a resampled interval says more about the resampling than about the draft.
MIN_PROMPTS = 5
_RESAMPLES = 2000


def acceptance_interval(tokens: Sequence[int], rounds: Sequence[int], seed: int = 0) -> tuple[float, float] | None:
    """95 % percentile interval of ``sum(tokens) / sum(rounds)`` when prompts are resampled with replacement.

    Prompts are the unit because rounds of one answer are alike; the ratio is taken after summing, as the figure itself is.

    :param tokens: tokens emitted by the rounds of each prompt.
    :param rounds: rounds of each prompt.
    :returns: None for fewer than :data:`MIN_PROMPTS` prompts with a round.
    """
    counts = np.array([pair for pair in zip(tokens, rounds) if pair[1] > 0], dtype=np.float64).reshape(-1, 2)
    if len(counts) < MIN_PROMPTS:
        return None
    chosen = np.random.default_rng(seed).integers(0, len(counts), size=(_RESAMPLES, len(counts)))
    sums = counts[chosen].sum(axis=1)
    low, high = np.quantile(sums[:, 0] / sums[:, 1], [0.025, 0.975])
    return float(low), float(high)
