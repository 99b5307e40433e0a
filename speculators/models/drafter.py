"""What the decoder asks of a draft, whatever its family."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from speculators.sampling import SamplingParams, probabilities, sample

if TYPE_CHECKING:
    from speculators.models.vocabulary import DraftVocabularyMixin

__all__ = ["Draft", "DraftBuilder", "Drafter", "RequestsDrafter"]


@dataclass(slots=True)
class Draft:
    """Tokens drafted for one request. n tokens, D draft vocabulary."""

    tokens: Tensor  #: int64 ``[n]``, verifier ids
    draft_ids: Tensor  #: int64 ``[n]``, the same in draft ids
    probabilities: Tensor | None  #: ``[n, D]``, the distribution each token was drawn from, over draft ids; None when greedy
    confidence: Tensor | None  #: ``[n]`` in 0..1, the draft's guess of each token's acceptance; None without such a head


class DraftBuilder:
    """Draws one request's tokens one after another and puts them together as a :class:`Draft`.

    :param model: maps draft ids to verifier ids.
    :param sampling: the verifier's settings; its filters are not the draft's.
    """

    def __init__(self, model: DraftVocabularyMixin, sampling: SamplingParams, generator: torch.Generator | None = None) -> None:
        self._model = model
        self._greedy = sampling.greedy
        self._sampling = sampling.without_filters()
        self._generator = generator
        self._draft_ids: list[Tensor] = []
        self._tokens: list[Tensor] = []
        self._distributions: list[Tensor] = []

    def add(self, logits: Tensor) -> Tensor:
        """Draw the next token from corrected logits ``[1, D]``; its verifier id ``[1]``."""
        if self._greedy:
            drawn = logits.argmax(dim=-1)
        else:
            distribution = probabilities(logits, self._sampling)
            drawn = sample(distribution, self._generator)
            self._distributions.append(distribution)
        self._draft_ids.append(drawn)
        self._tokens.append(self._model.draft_to_verifier(drawn))
        return self._tokens[-1]

    def finish(self, confidence: Tensor | None = None) -> Draft:
        """The draft of all tokens so far; ``confidence`` is ``[n]`` in 0..1."""
        return Draft(
            tokens=torch.cat(self._tokens),
            draft_ids=torch.cat(self._draft_ids),
            probabilities=torch.cat(self._distributions) if self._distributions else None,
            confidence=confidence,
        )


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


class Context(Protocol):
    """What a :class:`RequestsDrafter` keeps of one request."""

    length: int  #: tokens


ContextType = TypeVar("ContextType", bound=Context)


class RequestsDrafter(Generic[ContextType]):
    """The part of a :class:`Drafter` that is the same whatever is kept of a request.

    :param model: the draft, on its device and in its dtype; put into evaluation mode.
    :param new_context: makes an empty request.
    """

    def __init__(self, model: Any, new_context: Callable[[], ContextType]) -> None:
        self.model = model.eval()
        self.max_draft_tokens = int(model.layout.most_draft_tokens)
        self.layer_ids = tuple(model.target_layer_ids)
        self._new_context = new_context
        self._contexts: list[ContextType] = []

    @property
    def device(self) -> torch.device:
        return torch.device(self.model.embed_tokens.weight.device)

    @property
    def verifier_ids(self) -> Tensor | None:
        if not self.model.reduced_vocabulary:
            return None
        ids: Tensor = self.model.draft_to_verifier(torch.arange(self.model.draft_vocab_size, device=self.device))
        return ids

    def start(self, num_requests: int) -> None:
        self._contexts = [self._new_context() for _ in range(num_requests)]

    def context_length(self, request: int) -> int:
        return self._contexts[request].length

    def drop(self, request: int) -> None:
        self._contexts[request] = self._new_context()

    @torch.no_grad()
    def extend(self, token_ids: list[Tensor], features: list[Tensor]) -> None:
        """Append tokens with the verifier's states at them.

        :raises ValueError: lists or lengths do not match the requests.
        """
        if not len(token_ids) == len(features) == len(self._contexts):
            raise ValueError(
                f"expected {len(self._contexts)} requests, got {len(token_ids)} token lists and {len(features)} features"
            )
        for context, ids, states in zip(self._contexts, token_ids, features, strict=True):
            if ids.shape[0] != states.shape[0]:
                raise ValueError(f"{ids.shape[0]} tokens came with features of {states.shape[0]}")
            if ids.shape[0]:
                self._extend(context, ids.to(self.device), states.to(self.device))

    @torch.no_grad()
    def propose(
        self,
        anchors: list[int],
        n: int,
        sampling: SamplingParams,
        generator: torch.Generator | None = None,
        full_block: bool = False,
    ) -> list[Draft]:
        """Draft n tokens per request.

        :raises ValueError: n is outside the layout's range, or a list has the wrong length.
        """
        if len(anchors) != len(self._contexts):
            raise ValueError(f"expected {len(self._contexts)} anchors, got {len(anchors)}")
        needed = self.model.layout.query_slots(n)
        slots = self.model.layout.block_size if full_block else needed
        return [
            self._propose(context, anchor, n, slots, sampling, generator) for context, anchor in zip(self._contexts, anchors)
        ]

    def _extend(self, context: ContextType, ids: Tensor, states: Tensor) -> None:
        """Append tokens ``[t]``, t > 0, with their states ``[t, M, H]`` to one request."""
        raise NotImplementedError

    def _propose(
        self,
        context: ContextType,
        anchor: int,
        n: int,
        num_slots: int,
        sampling: SamplingParams,
        generator: torch.Generator | None,
    ) -> Draft:
        """n tokens of one request, of a block of ``num_slots`` slots."""
        raise NotImplementedError
