"""Training metrics of blocks as (numerator, denominator) pairs.

Acceptance here is teacher-forced and, with the support ``draft``, over the draft vocabulary alone: a training signal, not
what a decoder reaches. Real acceptance comes from :mod:`speculators.decoding`.
"""

from __future__ import annotations

from torch import Tensor

__all__ = ["confidence_metrics", "draft_metrics"]

Sums = dict[str, tuple[Tensor, Tensor]]


def draft_metrics(acceptance: Tensor, correct: Tensor, counts: Tensor) -> Sums:
    """Accuracy and acceptance of the draft's predictions.

    ``accuracy`` and ``position_{k}_accuracy`` (k from 1)
        share of predictions whose argmax is the verifier's argmax over the draft vocabulary.
    ``accept_rate``
        mean of alpha = sum_v min(p, q).
    ``tau_uniform``
        mean over blocks of 1 + sum_k prod_{j <= k} alpha_j over counted predictions, the bonus token included.
    ``greedy_run``
        mean over blocks of 1 + leading run of correct predictions.

    :param acceptance: alpha ``[A, N]``.
    :param correct: bool ``[A, N]``.
    :param counts: bool ``[A, N]``, a prefix of every row.
    """
    dtype = acceptance.dtype
    mask = counts.to(dtype)
    total = mask.sum()
    hits = correct.to(dtype) * mask
    # A block counts as soon as its first prediction does.
    blocks = mask[:, 0].sum()
    sums: Sums = {
        "accuracy": (hits.sum(), total),
        "accept_rate": ((acceptance * mask).sum(), total),
        "tau_uniform": (blocks + (acceptance * mask).cumprod(dim=-1).sum(), blocks),
        "greedy_run": (blocks + hits.cumprod(dim=-1).sum(), blocks),
    }
    for depth in range(counts.shape[-1]):
        sums[f"position_{depth + 1}_accuracy"] = (hits[:, depth].sum(), mask[:, depth].sum())
    return sums


def confidence_metrics(predicted: Tensor, acceptance: Tensor, counts: Tensor) -> Sums:
    """How well the confidence head predicts acceptance.

    ``confidence_abs_error``: mean of abs(c - alpha); ``confidence_pred_mean``: mean of c; ``confidence_cumprod_bias``: mean
    of prod_{j <= k} c_j - prod_{j <= k} alpha_j, positive where the head promises too long a prefix.

    :param predicted: c ``[A, N]``, probabilities.
    :param acceptance: alpha ``[A, N]``.
    :param counts: bool ``[A, N]``.
    """
    mask = counts.to(acceptance.dtype)
    total = mask.sum()
    bias = predicted.cumprod(dim=-1) - acceptance.cumprod(dim=-1)
    return {
        "confidence_abs_error": (((predicted - acceptance).abs() * mask).sum(), total),
        "confidence_pred_mean": ((predicted * mask).sum(), total),
        "confidence_cumprod_bias": ((bias * mask).sum(), total),
    }
