"""Elementwise loss terms between a draft distribution q and a verifier distribution p.

q is a softmax over the D ids of the draft vocabulary. p is either a softmax over the same ids (support ``draft``), or the
verifier's softmax over all V ids, of which only the D draft entries are kept and *not* renormalised (support ``full``); the
mass outside the draft vocabulary is then ``outside``, and q is 0 there. With the full support:

=============  ========================================================================================================
``tv``         1 - sum_D min(p, q): one minus the true acceptance probability
``l1``         sum_D abs(p - q) + outside, which is 2 tv
``nla``        -log of the true acceptance probability
``rkl``        sum_D q log(q / p), p the full-vocabulary probability
``jsd``        with the full p; ids outside add outside * log(2) / 2
``kl_div``     infinite over all V ids (q is 0 outside), hence against p renormalised over the draft vocabulary
``lk_hybrid``  lambda and tv from the full p, KL as ``kl_div``
``ce``         against one label, so p plays no part; a ``verifier`` label is the argmax over the draft vocabulary
=============  ========================================================================================================
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

__all__ = ["MIN_ACCEPTANCE", "TERMS", "Distributions", "full_precision"]

#: Acceptance below which -log(acceptance) stops growing.
MIN_ACCEPTANCE = 1e-5


def full_precision(logits: Tensor) -> Tensor:
    """float64 as it is, everything else as float32: the precision of every softmax here."""
    return logits if logits.dtype == torch.float64 else logits.float()


@dataclass
class Distributions:
    """What the terms are functions of; quantities shared by several terms are computed once.

    :param log_q: log of the draft's distribution, ``[..., D]``.
    :param log_p: log of the verifier's, ``[..., D]``; constant, no gradient.
    :param labels: draft ids of the ``ce`` label, ``[...]``.
    :param outside: verifier's mass outside the draft vocabulary, ``[...]``; None when p is renormalised.
    """

    log_q: Tensor
    log_p: Tensor
    labels: Tensor
    outside: Tensor | None = None

    @cached_property
    def q(self) -> Tensor:
        return self.log_q.exp()

    @cached_property
    def p(self) -> Tensor:
        return self.log_p.exp()

    @cached_property
    def acceptance(self) -> Tensor:
        """alpha = sum_v min(p(v), q(v)) ``[...]``: probability that a token drawn from q is accepted."""
        return torch.minimum(self.p, self.q).sum(dim=-1)

    @cached_property
    def kl(self) -> Tensor:
        log_p = self.log_p if self.outside is None else self.log_p - self.log_p.logsumexp(dim=-1, keepdim=True)
        return (log_p.exp() * (log_p - self.log_q)).sum(dim=-1)


def _ce(d: Distributions) -> Tensor:
    return -d.log_q.gather(-1, d.labels[..., None]).squeeze(-1)


def _tv(d: Distributions) -> Tensor:
    return 1 - d.acceptance


def _l1(d: Distributions) -> Tensor:
    difference = (d.p - d.q).abs().sum(dim=-1)
    return difference if d.outside is None else difference + d.outside


def _kl_div(d: Distributions) -> Tensor:
    return d.kl


def _rkl(d: Distributions) -> Tensor:
    return (d.q * (d.log_q - d.log_p)).sum(dim=-1)


def _jsd(d: Distributions) -> Tensor:
    log_m = torch.logaddexp(d.log_p, d.log_q) - math.log(2)
    divergence = 0.5 * (d.p * (d.log_p - log_m)).sum(dim=-1) + 0.5 * (d.q * (d.log_q - log_m)).sum(dim=-1)
    return divergence if d.outside is None else divergence + 0.5 * math.log(2) * d.outside


def _nla(d: Distributions) -> Tensor:
    return -d.acceptance.clamp(min=MIN_ACCEPTANCE).log()


def _lk_hybrid(d: Distributions) -> Tensor:
    """lambda KL + (1 - lambda) TV, lambda = exp(-3 alpha) without gradient (arXiv 2602.23881)."""
    share = torch.exp(-3 * d.acceptance.detach())
    return share * d.kl + (1 - share) * _tv(d)


#: Term name -> elementwise loss ``[...]``.
TERMS: dict[str, Callable[[Distributions], Tensor]] = {
    "ce": _ce,
    "tv": _tv,
    "l1": _l1,
    "kl_div": _kl_div,
    "rkl": _rkl,
    "jsd": _jsd,
    "nla": _nla,
    "lk_hybrid": _lk_hybrid,
}
