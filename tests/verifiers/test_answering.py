"""Engines behind one protocol: the same answers in process and from a server, whatever befalls the server."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from speculators.errors import ConfigError, VerifierError
from speculators.sampling import SamplingParams
from speculators.verifiers.answering import Answer, AnswerEngine, Chat, Failure, Outcome, Question, answer_all
from speculators.verifiers.generation import generate_answers
from speculators.verifiers.loading import Verifier, load_verifier
from speculators.verifiers.local_answers import LocalEngine
from speculators.verifiers.server_answers import ServerEngine
from speculators.verifiers.server_protocol import answer_of_chat, base_address, chat_body
from tests.tiny import tiny_verifier
from tests.verifiers.fake_server import FAULTS, FakeServer
from tests.verifiers.models import random_ids

SAMPLED = SamplingParams(temperature=0.9, top_k=20, top_p=0.95)
LIMIT = 24
SLOW = ("slow", "drip")  # of the server's faults, those that a timeout ends


@pytest.fixture(scope="module")
def verifier(tmp_path_factory: pytest.TempPathFactory) -> Verifier:
    verifier = load_verifier(tiny_verifier(tmp_path_factory.mktemp("verifier"), max_positions=128), dtype=torch.float64)
    verifier.eos_ids = (2, 7, 11)  # so that answers end at different lengths
    return verifier


def questions(count: int, sampled: bool = False) -> list[Question]:
    lengths = np.random.default_rng(0).integers(1, 40, size=count)
    prompts = [random_ids(int(length), seed).tolist() for seed, length in enumerate(lengths)]
    how = [SAMPLED if sampled and place % 2 else SamplingParams() for place in range(count)]
    return [Question(f"q{place}", prompts[place], LIMIT, how[place], 7 * place) for place in range(count)]


@contextmanager
def connected(server: FakeServer, **settings: Any) -> Iterator[ServerEngine]:
    engine = ServerEngine(server.address, **{"first_wait": 0.01, "timeout": 30.0, **settings})
    try:
        yield engine
    finally:
        engine.close()


def answers_of(engine: AnswerEngine, asked: Sequence[Question]) -> dict[Any, Outcome]:
    outcomes = list(answer_all(engine, asked))
    assert len(outcomes) == len(asked)
    assert {key for key, _ in outcomes} == {question.key for question in asked}
    return dict(outcomes)


def test_in_process_answers_are_those_of_generation(verifier: Verifier) -> None:
    asked = questions(20)
    engine = LocalEngine(verifier, 4)
    answers = answers_of(engine, asked)
    expected = dict(generate_answers(verifier, [question.prompt for question in asked], LIMIT))
    reasons = set()
    for place, question in enumerate(asked):
        answer = answers[question.key]
        assert isinstance(answer, Answer)
        assert answer.ids == expected[place]
        assert answer.finish_reason == ("stop" if answer.ids[-1] in verifier.eos_ids else "length")
        assert (answer.prompt_tokens, answer.answer_tokens) == (len(question.prompt), len(answer.ids))
        reasons.add(answer.finish_reason)
    assert reasons == {"stop", "length"}
    assert engine.tokens == sum(len(ids) for ids in expected.values())


def test_parameters_for_servers_are_refused_in_process(verifier: Verifier) -> None:
    with pytest.raises(ConfigError, match="min_p"):
        LocalEngine(verifier).ask(Question(0, [1], 5, further={"min_p": 0.1}))


def test_a_server_gives_the_same_answers_a_few_at_a_time(verifier: Verifier) -> None:
    asked = questions(10, sampled=True)
    expected = answers_of(LocalEngine(verifier, 5), asked)
    with FakeServer(verifier, delay=0.01) as server, connected(server, concurrency=3, eos_ids=verifier.eos_ids) as engine:
        assert answers_of(engine, asked) == expected
        assert server.busiest == 3
        assert (engine.model, engine.root, engine.context_length) == ("tiny", verifier.name, 128)
        sent = {tuple(body["prompt"]): body for body in server.bodies}[tuple(asked[1].prompt)]
        assert sent["return_token_ids"] is True
        assert (sent["temperature"], sent["top_k"], sent["top_p"], sent["seed"]) == (0.9, 20, 0.95, 7)
        assert sent["stop_token_ids"] == [2, 7, 11]
        assert engine.tokens == sum(answer.answer_tokens for answer in expected.values() if isinstance(answer, Answer))


@pytest.mark.parametrize("fault", [*FAULTS, 429, 500, 503, 408])
def test_what_may_pass_is_tried_again(fault: str | int, verifier: Verifier) -> None:
    asked = questions(3)
    expected = answers_of(LocalEngine(verifier), asked)
    with FakeServer(verifier, [fault] * 2) as server, connected(server, timeout=0.8 if fault in SLOW else 30.0) as engine:
        assert answers_of(engine, asked) == expected
        assert len(server.bodies) == 5 or (fault in SLOW and len(server.bodies) > 5)  # a busy machine may be slow on its own


def test_a_question_that_never_gets_an_answer_fails_alone(verifier: Verifier) -> None:
    asked = questions(4)
    with FakeServer(verifier, [500] * 3) as server, connected(server, concurrency=1, max_retries=2) as engine:
        answers = answers_of(engine, asked)
        failed = answers.pop("q0")
        assert isinstance(failed, Failure)
        assert failed.reason == "status 500: not today, after 3 tries"
        assert all(isinstance(answer, Answer) for answer in answers.values())


def test_a_refused_question_is_not_asked_again(verifier: Verifier) -> None:
    with FakeServer(verifier, [400]) as server, connected(server, concurrency=1) as engine:
        answers = answers_of(engine, questions(3))
        assert answers["q0"] == Failure("status 400: not today")
        assert len(server.bodies) == 3


def test_a_server_that_refuses_everything_ends_the_run(verifier: Verifier) -> None:
    with (
        FakeServer(verifier, [422] * 30) as server,
        connected(server, concurrency=4) as engine,
        pytest.raises(VerifierError, match=r"20 questions in a row failed.*not today"),
    ):
        list(answer_all(engine, questions(30)))


def test_a_server_that_is_gone_ends_the_run_and_what_is_done_is_handed_over(verifier: Verifier) -> None:
    seen: list[Any] = []
    server = FakeServer(verifier)

    def ask() -> None:
        for key, outcome in answer_all(engine, questions(16)):
            assert isinstance(outcome, Answer)
            seen.append(key)
            if len(seen) == 5:
                server.stop()

    server.__enter__()
    with (
        connected(server, concurrency=2, max_retries=1) as engine,
        pytest.raises(VerifierError, match=r"is gone \(.*\); what is done is kept"),
    ):
        ask()
    assert 5 <= len(seen) < 16


def test_text_without_ids_is_refused_unless_it_is_asked_for(verifier: Verifier) -> None:
    chat = Chat([{"role": "user", "content": "hello"}])
    question = Question("q", [1, 52, 5], LIMIT, chat=chat)
    with FakeServer(verifier, token_ids=False) as server:
        with connected(server) as engine, pytest.raises(ConfigError, match=r"gives no token ids.*--allow-retokenized"):
            list(answer_all(engine, [question]))
        with connected(server, allow_retokenized=True) as engine:
            ((_, answer),) = answer_all(engine, [question])
            assert isinstance(answer, Answer)
            assert answer.ids == []
            assert answer.message is not None
            assert answer.message["role"] == "assistant"
            assert not engine.exact


def test_a_prompt_that_the_server_changes_ends_the_run(verifier: Verifier) -> None:
    said = "read a prompt of 11 tokens that is not the one of 12 sent"
    with (
        FakeServer(verifier, eats_prompt=True) as server,
        connected(server) as engine,
        pytest.raises(VerifierError, match=said),
    ):
        list(answer_all(engine, [Question(0, random_ids(12, 0).tolist(), 5)]))


def test_ids_that_the_model_should_not_have_end_the_run(verifier: Verifier) -> None:
    with FakeServer(verifier) as server, connected(server) as engine:
        engine.vocab_size = 2  # every answer has larger ids
        with pytest.raises(VerifierError, match=r"generated the id \d+, but its model should have 2 ids.*--tokenizer"):
            list(answer_all(engine, questions(1)))


def test_servers_that_cannot_be_used(verifier: Verifier, tmp_path: Path) -> None:
    with FakeServer(verifier, models=("one", "two")) as server:
        with pytest.raises(ConfigError, match="serves one, two; choose one with --model"):
            ServerEngine(server.address)
        with pytest.raises(VerifierError, match="serves one, two and not three"):
            ServerEngine(server.address, "three")
        with connected(server, model="two") as engine:
            assert engine.model == "two"
    with pytest.raises(VerifierError, match="no server answers at"):
        ServerEngine(server.address)
    with FakeServer(verifier, key="secret") as server:
        with pytest.raises(VerifierError, match="wants a key"):
            ServerEngine(server.address)
        with connected(server, api_key="secret") as engine:
            assert engine.model == "tiny"


def test_closing_does_not_wait_for_answers(verifier: Verifier) -> None:
    with FakeServer(verifier, delay=5.0) as server:
        began = time.monotonic()
        with connected(server, timeout=30.0) as engine:
            for question in questions(8):
                engine.ask(question)
            time.sleep(0.05)
        engine.close()
        assert time.monotonic() - began < 3.0


def test_waits_grow_and_are_not_the_same_for_all(verifier: Verifier) -> None:
    with FakeServer(verifier) as server, connected(server, first_wait=1.0) as engine:
        waits = [[engine._wait(attempt) for _ in range(200)] for attempt in range(1, 12)]
    for attempt, these in enumerate(waits):
        middle = min(60.0, 2.0**attempt)
        assert min(these) >= 0.5 * middle
        assert max(these) <= 1.5 * middle
        assert max(these) - min(these) > 0.5 * middle


@pytest.mark.parametrize("path", ["", "/", "/v1", "/v1/", "/v1/chat/completions", "/v1/completions", "/v1/models"])
def test_addresses_as_people_write_them(path: str) -> None:
    assert base_address(f"http://localhost:8000{path}") == "http://localhost:8000/v1"
    assert base_address(f"localhost:8000{path}") == "http://localhost:8000/v1"
    for address in (f"http://me:secret@localhost:8000{path}", f"me:secret@localhost{path}"):
        with pytest.raises(ConfigError, match="--endpoint has a name or password") as refused:
            base_address(address)
        assert "secret" not in str(refused.value)


def test_conversations_as_they_are_sent_and_received() -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    thought = {"reasoning_content": "hm", "thinking": "hm"}
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "", "tool_calls": [call, {**call, "id": "own"}], **thought},
        {"role": "tool", "content": "1"},
        {"role": "tool", "content": "2"},
    ]
    options = {"reasoning_effort": "low", "enable_thinking": True}
    body = chat_body(
        "m", Question(0, [1], 9, SamplingParams(temperature=0.5), 3, {"min_p": 0.1}, Chat(messages, None, options))
    )
    assert body["messages"][1]["tool_calls"][0] == {
        "id": "call_1_0",
        "type": "function",
        "function": {"name": "f", "arguments": '{"a": 1}'},
    }
    assert [message.get("tool_call_id") for message in body["messages"][2:]] == ["call_1_0", "own"]
    assert "thinking" not in body["messages"][1]
    assert body["reasoning_effort"] == "low"
    assert body["chat_template_kwargs"] == {"enable_thinking": True}
    assert (body["min_p"], body["temperature"], body["seed"], body["max_tokens"]) == (0.1, 0.5, 3, 9)
    assert "top_k" not in body
    assert messages[1]["tool_calls"][0] == call  # nothing of the caller's was changed
    received = answer_of_chat(
        b'{"choices": [{"finish_reason": "tool_calls", "message": {"content": null, "reasoning": "hm", "tool_calls": '
        b'[{"id": "i", "function": {"name": "f", "arguments": "{\\"a\\": 1}"}}]}}]}'
    )
    assert received.finish_reason == "stop"
    assert received.message == {"role": "assistant", "content": "", "tool_calls": [{**call, "id": "i"}], **thought}
