"""A rollout of two actors on this machine's Ray: the bits of the verifier in this process, whatever becomes of an actor."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from speculators.cli.app import run
from speculators.data.rows import Row
from speculators.errors import ConfigError, DataError, VerifierError
from speculators.sampling import SamplingParams
from speculators.train import train
from speculators.verifiers.answering import Question, answer_all
from speculators.verifiers.loading import Verifier
from speculators.verifiers.local_answers import LocalEngine
from speculators.verifiers.rollout import RayAnswerEngine, RaySource, RolloutSettings
from speculators.verifiers.rollout.transfer import pack, unpack
from speculators.verifiers.source import HiddenStates
from speculators.verifiers.transformers_source import TransformersSource
from tests.tiny import random_rows
from tests.train.helpers import loaded_verifier, settings, tiny_rows

pytest.importorskip("ray")

LAYERS = (1, 2)
ROWS = random_rows(6)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("rollout")


@pytest.fixture(scope="module")
def verifier(folder: Path) -> Verifier:
    return loaded_verifier(folder)


@pytest.fixture(scope="module")
def truth(verifier: Verifier) -> list[HiddenStates]:
    return TransformersSource(verifier, LAYERS).fetch(ROWS)


@pytest.fixture(scope="module")
def source(verifier: Verifier) -> Iterator[RaySource]:
    opened = RaySource(verifier.name, LAYERS, settings=RolloutSettings(workers=2, cpus=0.5, max_restarts=3))
    yield opened
    opened.close()


def same(found: list[HiddenStates], truth: list[HiddenStates]) -> bool:
    return all(
        one.row_id == other.row_id
        and torch.equal(one.token_ids, other.token_ids)
        and torch.equal(one.features, other.features)
        and torch.equal(one.final, other.final)
        for one, other in zip(found, truth, strict=True)
    )


def test_an_actor_gives_the_bits_of_the_verifier(source: RaySource, verifier: Verifier, truth: list[HiddenStates]) -> None:
    assert same(source.fetch(ROWS), truth)
    assert source.description == TransformersSource(verifier, LAYERS).description
    own = TransformersSource(verifier, LAYERS).next_tokens(ROWS[0], [0, 2], 3)
    told = source.next_tokens(ROWS[0], [0, 2], 3)
    assert torch.equal(told.ids, own.ids)
    assert torch.equal(told.logprobs, own.logprobs)


def test_what_the_verifier_refuses_is_refused_here(source: RaySource) -> None:
    with pytest.raises(DataError, match="outside the verifier's vocabulary"):
        source.fetch([Row(0, np.array([1, 10**6]), np.ones(2, dtype=bool))])


def test_a_killed_actor_is_replaced_and_its_work_done_again(source: RaySource, truth: list[HiddenStates]) -> None:
    source.fetch(ROWS)
    before = source.status()
    for process in source.processes():
        os.kill(process, signal.SIGKILL)
    assert same(source.fetch(ROWS), truth)
    after = source.status()
    assert after["redone"] > before["redone"]
    assert after["restarts"] > before["restarts"]
    assert after["actors"] == 2


def test_training_is_the_same_bit_for_bit(source: RaySource, folder: Path, verifier: Verifier, tmp_path: Path) -> None:
    """The rollout's Ray is joined; one of the source's actors gives its place to the training's."""

    def losses(name: str, **changes: Any) -> list[float]:
        seen: list[float] = []
        config = settings(folder, save_path=str(tmp_path / name), max_steps=8, states_cache_gib=0, **changes)
        train(config, dataset=tiny_rows(), progress=False, on_step=lambda info: seen.append(info.metrics["loss"]))
        return seen

    wanted = losses("transformers")
    assert len(wanted) == 8
    assert losses("ray", hidden_states="ray", ray_rollout_workers=1, ray_rollout_cpus=0.5) == wanted


@pytest.mark.parametrize(("dtype", "tolerance"), [("native", 0.0), ("bfloat16", 1 / 256), ("fp8", 1 / 16)])
def test_states_on_their_way(truth: list[HiddenStates], verifier: Verifier, dtype: Any, tolerance: float) -> None:
    description = TransformersSource(verifier, LAYERS).description
    packed = pack(truth, dtype)
    assert packed.dtype == ("float32" if dtype == "native" else dtype)
    found = unpack(packed, ROWS, description)
    for one, other in zip(found, truth, strict=True):
        largest = float(torch.cat([other.features, other.final[:, None]], dim=1).abs().max())
        assert float((one.features - other.features).abs().max()) <= tolerance * largest
        assert float((one.final - other.final).abs().max()) <= tolerance * largest
    assert (dtype != "native") or same(found, truth)


@pytest.mark.parametrize("fault", ["rows", "tokens", "few"])
def test_states_of_other_rows_are_refused(truth: list[HiddenStates], verifier: Verifier, fault: str) -> None:
    packed = pack(truth, "native")
    changes = {
        "rows": {"row_ids": packed.row_ids[::-1]},
        "tokens": {"token_ids": packed.token_ids + 1},
        "few": {"states": packed.states[:-4]},
    }[fault]
    broken = SimpleNamespace(**{name: getattr(packed, name) for name in packed.__slots__} | changes)
    with pytest.raises(VerifierError, match="an actor of the rollout"):
        unpack(broken, ROWS, TransformersSource(verifier, LAYERS).description)  # type: ignore[arg-type]


def test_no_actor_left_is_one_sentence(verifier: Verifier, source: RaySource) -> None:
    lonely = RaySource(verifier.name, LAYERS, settings=RolloutSettings(workers=1, cpus=0.1, max_restarts=0))
    os.kill(lonely.processes()[0], signal.SIGKILL)
    with pytest.raises(VerifierError, match="no actor of the rollout is left after 0 restarts"):
        lonely.fetch(ROWS)
    lonely.close()
    begun = time.monotonic()
    assert source.fetch(ROWS)  # Ray is the other source's, too
    assert time.monotonic() - begun < 60


@pytest.mark.chaos
def test_answers_are_those_of_the_process_though_an_actor_is_killed(verifier: Verifier) -> None:
    sampled = SamplingParams(temperature=0.9, top_k=20)
    prompts = [row.input_ids[: 3 + place].tolist() for place, row in enumerate(random_rows(12, seed=1))]
    questions = [
        Question(f"q{place}", prompt, 200, sampled if place % 2 else SamplingParams(), 7 * place)
        for place, prompt in enumerate(prompts)
    ]
    local = LocalEngine(verifier, 2, (2, 7))
    truth = dict(answer_all(local, questions))
    engine = RayAnswerEngine(verifier.name, 2, (2, 7), settings=RolloutSettings(workers=2, cpus=0.1, max_restarts=0))
    try:
        answers: dict[Any, Any] = {}
        for key, answer in answer_all(engine, questions):
            if not answers:
                os.kill(engine.processes()[0], signal.SIGKILL)
            answers[key] = answer
        assert answers == truth
        assert engine.describe() == local.describe()
        assert (engine.context_length, engine.origin) == (local.context_length, local.origin)
        assert engine.tokens >= sum(answer.answer_tokens for answer in answers.values())
        status = engine.status()
        assert (status["actors"], status["restarts"]) == (1, 0)
        assert status["redone"] >= 1
        with pytest.raises(ConfigError, match="a verifier on Ray does not know the sampling parameters min_p"):
            engine.ask(Question(0, [1], 5, further={"min_p": 0.1}))
    finally:
        engine.close()


def test_responses_are_regenerated_on_actors(source: RaySource, folder: Path, verifier: Verifier) -> None:
    """What a run in the process began, one on Ray goes on with, as if it were the same."""
    turns = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "old"}]
    records = [json.dumps({"id": place, "messages": [*turns[: 1 + place % 2], *turns]}) for place in range(6)]
    (folder / "said.jsonl").write_text("\n".join(records))

    def rows(outfile: str, *further: object) -> dict[str, Any]:
        words = ("--verifier", verifier.name, "--dataset", folder / "said.jsonl", "--outfile", folder / outfile)
        how = ("--max-tokens", 30, "--temperature", "0.8", *further)
        assert run([str(word) for word in ("regenerate-responses", *words, *how)]) == 0
        return {row["id"]: row for row in map(json.loads, (folder / outfile).read_text().splitlines())}

    wanted = rows("local.jsonl")
    rows("ray.jsonl", "--limit", 2)
    rollout = ("--ray-rollout-workers", 1, "--ray-rollout-cpus", 0.1, "--ray-rollout-resources", "{}")
    assert rows("ray.jsonl", "--ray-address", "local", *rollout) == wanted
    assert len(wanted) >= 6
