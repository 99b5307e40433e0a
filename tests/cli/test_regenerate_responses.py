"""``speculators regenerate-responses`` as it is typed: both engines, and every flag that is refused by name."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from speculators.cli.app import run
from speculators.verifiers.loading import load_verifier
from tests.tiny import tiny_verifier
from tests.verifiers.fake_server import FakeServer

OLD = {"role": "assistant", "content": "old"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("regenerate")
    tiny_verifier(folder)
    with (folder / "data.jsonl").open("w", encoding="utf-8") as file:
        for index in range(8):
            turns = [{"role": "user", "content": f"turn {index} of {'many ' * index}"}, OLD]
            file.write(json.dumps({"id": index, "messages": [*turns, *turns, *turns[:1]]}) + "\n")
    return folder


def rows(outfile: Path) -> dict[str, dict[str, Any]]:
    found = {}
    for line in outfile.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        for key in ("verifier", "endpoint", "model"):
            row["metadata"].pop(key, None)
        assert row["id"] not in found
        found[row["id"]] = row
    return found


def typed(folder: Path, outfile: str, *further: object) -> list[str]:
    words = ("regenerate-responses", "--dataset", folder / "data.jsonl", "--outfile", folder / outfile, *further)
    return [str(word) for word in words]


def test_a_server_and_the_process_give_the_same_rows(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    how = ("--max-tokens", 30, "--temperature", '{"0.0": 0.5, "0.8": 0.5}')
    assert run(typed(folder, "local.jsonl", "--verifier", folder / "verifier", *how)) == 0
    said = capsys.readouterr().out
    assert "8 records -> " in said
    assert "finish reasons: stop " in said
    with FakeServer(load_verifier(folder / "verifier"), [500, "drop"]) as server:
        assert run(typed(folder, "server.jsonl", "--endpoint", f"{server.address}/v1/chat/completions", *how)) == 0
    assert rows(folder / "server.jsonl") == rows(folder / "local.jsonl")
    assert len(rows(folder / "local.jsonl")) >= 8


def test_a_server_that_goes_away_keeps_what_is_done(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    verifier = load_verifier(folder / "verifier")
    how = ("--max-tokens", 6, "--max-retries", 0, "--concurrency", 2)
    with FakeServer(verifier, stops_after=4) as server:
        assert run(typed(folder, "gone.jsonl", "--endpoint", server.address, *how)) == 1
    assert "is gone" in capsys.readouterr().err
    done = len(rows(folder / "gone.jsonl"))
    assert 1 <= done < 8
    with FakeServer(verifier) as server:
        assert run(typed(folder, "gone.jsonl", "--endpoint", server.address, *how)) == 0
        assert len(server.bodies) == len(rows(folder / "gone.jsonl")) - done


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ((), 2, "give either --endpoint"),
        (("--endpoint", "localhost:1", "--verifier", "VERIFIER"), 2, "give either --endpoint"),
        (("--verifier", "absent/verifier/folder"), 1, "there is no verifier folder"),
        (("--endpoint", "localhost:1"), 1, "no server answers at http://localhost:1/v1"),
        (("--endpoint", "localhost:1", "--device", "cpu"), 2, "--device is for an in-process verifier"),
        (("--endpoint", "localhost:1", "--ray-address", "local"), 2, "--ray-address is for a verifier's folder"),
        (
            ("--verifier", "VERIFIER", "--ray-rollout-gpus", "1"),
            2,
            "answers on a Ray cluster (--ray-address); give that",
        ),
        (("--verifier", "VERIFIER", "--ray-address", "local", "--device", "cpu"), 2, "--device is for an in-process verifier"),
        (
            ("--verifier", "VERIFIER", "--ray-address", "local", "--ray-rollout-resources", "gpu"),
            2,
            "--ray-rollout-resources gpu is no JSON object of amounts",
        ),
        (("--verifier", "VERIFIER", "--model", "x"), 2, "--model is for a server"),
        (("--verifier", "VERIFIER", "--allow-retokenized"), 2, "--allow-retokenized is for a server"),
        (("--verifier", "VERIFIER", "--on-length", "burn"), 2, "--on-length is burn"),
        (("--verifier", "VERIFIER", "--sampling-params", '{"min_p": 1}'), 2, "min_p, which only servers know"),
        (("--verifier", "VERIFIER", "--sampling-params", "x"), 2, "no JSON object"),
        (("--verifier", "VERIFIER", "--temperature", "-1"), 2, "(input should be greater than or equal to 0)"),
        (("--verifier", "VERIFIER", "--temperature", "1", "--sampling-params", '{"temperature": 1}'), 2, "leave one out"),
        (("--verifier", "VERIFIER", "--reasoning-effort", "low"), 2, "knows no reasoning_effort"),
        (("--verifier", "VERIFIER", "--split", "train"), 2, "--split and --subset"),
        (("--verifier", "VERIFIER", "--language-filter", "de"), 1, "says that its language is de"),
        (("--verifier", "VERIFIER", "--concurrency", "4", "--dataset", ""), 1, "the name of the data is empty"),
        (("--verifier", "VERIFIER", "--outfile", "/"), 2, "--outfile / is there and no ordinary file"),
        (("--verifier", "VERIFIER", "--outfile", "FOLDER"), 2, "is there and no ordinary file"),
        (("--verifier", "VERIFIER", "--dataset", "VERIFIER/config.json"), 1, "refused.errors.jsonl says of every record why"),
        (("--endpoint", "localhost:1", "--api-key-env", "NO_SUCH_VARIABLE_HERE"), 2, "NO_SUCH_VARIABLE_HERE"),
    ],
)
def test_what_is_refused(
    words: tuple[str, ...], code: int, said: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = tuple(word.replace("VERIFIER", str(folder / "verifier")).replace("FOLDER", str(folder)) for word in words)
    assert run(typed(folder, "refused.jsonl", *words)) == code
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert said in errors[0]


@pytest.mark.chaos
def test_killed_again_and_again(folder: Path) -> None:
    """The real command with the real engine, killed at random moments: the rows of a run that was let be."""
    how = ("--verifier", folder / "verifier", "--max-tokens", 400, "--temperature", "0.8", "--concurrency", 3)
    assert run(typed(folder, "let-be.jsonl", *how)) == 0
    command = [sys.executable, "-m", "speculators", *typed(folder, "killed.jsonl", *how)]
    chance = random.Random(0)
    kills = 0
    while kills < 12:
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
            began, size = time.monotonic(), _size(folder / "killed.jsonl")
            while process.poll() is None and _size(folder / "killed.jsonl") == size and time.monotonic() - began < 60:
                time.sleep(0.005)
            time.sleep(chance.random() * 0.1)
            if process.poll() is not None:
                break
            os.kill(process.pid, signal.SIGKILL)
        kills += 1
    assert kills >= 3
    assert run(typed(folder, "killed.jsonl", *how)) == 0
    killed, let_be = rows(folder / "killed.jsonl"), rows(folder / "let-be.jsonl")
    assert killed.keys() == let_be.keys()
    assert killed == let_be


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
