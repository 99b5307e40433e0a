"""Validation: the training metrics, and what only the verifier's whole vocabulary tells, on held-out rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from speculators.batch import PackedBatch
from speculators.losses import BlockTargets, LossConfig, block_loss, gather_block_targets, loss_denominators

__all__ = ["Sums", "full_vocabulary_sums", "validation_sums"]

#: Blocks whose whole-vocabulary distributions are in memory at once.
CHUNK = 64

Sums = dict[str, tuple[Tensor, Tensor]]


@torch.no_grad()
def validation_sums(
    model: Any, batch: PackedBatch, teacher: Any, config: LossConfig, *, impl: str = "reference", attn_impl: str = "document"
) -> Sums:
    """Sums of :func:`~speculators.losses.block_loss` and of :func:`full_vocabulary_sums` of one packed row.

    :param model: a block draft, such as :class:`~speculators.models.DFlashDraftModel`.
    :param teacher: the verifier's head.
    """
    slot_states = model.draft_hidden(batch, attn_impl=attn_impl)
    hidden, heads = model.predicting(slot_states), model.heads_of(slot_states, batch.anchor_ids)
    states = batch.final_states
    if states is not None and model.config.final_state == "pre_norm":
        states = teacher.normalize(states)
    targets = gather_block_targets(batch, hidden.shape[1], model.verifier_to_draft, states)
    denominators = loss_denominators(targets.counts, targets.label_draft_ids, config)
    output = block_loss(hidden, heads, teacher, targets, config, denominators, impl=impl)  # type: ignore[arg-type]
    return {**output.sums, **full_vocabulary_sums(hidden, heads, model, teacher, targets)}


@torch.no_grad()
def full_vocabulary_sums(
    hidden: Tensor, heads: Any, model: Any, teacher: Any, targets: BlockTargets, chunk: int = CHUNK
) -> Sums:
    """Acceptance against the verifier's whole vocabulary, where a token outside the draft's is never accepted.

    ``verifier_mass_in_draft_vocabulary``
        mean probability that the verifier gives to tokens the draft can say.
    ``true_accept_rate``, ``true_tau_uniform``
        as ``accept_rate`` and ``tau_uniform`` with p not renormalised.
    ``greedy_accept_rate``, ``greedy_tau_uniform``
        the same for greedy decoding: the draft's argmax is the verifier's over its whole vocabulary.

    :param hidden: ``[A, N, H]`` of the predicting slots.
    :param heads: the model's, for these blocks.
    """
    counts = targets.counts
    draft_ids = torch.arange(model.draft_vocab_size, device=hidden.device)
    kept = model.draft_to_verifier(draft_ids)
    mass, accepted, greedy = (torch.zeros(counts.shape, dtype=torch.float32, device=hidden.device) for _ in range(3))
    for start in range(0, hidden.shape[0], chunk):
        part = slice(start, start + chunk)
        q = heads.rows(part).logits(hidden[part], targets.previous_ids[part]).float().softmax(dim=-1)
        states = targets.states[part] if targets.state_index is None else targets.states[targets.state_index[part]]
        logits = teacher.full_logits(states).float()
        p = (logits[..., kept] - logits.logsumexp(dim=-1, keepdim=True)).exp()
        mass[part] = p.sum(dim=-1)
        accepted[part] = torch.minimum(p, q).sum(dim=-1)
        greedy[part] = (model.draft_to_verifier(q.argmax(dim=-1)) == logits.argmax(dim=-1)).float()
    mask = counts.float()
    total, blocks = mask.sum(), mask[:, 0].sum()

    def tau(rates: Tensor) -> tuple[Tensor, Tensor]:
        return blocks + (rates * mask).cumprod(dim=-1).sum(), blocks

    return {
        "verifier_mass_in_draft_vocabulary": ((mass * mask).sum(), total),
        "true_accept_rate": ((accepted * mask).sum(), total),
        "true_tau_uniform": tau(accepted),
        "greedy_accept_rate": ((greedy * mask).sum(), total),
        "greedy_tau_uniform": tau(greedy),
    }
