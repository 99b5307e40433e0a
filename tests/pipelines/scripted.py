"""An engine without a model: its answers are a function of the question, and it dies, fails or dawdles when told to."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Hashable
from typing import Any

from speculators.errors import VerifierError
from speculators.verifiers.answering import Answer, Failure, Outcome, Question
from tests.tiny import tiny_tokenizer

TOKENIZER = tiny_tokenizer()
END = int(TOKENIZER.convert_tokens_to_ids("<|im_end|>"))


def spell(text: str, limit: int) -> Answer:
    """An answer of this text, cut at the limit."""
    ids = [*TOKENIZER(text, add_special_tokens=False)["input_ids"], END]
    return Answer(ids[:limit], "stop" if len(ids) <= limit else "length", 0, len(ids[:limit]))


def echo(question: Question) -> Outcome:
    """The sum of the prompt, so that each answer depends on all that was said, and a few letters that the seed draws."""
    drawn = "" if question.sampling.greedy else f" {question.seed % 997}"
    return spell(f"{sum(place * token for place, token in enumerate(question.prompt)) % 9973}{drawn}", question.limit)


class ScriptedEngine:
    """Answers two questions at a time, the newer first."""

    def __init__(
        self,
        answer: Callable[[Question], Outcome] = echo,
        *,
        dies_after: int | None = None,
        context_length: int | None = None,
        seconds: float = 0.0,
        name: str = "script",
    ) -> None:
        self.answer, self.left, self.seconds, self.name = answer, dies_after, seconds, name
        self.context_length = context_length
        self.tokens = 0
        self.asked: list[Question] = []
        self._waiting: deque[Question] = deque()

    window = 5

    @property
    def origin(self) -> dict[str, str]:
        return {"verifier": self.name}

    def describe(self) -> dict[str, Any]:
        return {"verifier": self.name}

    def ask(self, question: Question) -> None:
        self.asked.append(question)
        self._waiting.append(question)
        assert len(self._waiting) <= self.window

    def finished(self) -> list[tuple[Hashable, Outcome]]:
        time.sleep(self.seconds)
        done = []
        for _ in range(min(2, len(self._waiting))):
            if self.left == 0:
                raise VerifierError("the engine is gone; what is done is kept")
            self.left = None if self.left is None else self.left - 1
            question = self._waiting.pop()
            outcome = self.answer(question)
            self.tokens += 0 if isinstance(outcome, Failure) else outcome.answer_tokens
            done.append((question.key, outcome))
        return done

    def close(self) -> None:
        self._waiting.clear()
