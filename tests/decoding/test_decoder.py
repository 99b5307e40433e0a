"""The decoder's bookkeeping: rounds, ends, limits, positions, and greedy output equal to plain decoding."""

from __future__ import annotations

import pytest
import torch

from speculators.decoding import AcceptanceStatistics, Decoder, Round
from speculators.decoding.acceptance import RandomChance, accept_block, verify_greedy
from speculators.errors import ConfigError, DataError
from speculators.sampling import SamplingParams, probabilities
from tests.decoding.tables import TableDrafter, Tables, TableSession

PROMPT = [1, 2, 3]


def predictable(seed: int = 0, vocab: int = 12, depths: int = 4) -> Tables:
    """Tables whose draft is often right: its logits lean towards the verifier's greedy continuation."""
    kept = tuple(token for token in range(vocab) if token != 5)
    tables = Tables(vocab=vocab, draft_ids=kept, depths=depths, seed=seed, spread=1.0)
    for before in range(vocab):
        for anchor in range(vocab):
            text = [before, anchor]
            for depth in range(depths):
                text.append(int(tables.verifier_logits(text).argmax()))
                tables.q[before, anchor, depth] += 3.0 * (tables.verifier_ids == text[-1])
    return tables


def decoder_of(tables: Tables, n: int, **options: object) -> Decoder:
    return Decoder(lambda: TableSession(tables), TableDrafter(tables), n, **options)  # type: ignore[arg-type]


def greedy_text(tables: Tables, length: int, prompt: list[int] | None = None) -> list[int]:
    text = list(PROMPT if prompt is None else prompt)
    start = len(text)
    for _ in range(length):
        text.append(int(tables.verifier_logits(text).argmax()))
    return text[start:]


@pytest.mark.parametrize("n", [0, 1, 2, 4])
@pytest.mark.parametrize("seed", range(4))
def test_greedy_output_is_the_verifier_s(n: int, seed: int) -> None:
    tables = predictable(seed)
    decoded = decoder_of(tables, n).decode(PROMPT, 40)
    assert decoded.tokens == greedy_text(tables, 40)
    assert decoded.finish == "length"


def test_rounds_say_where_they_were_and_what_they_gave() -> None:
    tables, n = predictable(), 3
    decoded = decoder_of(tables, n).decode(PROMPT, 30)
    anchor = len(PROMPT)  # the token that the prefill gives
    for one in decoded.rounds:
        assert one.anchor == anchor
        assert one.drafted == n
        assert one.emitted == one.accepted + 1
        assert one.complete == (anchor + n <= len(PROMPT) + 29)
        assert one.confidence == pytest.approx((0.0, 0.1, 0.2))
        anchor += one.emitted
    assert 1 + sum(one.kept for one in decoded.rounds) == len(decoded.tokens) == 30
    assert [one.truncated for one in decoded.rounds[:-1]] == [False] * (len(decoded.rounds) - 1)
    assert len(decoded.rounds) < 29  # something was accepted
    statistics = decoded.statistics
    assert statistics.acceptance_length == sum(one.emitted for one in decoded.rounds) / len(decoded.rounds)
    assert statistics.generated == 30


def test_plain_decoding_is_one_round_per_token() -> None:
    tables = predictable()
    decoded = decoder_of(tables, 0).decode(PROMPT, 9)
    assert [one.emitted for one in decoded.rounds] == [1] * 8
    assert [one.drafted for one in decoded.rounds] == [0] * 8
    assert decoded.statistics.acceptance_length == 1.0
    assert decoded.statistics.acceptance_by_position == []
    assert decoded.seconds.draft < decoded.seconds.total
    assert decoded.tokens_per_second > 0


def test_the_query_has_one_shape_to_the_end() -> None:
    """As in serving, the last rounds draft n tokens too, and the output is cut."""
    tables, sessions, drafter = predictable(), [], TableDrafter(predictable())

    def session() -> TableSession:
        sessions.append(TableSession(tables))
        return sessions[-1]

    for length in range(1, 12):
        decoded = Decoder(session, drafter, 4).decode(PROMPT, length)
        assert decoded.tokens == greedy_text(tables, length)
        assert all(parts == [5] for parts in sessions[-1].passes)
    assert set(drafter.calls) == {(4, False)}
    Decoder(session, drafter, 2, full_block=True).decode(PROMPT, 5)
    assert drafter.calls[-1] == (2, True)


def test_an_end_inside_a_block_ends_the_request() -> None:
    tables, n = predictable(), 4
    plain = greedy_text(tables, 40)
    seen = set()
    for end in sorted(set(plain)):
        decoded = decoder_of(tables, n).decode(PROMPT, 40, eos_ids=(end,))
        expected = plain[: plain.index(end) + 1]
        assert decoded.tokens == expected
        assert decoded.finish == "eos"
        if not decoded.rounds:
            assert len(expected) == 1
            continue
        last = decoded.rounds[-1]
        seen.add(last.ended)
        assert last.emitted == (last.accepted if last.ended else last.accepted + 1) == last.kept
        assert 1 + sum(one.emitted for one in decoded.rounds) == len(expected)
    assert seen == {True, False}  # ended by an accepted token, and by the verifier's own


def test_an_end_beyond_the_budget_does_not_count() -> None:
    tables = predictable()
    plain = greedy_text(tables, 40)
    end = plain[6]
    length = plain.index(end)
    decoded = decoder_of(tables, 4).decode(PROMPT, max(1, length), eos_ids=(end,))
    assert decoded.tokens == plain[: max(1, length)]
    assert decoded.finish == "length"


@pytest.mark.parametrize("context", range(4, 16))
@pytest.mark.parametrize("n", [0, 2, 4])
def test_the_context_s_end_is_kept(context: int, n: int) -> None:
    """Drafting generates as many tokens as plain decoding does, and no pass goes beyond the context."""
    tables, longest = predictable(), 0

    class Watched(TableSession):
        def verify(self, tokens: list) -> list:
            nonlocal longest
            outputs = super().verify(tokens)
            longest = max(longest, *self.lengths)
            return outputs

    decoder = Decoder(lambda: Watched(tables), TableDrafter(tables), n, context_length=context)
    decoded = decoder.decode(PROMPT, 40)
    assert decoded.tokens == greedy_text(tables, context - len(PROMPT))
    assert decoded.finish == "context"
    assert longest <= context


def test_bad_input_is_refused_in_a_sentence() -> None:
    tables = predictable()
    with pytest.raises(ConfigError, match="use at most 4"):
        decoder_of(tables, 5)
    with pytest.raises(ConfigError, match="needs a draft"):
        Decoder(lambda: TableSession(tables), None, 3)
    with pytest.raises(ConfigError, match="positive"):
        decoder_of(tables, -1)
    with pytest.raises(ConfigError, match="at least 1"):
        decoder_of(tables, 2).decode(PROMPT, 0)
    with pytest.raises(DataError, match="without tokens"):
        decoder_of(tables, 2).decode([], 5)
    for length in (3, 2):
        with pytest.raises(DataError, match="3 tokens and the verifier's context only"):
            decoder_of(tables, 2, context_length=length).decode(PROMPT, 5)


@pytest.mark.parametrize("n", [0, 3])
def test_requests_in_one_session_answer_as_they_do_alone(n: int) -> None:
    tables = predictable()
    prompts = [[1, 2, 3], [4], [7, 7]]
    alone = [decoder_of(tables, n).decode(prompt, 17, eos_ids=(9,)) for prompt in prompts]
    together = decoder_of(tables, n).decode_together(prompts, 17, eos_ids=(9,))
    assert [one.tokens for one in together] == [one.tokens for one in alone]
    assert [one.rounds for one in together] == [one.rounds for one in alone]
    assert len({len(one.tokens) for one in alone}) > 1  # they do not all end at once


def test_sampled_output_is_a_function_of_seed_and_index() -> None:
    tables, sampling = predictable(), SamplingParams(temperature=1.0)
    decoder = decoder_of(tables, 3, sampling=sampling, seed=1)
    first = decoder.decode(PROMPT, 20, index=4).tokens
    decoder.decode(PROMPT, 20, index=5)
    assert decoder.decode(PROMPT, 20, index=4).tokens == first
    others = [
        decoder.decode(PROMPT, 20, index=5),
        decoder_of(tables, 3, sampling=sampling, seed=2).decode(PROMPT, 20, index=4),
    ]
    assert all(other.tokens != first for other in others)


@pytest.mark.parametrize("seed", range(20))
def test_greedy_rule_is_the_general_rule_on_one_hot_distributions(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    n, vocab = 4, 6
    verifier_ids = torch.tensor([0, 1, 3, 4])
    logits = torch.randn(n + 1, vocab, generator=generator)
    best = logits.argmax(-1)
    draft_ids = torch.randint(0, 4, (n,), generator=generator)
    for place in range(n):  # mostly right where the draft can be
        if int(best[place]) in verifier_ids and torch.rand(1, generator=generator) < 0.8:
            draft_ids[place] = int((verifier_ids == best[place]).nonzero())
    tokens = verifier_ids[draft_ids]
    q = torch.nn.functional.one_hot(draft_ids, 4).float()
    p = probabilities(logits, SamplingParams())
    general = accept_block(p, q, tokens, draft_ids, verifier_ids=verifier_ids, chance=RandomChance())
    assert verify_greedy(logits, tokens) == general


def test_statistics_by_hand() -> None:
    rounds = [
        Round(3, 2, 2, 3, 3),
        Round(6, 2, 0, 1, 1),
        Round(7, 2, 1, 2, 2),
        Round(9, 2, 1, 1, 1, ended=True),  # its first token was accepted and ended the request
    ]
    statistics = AcceptanceStatistics()
    statistics.add(rounds[:2], 5)
    other = AcceptanceStatistics()
    other.add(rounds[2:], 4)
    total = statistics + other
    assert (total.rounds, total.drafted, total.accepted, total.emitted, total.generated) == (4, 8, 4, 7, 9)
    assert total.acceptance_length == 7 / 4
    assert total.acceptance_by_position == [3 / 4, 1 / 4]
    assert total.conditional_acceptance_by_position == [3 / 4, 1 / 2]
    assert AcceptanceStatistics().acceptance_length is None
    never = AcceptanceStatistics()
    never.add([Round(1, 2, 0, 1, 1)], 2)
    assert never.conditional_acceptance_by_position == [0.0, None]
    # Sums of different n keep their own denominators.
    mixed = never + total
    mixed.add([Round(0, 3, 3, 4, 4)], 5)
    assert mixed.acceptance_by_position == [4 / 6, 2 / 6, 1.0]
