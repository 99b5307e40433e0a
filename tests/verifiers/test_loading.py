import json
import shutil

import pytest
import torch

from speculators.errors import VerifierError
from speculators.verifiers import load_verifier
from speculators.verifiers.packed_linear import PackedLinear, can_pack
from tests.tiny import tiny_verifier
from tests.verifiers.models import plain_model, random_ids


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_verifier(tmp_path_factory.mktemp("verifier"))


def test_the_facts_of_a_verifier(folder):
    verifier = load_verifier(folder)
    assert (verifier.vocab_size, verifier.hidden_size, verifier.num_layers, verifier.context_length) == (64, 32, 4, 512)
    assert verifier.eos_ids == (2,)
    assert verifier.dtype == torch.float32
    assert verifier.name == str(folder)
    assert not verifier.model.training
    assert not any(parameter.requires_grad for parameter in verifier.model.parameters())
    assert verifier.tokenizer is not None
    assert verifier.tokenizer.decode([10]) == verifier.tokenizer.convert_ids_to_tokens(10)
    ids = random_ids(9, 0).view(1, -1)
    with torch.no_grad():
        expected = plain_model(verifier)(input_ids=ids, output_hidden_states=True)
        torch.testing.assert_close(verifier.logits(ids), expected.logits)
        torch.testing.assert_close(verifier.logits(ids, keep=2), expected.logits[:, -2:])
        torch.testing.assert_close(verifier.logits(ids, keep=torch.tensor([1, 5])), expected.logits[:, [1, 5]])
        torch.testing.assert_close(verifier.states(ids), expected.hidden_states[-1])


def test_the_dtype_is_as_asked(folder):
    assert load_verifier(folder, dtype=torch.float64).dtype == torch.float64
    assert load_verifier(folder, dtype="bfloat16").dtype == torch.bfloat16


def test_end_of_sequence_ids_of_the_generation_config_come_first(folder, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    (copy / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 2]}))
    assert load_verifier(copy).eos_ids == (2, 7)


def test_the_hash_tells_verifiers_apart(folder, tmp_path):
    first = load_verifier(folder).hash
    assert load_verifier(tiny_verifier(tmp_path, seed=0)).hash == first  # a copy is the same verifier
    assert load_verifier(tiny_verifier(tmp_path, layers=3, name="other")).hash != first


def test_a_folder_without_tokenizer_loads(folder, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy, ignore=shutil.ignore_patterns("*token*", "*.jinja"))
    assert load_verifier(copy).tokenizer is None


@pytest.mark.skipif(not can_pack(), reason="this PyTorch build has no oneDNN")
def test_large_layers_are_packed_on_a_cpu(tmp_path):
    path = tiny_verifier(tmp_path, hidden=192, heads=4, kv_heads=2, intermediate=512, tie=True)
    verifier = load_verifier(path)
    assert sum(isinstance(module, PackedLinear) for module in verifier.model.modules()) == 4 * 5
    ids = random_ids(11, 0).view(1, -1)
    with torch.no_grad():
        torch.testing.assert_close(verifier.logits(ids), plain_model(verifier)(input_ids=ids).logits, atol=1e-3, rtol=1e-4)
    assert not any(isinstance(module, PackedLinear) for module in load_verifier(path, dtype=torch.float64).model.modules())


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda path: path, "there is no verifier folder"),
        (lambda path: "no-such-model", "there is no verifier folder"),
        (lambda path: path.mkdir() or path, "has no config.json"),
        (lambda path: path.mkdir() or ((path / "config.json").write_text("{}") and path), "has no safetensors weights"),
        (lambda path: path.write_text("a file") and path, "there is no verifier folder"),
    ],
)
def test_what_is_not_a_verifier_is_refused_in_one_sentence(tmp_path, make, sentence):
    with pytest.raises(VerifierError, match=sentence) as caught:
        load_verifier(make(tmp_path / "verifier"))
    assert "\n" not in str(caught.value)


def test_torn_weights_are_refused_in_one_sentence(folder, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    weights = copy / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(VerifierError, match="cannot be loaded") as caught:
        load_verifier(copy)
    assert "\n" not in str(caught.value)
