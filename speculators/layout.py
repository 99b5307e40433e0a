"""Block layouts: every off-by-one-prone fact of block drafting, in one place, as pure functions on integers.

A *block* starts at an *anchor*: the newest token that is known, at position ``a`` of its document. Its input is
``[x_a, M, ..., M]`` (``block_size`` slots, M the mask token), slot ``k`` sitting at position ``a + k``. Two layouts are in use:

``anchor-first`` (``sample_from_anchor=True``; DSpark paper, DeepSpec)
    every slot predicts the token after its own position: slot ``k`` predicts ``x_{a+k+1}``.
``fill-in`` (``sample_from_anchor=False``; DFlash, speculators before PR #760)
    a mask slot predicts its own position: slot ``k >= 1`` predicts ``x_{a+k}``; slot 0 predicts nothing.

Counting the *predicted* tokens of a block by their **depth** ``d = 0, 1, ...`` removes the difference: in both layouts
the token of depth ``d`` is ``x_{a+1+d}``, the token before it is ``x_{a+d}``, and the verifier's state at position ``a + d``
gives its distribution. Only the map between slots and depths differs, so it is written here and nowhere else.

All scalar functions take plain integers, NumPy arrays or torch tensors. Shape letters: T tokens of a packed row,
A anchors, K slots of a block, N predicted tokens of a block.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

__all__ = [
    "PAD_DOCUMENT",
    "BlockLayout",
    "ChainLayout",
    "DraftLayout",
    "WindowReference",
    "anchor_candidates",
    "chain_window",
    "has_pair",
    "block_input_ids",
    "counted_predictions",
    "depth_weight",
    "final_layer_id",
    "label_position",
    "previous_position",
    "sees_block",
    "sees_context",
    "slot_position",
    "state_position",
    "truth_table",
]

Integers = TypeVar("Integers", int, Any)

#: ``document_ids`` value of padding.
PAD_DOCUMENT = -1

#: The most tokens a recurrent chain drafts at a time; no draft is worth verifying so far ahead.
MAX_CHAIN = 64

#: Where a sliding window is measured from: the block's anchor (upstream: ``c >= a - W``) or each slot's own position
#: (serving engines and SpecForge: ``c >= a + k - (W - 1)``).
WindowReference = Literal["anchor", "slot"]


def final_layer_id(num_layers: int, after_norm: bool) -> int:
    """Layer id of the verifier's final state: n before its final norm (the residual stream after n layers), n + 1 after it."""
    return num_layers + 1 if after_norm else num_layers


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """How the slots of a block map to the tokens it predicts.

    :param block_size: K, slots in a block, the anchor's included.
    :param sample_from_anchor: whether slot 0 predicts a token (``config.json`` key ``sample_from_anchor``).
    """

    block_size: int
    sample_from_anchor: bool

    def __post_init__(self) -> None:
        if self.max_draft_tokens < 1:
            raise ValueError(
                f"block_size {self.block_size} leaves no token to predict in the {self.name} layout; "
                f"use at least {self.first_predicting_slot + 1}"
            )

    @property
    def name(self) -> str:
        return "anchor-first" if self.sample_from_anchor else "fill-in"

    @property
    def first_predicting_slot(self) -> int:
        """Slot of depth 0."""
        return 0 if self.sample_from_anchor else 1

    @property
    def max_draft_tokens(self) -> int:
        """N, the most tokens one block can predict: K anchor-first, K - 1 fill-in."""
        return self.block_size - self.first_predicting_slot

    def depth_of_slot(self, slot: Integers) -> Integers:
        """Depth of the token that ``slot`` predicts; -1 for the fill-in layout's slot 0, which predicts nothing."""
        return slot - self.first_predicting_slot

    def slot_of_depth(self, depth: Integers) -> Integers:
        """Slot that predicts the token of ``depth``."""
        return depth + self.first_predicting_slot

    @property
    def most_draft_tokens(self) -> int:
        """The most tokens that can be drafted at a time."""
        return self.max_draft_tokens

    @property
    def first_anchor(self) -> int:
        """Position of the first token of a document that may be an anchor."""
        return 0

    def query_slots(self, num_tokens: int) -> int:
        """Slots to run in order to draft ``num_tokens`` tokens, as serving engines do: n, or 1 + n in the fill-in layout."""
        if not 1 <= num_tokens <= self.max_draft_tokens:
            raise ValueError(
                f"cannot draft {num_tokens} tokens from a {self.name} block of {self.block_size} slots; "
                f"ask for 1 to {self.max_draft_tokens}"
            )
        return num_tokens + self.first_predicting_slot


@dataclass(frozen=True, slots=True)
class ChainLayout:
    """Drafts whose slots each read a token and a state: EAGLE-3, P-EAGLE, MTP.

    Slot 0 of anchor ``a`` reads ``(x_a, h_{a-1})``, the newest token and the verifier's state before it; slot ``k`` sits at
    position ``a + k`` and predicts ``x_{a+1+k}``, so the depth of its prediction is ``k``. What slot 0 sees of the context is
    the pairs ``(x_t, h_{t-1})`` with ``t < a`` of its document: :func:`sees_context` on the tokens' positions. A document's
    first token has no state before it, so there is no pair of it and it cannot be an anchor.

    :param steps: N, slots that are trained.
    :param recurrent: whether slot k reads what slot k - 1 gave out, so that drafting can go on past ``steps``; else slots
        1, 2, ... read a mask and all run at once.
    """

    steps: int
    recurrent: bool

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"a chain of {self.steps} steps predicts no token; use at least 1")

    @property
    def name(self) -> str:
        return "chain" if self.recurrent else "parallel chain"

    @property
    def first_predicting_slot(self) -> int:
        return 0

    @property
    def block_size(self) -> int:
        """Slots that are trained."""
        return self.steps

    @property
    def max_draft_tokens(self) -> int:
        """N, the tokens a slot is trained for."""
        return self.steps

    @property
    def most_draft_tokens(self) -> int:
        """The most tokens that can be drafted at a time."""
        return MAX_CHAIN if self.recurrent else self.steps

    @property
    def first_anchor(self) -> int:
        return 1

    def depth_of_slot(self, slot: Integers) -> Integers:
        return slot

    def slot_of_depth(self, depth: Integers) -> Integers:
        return depth

    def query_slots(self, num_tokens: int) -> int:
        """Slots to run in order to draft ``num_tokens`` tokens."""
        if not 1 <= num_tokens <= self.most_draft_tokens:
            raise ValueError(
                f"cannot draft {num_tokens} tokens with a {self.name} of {self.steps} steps; "
                f"ask for 1 to {self.most_draft_tokens}"
            )
        return num_tokens


#: How a family's slots map to the tokens they predict.
DraftLayout = BlockLayout | ChainLayout


def has_pair(document_ids: Tensor) -> Tensor:
    """Which tokens of a packed row have a state before them in their document, bool ``[T]``; see :class:`ChainLayout`."""
    inside = document_ids != PAD_DOCUMENT
    inside[1:] &= document_ids[1:] == document_ids[:-1]
    inside[:1] = False
    return inside


def chain_window(window: int | None, reference: WindowReference) -> int | None:
    """A chain's sliding window of W tokens, the query's own included, as :func:`sees_context` counts it.

    Measured from the slot that is ``c > a + k - W``, which :func:`sees_context` has too; from the anchor (upstream's EAGLE-3)
    ``c > a - W``, one token less than a block's ``c >= a - W``.
    """
    return window - 1 if window is not None and reference == "anchor" else window


def slot_position(anchor: Integers, slot: Integers) -> Integers:
    """Position id (RoPE) of a slot; the anchor slot sits at the anchor's own position."""
    return anchor + slot


def label_position(anchor: Integers, depth: Integers) -> Integers:
    """Position of the token that depth ``depth`` predicts."""
    return anchor + 1 + depth


def previous_position(anchor: Integers, depth: Integers) -> Integers:
    """Position of the token before the predicted one: what the Markov head reads. Depth 0 reads the anchor."""
    return label_position(anchor, depth) - 1


def state_position(anchor: Integers, depth: Integers) -> Integers:
    """Position whose verifier state gives the distribution of the predicted token."""
    return label_position(anchor, depth) - 1


def depth_weight(depth: int, gamma: float) -> float:
    """Loss weight exp(-depth / gamma); 1 for the first predicted token of a block in either layout."""
    return math.exp(-depth / gamma)


def sees_context(
    context: Integers,
    anchor: Integers,
    slot: Integers,
    window: int | None = None,
    reference: WindowReference = "anchor",
) -> Any:
    """Whether a slot sees the verifier feature of a context position of its own document.

    Strictly before the anchor: at inference the newest token has no verifier state yet.
    """
    visible = context < anchor
    if window is None:
        return visible
    oldest = anchor - window if reference == "anchor" else slot_position(anchor, slot) - (window - 1)
    return visible & (context >= oldest)


def sees_block(query_slot: Integers, key_slot: Integers, causal: bool) -> Any:
    """Whether a slot sees another slot of its own block."""
    return (key_slot <= query_slot) if causal else (key_slot == key_slot)  # noqa: PLR0124 - true, in the argument's type


def block_input_ids(anchor_ids: Tensor, num_slots: int, mask_token_id: int) -> Tensor:
    """Token ids of the blocks' slots.

    :param anchor_ids: token at each anchor, ``[A]``.
    :returns: ``[A, num_slots]``: the anchor's token, then mask tokens.
    """
    ids = anchor_ids.new_full((anchor_ids.shape[0], num_slots), mask_token_id)
    ids[:, 0] = anchor_ids
    return ids


def anchor_candidates(loss_mask: Tensor, document_ids: Tensor, first_anchor: int = 0) -> Tensor:
    """Positions that may start a block: a supervised token whose successor is supervised, in one document.

    :param loss_mask: bool ``[T]``, true on supervised (assistant) tokens.
    :param document_ids: int ``[T]``, :data:`PAD_DOCUMENT` on padding.
    :param first_anchor: 1 where a document's first token cannot be an anchor (:class:`ChainLayout`).
    :returns: bool ``[T]``.
    """
    candidates = torch.zeros_like(loss_mask, dtype=torch.bool)
    supervised = loss_mask.bool() & (document_ids != PAD_DOCUMENT)
    candidates[:-1] = supervised[:-1] & supervised[1:] & (document_ids[:-1] == document_ids[1:])
    return candidates & has_pair(document_ids) if first_anchor else candidates


def counted_predictions(anchors: Tensor, num_depths: int, loss_mask: Tensor, document_ids: Tensor) -> Tensor:
    """Which predicted tokens of which blocks count in the loss.

    A predicted token counts iff its position lies in the row, is supervised, belongs to the anchor's document, and
    every predicted token of smaller depth counts.

    :param anchors: int ``[A]``, row positions.
    :param loss_mask: bool ``[T]``.
    :param document_ids: int ``[T]``.
    :returns: bool ``[A, num_depths]``.
    """
    length = loss_mask.shape[0]
    depths = torch.arange(num_depths, device=anchors.device)
    positions = label_position(anchors[:, None], depths[None, :])
    inside = positions < length
    clamped = positions.clamp(max=length - 1)
    same_document = (document_ids[clamped] == document_ids[anchors][:, None]) & (document_ids[anchors] != PAD_DOCUMENT)[:, None]
    allowed = inside & loss_mask.bool()[clamped] & same_document
    return allowed.cumprod(dim=1).bool()


def truth_table(layout: BlockLayout, anchor: int = 10) -> str:
    """The layout's facts for one anchor as a printed table, for documentation and tests."""
    lines = ["slot | position | predicts | depth | previous | state"]
    for slot in range(layout.block_size):
        depth = layout.depth_of_slot(slot)
        if depth < 0:
            facts = ["-", "-", "-", "-"]
        else:
            places = (label_position(anchor, depth), previous_position(anchor, depth), state_position(anchor, depth))
            facts = [f"x{places[0]}", str(depth), f"x{places[1]}", f"h{places[2]}"]
        lines.append(" | ".join([str(slot), str(slot_position(anchor, slot)), *facts]))
    return "\n".join(lines)
