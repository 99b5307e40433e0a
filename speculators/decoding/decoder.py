"""The lossless decoder: a draft proposes, the verifier checks in one pass, and the output is distributed as the verifier's own.

Plain decoding is the same code with n = 0: one verifier pass per token, through the same session. So a speedup
measured against it compares drafting with not drafting, and nothing else.

One round of a request, when the newest token (the *anchor*) sits at position a and the verifier has seen positions 0..a-1:

1. the drafter proposes x_1..x_n after the anchor;
2. the verifier appends [anchor, x_1, ..., x_n] and returns n + 1 rows of logits;
3. the acceptance rule keeps k of them and yields one token more, the next anchor;
4. the verifier is rolled back to a + 1 + k tokens; the features of [anchor, x_1, ..., x_k] extend the drafter's context.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from torch import Tensor

from speculators.decoding.acceptance import Chance, RandomChance, accept_block, verify_greedy
from speculators.decoding.statistics import AcceptanceStatistics, Round
from speculators.errors import ConfigError, DataError
from speculators.sampling import SamplingParams, probabilities

if TYPE_CHECKING:
    from speculators.models.drafter import Draft, Drafter
    from speculators.verifiers.session import VerifierSession

__all__ = ["Decoded", "Decoder", "Finish", "Seconds"]

#: Why a request ended: an end-of-sequence token, ``max_new_tokens``, or the end of the context.
Finish = Literal["eos", "length", "context"]


@dataclass(slots=True)
class Seconds:
    """Wall clock of one decode. ``draft`` includes extending the drafter's context by accepted tokens."""

    prefill: float = 0.0
    draft: float = 0.0
    verify: float = 0.0
    total: float = 0.0

    @property
    def decoding(self) -> float:
        """All but the prefill."""
        return self.total - self.prefill


@dataclass(slots=True)
class Decoded:
    """One answered prompt. Requests decoded together share their ``seconds``."""

    prompt_length: int
    tokens: list[int]  #: the answer, the end-of-sequence token included
    rounds: list[Round]
    finish: Finish
    seconds: Seconds

    @property
    def statistics(self) -> AcceptanceStatistics:
        statistics = AcceptanceStatistics()
        statistics.add(self.rounds, len(self.tokens))
        return statistics

    @property
    def tokens_per_second(self) -> float:
        """Tokens after the first one (which the prefill gives) per second of decoding without the prefill; 0 without any."""
        return (len(self.tokens) - 1) / self.seconds.decoding if self.rounds else 0.0


@dataclass(slots=True)
class _Request:
    prompt_length: int
    budget: int  #: most tokens to generate
    cut: Finish  #: why it ends when the budget is used up
    chance: Chance
    tokens: list[int] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    finish: Finish | None = None

    @property
    def anchor(self) -> int:
        """Position of the newest token; also the number of tokens the verifier has seen."""
        return self.prompt_length + len(self.tokens) - 1

    @property
    def last_position(self) -> int:
        """The last position a token may have."""
        return self.prompt_length + self.budget - 1

    def append(self, tokens: list[int], eos_ids: Collection[int]) -> int:
        """Take over as many of ``tokens`` as the budget allows and return how many."""
        kept = tokens[: self.budget - len(self.tokens)]
        self.tokens += kept
        if kept and kept[-1] in eos_ids:
            self.finish = "eos"
        elif len(self.tokens) == self.budget:
            self.finish = self.cut
        return len(kept)


class Decoder:
    """Decodes prompts by drafting ``num_draft_tokens`` tokens a round and verifying them.

    :param session_factory: opens a verifier session; called once per :meth:`decode`.
    :param drafter: proposes tokens; not needed (and not used) when ``num_draft_tokens`` is 0.
    :param num_draft_tokens: n, the same in every round as in serving; 0 is plain decoding.
    :param sampling: how the verifier samples; the draft samples at the same temperature without top-k and top-p.
    :param full_block: draft the layout's whole block and use its first n tokens, instead of querying n slots only.
    :param context_length: most tokens of prompt and answer together; None for no limit.
    :param seed: with the prompt's index, seeds the draws of each request.
    :raises ConfigError: when n is negative, has no drafter, or exceeds what a block of the drafter can predict.
    """

    def __init__(
        self,
        session_factory: Callable[[], VerifierSession],
        drafter: Drafter | None = None,
        num_draft_tokens: int = 0,
        sampling: SamplingParams | None = None,
        *,
        full_block: bool = False,
        context_length: int | None = None,
        seed: int = 0,
    ) -> None:
        if num_draft_tokens < 0:
            raise ConfigError(f"cannot draft {num_draft_tokens} tokens; use 0 for plain decoding or a positive number")
        if num_draft_tokens and drafter is None:
            raise ConfigError(f"drafting {num_draft_tokens} tokens needs a draft; give one or use 0 for plain decoding")
        if drafter is not None and num_draft_tokens > drafter.max_draft_tokens:
            raise ConfigError(
                f"cannot draft {num_draft_tokens} tokens with this draft, whose blocks predict {drafter.max_draft_tokens}; "
                f"use at most {drafter.max_draft_tokens}"
            )
        self.session_factory = session_factory
        self.drafter = drafter if num_draft_tokens else None
        self.num_draft_tokens = num_draft_tokens
        self.sampling = sampling if sampling is not None else SamplingParams()
        self.full_block = full_block
        self.context_length = context_length
        self.seed = seed

    def decode(
        self,
        prompt: Sequence[int] | Tensor,
        max_new_tokens: int,
        eos_ids: Collection[int] = (),
        *,
        index: int = 0,
        chance: Chance | None = None,
    ) -> Decoded:
        """Answer one prompt.

        :param prompt: token ids ``[T]``.
        :param max_new_tokens: most tokens to generate, at least 1.
        :param eos_ids: tokens that end the answer (kept as its last token).
        :param index: the prompt's index: its draws are a pure function of (seed, index).
        :param chance: takes the random decisions instead of a generator seeded so.
        :raises DataError: when the prompt is empty or leaves no room in the context.
        """
        return self.decode_together([prompt], max_new_tokens, eos_ids, [index], None if chance is None else [chance])[0]

    @torch.no_grad()
    def decode_together(
        self,
        prompts: Sequence[Sequence[int] | Tensor],
        max_new_tokens: int,
        eos_ids: Collection[int] = (),
        indices: Sequence[int] | None = None,
        chances: Sequence[Chance] | None = None,
    ) -> list[Decoded]:
        """Answer several prompts in one session, as far as the session takes more than one.

        The drafter draws for all of them from the first request's generator, so sampled outputs depend on the company
        (their distribution does not); greedy outputs do not. Parameters as for :meth:`decode`.
        """
        if not prompts:
            return []
        ids = [torch.as_tensor(prompt, dtype=torch.long) for prompt in prompts]
        budgets = [self._budget(prompt, max_new_tokens) for prompt in ids]
        seconds = Seconds()
        began = time.perf_counter()
        session = self.session_factory()
        outputs = session.prefill(ids)
        device = outputs[0].logits.device
        if chances is None:
            chances = [RandomChance(self._generator(i, device)) for i in (range(len(ids)) if indices is None else indices)]
        requests = []
        for prompt, (budget, cut), chance, output in zip(ids, budgets, chances, outputs, strict=True):
            request = _Request(prompt.shape[0], budget, cut, chance)
            request.append([self._accept(output.logits[-1:], None, chance)[1]], eos_ids)
            requests.append(request)
        if self.drafter is not None:
            self.drafter.start(len(requests))
            self.drafter.extend(ids, [output.features for output in outputs])
        seconds.prefill = _now(device) - began
        while any(request.finish is None for request in requests):
            self._round(session, requests, eos_ids, device, seconds)
        seconds.total = _now(device) - began
        return [
            Decoded(request.prompt_length, request.tokens, request.rounds, request.finish or request.cut, seconds)
            for request in requests
        ]

    def _budget(self, prompt: Tensor, max_new_tokens: int) -> tuple[int, Finish]:
        """Tokens that may be generated, and what ends the answer when they are."""
        length = prompt.shape[0]
        if max_new_tokens < 1:
            raise ConfigError(f"cannot generate {max_new_tokens} tokens; max_new_tokens must be at least 1")
        if length == 0:
            raise DataError("cannot answer a prompt without tokens; leave it out")
        if self.context_length is None or length + max_new_tokens <= self.context_length:
            return max_new_tokens, "length"
        if length >= self.context_length:
            raise DataError(
                f"the prompt has {length} tokens and the verifier's context only {self.context_length}; "
                "shorten the prompt or leave it out"
            )
        return self.context_length - length, "context"

    def _generator(self, index: int, device: torch.device) -> torch.Generator:
        generator = torch.Generator(device)
        generator.manual_seed(int(np.random.SeedSequence([self.seed, index]).generate_state(1, np.uint64)[0]))
        return generator

    def _round(
        self,
        session: VerifierSession,
        requests: list[_Request],
        eos_ids: Collection[int],
        device: torch.device,
        seconds: Seconds,
    ) -> None:
        """Draft, verify, accept, roll back and extend, once for every request; finished ones only keep their place."""
        began = _now(device)
        drafts = self._propose(requests)
        blocks = [self._block(request, draft, device) for request, draft in zip(requests, drafts)]
        drafted_at = _now(device)
        outputs = session.verify(blocks)
        accepted_tokens: list[Tensor] = []
        features: list[Tensor] = []
        for request, draft, block, output in zip(requests, drafts, blocks, outputs, strict=True):
            kept = 0
            if request.finish is None:
                one = self._settle(request, draft, block, output.logits, eos_ids)
                request.rounds.append(one)
                kept = 0 if request.finish is not None else one.accepted + 1
            if self.drafter is not None:
                accepted_tokens.append(block[:kept])
                features.append(output.features[:kept])
        # A request that has just finished keeps what it had: nothing reads its caches again.
        lengths = [min(length, request.anchor) for length, request in zip(session.lengths, requests)]
        session.rollback(lengths)
        verified_at = _now(device)
        if self.drafter is not None and any(request.finish is None for request in requests):
            self.drafter.extend(accepted_tokens, features)
        seconds.draft += drafted_at - began + _now(device) - verified_at
        seconds.verify += verified_at - drafted_at

    def _propose(self, requests: list[_Request]) -> list[Draft | None]:
        if self.drafter is None:
            return [None] * len(requests)
        anchors = [request.tokens[-1] for request in requests]
        generator = requests[0].chance.generator
        return [*self.drafter.propose(anchors, self.num_draft_tokens, self.sampling, generator, full_block=self.full_block)]

    def _block(self, request: _Request, draft: Draft | None, device: torch.device) -> Tensor:
        """What the verifier appends: the anchor and the drafted tokens ``[1 + n]``; nothing once the request has finished."""
        if request.finish is not None:
            return torch.empty(0, dtype=torch.long, device=device)
        anchor = torch.tensor([request.tokens[-1]], device=device)
        if draft is None:
            return anchor
        # Near the end of the context fewer tokens fit; the draft's own pass keeps its shape.
        room = self.num_draft_tokens
        if self.context_length is not None:
            room = min(room, self.context_length - request.anchor - 1)
        return torch.cat([anchor, draft.tokens[:room].to(device)])

    def _settle(self, request: _Request, draft: Draft | None, block: Tensor, logits: Tensor, eos_ids: Collection[int]) -> Round:
        """Apply the rule to one verified block ``[1 + n]`` with its logits ``[1 + n, V]``."""
        anchor = request.anchor
        drafted: list[int] = block[1:].tolist()
        accepted, following = self._accept(logits, draft, request.chance, block[1:])
        emitted = [*drafted[:accepted], following]
        ended = False
        for place, token in enumerate(drafted[:accepted]):
            if token in eos_ids:
                accepted, emitted, ended = place + 1, drafted[: place + 1], True
                break
        complete = anchor + self.num_draft_tokens <= request.last_position
        kept = request.append(emitted, eos_ids)
        confidence = None
        if draft is not None and draft.confidence is not None:
            confidence = tuple(draft.confidence[: len(drafted)].tolist())
        return Round(anchor, len(drafted), accepted, len(emitted), kept, ended, complete, confidence)

    def _accept(self, logits: Tensor, draft: Draft | None, chance: Chance, tokens: Tensor | None = None) -> tuple[int, int]:
        if self.sampling.greedy:
            return verify_greedy(logits, logits.new_empty(0, dtype=torch.long) if tokens is None else tokens)
        p = probabilities(logits, self.sampling)
        if draft is None or tokens is None or draft.probabilities is None or self.drafter is None:
            return 0, chance.choose(p[0])
        n = tokens.shape[0]
        q, draft_ids = draft.probabilities[:n], draft.draft_ids[:n]
        return accept_block(p, q, tokens, draft_ids, verifier_ids=self.drafter.verifier_ids, chance=chance)


def _now(device: torch.device) -> float:
    """The clock, after the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
