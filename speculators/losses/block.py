"""The loss of anchored blocks, for every family that drafts a block at once.

Shape letters: A anchors, N predicted tokens per block, H hidden size, D draft vocabulary, V verifier vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from speculators.batch import PackedBatch
from speculators.losses.chunked import LogitTerms, chunked_terms
from speculators.losses.config import LossConfig
from speculators.losses.metrics import confidence_metrics, draft_metrics
from speculators.losses.targets import BlockTargets, gather_block_labels
from speculators.losses.terms import TERMS, Distributions, full_precision
from speculators.losses.weights import decay_weights, dpace_weights

__all__ = ["BlockHeads", "BlockLossOutput", "TeacherHead", "batch_denominators", "block_loss", "loss_denominators"]

#: Name of the confidence head's term in denominators and sums.
CONFIDENCE = "confidence"

Sums = dict[str, tuple[Tensor, Tensor]]


class BlockHeads(Protocol):
    """The draft's output heads."""

    def logits(self, hidden: Tensor, previous_ids: Tensor) -> Tensor:
        """Corrected logits (base head plus Markov bias) ``[A, N, D]`` of hidden ``[A, N, H]``, previous ids ``[A, N]``."""
        ...

    def linear_parts(self, hidden: Tensor, previous_ids: Tensor) -> list[tuple[Tensor, Tensor]]:
        """The same logits as pairs (input ``[A, N, k]``, weight ``[D, k]``) whose products add up to them."""
        ...

    def confidence_logits(self, hidden: Tensor, previous_ids: Tensor) -> Tensor | None:
        """Logit of the acceptance probability ``[A, N]``; None without a confidence head."""
        ...


class TeacherHead(Protocol):
    """The verifier's output head on states that are ready for it."""

    def draft_logits(self, states: Tensor) -> Tensor:
        """Logits of the draft vocabulary's ids ``[..., D]`` of states ``[..., H]``."""
        ...

    def full_logits(self, states: Tensor) -> Tensor:
        """Logits of all ids ``[..., V]`` of states ``[..., H]``."""
        ...


@dataclass(slots=True)
class BlockLossOutput:
    """Loss to differentiate, and what to log as (numerator, denominator) pairs, detached scalars.

    Pairs of several batches, accumulation steps or ranks are added before the one division. ``loss`` is divided by the
    denominators that were handed in; the pairs' denominators are this batch's own.
    """

    loss: Tensor
    sums: Sums = field(default_factory=dict)


def loss_denominators(counts: Tensor, label_draft_ids: Tensor | None, config: LossConfig) -> dict[str, float]:
    """Denominator of every term, and of the confidence term, for these blocks; add them up over the batches of a step.

    Needs masks and anchors only, so a step's denominators are known before its first forward.

    :param counts: bool ``[A, N]``.
    :param label_draft_ids: int ``[A, N]``, -1 outside the draft vocabulary; may be None unless ``ce_label`` is ``data``.
    """
    weights = decay_weights(counts.shape[-1], config.gamma, device=counts.device)

    def total(mask: Tensor, weighted: bool) -> float:
        per_depth = mask.sum(dim=0).double()
        return float(((per_depth * weights) if weighted else per_depth).sum())

    weighted = config.normalization == "weight"
    # D-PACE's weights depend on the forward; its denominator is the count, as upstream's.
    term_weighted = weighted and config.per_position_weight != "dpace"
    denominators = {name: total(_term_mask(name, counts, label_draft_ids, config), term_weighted) for name in config.loss_fn}
    denominators[CONFIDENCE] = total(counts, weighted)
    return denominators


def batch_denominators(
    batch: PackedBatch, num_depths: int, verifier_to_draft: Callable[[Tensor], Tensor], config: LossConfig
) -> dict[str, float]:
    """:func:`loss_denominators` of a packed row's anchors; needs no verifier states."""
    _, draft_labels, counts = gather_block_labels(batch, num_depths, verifier_to_draft)
    return loss_denominators(counts, draft_labels, config)


def block_loss(
    hidden: Tensor,
    heads: BlockHeads,
    teacher: TeacherHead,
    targets: BlockTargets,
    config: LossConfig,
    denominators: Mapping[str, float],
    *,
    impl: Literal["reference", "chunked"] = "reference",
    metrics: bool = True,
) -> BlockLossOutput:
    """Loss of A blocks; see :class:`~speculators.losses.config.LossConfig` for the formula.

    The verifier is a constant: no gradient reaches ``teacher`` or ``targets.states``, and the confidence target
    1 - TV is detached from the draft. With nothing counted the loss is 0 and still has a graph.

    :param hidden: the draft's post-norm states of the predicting slots, ``[A, N, H]``.
    :param denominators: as from :func:`loss_denominators`, summed over the optimiser step (all batches, all ranks).
    :param impl: ``reference`` reads like the formula; ``chunked`` takes the same values and gradients a few blocks at a time,
        so that memory does not grow with their number times the vocabulary (:mod:`speculators.losses.chunked`).
    :param metrics: whether to fill in the training metrics besides the terms' own sums.
    :raises ValueError: for an unknown ``impl``.
    """
    if impl not in ("reference", "chunked"):
        raise ValueError(f"unknown block_loss implementation {impl!r}; use 'reference' or 'chunked'")
    scales = {name: coefficient * _inverse(denominators[name]) for name, coefficient in config.loss_fn.items()}

    def evaluate(logits: Tensor, blocks: slice) -> LogitTerms:
        return _logit_terms(full_precision(logits), teacher, targets.blocks(blocks), config, scales, metrics)

    if impl == "chunked":
        terms = chunked_terms(heads.linear_parts(hidden, targets.previous_ids), evaluate)
    else:
        terms = evaluate(heads.logits(hidden, targets.previous_ids), slice(None))
    loss, numerators, coefficients = terms.loss, terms.numerators, dict(config.loss_fn)

    confidence = heads.confidence_logits(hidden, targets.previous_ids)
    if confidence is not None:
        coefficients[CONFIDENCE] = config.confidence_alpha
        numerator = _confidence_term(confidence, terms.acceptance, targets.counts, config)
        loss = loss + numerator * (config.confidence_alpha * _inverse(denominators[CONFIDENCE]))
        numerators[CONFIDENCE] = numerator.detach()

    with torch.no_grad():
        own = {name: value.to(loss.dtype) for name, value in _own_denominators(targets, config).items()}
        sums = {name: (numerators[name], own[name]) for name in coefficients}
        sums["loss"] = _loss_pair(sums, coefficients, own[CONFIDENCE])
        if metrics:
            sums |= draft_metrics(terms.acceptance, terms.correct, targets.counts)
            if confidence is not None:
                predicted = full_precision(confidence.detach()).sigmoid()
                sums |= confidence_metrics(predicted, terms.acceptance, targets.counts)
    return BlockLossOutput(loss=loss, sums=sums)


def _inverse(denominator: float) -> float:
    return 1 / denominator if denominator > 0 else 0.0


def _term_mask(name: str, counts: Tensor, label_draft_ids: Tensor | None, config: LossConfig) -> Tensor:
    """Which predictions a term sums over: all that count, but no data label that the draft cannot say."""
    if name == "ce" and config.ce_label == "data":
        if label_draft_ids is None:
            raise ValueError("ce_label 'data' needs label_draft_ids")
        return counts & (label_draft_ids >= 0)
    return counts


@torch.no_grad()
def _teacher_log_p(teacher: TeacherHead, states: Tensor, config: LossConfig) -> tuple[Tensor, Tensor | None]:
    """log p on the draft ids ``[..., D]``, and the mass outside them ``[...]`` where the full support is asked for."""
    draft_logits = full_precision(teacher.draft_logits(states))
    if config.target_support == "draft":
        return draft_logits.log_softmax(dim=-1), None
    log_normaliser = full_precision(teacher.full_logits(states)).logsumexp(dim=-1, keepdim=True)
    log_p = draft_logits - log_normaliser
    return log_p, (1 - log_p.exp().sum(dim=-1)).clamp(min=0)


def _distributions(
    logits: Tensor, teacher: TeacherHead, targets: BlockTargets, config: LossConfig
) -> tuple[Distributions, Tensor]:
    """Draft and verifier distributions ``[A, N, D]``, and the verifier's argmax over the draft vocabulary ``[A, N]``."""
    log_p, outside = _teacher_log_p(teacher, targets.states.detach(), config)
    verifier_labels = log_p.argmax(dim=-1)
    if targets.state_index is not None:
        log_p, verifier_labels = log_p[targets.state_index], verifier_labels[targets.state_index]
        outside = None if outside is None else outside[targets.state_index]
    labels = verifier_labels if config.ce_label == "verifier" else targets.label_draft_ids.clamp(min=0)
    log_q = logits.log_softmax(dim=-1)
    return Distributions(log_q=log_q, log_p=log_p.to(log_q.dtype), labels=labels, outside=outside), verifier_labels


def _logit_terms(
    logits: Tensor,
    teacher: TeacherHead,
    targets: BlockTargets,
    config: LossConfig,
    scales: Mapping[str, float],
    metrics: bool,
) -> LogitTerms:
    """Everything that reads the logits ``[A, N, D]``: the terms, each times its scale, and acceptance and accuracy."""
    distributions, verifier_labels = _distributions(logits, teacher, targets, config)
    decay = decay_weights(targets.counts.shape[-1], config.gamma, device=targets.counts.device).to(logits.dtype)
    loss = zero = logits.new_zeros(())
    numerators = {}
    for name, scale in scales.items():
        mask = _term_mask(name, targets.counts, targets.label_draft_ids, config)
        elementwise = TERMS[name](distributions)
        if config.per_position_weight == "dpace":
            weights = dpace_weights(elementwise, mask, config.dpace_alpha)
        else:
            weights = decay.expand_as(elementwise)
        numerator = torch.where(mask, elementwise * weights, zero).sum()
        loss = loss + numerator * scale
        numerators[name] = numerator.detach()
    with torch.no_grad():
        acceptance = distributions.acceptance.detach()
        correct = logits.argmax(dim=-1) == verifier_labels if metrics else torch.zeros_like(targets.counts)
    return LogitTerms(loss, numerators, acceptance, correct)


def _confidence_term(confidence: Tensor, acceptance: Tensor, counts: Tensor, config: LossConfig) -> Tensor:
    """sum(weight * count * BCE) of the confidence logits ``[A, N]`` against the acceptance ``[A, N]``."""
    decay = decay_weights(counts.shape[-1], config.gamma, device=counts.device).to(acceptance.dtype)
    target = acceptance.clamp(0, 1)
    elementwise = F.binary_cross_entropy_with_logits(confidence.to(target.dtype), target, reduction="none")
    return torch.where(counts, elementwise * decay, elementwise.new_zeros(())).sum()


def _own_denominators(targets: BlockTargets, config: LossConfig) -> dict[str, Tensor]:
    """This batch's own denominator of every term, the confidence term included."""
    counts = targets.counts
    decay = decay_weights(counts.shape[-1], config.gamma, device=counts.device)
    weighted = config.normalization == "weight"
    term_weighted = weighted and config.per_position_weight != "dpace"
    found = {}
    for name in config.loss_fn:
        mask = _term_mask(name, counts, targets.label_draft_ids, config)
        found[name] = ((mask * decay) if term_weighted else mask).sum()
    found[CONFIDENCE] = ((counts * decay) if weighted else counts).sum()
    return found


def _loss_pair(sums: Sums, coefficients: Mapping[str, float], denominator: Tensor) -> tuple[Tensor, Tensor]:
    """The whole loss as one pair over the common denominator; exact for the batch where a term leaves some labels out."""
    total = torch.zeros_like(denominator)
    for name, coefficient in coefficients.items():
        numerator, own = sums[name]
        total = total + torch.where(own > 0, coefficient * numerator * denominator / own.clamp(min=1e-30), total.new_zeros(()))
    return total, denominator
