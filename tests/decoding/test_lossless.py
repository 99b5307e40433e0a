"""The output distribution is the verifier's: by exact enumeration and by a chi-square test, through the real decoder."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from speculators.decoding import Decoder, acceptance
from speculators.sampling import SamplingParams
from tests.decoding.tables import EveryChance, TableDrafter, Tables, TableSession, every_outcome, verifier_distribution

PROMPT = [1, 2]


def output_distribution(
    tables: Tables, n: int, length: int, sampling: SamplingParams, eos: tuple[int, ...] = ()
) -> dict[tuple[int, ...], float]:
    """The exact distribution of the decoder's outputs: every draw of draft, acceptance, residual and bonus is gone through."""
    drafter = TableDrafter(tables)
    decoder = Decoder(lambda: TableSession(tables), drafter, n, sampling)

    def run(chance: EveryChance) -> tuple[int, ...]:
        drafter.chance = chance
        return tuple(decoder.decode(PROMPT, length, eos, chance=chance).tokens)

    result: dict[tuple[int, ...], float] = {}
    for probability, output in every_outcome(run):
        result[output] = result.get(output, 0.0) + probability
    return result


def distance(left: dict[tuple[int, ...], float], right: dict[tuple[int, ...], float]) -> float:
    """Largest difference of two output probabilities."""
    return max(abs(left.get(key, 0.0) - right.get(key, 0.0)) for key in {*left, *right})


SETTINGS = {
    "temperature 1": SamplingParams(temperature=1.0),
    "temperature 0.6": SamplingParams(temperature=0.6),
    "top-k 2": SamplingParams(temperature=1.3, top_k=2),
    "top-p 0.7": SamplingParams(temperature=1.0, top_p=0.7),
    "greedy": SamplingParams(),
}


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize(
    ("n", "draft_ids", "length", "eos"), [(2, (0, 2), 3, ()), (1, (0, 1, 2), 3, (2,)), (3, (0, 2), 3, (2,))]
)
def test_exact_enumeration(name: str, n: int, draft_ids: tuple[int, ...], length: int, eos: tuple[int, ...]) -> None:
    tables = Tables(vocab=3, draft_ids=draft_ids, seed=n)
    sampling = SETTINGS[name]
    actual = output_distribution(tables, n, length, sampling, eos)
    assert sum(actual.values()) == pytest.approx(1.0, abs=1e-12)
    assert distance(actual, verifier_distribution(tables, PROMPT, length, sampling, eos)) < 1e-12


def accept_everything(p: Tensor, q: Tensor, tokens: Tensor, draft_ids: Tensor) -> Tensor:
    return torch.ones(tokens.shape[0], dtype=p.dtype)


def accept_with_q_squared(p: Tensor, q: Tensor, tokens: Tensor, draft_ids: Tensor) -> Tensor:
    of_verifier = p[: tokens.shape[0]].gather(1, tokens[:, None]).squeeze(1)
    of_draft = q.gather(1, draft_ids[:, None]).squeeze(1)
    return (of_verifier / of_draft**2).clamp(max=1.0)


def resample_from_p(p: Tensor, q: Tensor, verifier_ids: Tensor | None) -> Tensor:
    return p


def subtract_in_draft_ids(p: Tensor, q: Tensor, verifier_ids: Tensor | None) -> Tensor:
    """Forgets the map from draft ids to verifier ids."""
    rest = p.clone()
    rest[: q.shape[0]] -= q
    rest = rest.clamp_min(0.0)
    return rest / rest.sum()


BROKEN = {
    "accepts everything": ("acceptance_probabilities", accept_everything),
    "wrong q in the ratio": ("acceptance_probabilities", accept_with_q_squared),
    "residual without subtraction": ("residual_distribution", resample_from_p),
    "residual in draft ids": ("residual_distribution", subtract_in_draft_ids),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_enumeration_catches_a_broken_rule(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acceptance, *BROKEN[fault])
    tables, sampling = Tables(vocab=3, draft_ids=(0, 2)), SamplingParams(temperature=1.0)
    actual = output_distribution(tables, 2, 3, sampling)
    assert distance(actual, verifier_distribution(tables, PROMPT, 3, sampling)) > 0.005


def test_enumeration_catches_a_draft_that_reports_another_q(monkeypatch: pytest.MonkeyPatch) -> None:
    """q before the Markov bias is not what the tokens were drawn from."""
    propose = TableDrafter.propose

    def uncorrected(self: TableDrafter, anchors: list[int], *args: object, **kwargs: object) -> list:
        drafts = propose(self, anchors, *args, **kwargs)  # type: ignore[arg-type]
        for context, anchor, draft in zip(self.contexts, anchors, drafts):
            n = len(draft.tokens)
            draft.probabilities = self.tables.q[context[-1], anchor, :n].softmax(-1)
        return drafts

    monkeypatch.setattr(TableDrafter, "propose", uncorrected)
    tables, sampling = Tables(vocab=3, draft_ids=(0, 2)), SamplingParams(temperature=1.0)
    actual = output_distribution(tables, 2, 3, sampling)
    assert distance(actual, verifier_distribution(tables, PROMPT, 3, sampling)) > 0.005


def chi_square(n: int, sampling: SamplingParams, draws: int = 1500) -> tuple[float, int]:
    """Pearson's statistic of the decoder's own sampled outputs against the verifier's exact distribution, and its degrees."""
    tables = Tables(vocab=3, draft_ids=(0, 2), spread=1.0)
    decoder = Decoder(lambda: TableSession(tables), TableDrafter(tables), n, sampling, seed=7)
    expected = verifier_distribution(tables, PROMPT, 2, sampling)
    counts = dict.fromkeys(expected, 0)
    for index in range(draws):
        counts[tuple(decoder.decode(PROMPT, 2, index=index).tokens)] += 1
    statistic = sum((counts[key] - draws * mass) ** 2 / (draws * mass) for key, mass in expected.items())
    return statistic, len(expected) - 1


def chi_square_limit(degrees: int) -> float:
    """The 0.999 quantile of the chi-square distribution (Wilson and Hilferty's approximation)."""
    return degrees * (1 - 2 / (9 * degrees) + 3.0902 * (2 / (9 * degrees)) ** 0.5) ** 3


@pytest.mark.parametrize("n", [0, 2])
def test_sampled_outputs_pass_a_chi_square_test(n: int) -> None:
    statistic, degrees = chi_square(n, SamplingParams(temperature=0.8))
    assert degrees >= 5
    assert statistic < chi_square_limit(degrees)


@pytest.mark.parametrize("fault", BROKEN)
def test_chi_square_catches_a_broken_rule(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acceptance, *BROKEN[fault])
    statistic, degrees = chi_square(2, SamplingParams(temperature=0.8))
    assert statistic > chi_square_limit(degrees)
