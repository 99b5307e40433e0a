"""prepare-data --generate: answers become rows, a kill costs little, and a refusal comes before anything is generated."""

from __future__ import annotations

import json
from collections.abc import Hashable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from speculators.cli.prepare_data import main
from speculators.data import AnswerRecord, RowDataset, render_prompt
from speculators.errors import ConfigError
from speculators.pipelines.answered_data import prepare_answers
from speculators.pipelines.regenerate_settings import RegenerateSettings
from speculators.sampling import SamplingParams
from speculators.verifiers.answering import Answer, Outcome, Question
from tests.data.preparing import chat, config, loaded, write_lines
from tests.tiny import tiny_tokenizer, tiny_verifier

END = tiny_tokenizer().eos_token_id


@dataclass
class Engine:
    """Answers every prompt with its length, the latest question first, and dies after ``most`` answers."""

    most: int = 10**9
    name: str = "tiny"
    context_length: int | None = 100
    window: int = 4
    tokens: int = 0
    origin: dict[str, Any] = field(default_factory=dict)
    asked: list[Question] = field(default_factory=list)
    waiting: list[Question] = field(default_factory=list)

    def describe(self) -> dict[str, Any]:
        return {"verifier": self.name}

    def ask(self, question: Question) -> None:
        self.asked.append(question)
        self.waiting.append(question)

    def finished(self) -> list[tuple[Hashable, Outcome]]:
        if not self.most:
            raise KeyboardInterrupt  # as a kill: nothing of the library catches it
        self.most -= 1
        question = self.waiting.pop()
        ids = [10 + len(question.prompt) % 30, 11, END]
        return [(question.key, Answer(ids, "stop", len(question.prompt), len(ids)))]

    def close(self) -> None: ...


SETTINGS = RegenerateSettings(max_tokens=4, sampling=SamplingParams(temperature=0.7))


def prepared(data: Path, output: Path, engine: Engine, **changes: Any) -> RowDataset:
    _, report = prepare_answers(config(data, output, seq_length=100, **changes), loaded(), engine, SETTINGS)
    assert report.dataset is not None
    return report.dataset


@pytest.fixture
def data(tmp_path: Path) -> Path:
    records = [chat(f"question {number}", *["not kept"] * (1 + number % 2), id=f"c{number}") for number in range(9)]
    return write_lines(tmp_path / "questions.jsonl", [*records, {"prompt": "q" * 200}, "{broken"])


def test_rows_are_prompts_and_answers_as_they_were_generated(data: Path, tmp_path: Path) -> None:
    engine = Engine()
    dataset = prepared(data, tmp_path / "output", engine)
    prompts = {tuple(question.prompt) for question in engine.asked}
    assert tuple(render_prompt(tiny_tokenizer(), [{"role": "user", "content": "question 0"}])) in prompts
    assert len(dataset) == len(engine.asked) == 13  # 5 conversations of one turn, 4 of two
    for row in dataset:
        assert tuple(row.input_ids[~row.loss_mask].tolist()) in prompts
        assert row.input_ids[row.loss_mask].tolist() == [10 + int((~row.loss_mask).sum()) % 30, 11, END]
    assert dataset.conversations is not None
    assert len(set(dataset.conversations.tolist())) == 9
    manifest = dataset.manifest
    assert manifest.answers == AnswerRecord(on_policy=True, temperature=0.7, max_new_tokens=4)
    assert manifest.options["asked"]["verifier"] == "tiny"
    errors = [json.loads(line)["outcome"] for line in (tmp_path / "output" / "answers.errors.jsonl").read_text().splitlines()]
    assert sorted(errors) == ["prompt_too_long", "unreadable"]


def test_a_kill_costs_the_answers_that_were_not_done(data: Path, tmp_path: Path) -> None:
    whole = prepared(data, tmp_path / "whole", Engine())
    with pytest.raises(KeyboardInterrupt):
        prepared(data, tmp_path / "output", Engine(most=5))
    second = Engine()
    dataset = prepared(data, tmp_path / "output", second)
    assert len(second.asked) == 13 - 5
    assert dataset.fingerprint == whole.fingerprint
    third = Engine()
    assert prepared(data, tmp_path / "output", third).fingerprint == whole.fingerprint
    assert not third.asked


def test_some_rows_are_the_first_of_all(data: Path, tmp_path: Path) -> None:
    whole = prepared(data, tmp_path / "whole", Engine())
    few = Engine()
    dataset = prepared(data, tmp_path / "few", few, max_samples=3)
    assert [row.input_ids.tolist() for row in dataset] == [whole.row(row).input_ids.tolist() for row in range(3)]
    assert len(few.asked) <= 6


def test_what_would_not_be_taken_is_refused_before_anything_is_generated(data: Path, tmp_path: Path) -> None:
    output = tmp_path / "output"
    first = prepared(data, output, Engine())
    for engine, changes in ((Engine(name="other"), {}), (Engine(), {"seed": 1}), (Engine(), {"minimum_valid_tokens": 2})):
        with pytest.raises(ConfigError, match="rows of other data or settings"):
            prepared(data, output, engine, **changes)
        assert not engine.asked
    assert RowDataset.load(output).fingerprint == first.fingerprint
    same, other = Engine(), Engine(name="other")
    prepared(data, output, same, minimum_valid_tokens=2, overwrite=True)
    assert not same.asked  # the answers are the same
    prepared(data, output, other, overwrite=True)
    assert len(other.asked) == 13


def test_generation_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tiny_verifier(tmp_path)
    questions = write_lines(tmp_path / "questions.jsonl", ({"prompt": f"question {number}"} for number in range(5)))
    arguments = ["--model", str(model), "--data", str(questions), "--seq-length", "64", "--generate", "--max-new-tokens", "8"]
    fingerprints = []
    for name in ("a", "b", "b"):
        with pytest.raises(SystemExit) as exit_:
            main([*arguments, "--output", str(tmp_path / name)])
        assert exit_.value.code == 0
        assert "5 records -> 5 rows" in capsys.readouterr().out
        dataset = RowDataset.load(tmp_path / name)
        assert dataset.manifest.answers == AnswerRecord(on_policy=True, max_new_tokens=8)
        assert all(1 <= row.loss_mask.sum() <= 8 for row in dataset)
        fingerprints.append(dataset.fingerprint)
    assert len(set(fingerprints)) == 1
