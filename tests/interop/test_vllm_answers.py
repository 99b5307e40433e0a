"""regenerate-responses against a real vLLM server: the greedy ids of its in-process engine, but for near ties."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from speculators.cli.app import run
from speculators.data.prompts import find_prompt_files
from speculators.verifiers.loading import Verifier, load_verifier
from speculators.verifiers.packaged import packaged_verifier
from speculators.verifiers.session import TransformersSession
from tests.interop.vllm_server import vllm_server

pytestmark = pytest.mark.interop

PROMPTS, TOKENS = 20, 48
#: Logits closer than this may change places between two programs.
TIE = 1e-3


def some_prompts(folder: Path) -> Path:
    """The same number of prompts of every kind."""
    files = find_prompt_files()
    path = folder / "prompts.jsonl"
    with path.open("w", encoding="utf-8") as target:
        for file in files:
            for number, line in enumerate(file.read_text(encoding="utf-8").splitlines()[: PROMPTS // len(files)]):
                target.write(json.dumps({"id": f"{file.stem}-{number}", **json.loads(line)}) + "\n")
    return path


def answers(outfile: Path) -> dict[str, dict[str, Any]]:
    return {row["id"]: row for row in map(json.loads, outfile.read_text(encoding="utf-8").splitlines())}


def logits_before(verifier: Verifier, row: dict[str, Any], place: int) -> Tensor:
    """The verifier's logits ``[V]`` before generated token ``place``, computed one token at a time."""
    start = row["loss_mask"].index(1)
    session = TransformersSession(verifier)
    logits = session.prefill([torch.tensor(row["input_ids"][:start])])[0].logits[-1]
    for token in row["input_ids"][start : start + place]:
        logits = session.verify([torch.tensor([token])])[0].logits[-1]
    return logits


def test_greedy_ids_of_a_server_are_those_of_the_process(tmp_path: Path) -> None:
    folder = packaged_verifier()
    common = ["regenerate-responses", "--dataset", str(some_prompts(tmp_path)), "--max-tokens", str(TOKENS), "--limit", "20"]
    with vllm_server(folder, tmp_path / "server.log", "--max-model-len", "2048", "--max-num-seqs", "16") as address:
        assert run([*common, "--outfile", str(tmp_path / "server.jsonl"), "--endpoint", address, "--concurrency", "16"]) == 0
    assert run([*common, "--outfile", str(tmp_path / "local.jsonl"), "--verifier", str(folder)]) == 0
    server, local = answers(tmp_path / "server.jsonl"), answers(tmp_path / "local.jsonl")
    assert server.keys() == local.keys()
    verifier = load_verifier(folder)
    equal, ties, faults = 0, [], []
    for name, row in local.items():
        other, start = server[name], row["loss_mask"].index(1)
        assert other["input_ids"][:start] == row["input_ids"][:start]
        assert other["loss_mask"].index(1) == start
        assert other["metadata"]["exact_ids"] is True
        mine, theirs = row["input_ids"][start:], other["input_ids"][start:]
        if mine == theirs:
            equal += 1
            assert other["metadata"]["finish_reason"] == row["metadata"]["finish_reason"]
            assert other["text"] == row["text"]
            continue
        place = next(at for at, pair in enumerate(zip(mine, theirs)) if pair[0] != pair[1])
        logits = logits_before(verifier, row, place)
        best, second = (float(value) for value in logits.topk(2).values)
        both = float(logits[[mine[place], theirs[place]]].min())
        (ties if best - both < TIE else faults).append((name, place, best - second))
    reasons = sorted({row["metadata"]["finish_reason"] for row in server.values()})
    print(f"{equal} of {len(local)} equal, near ties {ties}, {sum(sum(row['loss_mask']) for row in local.values())} tokens")
    assert not faults
    assert reasons == ["length", "stop"]  # an answer that ends must end with the same token
