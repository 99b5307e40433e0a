import pytest
import torch

from speculators.errors import DataError, VerifierError
from speculators.verifiers import TransformersSession, load_verifier
from tests.tiny import tiny_verifier
from tests.verifiers.models import FAMILIES, family_verifier, float64_verifier, plain_model, random_ids

# transformers computes norms in float32 even in a float64 model; a difference of one rounding shows as about 1e-7.
EXACT = {"atol": 1e-10, "rtol": 0}


@pytest.fixture(scope="module")
def verifier(tmp_path_factory):
    return float64_verifier(tmp_path_factory.mktemp("verifier"))


@pytest.fixture(scope="module")
def whole(verifier):
    """Logits ``[T, V]`` and all states ``[T, layers + 1, H]`` of one pass of transformers' own model."""

    def run(ids):
        with torch.no_grad():
            output = plain_model(verifier)(input_ids=ids.view(1, -1), output_hidden_states=True)
        return output.logits[0], torch.stack([state[0] for state in output.hidden_states], dim=1)

    return run


def test_prefill_gives_the_last_logits_and_all_features(verifier, whole):
    ids = random_ids(23, 1)
    logits, states = whole(ids)
    session = TransformersSession(verifier, (3, 0, 1))
    output = session.prefill([ids])[0]
    assert output.logits.shape == (1, 64)
    assert output.features.shape == (23, 3, 32)
    torch.testing.assert_close(output.logits[0], logits[-1], **EXACT)
    torch.testing.assert_close(output.features, states[:, [3, 0, 1]], **EXACT)
    assert session.lengths == [23]


def test_the_final_state_has_an_id_before_its_norm_and_one_after(verifier, whole):
    ids = random_ids(12, 1)
    last = verifier.num_layers
    session = TransformersSession(verifier, (last + 1, last))
    features = session.prefill([ids])[0].features
    # transformers' last entry is the state after the norm.
    torch.testing.assert_close(features[:, 0], whole(ids)[1][:, last], **EXACT)
    torch.testing.assert_close(features[:, 0], verifier.parts.norm(features[:, 1]), **EXACT)
    assert not torch.allclose(features[:, 0], features[:, 1], atol=0.1)
    with pytest.raises(VerifierError, match=f"to {last} \\(before the final norm\\) and {last + 1} \\(after it\\)"):
        TransformersSession(verifier, (last + 2,))


def test_verifying_many_tokens_equals_one_at_a_time(verifier, whole):
    """With a rollback of wrong tokens before every step."""
    ids = random_ids(60, 2)
    logits, states = whole(ids)
    session = TransformersSession(verifier, (2,))
    session.prefill([ids[:10]])
    length = 10
    for count in (1, 8, 1, 1, 4, 16, 2, 17):
        session.verify([random_ids(1 + count % 7, count)])
        session.rollback([length])
        output = session.verify([ids[length : length + count]])[0]
        torch.testing.assert_close(output.logits, logits[length : length + count], **EXACT)
        torch.testing.assert_close(output.features[:, 0], states[length : length + count, 2], **EXACT)
        length += count
        assert session.lengths == [length]


def test_rollback_into_the_prompt(verifier, whole):
    ids = random_ids(30, 3)
    session = TransformersSession(verifier)
    session.prefill([ids])
    session.rollback([12])
    output = session.verify([ids[12:20]])[0]
    torch.testing.assert_close(output.logits, whole(ids[:20])[0][12:], **EXACT)
    assert output.features.shape == (8, 0, 32)
    with pytest.raises(ValueError, match="cannot be cut"):
        session.rollback([21])


def greedy(session, prompt, count, eos_ids=()):
    output = session.prefill([prompt])[0]
    tokens = [int(output.logits[-1].argmax())]
    while len(tokens) < count and tokens[-1] not in eos_ids:
        output = session.verify([torch.tensor([tokens[-1]])])[0]
        session.rollback(session.lengths)
        tokens.append(int(output.logits[-1].argmax()))
    return tokens


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_decoding_equals_generate(family, tmp_path):
    verifier = family_verifier(family, tmp_path)
    prompt = random_ids(14, 4)
    expected = plain_model(verifier).generate(prompt.view(1, -1), do_sample=False, max_new_tokens=30, eos_token_id=[])
    assert greedy(TransformersSession(verifier, (1,)), prompt, 30) == expected[0, 14:].tolist()


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_rolls_back(family, tmp_path):
    """Against a whole pass of transformers' own model; beyond the sliding windows."""
    verifier = family_verifier(family, tmp_path)
    ids = random_ids(40, 5)
    with torch.no_grad():
        expected = plain_model(verifier)(input_ids=ids.view(1, -1)).logits[0]
    session = TransformersSession(verifier, (1,))
    session.prefill([ids[:15]])
    for start in range(15, 40, 5):
        session.verify([random_ids(8, start)])
        session.rollback([start])
        session.verify([torch.cat([ids[start : start + 2], random_ids(4, start)])])
        session.rollback([start + 2])
        output = session.verify([ids[start + 2 : start + 5]])[0]
        session.rollback([start + 5])
        # transformers computes chunks of linear attention in float32.
        tolerance = 1e-4 if family == "qwen3_5_text" else 1e-5
        torch.testing.assert_close(output.logits, expected[start + 2 : start + 5], atol=tolerance, rtol=0)


def test_recurrent_states_go_back_to_the_bit_but_not_behind_the_last_pass(tmp_path):
    verifier = family_verifier("qwen3_5_text", tmp_path)
    ids = random_ids(30, 5)
    session, straight = TransformersSession(verifier, (1,)), TransformersSession(verifier, (1,))
    for one in (session, straight):
        one.prefill([ids[:15]])
    session.verify([torch.cat([ids[15:18], random_ids(4, 1)])])
    session.rollback([18])
    straight.verify([ids[15:18]])
    straight.rollback([18])
    ours, theirs = (one.verify([ids[18:30]])[0] for one in (session, straight))
    torch.testing.assert_close(ours.logits, theirs.logits, atol=0, rtol=0)
    session.rollback([20])
    assert session.lengths == [20]
    with pytest.raises(VerifierError, match="cannot be rolled back so far"):
        session.rollback([12])


def test_several_requests_do_not_mix(verifier, whole):
    first, second = random_ids(20, 6), random_ids(35, 7)
    session = TransformersSession(verifier, (1,), max_length=64)
    session.prefill([first[:5], second[:30]])
    outputs = session.verify([first[5:20], second[30:35]])
    assert session.lengths == [20, 35]
    torch.testing.assert_close(outputs[0].logits, whole(first)[0][5:], **EXACT)
    torch.testing.assert_close(outputs[1].logits, whole(second)[0][30:], **EXACT)
    session.rollback([6, 35])
    outputs = session.verify([first[6:8], second[:1]])
    torch.testing.assert_close(outputs[0].logits, whole(first)[0][6:8], **EXACT)
    with pytest.raises(ValueError, match="1 lists of tokens for 2 requests"):
        session.verify([first])


def test_a_session_can_start_again(verifier, whole):
    session = TransformersSession(verifier)
    session.prefill([random_ids(9, 8)])
    ids = random_ids(12, 9)
    torch.testing.assert_close(session.prefill([ids])[0].logits[0], whole(ids)[0][-1], **EXACT)


def test_the_context_is_a_limit(tmp_path):
    verifier = load_verifier(tiny_verifier(tmp_path, max_positions=32))
    session = TransformersSession(verifier)
    with pytest.raises(DataError, match="does not fit the verifier's context of 32"):
        session.prefill([random_ids(33, 0)])
    session.prefill([random_ids(30, 0)])
    with pytest.raises(DataError, match="does not fit"):
        session.verify([random_ids(3, 0)])
    assert session.lengths == [30]
    with pytest.raises(DataError, match="context of 16"):
        TransformersSession(verifier, max_length=16).prefill([random_ids(17, 0)])
    with pytest.raises(DataError, match="empty prompt"):
        session.prefill([torch.zeros(0, dtype=torch.long)])


@pytest.mark.parametrize("layer_ids", [(6,), (-1,), (1, 1)])
def test_layers_that_are_not_there_are_refused(verifier, layer_ids):
    with pytest.raises(VerifierError, match="cannot capture layers"):
        TransformersSession(verifier, layer_ids)


def test_no_hook_is_left_behind(verifier):
    TransformersSession(verifier, (0, 1, 4)).prefill([random_ids(5, 0)])
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in verifier.model.modules())
