"""The decoder's way through a known answer: where its rounds begin, and which of them a limit may have cut.

Shape letters: T tokens of the row, A anchors, n drafted tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from speculators.layout import label_position

__all__ = ["complete_blocks", "expected_visits"]


def expected_visits(anchors: Tensor, counts: Tensor, kept: Tensor, loss_mask: Tensor) -> Tensor:
    """Probability that the decoder has a round at each anchor, given that it writes this row ``[A]`` float64.

    From each answer's first token on, a round steps by the number of kept tokens + 1. Greedy, every number is 0 or 1 and the
    anchors of 1 are the decoder's walk.

    :param anchors: int ``[A]``, all positions that may start a block, ascending.
    :param counts: bool ``[A, n]``, which predictions lie in the answer.
    :param kept: float64 ``[A, n]``, probability that the row's token is kept if those before it in the block are.
    :param loss_mask: bool ``[T]``.
    """
    places = {position: place for place, position in enumerate(anchors.tolist())}
    visits = [0.0] * len(places)
    for position, place in places.items():
        if position == 0 or not loss_mask[position - 1]:
            visits[place] = 1.0
    limits = counts.sum(dim=1).tolist()
    for position, place in places.items():
        reaching = visits[place]
        for depth, probability in enumerate(kept[place, : limits[place]].tolist()):
            following = places.get(label_position(position, depth))
            if following is not None:
                visits[following] += reaching * (1.0 - probability)
            reaching *= probability
        following = places.get(label_position(position, counts.shape[1]))
        if following is not None and limits[place] == counts.shape[1]:
            visits[following] += reaching
    return torch.tensor(visits, dtype=torch.float64)


def complete_blocks(anchors: Tensor, n: int, loss_mask: Tensor, is_end: Tensor, max_new_tokens: int | None) -> Tensor:
    """Blocks whose outcome does not depend on tokens beyond a cut: whole inside the answer, or the answer ended by itself.

    :param anchors: int ``[A]``, ascending.
    :param n: drafted tokens per round.
    :param loss_mask: bool ``[T]``.
    :param is_end: bool ``[T]``, true on end-of-sequence tokens.
    :param max_new_tokens: the limit under which the answers were made. With it blocks near the limit are left out whether or
        not the answer ended by itself: to let the outcome decide would favour rounds that end answers.
    :returns: bool ``[A]``.
    """
    positions = torch.arange(loss_mask.shape[0])
    outside = torch.tensor([False])
    starts = loss_mask & ~torch.cat([outside, loss_mask[:-1]])
    lasts = loss_mask & ~torch.cat([loss_mask[1:], outside])
    first = torch.where(starts, positions, 0).cummax(dim=0).values[anchors]
    last = torch.where(lasts, positions, loss_mask.shape[0]).flip(0).cummin(dim=0).values.flip(0)[anchors]
    deepest = label_position(anchors, n - 1)
    complete = (deepest <= last) | is_end[last]
    if max_new_tokens is not None:
        complete &= deepest <= first + max_new_tokens - 1
    return complete
