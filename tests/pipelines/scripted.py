"""An engine without a model: its answers are a function of the question, and it dies, fails or dawdles when told to.

Also some conversations, and a regeneration of them in one call.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections import deque
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any

from speculators.errors import VerifierError
from speculators.pipelines.answer_files import errors_file
from speculators.pipelines.regenerate import Records, regenerate
from speculators.pipelines.regenerate_report import RegenerationReport
from speculators.pipelines.regenerate_settings import RegenerateSettings, parse_distribution, temperature_of
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


Record = dict[str, Any]


def user(text: str) -> Record:
    return {"role": "user", "content": text}


OLD = {"role": "assistant", "content": "old"}
CONVERSATIONS: list[Any] = [
    {"id": "one", "messages": [user("hello"), OLD, user("and"), OLD, user("so")]},
    {"id": "two", "messages": [{"role": "system", "content": "be kind"}, user("hi"), OLD]},
    {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}, {"from": "human", "value": "c"}]},
    {"turns": ["first", "second", "third"]},
    {"prompt": "what is it"},
    *({"id": number, "messages": [user(f"number {number}"), OLD, user("more"), OLD]} for number in range(6)),
]


def records(given: list[Any] | None = None) -> Records:
    given = CONVERSATIONS if given is None else given
    digest = hashlib.sha256(json.dumps(given, default=str).encode()).hexdigest()
    return Records([("data.jsonl", index, record) for index, record in enumerate(given)], {"data.jsonl": digest}, len(given))


def run(
    outfile: Path,
    engine: Any = None,
    given: list[Any] | None = None,
    how: RegenerateSettings | None = None,
    *,
    resume: bool = False,
    eos_ids: tuple[int, ...] = (END,),
    tokenizer: Any = TOKENIZER,
) -> RegenerationReport:
    how = how or RegenerateSettings(max_tokens=20)
    engine = engine or ScriptedEngine()
    return regenerate(records(given), engine, tokenizer, outfile, how, eos_ids=eos_ids, resume=resume, progress=False)


def rows(outfile: Path) -> list[Record]:
    return [json.loads(line) for line in outfile.read_text(encoding="utf-8").splitlines()]


def by_id(outfile: Path) -> dict[str, Record]:
    found = rows(outfile)
    named = {row["id"]: row for row in found}
    assert len(named) == len(found), "a row is there twice"
    return named


def errors(outfile: Path) -> list[Record]:
    return rows(errors_file(outfile)) if errors_file(outfile).exists() else []


TEMPERATURES = parse_distribution('{"0.0": 1, "0.7": 3}', "--temperature", temperature_of)
#: Nine tokens an answer, most of them sampled.
DRAWN = RegenerateSettings(max_tokens=9, temperature=TEMPERATURES)
