"""What the decoder asks of a draft, whatever its family."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from speculators.sampling import SamplingParams

__all__ = ["Draft", "Drafter"]


@dataclass(slots=True)
class Draft:
    """Tokens drafted for one request. n tokens, D draft vocabulary."""

    tokens: Tensor  #: int64 ``[n]``, verifier ids
    draft_ids: Tensor  #: int64 ``[n]``, the same in draft ids
    probabilities: Tensor | None  #: ``[n, D]``, the distribution each token was drawn from, over draft ids; None when greedy
    confidence: Tensor | None  #: ``[n]`` in 0..1, the draft's guess of each token's acceptance; None without such a head


class Drafter(Protocol):
    """Drafts for a list of requests, keeping each request's context.

    A request's *context* is the tokens that the verifier has states for: the prompt, then accepted tokens. The *anchor* is the
    newest token, which has no state yet; its position is the context's length.
    """

    #: The most tokens one call of :meth:`propose` can draft.
    max_draft_tokens: int
    #: Verifier layers whose states :meth:`extend` takes, in order.
    layer_ids: tuple[int, ...]

    @property
    def verifier_ids(self) -> Tensor | None:
        """Verifier id of every draft id ``[D]``; None when the draft keeps the whole vocabulary."""
        ...

    def start(self, num_requests: int) -> None:
        """Forget everything and begin with so many empty requests."""
        ...

    def extend(self, token_ids: list[Tensor], features: list[Tensor]) -> None:
        """Append tokens to each request's context.

        :param token_ids: per request, verifier ids ``[t]``; t may be 0.
        :param features: per request, the verifier's states at these tokens, ``[t, M, H]``.
        """
        ...

    def propose(
        self,
        anchors: list[int],
        n: int,
        sampling: SamplingParams,
        generator: torch.Generator | None = None,
        full_block: bool = False,
    ) -> list[Draft]:
        """Draft n tokens after each request's anchor. The context does not change.

        :param anchors: per request, the anchor's verifier id.
        :param n: 1 to ``max_draft_tokens``.
        :param sampling: the verifier's settings; drafts use its temperature without top-k and top-p.
        :param generator: of the draws; unused when greedy.
        :param full_block: run the whole block and cut it to n, instead of the slots that n tokens need.
        """
        ...

    def context_length(self, request: int) -> int:
        """Tokens in a request's context."""
        ...

    def drop(self, request: int) -> None:
        """Free a finished request's memory; its index stays taken."""
        ...
