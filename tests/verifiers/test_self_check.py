import dataclasses

import pytest
import torch

from speculators.errors import VerifierError
from speculators.models.verifier_weights import VerifierHead
from speculators.verifiers import TransformersSource, check_source, check_states, load_verifier
from tests.tiny import random_rows, tiny_verifier
from tests.verifiers.models import family_verifier


@pytest.fixture(scope="module")
def verifier(tmp_path_factory):
    return load_verifier(tiny_verifier(tmp_path_factory.mktemp("verifier")))


@pytest.fixture(scope="module")
def head(verifier):
    return VerifierHead.from_folder(verifier.name)


class Mislabelled:
    """A source that says the wrong thing about its final state."""

    def __init__(self, source, final_state):
        self.fetch = source.fetch
        self.description = dataclasses.replace(source.description, final_state=final_state)


@pytest.mark.parametrize("final_state", ["post_norm", "pre_norm"])
def test_right_states_pass(verifier, head, final_state):
    found = check_source(TransformersSource(verifier, (1,), final_state), head, verifier, random_rows(3))
    assert found.row_id == 0
    assert found.max_difference < 1e-5


@pytest.mark.parametrize("family", ["qwen3", "gemma2", "granite", "deepseek_v3"])
@pytest.mark.parametrize("final_state", ["post_norm", "pre_norm"])
def test_heads_with_scales_and_caps(family, final_state, tmp_path):
    verifier = family_verifier(family, tmp_path, torch.float32)
    head = VerifierHead.from_folder(verifier.name)
    assert check_source(TransformersSource(verifier, (1,), final_state), head, verifier, random_rows(3)).max_difference < 1e-5


@pytest.mark.parametrize(
    ("taken", "said", "hint"),
    [
        ("post_norm", "pre_norm", "they were taken after the final norm"),  # the norm would be applied twice
        ("pre_norm", "post_norm", "they were taken before the final norm"),  # or not at all
    ],
)
def test_a_norm_applied_twice_or_not_at_all_is_told(verifier, head, taken, said, hint):
    source = Mislabelled(TransformersSource(verifier, (1,), taken), said)
    with pytest.raises(VerifierError, match=hint) as caught:
        check_source(source, head, verifier, random_rows(3))
    assert "\n" not in str(caught.value)
    assert f"--final-state {taken}" in str(caught.value)
    assert "largest difference 0." in str(caught.value)


def test_states_of_another_layer_or_verifier_are_told(verifier, head, tmp_path):
    row = random_rows(1)[0]
    states = TransformersSource(verifier, (2,)).fetch([row])[0]
    with pytest.raises(VerifierError, match="another verifier or another layer"):
        check_states(states.features[:, 0], row, head, verifier, pre_norm=False)
    other = load_verifier(tiny_verifier(tmp_path, seed=1))
    with pytest.raises(VerifierError, match="another verifier or another layer"):
        check_source(TransformersSource(verifier, (1,)), head, other, random_rows(1))


def test_rounded_states_pass_at_their_precision(verifier, head):
    row = random_rows(1)[0]
    final = TransformersSource(verifier, (1,)).fetch([row])[0].final.to(torch.bfloat16)
    assert check_states(final, row, head, verifier, pre_norm=False).tolerance == 0.05


def test_rows_too_short_to_check_are_refused(verifier, head):
    row = random_rows(1)[0]
    short = type(row)(0, row.input_ids[:1], row.loss_mask[:1])
    with pytest.raises(VerifierError, match="no row has two tokens"):
        check_source(TransformersSource(verifier, (1,)), head, verifier, [short])
