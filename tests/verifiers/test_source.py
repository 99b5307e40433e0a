import numpy as np
import pytest
import torch

from speculators.data.rows import Row, RowDataset
from speculators.errors import ConfigError, DataError, VerifierError
from speculators.verifiers import CachedSource, StatesDescription, TransformersSource, load_verifier
from speculators.verifiers.grouping import consecutive_groups, length_groups
from tests.tiny import random_rows, tiny_verifier
from tests.verifiers.models import family_verifier, float64_verifier, plain_model


@pytest.fixture(scope="module")
def verifier(tmp_path_factory):
    return load_verifier(tiny_verifier(tmp_path_factory.mktemp("verifier")))


def same_bits(first, second):
    return all(
        (a.row_id, a.token_ids.tolist()) == (b.row_id, b.token_ids.tolist())
        and torch.equal(a.features, b.features)
        and torch.equal(a.final, b.final)
        for a, b in zip(first, second, strict=True)
    )


@pytest.mark.parametrize("final_state", ["post_norm", "pre_norm"])
@pytest.mark.parametrize("layer_ids", [(2, 0, 3), (1,), (4, 2)])
def test_states_are_those_of_transformers(tmp_path, layer_ids, final_state):
    verifier = float64_verifier(tmp_path)
    source = TransformersSource(verifier, layer_ids, final_state, token_budget=64)
    model = plain_model(verifier)
    pre_norm = []
    model.model.norm.register_forward_pre_hook(lambda module, args: pre_norm.append(args[0]))
    rows = random_rows(9)
    for row, states in zip(rows, source.fetch(rows), strict=True):
        with torch.no_grad():
            stock = model(input_ids=torch.from_numpy(row.input_ids)[None], output_hidden_states=True).hidden_states
        # transformers' last entry is after the norm; ours is the residual stream, whatever the layer.
        streams = [*stock[:-1], pre_norm[-1]]
        assert states.row_id == row.row_id
        assert torch.equal(states.token_ids, torch.from_numpy(row.input_ids))
        expected = torch.stack([streams[layer_id][0] for layer_id in layer_ids], dim=1)
        torch.testing.assert_close(states.features, expected, atol=1e-10, rtol=0)
        final = stock[-1][0] if final_state == "post_norm" else streams[-1][0]
        torch.testing.assert_close(states.final, final, atol=1e-10, rtol=0)


@pytest.mark.parametrize("family", ["qwen2", "gemma2", "gpt2", "gpt_oss", "deepseek_v3", "lfm2"])
def test_other_families(family, tmp_path):
    verifier = family_verifier(family, tmp_path)
    rows = random_rows(5)
    model = plain_model(verifier)
    for row, states in zip(rows, TransformersSource(verifier, (1, 2)).fetch(rows), strict=True):
        with torch.no_grad():
            stock = model(input_ids=torch.from_numpy(row.input_ids)[None], output_hidden_states=True).hidden_states
        torch.testing.assert_close(states.features, torch.stack([stock[1][0], stock[2][0]], dim=1), atol=1e-5, rtol=0)
        torch.testing.assert_close(states.final, stock[-1][0], atol=1e-5, rtol=0)


def test_bits_depend_on_the_rows_of_the_call_only(verifier):
    rows = random_rows(12)
    first = TransformersSource(verifier, (1, 2)).fetch(rows[3:8])
    source = TransformersSource(verifier, (1, 2))
    source.fetch(rows)
    source.fetch(rows[:5])
    assert same_bits(source.fetch(rows[3:8]), first)


def test_states_can_be_trained_on(verifier):
    states = TransformersSource(verifier, (1, 2)).fetch(random_rows(1))[0]
    weight = torch.randn(64, 8, requires_grad=True)
    (states.features.flatten(1) @ weight).sum().backward()
    assert torch.isfinite(weight.grad).all()
    assert not states.features.is_inference()


def test_the_description_and_its_record(verifier):
    description = TransformersSource(verifier, (2, 1), "pre_norm").description
    assert description.layer_ids == (2, 1)
    assert (description.final_state, description.layer_id_convention) == ("pre_norm", "after_k_layers")
    assert (description.dtype, description.hidden_size) == ("float32", 32)
    assert (description.verifier, description.verifier_hash) == (verifier.name, verifier.hash)
    assert description.bytes_per_token == 3 * 32 * 4
    assert StatesDescription.from_json(description.to_json()) == description
    with pytest.raises(ConfigError, match="layer id convention"):
        StatesDescription.from_json(description.to_json() | {"layer_id_convention": "output_of_layer_k"})
    with pytest.raises(ConfigError, match="not a description"):
        StatesDescription.from_json({"layer_ids": [1]})


def test_rows_that_do_not_fit_are_refused(verifier):
    source = TransformersSource(verifier, (1,))
    with pytest.raises(DataError, match="row 5 has 513 tokens"):
        source.fetch([Row(5, np.ones(513, np.int64), np.ones(513, bool))])
    with pytest.raises(DataError, match="outside the verifier's vocabulary"):
        source.fetch([Row(0, np.array([1, 64]), np.ones(2, bool))])
    with pytest.raises(VerifierError, match="cannot capture layers"):
        TransformersSource(verifier, (6,))


def test_groups_of_like_length_waste_little():
    lengths = np.random.default_rng(1).integers(20, 400, size=200).tolist()
    groups = length_groups(lengths, 2000)
    assert sorted(place for group in groups for place in group) == list(range(200))
    for group in groups:
        padded = max(lengths[place] for place in group) * len(group)
        assert padded <= 2000
        assert padded - sum(lengths[place] for place in group) <= 0.1 * padded
    assert len(groups) < 45
    assert length_groups([5000, 10], 2000) == [[1], [0]]
    assert length_groups([], 2000) == []
    assert consecutive_groups([9, 9, 8, 1, 0], 100) == [slice(0, 3), slice(3, 4), slice(4, 5)]


class CountingSource:
    """Remembers the rows of every call."""

    def __init__(self, source):
        self.source, self.calls = source, []
        self.description, self.token_budget = source.description, source.token_budget
        self.closed = False

    def fetch(self, rows):
        self.calls.append([row.row_id for row in rows])
        return self.source.fetch(rows)

    def close(self):
        self.closed = True


@pytest.fixture
def counting(verifier):
    return CountingSource(TransformersSource(verifier, (1, 2), token_budget=100))


@pytest.fixture
def dataset():
    return RowDataset.from_rows(random_rows(20))


def tokens_of(dataset):
    return int(sum(dataset.lengths))


def test_states_that_fit_are_computed_once_in_fixed_groups(counting, dataset):
    bytes_needed = tokens_of(dataset) * (3 * 32 * 4 + 8)
    cached = CachedSource(counting, dataset, max_bytes=bytes_needed)
    assert cached.caching
    assert cached.bytes_needed == bytes_needed
    first = cached.fetch([dataset.row(7), dataset.row(2)])
    assert [states.row_id for states in first] == [7, 2]
    everything = cached.fetch([dataset.row(index) for index in range(20)])
    assert sorted(row_id for call in counting.calls for row_id in call) == list(range(20))
    assert counting.calls == [group for group in counting.calls if group in length_groups(list(dataset.lengths), 100)]
    held = sum(tensor.nbytes for states in everything for tensor in (states.token_ids, states.features, states.final))
    assert held == bytes_needed
    # A resumed run asks in another order and gets the same bits.
    resumed = CachedSource(counting, dataset, max_bytes=bytes_needed)
    resumed.fetch([dataset.row(19)])
    assert same_bits(resumed.fetch([dataset.row(7), dataset.row(2)]), first)
    cached.close()
    assert counting.closed


def test_a_row_may_be_cut_but_not_be_another(counting, dataset):
    cached = CachedSource(counting, dataset, max_bytes=10**9)
    row = dataset.row(3)
    whole = cached.fetch([row])[0]
    part = cached.fetch([Row(3, row.input_ids[:6], row.loss_mask[:6])])[0]
    assert torch.equal(part.features, whole.features[:6])
    assert torch.equal(part.final, whole.final[:6])
    assert part.token_ids.tolist() == row.input_ids[:6].tolist()
    for other in (Row(20, row.input_ids, row.loss_mask), Row(3, np.tile(row.input_ids, 2), np.tile(row.loss_mask, 2))):
        with pytest.raises(DataError, match="not the one of the data set"):
            cached.fetch([other])


def test_states_that_do_not_fit_are_streamed(counting, dataset):
    cached = CachedSource(counting, dataset, max_bytes=tokens_of(dataset) * (3 * 32 * 4 + 8) - 1)
    assert not cached.caching
    rows = [dataset.row(4), dataset.row(9)]
    first = cached.fetch(rows)
    cached.fetch([dataset.row(4)])
    assert counting.calls == [[4, 9], [4]]
    assert same_bits(cached.fetch(rows), first)
