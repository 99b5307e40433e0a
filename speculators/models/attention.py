"""Attention of anchored blocks: every slot sees verifier features before its anchor, and its own block.

Both parts share one softmax. Which keys a slot sees is said by :mod:`speculators.layout` alone. Shape letters: T tokens of
a packed row, A anchors, K slots, h query heads, g key/value heads, c head size, L context tokens of one range.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from speculators.layout import PAD_DOCUMENT, WindowReference, sees_block, sees_context

__all__ = ["AttentionImpl", "AttentionPlan", "attend", "block_attention", "causal_attention", "plan_attention"]

AttentionImpl = Literal["reference", "document"]

#: Blocks of one document that share a context range. Fewer means tighter ranges (less masked work), more means larger matmuls.
BLOCKS_PER_RANGE = 32


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
    if not document_ids.numel():
        return AttentionPlan((), order, anchors, window, window_reference)
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

    :param q: ``[A, K, h, c]``, rotated: the last K of the blocks' slots.
    :param k_context: ``[T, g, c]``, rotated; ``v_context`` alike, with a head size of its own. h is a multiple of g:
        neighbouring query heads share a key head.
    :param k_block: ``[A, K', g, c]``, rotated, K' >= K; ``v_block`` alike.
    :param anchors: int ``[A]``, row positions, in any order.
    :param document_ids: int ``[T]``.
    :param window: sliding window in tokens; None is full attention.
    :param causal_block: whether a slot sees only slots up to its own.
    :param impl: ``reference`` masks a dense [A, K, T] score table; ``document`` scores each document's blocks against that
        document only.
    :param plan: cut of the row for ``document`` as from :func:`plan_attention`; made here when None.
    """
    slots = torch.arange(k_block.shape[1] - q.shape[1], k_block.shape[1], device=q.device)
    if impl == "reference":
        positions = torch.arange(k_context.shape[0], device=q.device)
        visible = sees_context(positions, anchors[:, None, None], slots[None, :, None], window, window_reference)
        documents = document_ids[anchors][:, None, None]
        visible = visible & (document_ids == documents) & (documents != PAD_DOCUMENT)
        return attend(q, k_context, v_context, k_block, v_block, visible=visible, causal_block=causal_block)
    if impl != "document":
        raise ValueError(f"unknown block_attention implementation {impl!r}; use 'reference' or 'document'")
    if plan is None:
        plan = plan_attention(anchors, document_ids, window=window, window_reference=window_reference)
    if not plan.ranges:
        # No block: an empty output that still hangs on every input, so that all ranks have the same graph.
        empty = q.new_zeros(*q.shape[:-1], v_block.shape[-1])
        return empty + 0.0 * (q.sum() + k_context.sum() + v_context.sum() + k_block.sum() + v_block.sum())
    if plan.order is not None:
        q, k_block, v_block = q[plan.order], k_block[plan.order], v_block[plan.order]
    contexts = []
    for part in plan.ranges:
        positions = torch.arange(part.context_start, part.context_end, device=q.device)
        own = plan.anchors[part.first_block : part.last_block, None, None]
        # [n, 1, L] when the window does not depend on the slot, else [n, K, L].
        visible = sees_context(positions, own, slots[None, :, None], plan.window, plan.window_reference)
        contexts.append(
            _Context(
                part.last_block - part.first_block,
                k_context[part.context_start : part.context_end],
                v_context[part.context_start : part.context_end],
                visible,
            )
        )
    output = _attend_ranges(q, k_block, v_block, contexts, causal_block)
    return output if plan.order is None else torch.empty_like(output).index_copy(0, plan.order, output)


@dataclass(frozen=True, slots=True)
class _Context:
    """What a run of consecutive blocks attends to besides their own slots."""

    num_blocks: int
    keys: Tensor  #: ``[L, g, c]``
    values: Tensor  #: ``[L, g, c]``
    visible: Tensor | None  #: bool, broadcastable to ``[num_blocks, K, L]``


def attend(
    q: Tensor,
    k_context: Tensor,
    v_context: Tensor,
    k_block: Tensor,
    v_block: Tensor,
    *,
    visible: Tensor | None,
    causal_block: bool,
) -> Tensor:
    """Attention of all blocks over one common context and their own slots.

    :param q: ``[A, K, h, c]``, the last K of the blocks' slots.
    :param k_context: ``[L, g, c]``; ``v_context`` alike.
    :param k_block: ``[A, K', g, c]``; ``v_block`` alike.
    :param visible: bool, broadcastable to ``[A, K, L]``; None: all the context is visible.
    :returns: ``[A, K, h, c]``.
    """
    context = _Context(q.shape[0], k_context, v_context, visible)
    return _attend_ranges(q, k_block, v_block, [context], causal_block)


def _attend_ranges(q: Tensor, k_block: Tensor, v_block: Tensor, contexts: list[_Context], causal_block: bool) -> Tensor:
    """Softmax over context and own block together, run by run; the runs partition the blocks in order.

    Query heads are folded into rows of their key head's matrix instead of repeating the keys, and what does not depend on
    the context is done for all blocks at once: many small matmuls cost more than one large one.
    """
    num_blocks, num_slots, num_heads, head_dim = q.shape
    num_keys, num_kv_heads = k_block.shape[1:3]
    group = num_heads // num_kv_heads
    rows = num_slots * group
    # [g, A, K * group, c]: the rows of one block and key head together.
    folded = (q * head_dim**-0.5).view(num_blocks, num_slots, num_kv_heads, group, head_dim).permute(2, 0, 1, 3, 4)
    folded = folded.reshape(num_kv_heads, num_blocks, rows, head_dim)
    # Key rows are laid out contiguously before they are transposed: batched matmul is slow on the other order.
    keys = k_block.permute(2, 0, 1, 3).contiguous()  # [g, A, K, c]
    block_scores = torch.matmul(folded, keys.transpose(-1, -2))  # [g, A, K * group, K']
    if causal_block:
        slots = torch.arange(num_keys, device=q.device)
        unseen = ~sees_block(slots[num_keys - num_slots :, None], slots[None, :], causal=True)
        block_scores = block_scores.masked_fill(unseen.repeat_interleave(group, dim=0), float("-inf"))

    outputs, block_weights = [], []
    sizes = [context.num_blocks for context in contexts]
    # `split` instead of slices: the gradient of a slice fills a tensor of the whole size.
    for context, q_run, block_run in zip(contexts, folded.split(sizes, dim=1), block_scores.split(sizes, dim=1)):
        length = context.keys.shape[0]
        scores = torch.bmm(q_run.flatten(1, 2), context.keys.permute(1, 2, 0)).unflatten(1, (-1, rows))
        if context.visible is not None:
            unseen = ~context.visible
            if unseen.shape[-2] > 1:
                unseen = unseen.repeat_interleave(group, dim=-2)
            scores = scores.masked_fill(unseen, float("-inf"))
        weights = torch.cat([scores, block_run], dim=-1).softmax(dim=-1)
        context_weights, own_weights = weights.split([length, num_keys], dim=-1)
        output = torch.bmm(context_weights.flatten(1, 2), context.values.transpose(0, 1))
        outputs.append(output.unflatten(1, (-1, rows)))
        block_weights.append(own_weights)
    output = torch.cat(outputs, dim=1) + torch.matmul(torch.cat(block_weights, dim=1), v_block.permute(2, 0, 1, 3))
    output = output.unflatten(2, (num_slots, group)).permute(1, 2, 0, 3, 4)
    return output.reshape(num_blocks, num_slots, num_heads, -1)


def causal_attention(
    q: Tensor, k: Tensor, v: Tensor, document_ids: Tensor, *, window: int | None = None, impl: AttentionImpl = "document"
) -> Tensor:
    """Attention of rows over the rows up to their own, within their document, ``[Q, h, c]``.

    :param q: ``[Q, h, c]``, rotated: the last Q rows of the keys.
    :param k: ``[L, g, c]``, rotated; ``v`` alike, with a head size of its own.
    :param document_ids: int ``[L]``, each document one run of rows.
    :param window: rows that a row sees, its own included; None: all.
    :param impl: ``reference`` masks a dense table; ``document`` goes document by document.
    """
    rows, offset = torch.arange(k.shape[0], device=q.device), k.shape[0] - q.shape[0]
    if impl == "reference":
        return _masked(q, k, v, _causal(rows[offset:], rows, window) & (document_ids[offset:, None] == document_ids))
    lengths = document_ids.unique_consecutive(return_counts=True)[1].tolist()
    outputs, start = [], 0
    for length in lengths:
        end, first = start + length, max(start, offset)
        if end > first:
            queries, keys, values = q[first - offset : end - offset], k[start:end], v[start:end]
            plain = window is None or length <= window
            visible = None if plain and first == start else _causal(rows[first:end], rows[start:end], window)
            outputs.append(_masked(queries, keys, values, visible))
        start = end
    return torch.cat(outputs) if outputs else q.new_zeros(0, q.shape[1], v.shape[-1])


def _causal(queries: Tensor, keys: Tensor, window: int | None) -> Tensor:
    """Which of the key rows ``[L]`` each query row ``[Q]`` sees; its own always."""
    return sees_context(keys, queries[:, None] + 1, 0, window)


def _masked(q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None) -> Tensor:
    """Fused attention of one document; None: causal."""
    heads, keys, values = (part.transpose(0, 1)[None] for part in (q, k, v))
    grouped = q.shape[1] != k.shape[1]
    output = F.scaled_dot_product_attention(
        heads, keys, values, attn_mask=visible, is_causal=visible is None, enable_gqa=grouped
    )
    return output[0].transpose(0, 1)
