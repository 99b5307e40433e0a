import numpy as np
import pytest
import torch

from speculators.errors import DataError
from speculators.sampling import SamplingParams, probabilities
from speculators.verifiers import generate_answers, generation, load_verifier
from speculators.verifiers.generation import Generation, GenerationRow, draw
from tests.tiny import tiny_verifier
from tests.verifiers.models import family_verifier, float64_verifier, plain_model, random_ids

GREEDY = SamplingParams()
SAMPLED = SamplingParams(temperature=0.8, top_k=20, top_p=0.9)


@pytest.fixture(scope="module")
def verifier(tmp_path_factory):
    verifier = float64_verifier(tmp_path_factory.mktemp("verifier"), max_positions=128)
    verifier.eos_ids = (2, 7, 11, 30)  # so that answers end at different lengths
    return verifier


def prompts(count, longest=40):
    lengths = np.random.default_rng(0).integers(1, longest, size=count)
    return [random_ids(int(length), seed).tolist() for seed, length in enumerate(lengths)]


def one_by_one(verifier, prompt, count):
    """transformers' own generate, one prompt at a time."""
    ids = torch.tensor([prompt])
    model = plain_model(verifier)
    answer = model.generate(ids, do_sample=False, max_new_tokens=count, eos_token_id=list(verifier.eos_ids), pad_token_id=0)
    return answer[0, len(prompt) :].tolist()


@pytest.mark.parametrize("batch_size", [1, 5, 64])
def test_greedy_answers_equal_generate(verifier, batch_size):
    """Rows of many lengths join and leave: at 5 rows, each place is used several times."""
    given = prompts(24)
    answers = dict(generate_answers(verifier, given, 50, batch_size=batch_size))
    assert sorted(answers) == list(range(24))
    assert {len(answer) for answer in answers.values()} > {50, 2}
    for index, prompt in enumerate(given):
        assert answers[index] == one_by_one(verifier, prompt, 50), index


def test_rows_may_be_added_later_and_each_has_its_sampling(verifier):
    """Long prompts join short ones that are in the middle of their answers; neighbours sample differently."""
    given = prompts(14)
    expected = {
        sampling: dict(generate_answers(verifier, given, 30, sampling, batch_size=3, seed=5)) for sampling in (GREEDY, SAMPLED)
    }
    generation = Generation(verifier, 3)
    waiting = [
        GenerationRow(index, prompt, 30, SAMPLED if index % 2 else GREEDY, (5, index)) for index, prompt in enumerate(given)
    ]
    waiting.sort(key=lambda row: len(row.prompt), reverse=True)
    answers = {}
    for _ in range(500):
        if waiting and generation.tokens % 2 == 0:
            generation.add(waiting.pop())
        answers.update((row.index, row.answer) for row in generation.step())
    assert not len(generation)
    for index in range(14):
        assert answers[index] == expected[SAMPLED if index % 2 else GREEDY][index], index


@pytest.mark.parametrize("family", ["mistral", "qwen2", "gemma2", "gpt2", "granite", "gpt_oss", "deepseek_v3", "lfm2"])
def test_families_with_windows_caps_and_caches_of_their_own(family, tmp_path):
    verifier = family_verifier(family, tmp_path)
    verifier.eos_ids = (7, 11, 30)
    given = prompts(7, longest=20)
    answers = dict(generate_answers(verifier, given, 25, batch_size=3))
    for index, prompt in enumerate(given):
        assert answers[index] == one_by_one(verifier, prompt, 25), index


def test_sampled_answers_are_a_function_of_seed_row_and_position(verifier):
    given = prompts(9)
    answers = dict(generate_answers(verifier, given, 30, SAMPLED, batch_size=4, seed=3))
    assert dict(generate_answers(verifier, given, 30, SAMPLED, batch_size=9, seed=3)) == answers
    some = dict(generate_answers(verifier, given[5:], 30, SAMPLED, seed=3, row_ids=range(5, 9)))
    assert {index + 5: answer for index, answer in some.items()} == {index: answers[index] for index in range(5, 9)}
    assert dict(generate_answers(verifier, given, 30, SAMPLED, batch_size=4, seed=4)) != answers
    longer = dict(generate_answers(verifier, given, 40, SAMPLED, batch_size=4, seed=3))
    assert {index: answer[:30] for index, answer in longer.items()} == answers


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(temperature=1.3),
        SamplingParams(temperature=0.7, top_p=0.8),
        SAMPLED,
        SamplingParams(temperature=1, top_k=5),
    ],
)
@pytest.mark.parametrize("nucleus", [1024, 8])
def test_draws_follow_the_distribution(sampling, nucleus, monkeypatch):
    """Evenly spaced numbers in [0, 1) must fall on each token in proportion to its probability."""
    monkeypatch.setattr(generation, "_NUCLEUS", nucleus)
    logits = 3 * torch.randn(1, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    expected = probabilities(logits, sampling)[0]
    steps = 20_000
    drawn = draw(logits.expand(steps, -1), sampling, (np.arange(steps) + 0.5) / steps)
    shares = torch.bincount(drawn, minlength=64).double() / steps
    assert float((shares - expected).abs().max()) < 1.01 / steps
    assert not shares[expected == 0].any()


def test_draws_at_the_ends_of_the_interval_can_happen():
    logits = torch.tensor([[float("-inf"), 0.0, 1.0, float("-inf")]]).expand(2, -1)
    drawn = draw(logits, SamplingParams(temperature=1.0), np.array([0.0, np.nextafter(1.0, 0.0)]))
    assert drawn.tolist() == [1, 2]
    assert draw(logits, SamplingParams(), np.zeros(2)).tolist() == [2, 2]


def test_the_context_ends_an_answer(verifier):
    verifier = load_verifier(verifier.name, dtype=torch.float64)
    verifier.eos_ids = ()
    given = [random_ids(120, 1).tolist(), random_ids(127, 2).tolist(), [9]]
    answers = dict(generate_answers(verifier, given, 20))
    assert {index: len(answer) for index, answer in answers.items()} == {0: 8, 1: 1, 2: 20}


def test_refusals_come_before_the_first_pass(verifier):
    with pytest.raises(DataError, match="prompt 1 is empty"):
        generate_answers(verifier, [[1], []], 5)
    with pytest.raises(DataError, match="prompt 0 has 128 tokens, which leaves no room"):
        generate_answers(verifier, [[1] * 128], 5)
    with pytest.raises(DataError, match="at least one new token"):
        generate_answers(verifier, [[1]], 0)
    assert list(generate_answers(verifier, [], 5)) == []


def test_progress_is_reported_and_the_caller_keeps_its_modes(verifier, capsys):
    reports = []
    for _ in generate_answers(verifier, prompts(3), 8, progress=lambda finished, tokens: reports.append((finished, tokens))):
        assert not torch.is_inference_mode_enabled()
        assert torch.is_grad_enabled()
    assert reports[-1][0] == 3
    assert reports == sorted(reports)
    list(generate_answers(verifier, prompts(3), 8, progress=True))
    captured = capsys.readouterr()
    assert "answers" in captured.err
    assert captured.out == ""


def test_stopping_keeps_what_was_begun(verifier):
    given = prompts(12)
    whole = dict(generate_answers(verifier, given, 50, batch_size=4))
    steps = iter(range(100))
    cut = dict(generate_answers(verifier, given, 50, batch_size=4, stop=lambda: next(steps) >= 20))
    assert 4 <= len(cut) < 12
    assert all(whole[index][: len(answer)] == answer for index, answer in cut.items())
    assert any(len(answer) < len(whole[index]) for index, answer in cut.items())
    assert dict(generate_answers(verifier, given, 50, stop=lambda: True)) == {}


def test_float32_answers_are_repeatable(tmp_path):
    verifier = load_verifier(tiny_verifier(tmp_path))
    given = prompts(10)
    first = dict(generate_answers(verifier, given, 30, SAMPLED, batch_size=4))
    assert dict(generate_answers(verifier, given, 30, SAMPLED, batch_size=4)) == first
