"""The acceptance rule of speculative sampling: which drafted tokens stay, and which token follows them.

A drafted token x, drawn from q, is kept with probability min(1, p(x) / q(x)); at the first one that is not, the next
token is drawn from norm((p - q)+) instead; when all are kept, the *bonus* token is drawn from the verifier's p after the last
one. The tokens that come out are distributed as the verifier's own, whatever q is (Leviathan et al. 2023, Chen et al. 2023).
That holds only if x was drawn from exactly this q, so q is the draft's corrected distribution (after the Markov bias and
the temperature), and 0 outside the draft vocabulary.

Shape letters: n drafted tokens, V verifier vocabulary, D draft vocabulary.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from speculators.sampling import sample

__all__ = ["Chance", "RandomChance", "accept_block", "acceptance_probabilities", "residual_distribution", "verify_greedy"]


class Chance(Protocol):
    """The random decisions of decoding. An interface, so that a test can go through every outcome instead of drawing one."""

    generator: torch.Generator | None

    def accepted_prefix(self, probabilities: Tensor) -> int:
        """Length of the accepted prefix, where token k is accepted with ``probabilities[k]`` ``[n]`` if all before it were."""
        ...

    def choose(self, distribution: Tensor) -> int:
        """An index drawn from ``distribution`` ``[V]``."""
        ...


class RandomChance:
    """Draws from a generator on the device of the tensors."""

    def __init__(self, generator: torch.Generator | None = None) -> None:
        self.generator = generator

    def accepted_prefix(self, probabilities: Tensor) -> int:
        draws = torch.rand(
            probabilities.shape, dtype=probabilities.dtype, device=probabilities.device, generator=self.generator
        )
        return int((draws < probabilities).cumprod(dim=0).sum())

    def choose(self, distribution: Tensor) -> int:
        return int(sample(distribution, self.generator))


def verify_greedy(logits: Tensor, tokens: Tensor) -> tuple[int, int]:
    """The rule at temperature 0: the one-hot case of :func:`accept_block`, without building the distributions.

    :param logits: the verifier's, ``[n + 1, V]``: row k gives its token after the first k drafted ones.
    :param tokens: the drafted tokens in verifier ids, ``[n]``.
    :returns: how many drafted tokens are accepted, and the verifier's token after them.
    """
    best: list[int] = logits.argmax(dim=-1).tolist()
    accepted = 0
    for token in tokens.tolist():
        if token != best[accepted]:
            break
        accepted += 1
    return accepted, best[accepted]


def acceptance_probabilities(p: Tensor, q: Tensor, tokens: Tensor, draft_ids: Tensor) -> Tensor:
    """min(1, p(x) / q(x)) of each drafted token x, ``[n]``.

    :param p: verifier distributions ``[n or more, V]``, row k before drafted token k.
    :param q: draft distributions the tokens were drawn from, ``[n, D]``.
    :param tokens: drafted tokens in verifier ids, ``[n]``.
    :param draft_ids: the same tokens in draft ids, ``[n]``.
    """
    of_verifier = p[: tokens.shape[0]].gather(1, tokens[:, None]).squeeze(1)
    of_draft = q.gather(1, draft_ids[:, None]).squeeze(1).to(p.dtype)
    return (of_verifier / of_draft.clamp_min(torch.finfo(p.dtype).tiny)).clamp(max=1.0)


def residual_distribution(p: Tensor, q: Tensor, verifier_ids: Tensor | None) -> Tensor:
    """norm((p - q)+), the distribution of the token that replaces a rejected one.

    :param p: verifier distribution ``[V]``.
    :param q: draft distribution ``[D]``.
    :param verifier_ids: verifier id of each draft id, ``[D]``; None when the vocabularies are the same.
    """
    rest = p - q if verifier_ids is None else p.index_add(0, verifier_ids, q.to(p.dtype), alpha=-1)
    rest = rest.clamp_min(0.0)
    total = rest.sum()
    # Nothing is left only where p equals q up to rounding; any token drawn from p is right then.
    return rest / total if total > 0 else p


def accept_block(
    p: Tensor, q: Tensor, tokens: Tensor, draft_ids: Tensor, *, verifier_ids: Tensor | None, chance: Chance
) -> tuple[int, int]:
    """The rule for one block.

    :param p: verifier distributions ``[n + 1, V]``, after temperature, top-k and top-p.
    :param q: draft distributions ``[n, D]`` the tokens were drawn from, after the Markov bias and the temperature.
    :param tokens: drafted tokens in verifier ids, ``[n]``; n may be 0, which is plain sampling.
    :param draft_ids: the same tokens in draft ids, ``[n]``.
    :param verifier_ids: verifier id of each draft id, ``[D]``; None when the vocabularies are the same.
    :param chance: where the random decisions come from.
    :returns: how many drafted tokens are accepted, and the token after them: residual, or bonus when all are accepted.
    """
    drafted = tokens.shape[0]
    accepted = chance.accepted_prefix(acceptance_probabilities(p, q, tokens, draft_ids)) if drafted else 0
    if accepted == drafted:
        return accepted, chance.choose(p[drafted])
    return accepted, chance.choose(residual_distribution(p[accepted], q[accepted], verifier_ids))
