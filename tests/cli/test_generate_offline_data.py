"""``speculators generate-offline-data``: a store from a verifier, gone on with after a stop; what cannot be is refused."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from speculators.__main__ import main
from speculators.data import CutRows, DataManifest, RowDataset
from speculators.verifiers.loading import load_verifier
from speculators.verifiers.source import CachedSource
from speculators.verifiers.store import StoreSource
from speculators.verifiers.transformers_source import TransformersSource
from tests.tiny import random_rows, tiny_verifier
from tests.verifiers.fake_states_server import FakeStatesServer
from tests.verifiers.store.stores import contents, same


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a verifier and a data set."""
    folder = tmp_path_factory.mktemp("offline")
    tiny_verifier(folder)
    RowDataset.save(folder / "data", random_rows(60, seed=3), DataManifest())
    return folder


def arguments(folder: Path, store: Path, *more: str) -> list[str]:
    return [
        "generate-offline-data",
        *("--model", str(folder / "verifier"), "--preprocessed-data", str(folder / "data"), "--output", str(store)),
        *("--target-layer-ids", "1", "2", "--capture-batch-tokens", "128", "--seq-length", "32", "--shard-mib", "0.02"),
        *more,
    ]


def test_fills_as_training_would_capture(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments(folder, tmp_path / "whole")) == 0
    printed = capsys.readouterr()
    assert "60 rows: 0 were there, 60 were captured" in printed.out
    assert "Capturing hidden states" in printed.err
    dataset, verifier = RowDataset.load(folder / "data"), load_verifier(folder / "verifier")
    live = CachedSource(TransformersSource(verifier, (1, 2), "post_norm", 128), CutRows(dataset, 32), 1 << 30, token_budget=128)
    stored = StoreSource(tmp_path / "whole", dataset)
    assert stored.description == live.description
    rows = CutRows(dataset, 32)
    assert all(same(stored.fetch([rows[i]])[0], live.fetch([rows[i]])[0]) for i in range(60))
    # In parts, by ranks.
    for rank in ("1", "0"):
        assert main(arguments(folder, tmp_path / "parts", "--world-size", "2", "--rank", rank)) == 0
    parts = StoreSource(tmp_path / "parts", dataset)
    assert all(same(parts.fetch([rows[i]])[0], live.fetch([rows[i]])[0]) for i in range(60))
    assert sorted(path.name for path in (tmp_path / "parts" / "index").iterdir()) == ["00000.jsonl", "00001.jsonl"]


@pytest.mark.parametrize("fp8", [False, True])
def test_fills_from_a_server(folder: Path, tmp_path: Path, fp8: bool) -> None:
    verifier = load_verifier(folder / "verifier")
    with FakeStatesServer(verifier, tmp_path / "shared", (1, 2, 4), fp8=fp8) as server:
        more = ("--endpoint", server.address, "--hidden-states-path", str(tmp_path / "shared"), "--max-samples", "12")
        backend = ("--hidden-states-backend", "fp8", "--dtype", "fp8") if fp8 else ()
        assert main(arguments(folder, tmp_path / "store", *more, *backend)) == 0
    stored, live = StoreSource(tmp_path / "store"), TransformersSource(verifier, (1, 2), "pre_norm")
    assert (stored.description.final_state, stored.description.verifier_hash) == ("pre_norm", verifier.hash)
    rows = CutRows(RowDataset.load(folder / "data"), 32)
    for row_id in range(12):
        [found], [wanted] = stored.fetch([rows[row_id]]), live.fetch([rows[row_id]])
        tolerance = 0.15 if fp8 else 1e-4  # packed by the server, then once more
        torch.testing.assert_close(found.final.float(), wanted.final, rtol=tolerance, atol=tolerance)
    assert len(stored.next_tokens(rows[0], [0], 5).positions) > 5
    assert not list((tmp_path / "shared").glob("*.safetensors"))


def test_some_samples_then_more(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments(folder, tmp_path / "store", "--max-samples", "10", "--dtype", "fp8")) == 0
    assert "10 rows: 0 were there, 10 were captured" in capsys.readouterr().out
    assert main(arguments(folder, tmp_path / "store", "--dtype", "fp8")) == 0
    assert "60 rows: 10 were there, 50 were captured" in capsys.readouterr().out
    assert main(arguments(folder, tmp_path / "store", "--dtype", "fp8", "--validate-outputs")) == 0
    assert "60 rows: 60 were there, 0 were captured" in capsys.readouterr().out
    assert main(arguments(folder, tmp_path / "store")) == 2
    assert "holds other states (states.precision fp8 there, None asked for; dtype fp8 there, float32" in capsys.readouterr().err


def test_quota(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments(folder, tmp_path / "store", "--max-gib", "0.0003")) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: the store in ")
    assert "raise --max-gib" in error
    assert main(arguments(folder, tmp_path / "store", "--max-gib", "0.0003", "--on-full", "evict")) == 0
    assert "rows were evicted again to stay within --max-gib" in capsys.readouterr().out
    record = json.loads((tmp_path / "store" / "hidden_states.json").read_text())
    assert (record["on_full"], record["max_bytes"]) == ("evict", int(0.0003 * 2**30))


@pytest.mark.parametrize(
    ("more", "code", "problem"),
    [
        (("--rank", "1"), 2, "--rank is 1 of --world-size 1; ranks count from 0"),
        (("--dtype", "int8"), 2, "--dtype is int8; choose one of float32, bfloat16, float16, fp8"),
        (("--on-full", "grow"), 2, "choose one of stop, evict"),
        (("--max-gib", "inf"), 2, "--max-gib"),
        (("--shard-mib", "inf"), 2, "--shard-mib"),
        (("--hidden-states", "magic"), 2, "choose one of transformers, vllm"),
        (("--final-state", "none"), 2, "choose one of pre_norm, post_norm"),
        (("--target-layer-ids", "x"), 2, "--target-layer-ids takes whole numbers"),
        (("--target-layer-ids", "9"), 1, "9"),
        (("--preprocessed-data", "missing"), 1, "missing"),
        (("--model", "missing"), 1, "missing"),
        (("--hidden-states", "transformers", "--model", ""), 2, "name the folder of the verifier"),
        (("--endpoint", "127.0.0.1:9"), 2, "--hidden-states-path is missing"),
        (("--endpoint", "127.0.0.1:9", "--hidden-states-backend", "mooncake"), 2, "reads the backends file and fp8"),
        (("--endpoint", "127.0.0.1:9", "--final-state", "post_norm"), 2, "vLLM gives the last state before the norm"),
    ],
)
def test_refused(
    folder: Path, tmp_path: Path, more: tuple[str, ...], code: int, problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*arguments(folder, tmp_path / "store"), *more]) == code
    lines = [line for line in capsys.readouterr().err.splitlines() if line.lower().startswith("error: ")]
    assert len(lines) == 1
    assert problem in lines[0]
    assert not (tmp_path / "store" / "hidden_states.json").exists()


#: Imports once, then runs the command again and again in a process of its own and kills it at some moment of its work.
KILLER = """
import os, random, signal, sys, time
from pathlib import Path
import speculators.pipelines.offline_states
import speculators.train.config
import speculators.verifiers.transformers_source
from speculators.__main__ import main

store, kills, draws = Path(sys.argv[1]), int(sys.argv[2]), random.Random(1)
lock = store / ".00000.lock"
for _ in range(kills):
    child = os.fork()
    if not child:
        sys.stdout = sys.stderr = open(os.devnull, "w")
        os._exit(main(sys.argv[3:]))
    while not (lock.exists() and lock.read_text().startswith(f"process {child} ")):  # until it has begun to write
        time.sleep(0.001)
    time.sleep(draws.uniform(0, 0.15))
    os.kill(child, signal.SIGKILL)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), len(list(store.glob("shards/0*.safetensors"))), flush=True)
"""


@pytest.mark.chaos
def test_killed_at_any_moment(folder: Path, tmp_path: Path) -> None:
    """kill -9 again and again, then a run to the end: the store is that of a run that nobody disturbed, byte for byte."""
    slow = ("--capture-batch-tokens", "32", "--shard-mib", "0.005")  # many passes and shards
    assert main([*arguments(folder, tmp_path / "whole"), *slow]) == 0
    command = arguments(folder, tmp_path / "killed")
    driver = subprocess.run(
        [sys.executable, "-c", KILLER, str(tmp_path / "killed"), "6", *command, *slow],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    ends = [tuple(map(int, line.split())) for line in driver.stdout.splitlines()]
    assert sum(code == -signal.SIGKILL for code, _ in ends) > 2
    assert len({shards for _, shards in ends}) > 1  # at different moments
    assert main([*command, *slow]) == 0
    assert contents(tmp_path / "killed") == contents(tmp_path / "whole")


def test_interrupted(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(TransformersSource, "fetch", interrupted)
    assert main(arguments(folder, tmp_path / "store")) == 130
    assert "the same command can be run again" in capsys.readouterr().err
    monkeypatch.undo()
    assert main(arguments(folder, tmp_path / "store")) == 0
