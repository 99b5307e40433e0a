import pytest
import torch
from transformers import DynamicCache

from speculators.errors import VerifierError
from speculators.verifiers.cache import PreallocatedCache, PreallocatedLayer, new_cache, truncate
from speculators.verifiers.structure import cache_argument
from tests.verifiers.models import random_ids, tiny_model


def states(tokens, rows=2, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 2, tokens, 4, generator=generator), torch.randn(rows, 2, tokens, 3, generator=generator)


def filled(lengths, seed=1):
    """A one-layer cache of ``len(lengths)`` rows and what each row holds."""
    keys, values = states(max(lengths), len(lengths), seed)
    cache = PreallocatedCache(1, capacity=4)
    cache.update(keys, values, 0)
    return cache, keys, values


def test_writes_in_place_and_grows():
    layer = PreallocatedLayer(capacity=4)
    keys, values = states(700)
    for start, stop in ((0, 3), (3, 4), (4, 5), (5, 300), (300, 700)):
        seen = layer.update(keys[:, :, start:stop], values[:, :, start:stop])
        assert layer.get_seq_length() == stop
        assert layer.get_mask_sizes(5) == (stop + 5, 0)
    assert torch.equal(seen[0], keys)
    assert torch.equal(seen[1], values)
    assert seen[0].data_ptr() == layer.buffers()[0].data_ptr()  # a view, not a copy


def test_forgets_at_the_end_and_at_the_front():
    cache, keys, values = filled([40, 40])
    cache.truncate(30)
    cache.drop_front(10)
    assert cache.get_seq_length() == 20
    more = states(900, seed=2)
    held = cache.update(*more, 0)  # moves or grows
    assert torch.equal(held[0], torch.cat([keys[:, :, 10:30], more[0]], dim=2))
    assert torch.equal(held[1], torch.cat([values[:, :, 10:30], more[1]], dim=2))
    cache.crop(-5)
    assert cache.get_seq_length() == 915
    cache.crop(7)  # the length to keep, in older releases of transformers
    assert cache.get_seq_length() == 7
    cache.reset()
    assert cache.get_seq_length() == 0


def test_room_in_front_is_used_before_growing():
    cache = PreallocatedCache(1, capacity=512)
    cache.update(*states(500), 0)
    cache.drop_front(450)
    before = cache.own_layers[0].buffers()[0].data_ptr()
    kept = cache.own_layers[0].buffers()[0][:, :, 450:500].clone()
    held = cache.update(*states(20, seed=4), 0)
    assert cache.own_layers[0].buffers()[0].data_ptr() == before
    assert torch.equal(held[0][:, :, :50], kept)


def test_rows_join_at_the_end_and_leave():
    cache = PreallocatedCache(1, row_capacity=4)
    first, first_keys, _ = filled([6, 6])
    cache.add_rows(first, [6, 4])
    second, second_keys, second_values = filled([5, 5], seed=3)
    cache.add_rows(second, [5, 0])
    keys, values = cache.update(*states(1, rows=4, seed=5), 0)
    assert torch.equal(keys[0, :, :6], first_keys[0])
    assert torch.equal(keys[1, :, 2:6], first_keys[1, :, :4])
    assert torch.equal(keys[2, :, 1:6], second_keys[0])
    assert torch.equal(values[2, :, 1:6], second_values[0])
    cache.remove_row(1)  # row 3 takes its place
    cache.remove_row(2)
    keys, _ = cache.update(*states(1, rows=2, seed=6), 0)
    assert torch.equal(keys[0, :, :6], first_keys[0])
    assert keys.shape[0] == 2
    longer, longer_keys, _ = filled([300], seed=7)  # longer than all rows, and than the buffers have room in front
    cache.add_rows(longer, [300])
    keys, _ = cache.update(*states(1, rows=3, seed=8), 0)
    assert keys.shape[2] == 301
    assert torch.equal(keys[0, :, 292:298], first_keys[0])
    assert torch.equal(keys[2, :, :300], longer_keys[0])
    assert keys.isfinite().all()
    cache.remove_row(2)
    cache.remove_row(1)
    cache.remove_row(0)
    long, long_keys, _ = filled([9])
    cache.add_rows(long, [9])  # in front of it stays what the longer row used
    keys, _ = cache.update(*states(1, rows=1), 0)
    assert torch.equal(keys[0, :, -10:-1], long_keys[0])


@pytest.mark.parametrize("options", [{"num_beams": 3}, {"num_return_sequences": 2, "num_beams": 2}, {}])
def test_transformers_generate_works_with_it(options):
    model = tiny_model("llama").double()
    ids = random_ids(9, 3).view(1, -1)

    def answer(cache):
        past = {cache_argument(model): cache}
        return model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=20, **past, **options)

    assert torch.equal(answer(PreallocatedCache(3, capacity=12)), answer(DynamicCache(config=model.config)))


def test_other_kinds_of_past_keep_the_cache_of_transformers():
    model = tiny_model("lfm2").double()
    past = cache_argument(model)
    ids = random_ids(12, 4).view(1, -1)
    with torch.no_grad():
        expected = model(input_ids=ids).logits[0, 8:]
        cache = new_cache(model.config)
        assert not isinstance(cache, PreallocatedCache)
        model(input_ids=ids[:, :8], use_cache=True, **{past: cache})
        truncate(cache, 8)
        model(input_ids=random_ids(3, 5).view(1, -1), use_cache=True, **{past: cache})
        truncate(cache, 8)
        found = model(input_ids=ids[:, 8:], use_cache=True, **{past: cache}).logits[0]
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)


def test_states_that_cannot_be_rolled_back_are_refused_when_they_should_be(monkeypatch):
    monkeypatch.setattr(DynamicCache, "is_croppable", property(lambda self: False))
    model = tiny_model("lfm2")
    cache = new_cache(model.config)
    with torch.no_grad():
        model(input_ids=random_ids(5, 1).view(1, -1), use_cache=True, **{cache_argument(model): cache})
    truncate(cache, 5)
    with pytest.raises(VerifierError, match="cannot be rolled back so far"):
        truncate(cache, 4)
