"""Attention of anchored blocks: every slot sees verifier features before its anchor, and its own block.

Both parts share one softmax. Which keys a slot sees is said by :mod:`speculators.layout` alone. Shape letters: T tokens of
a packed row, A anchors, K slots, h query heads, g key/value heads, c head size, L context tokens of one range.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from speculators.layout import PAD_DOCUMENT, WindowReference, sees_block, sees_context

__all__ = ["AttentionImpl", "AttentionPlan", "attend", "block_attention", "plan_attention"]

AttentionImpl = Literal["reference", "document"]

#: Blocks of one document that share a context range. Fewer means tighter ranges (less masked work), more means larger matmuls.
BLOCKS_PER_RANGE = 64


@dataclass(frozen=True, slots=True)
class BlockRange:
    """Consecutive blocks of one document and the context that the last of them may see."""

    first_block: int
    last_block: int  #: exclusive
    context_start: int
    context_end: int  #: exclusive


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """How the ``document`` implementation cuts a packed row; a pure function of anchors, documents and the window.

    Layers with one window share a plan, so that a row is cut once per forward.
    """

    ranges: tuple[BlockRange, ...]
    order: Tensor | None  #: ``[A]`` permutation that sorts the anchors; None if they are sorted
    anchors: Tensor  #: ``[A]`` sorted
    window: int | None
    window_reference: WindowReference


def plan_attention(
    anchors: Tensor, document_ids: Tensor, *, window: int | None = None, window_reference: WindowReference = "anchor"
) -> AttentionPlan:
    """Cut a packed row into ranges of blocks with common context.

    :param anchors: int ``[A]``, row positions.
    :param document_ids: int ``[T]``; each document is one run of positions.
    :raises ValueError: a document's positions are not consecutive.
    """
    order = None
    if anchors.numel() > 1 and not bool((anchors[1:] >= anchors[:-1]).all()):
        anchors, order = anchors.sort(stable=True)
    changes = (document_ids[1:] != document_ids[:-1]).nonzero().squeeze(-1) + 1
    starts = torch.cat([changes.new_zeros(1), changes])
    if document_ids.unique().shape[0] != starts.shape[0]:
        raise ValueError("each document of a packed row must be one run of positions")
    starts_of_anchors = starts[torch.searchsorted(starts, anchors, right=True) - 1]
    padding = document_ids[anchors] == PAD_DOCUMENT
    rows: list[list[int]] = torch.stack([anchors, starts_of_anchors, padding.long()], dim=1).tolist()

    ranges: list[BlockRange] = []
    first = 0
    for index in range(1, len(rows) + 1):
        full = index - first == BLOCKS_PER_RANGE
        if index < len(rows) and rows[index][1] == rows[first][1] and not full:
            continue
        anchor, start, is_padding = rows[first]
        if window is not None:
            start = max(start, anchor - window)
        end = start if is_padding else max(rows[index - 1][0], start)
        ranges.append(BlockRange(first, index, start, end))
        first = index
    return AttentionPlan(tuple(ranges), order, anchors, window, window_reference)


def block_attention(
    q: Tensor,
    k_context: Tensor,
    v_context: Tensor,
    k_block: Tensor,
    v_block: Tensor,
    anchors: Tensor,
    document_ids: Tensor,
    *,
    window: int | None = None,
    window_reference: WindowReference = "anchor",
    causal_block: bool = False,
    impl: AttentionImpl = "document",
    plan: AttentionPlan | None = None,
) -> Tensor:
    """Attention output of every slot, ``[A, K, h, c]``; both implementations give the same values and gradients.

    Slot (j, k) sees context position t iff t and anchor j share a document (no padding) and
    :func:`~speculators.layout.sees_context` holds, and slot (j, k') of its own block iff
    :func:`~speculators.layout.sees_block` holds.

    :param q: ``[A, K, h, c]``, rotated.
    :param k_context: ``[T, g, c]``, rotated; ``v_context`` alike. h is a multiple of g: query heads of one group share a key head.
    :param k_block: ``[A, K, g, c]``, rotated; ``v_block`` alike.
    :param anchors: int ``[A]``, row positions, in any order.
    :param document_ids: int ``[T]``.
    :param window: sliding window in tokens; None is full attention.
    :param causal_block: whether a slot sees only slots up to its own.
    :param impl: ``reference`` masks a dense [A, K, T] score table; ``document`` scores each document's blocks against that
        document only.
    :param plan: cut of the row for ``document`` as from :func:`plan_attention`; made here when None.
    """
    if impl == "reference":
        slots = torch.arange(q.shape[1], device=q.device)
        positions = torch.arange(k_context.shape[0], device=q.device)
        visible = sees_context(positions, anchors[:, None, None], slots[None, :, None], window, window_reference)
        documents = document_ids[anchors][:, None, None]
        visible = visible & (document_ids == documents) & (documents != PAD_DOCUMENT)
        return attend(q, k_context, v_context, k_block, v_block, visible, causal_block=causal_block)
    if impl != "document":
        raise ValueError(f"unknown block_attention implementation {impl!r}; use 'reference' or 'document'")
    if plan is None:
        plan = plan_attention(anchors, document_ids, window=window, window_reference=window_reference)
    if not plan.ranges:
        # No block: an empty output that still hangs on every input, so that all ranks have the same graph.
        return q + 0.0 * (k_context.sum() + v_context.sum() + k_block.sum() + v_block.sum())
    if plan.order is not None:
        q, k_block, v_block = q[plan.order], k_block[plan.order], v_block[plan.order]
    slots = torch.arange(q.shape[1], device=q.device)
    outputs = []
    for part in plan.ranges:
        blocks, context = slice(part.first_block, part.last_block), slice(part.context_start, part.context_end)
        positions = torch.arange(part.context_start, part.context_end, device=q.device)
        # [n, 1, L] when the window does not depend on the slot, else [n, K, L].
        visible = sees_context(
            positions, plan.anchors[blocks, None, None], slots[None, :, None], plan.window, plan.window_reference
        )
        outputs.append(
            attend(
                q[blocks],
                k_context[context],
                v_context[context],
                k_block[blocks],
                v_block[blocks],
                visible,
                causal_block=causal_block,
            )
        )
    output = torch.cat(outputs)
    return output if plan.order is None else torch.empty_like(output).index_copy(0, plan.order, output)


def attend(
    q: Tensor,
    k_context: Tensor,
    v_context: Tensor,
    k_block: Tensor,
    v_block: Tensor,
    visible: Tensor | None,
    *,
    causal_block: bool,
) -> Tensor:
    """Attention of n blocks over one common context and their own slots, in one softmax.

    Query heads are folded into rows of their key head's matrix instead of repeating the keys.

    :param q: ``[n, K, h, c]``.
    :param k_context: ``[L, g, c]``; ``v_context`` alike.
    :param k_block: ``[n, K, g, c]``; ``v_block`` alike.
    :param visible: bool, broadcastable to ``[n, K, L]``; None: all the context is visible.
    :returns: ``[n, K, h, c]``.
    """
    num_blocks, num_slots, num_heads, head_dim = q.shape
    length, num_kv_heads, _ = k_context.shape
    group = num_heads // num_kv_heads
    rows = num_slots * group
    # [g, n, K * group, c]: the rows of one block and key head together.
    folded = (q * head_dim**-0.5).view(num_blocks, num_slots, num_kv_heads, group, head_dim).permute(2, 0, 1, 3, 4)
    folded = folded.reshape(num_kv_heads, num_blocks, rows, head_dim)

    context_scores = torch.bmm(folded.flatten(1, 2), k_context.permute(1, 2, 0)).view(num_kv_heads, num_blocks, rows, length)
    if visible is not None:
        hidden = ~visible
        if hidden.shape[-2] > 1:
            hidden = hidden.repeat_interleave(group, dim=-2)
        context_scores = context_scores.masked_fill(hidden, float("-inf"))
    block_scores = folded @ k_block.permute(2, 0, 3, 1)  # [g, n, K * group, K]
    if causal_block:
        slots = torch.arange(num_slots, device=q.device)
        seen = sees_block(slots[:, None], slots[None, :], causal=True)
        block_scores = block_scores.masked_fill(~seen.repeat_interleave(group, dim=0), float("-inf"))

    weights = torch.cat([context_scores, block_scores], dim=-1).softmax(dim=-1)
    context_weights, block_weights = weights.split([length, num_slots], dim=-1)
    output = torch.bmm(context_weights.flatten(1, 2), v_context.transpose(0, 1)).view_as(folded)
    output = output + block_weights @ v_block.permute(2, 0, 1, 3)
    output = output.view(num_kv_heads, num_blocks, num_slots, group, head_dim).permute(1, 2, 0, 3, 4)
    return output.reshape(num_blocks, num_slots, num_heads, head_dim)
