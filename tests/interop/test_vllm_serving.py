"""vLLM serving trained drafts of ours: its greedy text is its text without a draft, and it accepts what our decoder accepts.

Six engines are started, of a tiny random verifier and of the packaged SmolLM2; DSpark needs vLLM's second runner, whose
kernels run in Triton's interpreter here.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from speculators.decoding import Decoded, Decoder
from speculators.models import SpeculatorModel
from speculators.verifiers.loading import Verifier, load_verifier
from speculators.verifiers.session import TransformersSession
from tests.interop.environments import peer_python, run_peer
from tests.interop.records import Measurement, record
from tests.interop.trained_drafts import smollm2_prompts, tiny_prompts, trained_draft

pytestmark = pytest.mark.interop

#: Prompts and tokens per family; the interpreter is slow.
SIZES = {"dspark": (10, 48), "dflash": (20, 96), "eagle3": (20, 96), "smollm2": (4, 32)}
#: Logits closer than this may change places between two programs.
TIE = 1e-3


@dataclass(frozen=True)
class Served:
    """What an engine answered: per prompt its tokens, and how many of them each step brought, that of the prefill included."""

    peer: str
    answers: list[list[int]]
    steps: list[list[int]]
    counts: dict[str, Any]

    def accepted(self, prompt: int) -> list[int]:
        """Drafted tokens accepted in each round, but for the last one, which the token limit may have cut."""
        return [emitted - 1 for emitted in self.steps[prompt][1:-1]]


def serve(folder: Path, model: Path, prompts: list[list[int]], max_tokens: int, interpreted: bool) -> Served:
    """One engine's greedy answers."""
    engine = {"model": str(model), "max_model_len": 256, "max_num_seqs": len(prompts), "max_num_batched_tokens": 1024}
    job = folder / "job.json"
    job.write_text(json.dumps({"engine": engine, "prompts": prompts, "max_tokens": max_tokens}), encoding="utf-8")
    home = peer_python("vllm").parent.parent
    variables = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "LD_PRELOAD": str(home / "lib" / "libiomp5.so"),
    }
    if interpreted:
        variables |= {"TRITON_INTERPRET": "1", "PYTHONPATH": str(home / "triton_site")}
    answer = run_peer("vllm", "vllm_serve.py", job, **variables)
    return Served(f"vllm-cpu {answer['version']}", answer["answers"], answer["steps"], answer["counts"])


class Family:
    """A trained draft as our decoder and as vLLM run it."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        trained = trained_draft(name)
        self.model: Any = SpeculatorModel.from_pretrained(trained.checkpoint, verifier=trained.verifier)
        self.verifier: Verifier = load_verifier(trained.verifier)
        count, self.max_tokens = SIZES[name]
        self.prompts = smollm2_prompts(self.verifier)[:count] if name == "smollm2" else tiny_prompts(count)
        # Written again, so that today's writer is what vLLM reads.
        self.model.save_pretrained(folder / "draft")
        self.served = serve(folder, folder / "draft", self.prompts, self.max_tokens, name in ("dspark", "smollm2"))
        self.tokens = self.model.config.speculative_tokens
        drafter = self.model.drafter()
        decoder = Decoder(lambda: TransformersSession(self.verifier, drafter.layer_ids), drafter, self.tokens)
        self.decoded: list[Decoded] = [decoder.decode(prompt, self.max_tokens) for prompt in self.prompts]

    @property
    def row(self) -> Any:
        family = self.model.config.speculators_model_type
        verifier = "SmolLM2-135M" if self.name == "smollm2" else "tiny Llama"
        case = f"trained draft, {verifier}, {len(self.prompts)} prompts x {self.max_tokens} tokens"
        return partial(Measurement, family, "served", self.served.peer, case)

    def margin(self, prompt: int, place: int) -> float:
        """Gap of the verifier's two best logits before generated token ``place`` of a prompt."""
        ids = torch.tensor([*self.prompts[prompt], *self.decoded[prompt].tokens[:place]])
        best = TransformersSession(self.verifier).prefill([ids])[0].logits[-1].topk(2).values
        return float(best[0] - best[1])


@pytest.fixture(scope="module", params=list(SIZES))
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Family:
    peer_python("vllm")
    return Family(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Family], list[list[int]]]:
    """vLLM's answers to a family's prompts without a draft; one engine per verifier."""
    answers: dict[bool, list[list[int]]] = {}

    def of(family: Family) -> list[list[int]]:
        real = family.name == "smollm2"
        if real not in answers:
            count, tokens = SIZES["smollm2" if real else "dflash"]
            prompts = family.prompts if real else tiny_prompts(count)
            verifier = trained_draft(family.name).verifier
            answers[real] = serve(tmp_path_factory.mktemp("plain"), verifier, prompts, tokens, interpreted=False).answers
        return answers[real]

    return of


def first_difference(one: list[int], other: list[int]) -> int | None:
    return next((place for place, (a, b) in enumerate(zip(one, other)) if a != b), None)


def test_greedy_text_is_that_without_a_draft(family: Family, plain: Callable[[Family], list[list[int]]]) -> None:
    expected = plain(family)
    equal, ties, faults = 0, [], []  # a text that differs is compared up to its first difference
    for prompt, answer in enumerate(family.served.answers):
        for other, by in ((expected[prompt], "vLLM without a draft"), (family.decoded[prompt].tokens, "our decoder")):
            place = first_difference(answer, other)
            if place is not None:
                margin = family.margin(prompt, place)
                (ties if margin < TIE else faults).append((by, prompt, place, margin))
        equal += first_difference(answer, expected[prompt]) is None
    record(family.row("greedy text", f"{equal} of {len(family.prompts)} equal, {len(ties)} near ties"))
    assert not faults


def test_accepts_what_our_decoder_accepts(family: Family) -> None:
    ours = [[one.accepted for one in decoded.rounds[:-1]] for decoded in family.decoded]
    theirs = [family.served.accepted(prompt) for prompt in range(len(family.prompts))]
    rounds, accepted = sum(map(len, ours)), sum(map(sum, ours))
    their_rounds, their_accepted = sum(map(len, theirs)), sum(map(sum, theirs))
    counts = family.served.counts
    record(family.row("rounds accepted alike", f"{sum(a == b for a, b in zip(ours, theirs))} of {len(ours)} prompts"))
    record(family.row("acceptance length", f"ours {1 + accepted / rounds:.4f}, vLLM {1 + their_accepted / their_rounds:.4f}"))
    assert 0 < accepted < rounds * family.tokens, "the draft must be both accepted and rejected to show anything"
    # The engine's own counters also hold each prompt's last round.
    assert counts["num_drafts"] == their_rounds + len(theirs)
    assert 0 <= counts["num_accepted_tokens"] - their_accepted <= len(theirs) * family.tokens
    assert ours == theirs
