"""A verifier and a draft whose distributions are explicit tables, and a way to go through every random outcome.

The verifier's p depends on the last two tokens. The draft's q depends on the last context token, the anchor, the depth and the
previous token, like a block draft with a Markov head: all it knows of the text is a context that ends before the anchor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from speculators.sampling import SamplingParams, probabilities, sample


@dataclass
class Output:
    """As a verifier session returns it."""

    logits: Tensor
    features: Tensor


@dataclass
class TableDraft:
    """As a drafter proposes it."""

    tokens: Tensor
    probabilities: Tensor | None
    confidence: Tensor | None
    draft_ids: Tensor


class Tables:
    """Random logits: ``p[before, last]`` ``[V]``; ``q[context, anchor, depth]`` plus ``markov[previous]`` ``[D]``."""

    def __init__(
        self,
        *,
        vocab: int = 4,
        draft_ids: Sequence[int] = (0, 2, 3),
        depths: int = 3,
        seed: int = 0,
        spread: float = 1.5,
        dtype: torch.dtype = torch.float64,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.vocab, self.depths, size = vocab, depths, len(draft_ids)
        self.verifier_ids = torch.tensor(draft_ids)
        shape = (vocab, vocab, vocab)
        self.p = (spread * torch.randn(shape, generator=generator, dtype=torch.float64)).to(dtype)
        self.q = (spread * torch.randn(vocab, vocab, depths, size, generator=generator, dtype=torch.float64)).to(dtype)
        self.markov = (spread * torch.randn(vocab, size, generator=generator, dtype=torch.float64)).to(dtype)

    def verifier_logits(self, text: Sequence[int]) -> Tensor:
        """Logits ``[V]`` of the token after ``text``."""
        return self.p[text[-2] if len(text) > 1 else 0, text[-1]]

    def draft_logits(self, context: int, anchor: int, depth: int, previous: int) -> Tensor:
        return self.q[context, anchor, depth] + self.markov[previous]


class TableSession:
    """A verifier session over tables. Features are (token, position), so that a drafter can check what it is given."""

    def __init__(self, tables: Tables) -> None:
        self.tables = tables
        self.texts: list[list[int]] = []
        self.passes: list[list[int]] = []

    @property
    def lengths(self) -> list[int]:
        return [len(text) for text in self.texts]

    def prefill(self, prompts: list[Tensor]) -> list[Output]:
        self.texts = [[] for _ in prompts]
        outputs = self._append(prompts)
        return [Output(output.logits[-1:], output.features) for output in outputs]

    def verify(self, tokens: list[Tensor]) -> list[Output]:
        self.passes.append([len(part) for part in tokens])
        return self._append(tokens)

    def rollback(self, lengths: list[int]) -> None:
        for text, length in zip(self.texts, lengths, strict=True):
            assert length <= len(text)
            del text[length:]

    def _append(self, tokens: list[Tensor]) -> list[Output]:
        outputs = []
        for text, part in zip(self.texts, tokens, strict=True):
            logits = [torch.zeros(0, self.tables.vocab, dtype=self.tables.p.dtype)]
            features = [torch.zeros(0, 1, 2, dtype=self.tables.p.dtype)]
            for token in part.tolist():
                text.append(token)
                logits.append(self.tables.verifier_logits(text)[None])
                features.append(torch.tensor([[[token, len(text) - 1]]], dtype=self.tables.p.dtype))
            outputs.append(Output(torch.cat(logits), torch.cat(features)))
        return outputs


class TableDrafter:
    """A drafter over tables. It refuses context that is not the text's next tokens with their own features."""

    layer_ids = (1,)

    def __init__(self, tables: Tables, verifier_ids: Tensor | None = None) -> None:
        self.tables = tables
        self.verifier_ids = tables.verifier_ids if verifier_ids is None else verifier_ids
        self.max_draft_tokens = tables.depths
        self.contexts: list[list[int]] = []
        self.chance: Any = None  # replaces drawing from the generator
        self.calls: list[tuple[int, bool]] = []

    def start(self, num_requests: int) -> None:
        self.contexts = [[] for _ in range(num_requests)]

    def context_length(self, request: int) -> int:
        return len(self.contexts[request])

    def drop(self, request: int) -> None:
        self.contexts[request] = []

    def extend(self, token_ids: list[Tensor], features: list[Tensor]) -> None:
        for context, ids, states in zip(self.contexts, token_ids, features, strict=True):
            expected = [[token, len(context) + place] for place, token in enumerate(ids.tolist())]
            assert states[:, 0].long().tolist() == expected
            context.extend(ids.tolist())

    def propose(
        self,
        anchors: list[int],
        n: int,
        sampling: SamplingParams,
        generator: torch.Generator | None,
        full_block: bool = False,
    ) -> list[TableDraft]:
        self.calls.append((n, full_block))
        return [self._block(context, anchor, n, sampling, generator) for context, anchor in zip(self.contexts, anchors)]

    def _block(
        self, context: list[int], anchor: int, n: int, sampling: SamplingParams, generator: torch.Generator | None
    ) -> TableDraft:
        previous, draft_ids, rows = anchor, [], []
        for depth in range(n):
            q = probabilities(self.tables.draft_logits(context[-1], anchor, depth, previous), sampling.without_filters())
            chosen = self.chance.choose(q) if self.chance is not None else int(sample(q, generator))
            previous = int(self.verifier_ids[chosen])
            draft_ids.append(chosen)
            rows.append(q)
        ids = torch.tensor(draft_ids)
        return TableDraft(
            tokens=self.verifier_ids[ids],
            probabilities=None if sampling.greedy else torch.stack(rows),
            confidence=torch.arange(n) / 10,
            draft_ids=ids,
        )


class EveryChance:
    """Takes given decisions, then the first possible ones, and knows the probability of the path taken."""

    generator = None

    def __init__(self, decisions: Sequence[int]) -> None:
        self.probability = 1.0
        self.taken: list[int] = []
        self.options: list[list[int]] = []
        self._decisions = decisions

    def choose(self, distribution: Tensor) -> int:
        weights = distribution.tolist()
        possible = [index for index, weight in enumerate(weights) if weight > 0]
        place = len(self.taken)
        chosen = self._decisions[place] if place < len(self._decisions) else possible[0]
        self.taken.append(chosen)
        self.options.append(possible)
        self.probability *= weights[chosen]
        return chosen

    def accepted_prefix(self, accept: Tensor) -> int:
        for place, probability in enumerate(accept.tolist()):
            if not self.choose(torch.tensor([1.0 - probability, probability], dtype=torch.float64)):
                return place
        return len(accept)


def every_outcome(run: Callable[[EveryChance], Any]) -> Iterator[tuple[float, Any]]:
    """Probability and result of every path of random decisions that ``run`` can take."""
    waiting: list[list[int]] = [[]]
    while waiting:
        given = waiting.pop()
        chance = EveryChance(given)
        result = run(chance)
        yield chance.probability, result
        for place in range(len(given), len(chance.taken)):
            others = [option for option in chance.options[place] if option != chance.taken[place]]
            waiting.extend([*chance.taken[:place], option] for option in others)


def verifier_distribution(
    tables: Tables, prompt: Sequence[int], length: int, sampling: SamplingParams, eos: Sequence[int] = ()
) -> dict[tuple[int, ...], float]:
    """The exact distribution of plain sampling's outputs of at most ``length`` tokens."""
    result: dict[tuple[int, ...], float] = {}

    def visit(answer: tuple[int, ...], mass: float) -> None:
        if len(answer) == length or (answer and answer[-1] in eos):
            result[answer] = mass
            return
        p = probabilities(tables.verifier_logits([*prompt, *answer]), sampling)
        for token, weight in enumerate(p.tolist()):
            if weight > 0:
                visit((*answer, token), mass * weight)

    visit((), 1.0)
    return result
