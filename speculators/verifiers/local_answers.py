"""Answers by a verifier in this process: a continuous batch, longest prompts first."""

from __future__ import annotations

import time
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any

from speculators.verifiers.answering import Answer, Outcome, Question, refuse_further
from speculators.verifiers.generation import Generation, GenerationRow
from speculators.verifiers.loading import Verifier

__all__ = ["LocalEngine"]

#: Prompts to choose the longest from, in batches: with few, long prompts join late and make all rows beside them as wide.
_CHOICE = 8

#: Seconds after which :meth:`LocalEngine.finished` returns with nothing.
_PATIENCE = 1.0


class LocalEngine:
    """The engine protocol over :class:`Generation`.

    :param batch_size: rows that run at once.
    :param eos_ids: ids that end an answer; by default the verifier's end-of-sequence ids.
    """

    def __init__(self, verifier: Verifier, batch_size: int = 64, eos_ids: Sequence[int] | None = None) -> None:
        self.verifier = verifier
        self._generation = Generation(verifier, batch_size, eos_ids)
        self._keys: dict[int, Hashable] = {}
        self._asked = 0

    @property
    def context_length(self) -> int | None:
        return self.verifier.context_length

    @property
    def window(self) -> int:
        return _CHOICE * self._generation.batch_size

    @property
    def tokens(self) -> int:
        return self._generation.tokens

    @property
    def origin(self) -> dict[str, str]:
        return {"verifier": self.verifier.name}

    def describe(self) -> dict[str, Any]:
        # The hash is not of the weights' content, so a verifier is known by its place, too.
        place = Path(self.verifier.name)
        facts = {"verifier": self.verifier.hash, "dtype": str(self.verifier.dtype).removeprefix("torch.")}
        return {**facts, "folder": str(place.resolve()) if place.is_dir() else self.verifier.name}

    def ask(self, question: Question) -> None:
        """Hand in a question.

        :raises ConfigError: for sampling parameters that only servers know.
        """
        refuse_further(question, "the in-process verifier")
        self._keys[self._asked] = question.key
        row = GenerationRow(self._asked, question.prompt, question.limit, question.sampling, (question.seed,))
        self._generation.add(row)
        self._asked += 1

    def finished(self) -> list[tuple[Hashable, Outcome]]:
        until = time.monotonic() + _PATIENCE
        done: list[GenerationRow] = []
        while not done and len(self._generation) and time.monotonic() < until:
            done = self._generation.step()
        return [(self._keys.pop(row.index), self._answer(row)) for row in done]

    def _answer(self, row: GenerationRow) -> Outcome:
        stopped = row.answer[-1] in self._generation.eos_ids
        return Answer(row.answer, "stop" if stopped else "length", len(row.prompt), len(row.answer))

    def close(self) -> None:
        """Nothing runs between calls."""
