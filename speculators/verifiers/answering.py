"""Engines that answer prompts: what they are asked, what they say, and the protocol they share.

An engine takes questions at any time and hands back answers in the order in which they are done, so that the next turn of
one conversation runs beside the turns of others.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from speculators.errors import ConfigError
from speculators.sampling import SamplingParams

__all__ = ["Answer", "AnswerEngine", "Chat", "Failure", "Outcome", "Question", "answer_all", "refuse_further"]


@dataclass(frozen=True, slots=True)
class Chat:
    """The conversation that a prompt was rendered from, for servers that take no token ids."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Any] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)  #: further arguments of the chat template


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt to answer."""

    key: Hashable  #: comes back with the answer
    prompt: Sequence[int]  #: token ids, at least one, fewer than the engine's context
    limit: int  #: most tokens of the answer, end-of-turn token included
    sampling: SamplingParams = field(default_factory=SamplingParams)
    seed: int = 0  #: of the draws, 0 <= seed < 2**31; an engine's answer is a function of prompt, limit, sampling and seed
    further: Mapping[str, Any] = field(default_factory=dict)  #: sampling parameters that only servers know
    chat: Chat | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """What an engine generated."""

    ids: list[int]  #: with the end-of-turn token, if there is one; empty if the engine gave a message only
    finish_reason: str  #: "stop", or "length" when the limit cut it
    prompt_tokens: int  #: as the engine counts them
    answer_tokens: int
    #: The assistant's message as a server parsed it, from an engine that does not say token ids.
    message: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Failure:
    """A question that could not be answered, though others can."""

    reason: str


Outcome = Answer | Failure


class AnswerEngine(Protocol):
    """Answers questions; not to be used by several threads at once."""

    @property
    def context_length(self) -> int | None:
        """Most tokens of prompt and answer together; None when it is not known."""

    @property
    def window(self) -> int:
        """Questions that it makes sense to have with the engine at once."""

    @property
    def tokens(self) -> int:
        """Tokens generated so far, those of unfinished answers included as far as they are known."""

    @property
    def origin(self) -> dict[str, str]:
        """Where answers come from, for the record of each: ``verifier``, or ``endpoint`` and ``model``."""

    def describe(self) -> dict[str, Any]:
        """What the answers depend on besides the questions: runs that say the same may be mixed."""

    def ask(self, question: Question) -> None:
        """Hand in a question; returns at once."""

    def finished(self) -> list[tuple[Hashable, Outcome]]:
        """What has been done since the last call: waits for it, but no longer than about a second, after which the list may be
        empty.

        :raises VerifierError: when the engine is lost, or is found not to do what was asked of it.
        """

    def close(self) -> None:
        """Stop the work on questions that are not done."""


def refuse_further(question: Question, engine: str) -> None:
    """:raises ConfigError: for sampling parameters that only servers know, of an engine of ours."""
    if question.further:
        names = ", ".join(sorted(question.further))
        raise ConfigError(f"{engine} does not know the sampling parameters {names}; it takes temperature, top_k and top_p")


def answer_all(engine: AnswerEngine, questions: Iterable[Question]) -> Iterator[tuple[Hashable, Outcome]]:
    """(key, answer or failure) of every question, in the order in which they are done.

    Questions are taken from the iterable as the engine has room for them.

    :raises VerifierError: as :meth:`AnswerEngine.finished`.
    """
    waiting = iter(questions)
    asked = 0
    while True:
        while asked < engine.window and (question := next(waiting, None)) is not None:
            engine.ask(question)
            asked += 1
        if not asked:
            return
        for key, outcome in engine.finished():
            asked -= 1
            yield key, outcome
