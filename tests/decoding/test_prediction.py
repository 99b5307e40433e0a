"""The teacher-forced prediction against the real decoder, both gone through exhaustively on tables."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from speculators.batch import PackedBatch
from speculators.data.rows import AnswerRecord
from speculators.decoding import (
    AcceptancePrediction,
    AcceptanceStatistics,
    Decoder,
    ReplayedRow,
    replay_row,
    require_own_answers,
)
from speculators.errors import DataError
from speculators.layout import BlockLayout
from speculators.sampling import SamplingParams, probabilities
from tests.decoding.tables import EveryChance, TableDrafter, Tables, TableSession, every_outcome, verifier_distribution

PROMPT = [1, 2]
EOS = (2,)


class TableModel:
    """The draft of the tables as a model: states are base logits, and the heads add the Markov table."""

    def __init__(self, tables: Tables, sample_from_anchor: bool) -> None:
        self.tables = tables
        self.layout = BlockLayout(tables.depths + (not sample_from_anchor), sample_from_anchor)
        self.draft_vocab_size = len(tables.verifier_ids)

    def heads_of(self, hidden: Tensor, anchor_ids: Tensor) -> TableModel:
        return self

    def rows(self, blocks: slice) -> TableModel:
        return self

    def draft_hidden(self, batch: PackedBatch, num_slots: int | None = None) -> Tensor:
        assert num_slots is not None
        before, anchor = batch.input_ids[batch.anchors - 1], batch.input_ids[batch.anchors]
        states = self.tables.q[before, anchor][:, : num_slots - self.layout.first_predicting_slot]
        if self.layout.sample_from_anchor:
            return states
        return torch.cat([torch.full_like(states[:, :1], 99.0), states], dim=1)  # slot 0 predicts nothing

    def logits(self, hidden: Tensor, previous_ids: Tensor) -> Tensor:
        return hidden + self.tables.markov[previous_ids]

    def draft_to_verifier(self, draft_ids: Tensor) -> Tensor:
        return self.tables.verifier_ids[draft_ids]

    def verifier_to_draft(self, verifier_ids: Tensor) -> Tensor:
        table = torch.full((self.tables.vocab,), -1)
        table[self.tables.verifier_ids] = torch.arange(self.draft_vocab_size)
        return table[verifier_ids]


class TableTeacher:
    """States are the verifier's logits."""

    def full_logits(self, states: Tensor) -> Tensor:
        return states

    def draft_logits(self, states: Tensor) -> Tensor:
        raise AssertionError("acceptance is decided over the whole vocabulary")


def replay(
    tables: Tables, answer: tuple[int, ...], n: int, sampling: SamplingParams, limit: int | None, *, anchor_first: bool = True
) -> ReplayedRow:
    text = [*PROMPT, *answer]
    states = torch.stack([tables.verifier_logits(text[: place + 1]) for place in range(len(text))])
    return replay_row(
        TableModel(tables, anchor_first),
        TableTeacher(),
        input_ids=torch.tensor(text),
        loss_mask=torch.arange(len(text)) >= len(PROMPT),
        features=torch.zeros(len(text), 1, 2),
        final_states=states,
        num_draft_tokens=n,
        sampling=sampling,
        eos_ids=EOS,
        max_new_tokens=limit,
    )


SETTINGS = {
    "temperature 1": SamplingParams(temperature=1.0),
    "temperature 0.5": SamplingParams(temperature=0.5),
    "top-k 2": SamplingParams(temperature=1.3, top_k=2),
    "top-p 0.7": SamplingParams(temperature=1.0, top_p=0.7),
}


@pytest.mark.parametrize(
    ("name", "n", "draft_ids", "anchor_first"),
    [
        *((name, 2, (0, 2), True) for name in SETTINGS),
        ("temperature 1", 1, (0, 1, 2), False),
        ("temperature 0.5", 2, (0, 1), False),
        ("top-k 2", 3, (0, 1), True),  # three tokens a round have many outcomes
    ],
)
def test_expectations_are_those_of_the_decoder(name: str, n: int, draft_ids: tuple[int, ...], anchor_first: bool) -> None:
    """Expected rounds, tokens and acceptances by position: over all rows here, over all paths of the decoder there."""
    tables, sampling, limit = Tables(vocab=3, draft_ids=draft_ids, seed=n), SETTINGS[name], 5
    drafter = TableDrafter(tables)
    decoder = Decoder(lambda: TableSession(tables), drafter, n, sampling)

    def run(chance: EveryChance) -> list:
        drafter.chance = chance
        return [one for one in decoder.decode(PROMPT, limit, EOS, chance=chance).rounds if one.complete]

    rounds, emitted, accepted_at = 0.0, 0.0, [0.0] * n
    for probability, outcome in every_outcome(run):
        rounds += probability * len(outcome)
        emitted += probability * sum(one.emitted for one in outcome)
        for k in range(n):
            accepted_at[k] += probability * sum(one.accepted > k for one in outcome)

    prediction, mass = AcceptancePrediction(), 0.0
    for answer, probability in verifier_distribution(tables, PROMPT, limit, sampling, EOS).items():
        one = AcceptancePrediction()
        one.add(replay(tables, answer, n, sampling, limit, anchor_first=anchor_first))
        assert one.surprises == 0
        mass += probability
        prediction.rounds += probability * one.rounds
        prediction.emitted += probability * one.emitted
        prediction.accepted_at = [
            total + probability * count
            for total, count in zip(prediction.accepted_at or [0.0] * n, one.accepted_at or [0.0] * n, strict=True)
        ]
    assert mass == pytest.approx(1.0, abs=1e-12)
    assert prediction.rounds == pytest.approx(rounds, abs=1e-12)
    assert prediction.emitted == pytest.approx(emitted, abs=1e-12)
    assert prediction.accepted_at == pytest.approx(accepted_at, abs=1e-12)
    assert prediction.predicted_acceptance_length == pytest.approx(emitted / rounds, abs=1e-12)


def prefix_probabilities(tables: Tables, n: int, sampling: SamplingParams, anchor: int) -> list[float]:
    """P(a block at ``anchor`` behind the prompt accepts its first k tokens), k = 1..n, by summing over all blocks."""
    result = [0.0] * n

    def visit(block: list[int], mass: float) -> None:
        if len(block) == n:
            return
        p = probabilities(tables.verifier_logits([*PROMPT, anchor, *block]), sampling)
        logits = tables.draft_logits(PROMPT[-1], anchor, len(block), [anchor, *block][-1])
        q = torch.zeros_like(p)
        q[tables.verifier_ids] = probabilities(logits, sampling.without_filters())
        for token, weight in enumerate(torch.minimum(p, q).tolist()):
            result[len(block)] += mass * weight
            if weight > 0:
                visit([*block, token], mass * weight)

    visit([], 1.0)
    return result


def test_prefix_estimates_are_unbiased_and_products_of_rates_are_not() -> None:
    tables, n, sampling, anchor = Tables(vocab=4, draft_ids=(0, 1, 3), seed=3), 3, SamplingParams(temperature=1.0), 0
    truth = torch.tensor(prefix_probabilities(tables, n, sampling, anchor), dtype=torch.float64)
    estimate, product = torch.zeros(n, dtype=torch.float64), torch.zeros(n, dtype=torch.float64)
    start = float(probabilities(tables.verifier_logits(PROMPT), sampling)[anchor])
    for answer, probability in verifier_distribution(tables, PROMPT, n + 1, sampling).items():
        if answer[0] == anchor:
            row = replay(tables, answer, n, sampling, None)
            estimate += probability / start * row.prefixes()[0]
            product += probability / start * row.overlap[0].cumprod(dim=0)
    assert torch.allclose(estimate, truth, atol=1e-12)
    assert torch.allclose(product[:1], truth[:1], atol=1e-12)  # nothing to be biased about at depth 0
    assert (product[1:] - truth[1:]).abs().min() > 0.01


@pytest.mark.parametrize("anchor_first", [True, False])
@pytest.mark.parametrize("seed", range(8))
def test_greedy_rounds_are_the_decoder_s(seed: int, anchor_first: bool) -> None:
    """Round by round, on answers that end by themselves and on answers that were cut."""
    tables, n, limit = Tables(vocab=8, draft_ids=(0, 1, 2, 4, 6), seed=seed, spread=1.0), 3, 12
    # A draft that is often right: its base logits lean towards the verifier's greedy continuation.
    for before in range(8):
        for anchor in range(8):
            text = [before, anchor]
            for depth in range(n):
                text.append(int(tables.verifier_logits(text).argmax()))
                tables.q[before, anchor, depth] += 2.0 * (tables.verifier_ids == text[-1])
    decoder = Decoder(lambda: TableSession(tables), TableDrafter(tables), n)
    decoded = decoder.decode(PROMPT, limit, EOS)
    row = replay(tables, tuple(decoded.tokens), n, SamplingParams(), limit, anchor_first=anchor_first)
    expected = [(one.anchor, one.accepted, one.emitted, one.ended) for one in decoded.rounds if one.complete]
    assert [(one.anchor, one.accepted, one.emitted, one.ended) for one in row.greedy_rounds() if one.complete] == expected
    assert row.surprises == 0

    prediction, statistics = AcceptancePrediction(), AcceptanceStatistics()
    prediction.add(row)
    statistics.add([one for one in decoded.rounds if one.complete], len(decoded.tokens))
    assert prediction.predicted_acceptance_length == statistics.acceptance_length
    assert prediction.predicted_acceptance_by_position == pytest.approx(statistics.acceptance_by_position)


def test_uniform_average_is_not_the_walk_s() -> None:
    """Both by hand: four anchors whose draft tokens are right, right, right, wrong at n = 2."""
    row = ReplayedRow(
        anchors=torch.arange(4),
        counts=torch.tensor([[True, True], [True, True], [True, True], [True, False]]),
        kept=torch.tensor([[1.0, 1.0], [1.0, 0.0], [1.0, 0.0], [0.0, 0.0]], dtype=torch.float64),
        overlap=torch.tensor([[1.0, 1.0], [1.0, 0.0], [1.0, 0.0], [0.0, 0.0]], dtype=torch.float64),
        overlap_going_on=torch.tensor([[1.0, 1.0], [1.0, 0.0], [1.0, 0.0], [0.0, 0.0]], dtype=torch.float64),
        visits=torch.tensor([1.0, 0.0, 0.0, 1.0], dtype=torch.float64),
        complete=torch.tensor([True, True, True, True]),
        ends=torch.zeros(4, 2, dtype=torch.bool),
        mass=3.0,
        tokens=4,
        surprises=0,
    )
    prediction = AcceptancePrediction()
    prediction.add(row)
    assert prediction.tau_uniform == (3 + 2 + 2 + 1) / 4
    assert prediction.predicted_acceptance_length == (3 + 1) / 2
    assert prediction.predicted_acceptance_by_position == [0.5, 0.5]
    assert prediction.verifier_mass_in_draft_vocabulary == 0.75
    both = prediction + prediction
    assert (both.rounds, both.anchors, both.accepted_at) == (4.0, 8, [2.0, 2.0])
    assert both.tau_uniform == prediction.tau_uniform
    assert AcceptancePrediction().predicted_acceptance_length is None


def test_mass_in_the_draft_vocabulary() -> None:
    tables = Tables(vocab=4, draft_ids=(0, 1, 3))
    answer = (0, 3, 1, 0)
    row = replay(tables, answer, 2, SamplingParams(temperature=1.0), None)
    text, expected = [*PROMPT, *answer], 0.0
    for end in range(len(PROMPT) + 1, len(text)):
        expected += 1.0 - float(tables.verifier_logits(text[:end]).softmax(-1)[2])
    assert row.mass == pytest.approx(expected)
    assert row.tokens == 3


@pytest.mark.parametrize(
    ("answers", "fits"),
    [
        (None, False),
        (AnswerRecord(on_policy=False, temperature=0.0, top_k=0, top_p=1.0, max_new_tokens=8), False),
        (AnswerRecord(on_policy=True, temperature=0.0, top_k=5, top_p=1.0, max_new_tokens=8), False),
        (AnswerRecord(on_policy=True, temperature=1.0, top_k=5, top_p=1.0, max_new_tokens=8), False),
        (AnswerRecord(on_policy=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=8), True),
    ],
)
def test_only_own_answers_predict(answers: AnswerRecord | None, fits: bool) -> None:
    sampling = SamplingParams(temperature=1.0)
    if fits:
        require_own_answers(answers, sampling)
    else:
        with pytest.raises(DataError, match="answer"):
            require_own_answers(answers, sampling)


def test_greedy_answers_predict_greedy_decoding_whatever_the_filters() -> None:
    answers = AnswerRecord(on_policy=True, temperature=0.0, top_k=20, top_p=0.8, max_new_tokens=8)
    require_own_answers(answers, SamplingParams())


def test_several_answers_in_a_row_each_start_a_walk() -> None:
    tables, n = Tables(vocab=4, draft_ids=(0, 1, 3)), 2
    text = torch.tensor([1, 2, 0, 3, 2, 1, 1, 0, 0])
    mask = torch.tensor([0, 0, 1, 1, 1, 0, 0, 1, 1], dtype=torch.bool)
    states = torch.stack([tables.verifier_logits(text[: place + 1].tolist()) for place in range(len(text))])
    row = replay_row(
        TableModel(tables, True),
        TableTeacher(),
        input_ids=text,
        loss_mask=mask,
        features=torch.zeros(len(text), 1, 2),
        final_states=states,
        num_draft_tokens=n,
        sampling=SamplingParams(temperature=1.0),
        eos_ids=EOS,
    )
    assert row.anchors.tolist() == [2, 3, 7]
    assert row.visits[[0, 2]].tolist() == [1.0, 1.0]
    assert row.counts.tolist() == [[True, True], [True, False], [True, False]]
    # The first answer ended by itself; the second was cut behind position 8.
    assert row.complete.tolist() == [True, True, False]


def test_a_row_without_an_answer_adds_nothing() -> None:
    row = replay(Tables(vocab=3, draft_ids=(0, 2)), (1,), 2, SamplingParams(temperature=1.0), None)
    prediction = AcceptancePrediction()
    prediction.add(row)
    assert prediction.anchors == 0
    assert prediction.tau_uniform is None
