"""The same loss a few blocks at a time, forward and backward, so that no ``[A, N, D]`` logits are ever whole.

The gradient of a chunk's logits is taken at once and multiplied back into the gradients of the head's inputs and weights;
the chunk is then forgotten.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = ["LogitTerms", "chunked_terms"]

#: Logits of one chunk, enough to keep the matrix products busy: smaller chunks read the head's weights more often.
CPU_ELEMENTS, DEVICE_ELEMENTS = 1 << 21, 1 << 26


@dataclass(slots=True)
class LogitTerms:
    """What the loss needs of the logits of some blocks."""

    loss: Tensor  #: scaled sum of the terms, with gradient
    numerators: dict[str, Tensor]  #: sum(weight * count * term) by term, detached
    acceptance: Tensor  #: alpha ``[A, N]``, detached
    correct: Tensor  #: bool ``[A, N]``: the draft's argmax is the verifier's over the draft vocabulary


class _Attach(torch.autograd.Function):
    """A value whose gradients with respect to some tensors are known already."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, gradients: Sequence[Tensor], *tensors: Tensor) -> Tensor:
        ctx.gradients = gradients
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        return (None, None, *(outer[0] * gradient for gradient in ctx.gradients))


def chunked_terms(
    parts: Sequence[tuple[Tensor, Tensor]],
    evaluate: Callable[[Tensor, slice], LogitTerms],
    max_elements: int | None = None,
) -> LogitTerms:
    """``evaluate`` on the logits of all blocks, chunk by chunk.

    :param parts: pairs (input ``[A, N, k]``, weight ``[D, k]``) whose products add up to the logits; inputs and weights get
        gradients where they require them.
    :param evaluate: the terms of the blocks of a slice from their logits ``[a, N, D]``.
    :param max_elements: logits per chunk; at least one block is taken.
    """
    inputs, weights = [pair[0] for pair in parts], [pair[1] for pair in parts]
    blocks, depths, vocabulary = inputs[0].shape[0], inputs[0].shape[1], weights[0].shape[0]
    if max_elements is None:
        max_elements = CPU_ELEMENTS if inputs[0].device.type == "cpu" else DEVICE_ELEMENTS
    size = max(1, max_elements // (depths * vocabulary))
    tracked = torch.is_grad_enabled()
    input_gradients = [torch.zeros_like(value) if tracked and value.requires_grad else None for value in inputs]
    weight_gradients = [torch.zeros_like(value) if tracked and value.requires_grad else None for value in weights]
    found: list[LogitTerms] = []
    # An empty slice gives terms of zero with the right names.
    for start in range(0, max(blocks, 1), size):
        rows = slice(start, min(start + size, blocks))
        leaves = [value[rows].detach().requires_grad_(grad is not None) for value, grad in zip(inputs, input_gradients)]
        terms = evaluate(_logits(leaves, weights), rows)
        sources = [value for value in (*leaves, *weights) if tracked and value.requires_grad]
        if sources and terms.loss.requires_grad:
            gradients = iter(torch.autograd.grad(terms.loss, sources, allow_unused=True))
            for total in [*(grad[rows] if grad is not None else None for grad in input_gradients), *weight_gradients]:
                gradient = next(gradients) if total is not None else None
                if total is not None and gradient is not None:
                    total += gradient
        terms.loss = terms.loss.detach()
        found.append(terms)
    loss = torch.stack([terms.loss for terms in found]).sum()
    pairs = zip((*inputs, *weights), (*input_gradients, *weight_gradients))
    attached = [(tensor, gradient) for tensor, gradient in pairs if gradient is not None]
    if attached:
        tensors, gradients_known = zip(*attached)
        loss = cast(Tensor, _Attach.apply(loss, gradients_known, *tensors))
    names = found[0].numerators
    return LogitTerms(
        loss,
        {name: torch.stack([terms.numerators[name] for terms in found]).sum() for name in names},
        torch.cat([terms.acceptance for terms in found]),
        torch.cat([terms.correct for terms in found]),
    )


def _logits(inputs: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
    """``[a, N, D]``; later products are added in place of a second matrix of that size."""
    logits = F.linear(inputs[0], weights[0])
    shape = logits.shape
    for value, weight in zip(inputs[1:], weights[1:], strict=True):
        logits = torch.addmm(logits.flatten(0, -2), value.flatten(0, -2), weight.t()).view(shape)
    return logits
