"""Answers by verifiers that actors on a Ray cluster run: the engine protocol over a rollout.

Questions wait in this process, the longest prompts first, and an actor is given a few more than it runs at once. It works in
calls of a second at most, each of which brings new questions and takes away what is done; so the questions that an actor holds
are known here, and asked again of another when it is lost.
"""

from __future__ import annotations

import dataclasses
import heapq
import os
import time
from collections.abc import Hashable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from typing import Any

from speculators.errors import VerifierError
from speculators.verifiers.answering import Answer, Outcome, Question, refuse_further
from speculators.verifiers.rollout.cluster import open_cluster
from speculators.verifiers.rollout.pool import ActorPool, Member
from speculators.verifiers.rollout.settings import RolloutSettings

__all__ = ["AnswerActor", "AnswersOf", "RayAnswerEngine"]

#: Questions that an actor holds, in batches: what runs and what follows it.
_HELD = 2

#: Questions to choose the longest from, in batches of every actor.
_CHOICE = 8

#: Seconds after which :meth:`RayAnswerEngine.finished` returns with nothing.
_PATIENCE = 1.0


@dataclass(frozen=True, slots=True)
class AnswersOf:
    """What an actor says of its verifier."""

    context_length: int | None
    origin: dict[str, str]
    record: dict[str, Any]  #: of :meth:`speculators.verifiers.answering.AnswerEngine.describe`


class AnswerActor:
    """A verifier of transformers on the actor's node that answers as one in the asking process would.

    :param verifier: folder or hub id, as this node sees it.
    :param batch_size: rows that run at once.
    """

    def __init__(
        self, verifier: str, batch_size: int, eos_ids: tuple[int, ...] | None, *, trust_remote_code: bool, threads: int
    ) -> None:
        import torch

        from speculators.verifiers.loading import load_verifier
        from speculators.verifiers.local_answers import LocalEngine

        torch.set_num_threads(threads)
        self._engine = LocalEngine(load_verifier(verifier, trust_remote_code=trust_remote_code), batch_size, eos_ids)

    def describe(self) -> tuple[AnswersOf, int]:
        """What the answers are of, and this actor's process id."""
        engine = self._engine
        return AnswersOf(engine.context_length, engine.origin, engine.describe()), os.getpid()

    def go_on(self, questions: list[Question]) -> tuple[list[tuple[Hashable, Outcome]], int]:
        """Take further questions and generate until one is done, or for a second; what is done, and all tokens so far."""
        for question in questions:
            self._engine.ask(question)
        return self._engine.finished(), self._engine.tokens


@dataclass(slots=True, eq=False)
class _Share:
    """What one actor works on."""

    member: Member
    held: dict[int, Question] = field(default_factory=dict)
    fresh: list[Question] = field(default_factory=list)  #: of those held, what it has not been given yet
    tokens: int = 0  #: that it said it had generated
    call: Any = None  #: under way
    since: float = 0.0


class RayAnswerEngine:
    """See :class:`speculators.verifiers.answering.AnswerEngine`.

    Answers are those of a :class:`~speculators.verifiers.local_answers.LocalEngine` in this process, up to rounding, whichever
    actor gives them and however often an actor is lost.

    :param verifier: folder or hub id, which every node with an actor can read.
    :param batch_size: rows that run at once on every actor.
    :param eos_ids: ids that end an answer; by default the verifier's end-of-sequence ids.
    :param address: as of :func:`~speculators.verifiers.rollout.cluster.open_cluster`.
    :raises ConfigError: without the package ray.
    :raises VerifierError: when there is no cluster, or no actor starts.
    """

    def __init__(
        self,
        verifier: str,
        batch_size: int = 64,
        eos_ids: Sequence[int] | None = None,
        *,
        address: str | None = None,
        settings: RolloutSettings | None = None,
        trust_remote_code: bool = False,
    ) -> None:
        import torch

        settings = settings or RolloutSettings()
        self.batch_size = batch_size
        self._seconds = settings.request_timeout
        self._open = ExitStack()
        self._ray = self._open.enter_context(open_cluster(address))
        threads = settings.threads or torch.get_num_threads()
        actor = self._ray.remote(AnswerActor).options(
            num_cpus=settings.cpus, num_gpus=settings.gpus, resources=dict(settings.resources), max_restarts=0
        )
        ends = None if eos_ids is None else tuple(eos_ids)

        def start() -> Any:
            return actor.remote(verifier, batch_size, ends, trust_remote_code=trust_remote_code, threads=threads)

        try:
            self._pool = self._open.enter_context(closing(ActorPool(self._ray, settings, start)))
            self._of: AnswersOf = self._pool.first_description()
        except BaseException:
            self._open.close()
            raise
        self._shares: dict[Member, _Share] = {}
        self._waiting: list[tuple[int, int, Question]] = []  # longest prompt first, then as they were asked
        self._keys: dict[int, Hashable] = {}  # of the questions that are not done
        self._asked = 0
        self._tokens = 0

    @property
    def context_length(self) -> int | None:
        return self._of.context_length

    @property
    def window(self) -> int:
        """Grows and shrinks with the actors."""
        return _CHOICE * self.batch_size * max(1, self._pool.status()["actors"])

    @property
    def tokens(self) -> int:
        return self._tokens

    @property
    def origin(self) -> dict[str, str]:
        return self._of.origin

    def describe(self) -> dict[str, Any]:
        """The same as the engine in this process says: runs of both may be mixed."""
        return self._of.record

    def ask(self, question: Question) -> None:
        """Hand in a question.

        :raises ConfigError: for sampling parameters that only servers know.
        """
        refuse_further(question, "a verifier on Ray")
        # What servers need of the conversation does not travel; keys of any kind stay here.
        self._keys[self._asked] = question.key
        self._wait(dataclasses.replace(question, key=self._asked, chat=None))
        self._asked += 1

    def _wait(self, question: Question) -> None:
        heapq.heappush(self._waiting, (-len(question.prompt), int(question.key), question))  # type: ignore[call-overload]

    def finished(self) -> list[tuple[Hashable, Outcome]]:
        """See :meth:`speculators.verifiers.answering.AnswerEngine.finished`; while no actor is left but others are starting, it
        waits for one.

        :raises VerifierError: when no actor is left, or one has another verifier than the others.
        """
        if not self._keys:
            return []
        self._hand_out()
        calls = {share.call: share for share in self._shares.values() if share.call is not None}
        if not calls:
            self._pool.first_description()
            return []
        self._ray.wait(list(calls), timeout=_PATIENCE)
        done, _ = self._ray.wait(list(calls), num_returns=len(calls), timeout=0)
        outcomes: list[tuple[Hashable, Outcome]] = []
        for call in done:
            outcomes += self._collect(calls.pop(call))
        for share in calls.values():
            if time.monotonic() - share.since > self._seconds:  # it is silent: what a passing answer would say is lost, too
                outcomes += self._collect(share, seconds=0)
        return outcomes

    def _hand_out(self) -> None:
        """Give waiting questions to the actors that hold fewest, and let those go on that have any."""
        for member in self._pool.ready():
            if member not in self._shares:
                self._shares[member] = _Share(self._like_the_first(member))
        shares = list(self._shares.values())
        while self._waiting and shares:
            share = min(shares, key=lambda one: len(one.held))
            if len(share.held) >= _HELD * self.batch_size:
                break
            question = heapq.heappop(self._waiting)[2]
            share.held[question.key] = question  # type: ignore[index]
            share.fresh.append(question)
        for share in shares:
            if share.call is None and share.held:
                share.call, share.since = share.member.handle.go_on.remote(share.fresh), time.monotonic()
                share.fresh = []

    def _like_the_first(self, member: Member) -> Member:
        if member.description.record != self._of.record:
            raise VerifierError(
                f"an actor answers with {member.description.record}, another one with {self._of.record}; give all nodes the "
                "same verifier and the same kind of device"
            )
        return member

    def _collect(self, share: _Share, seconds: float | None = None) -> list[tuple[Hashable, Outcome]]:
        """What an actor's call has done; its questions wait again when it is lost."""
        given = self._pool.collect(share.member, share.call, seconds)
        if given is None:
            del self._shares[share.member]
            for question in share.held.values():
                self._wait(question)
            return []
        share.call = None
        done, tokens = given
        self._tokens += tokens - share.tokens
        share.tokens = tokens
        return [self._take(share, key, outcome) for key, outcome in done]

    def _take(self, share: _Share, key: int, outcome: Outcome) -> tuple[Hashable, Outcome]:
        question = share.held.pop(key, None)
        if question is None or (isinstance(outcome, Answer) and outcome.prompt_tokens != len(question.prompt)):
            raise VerifierError("an actor of the rollout answered another question than it was asked")
        return self._keys.pop(key), outcome

    def status(self) -> dict[str, int]:
        """See :meth:`~speculators.verifiers.rollout.pool.ActorPool.status`."""
        return self._pool.status()

    def processes(self) -> list[int]:
        """Process ids of the actors that are ready, each on its own node."""
        return [member.process for member in self._pool.members if member.process is not None]

    def close(self) -> None:
        """End the actors, and Ray if it was started for them."""
        self._open.close()
