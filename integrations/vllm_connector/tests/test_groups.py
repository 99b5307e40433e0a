from __future__ import annotations

from types import SimpleNamespace

import pytest
from speculators_vllm_connector.groups import hidden_states_group


class Spec:
    def __init__(self, block_size=16, kv_cache_specs=None):
        self.block_size = block_size
        if kv_cache_specs is not None:
            self.kv_cache_specs = kv_cache_specs


class HiddenStateCacheSpec(Spec):
    pass


def config(*groups):
    return SimpleNamespace(
        kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec, layer_names=list(layers)) for spec, layers in groups]
    )


def test_the_group_is_known_by_its_spec():
    assert hidden_states_group(config((Spec(), ["layers.0"]), (HiddenStateCacheSpec(4), ["x"]))) == (1, 4)


def test_the_group_is_known_by_a_spec_inside_a_merged_one():
    merged = Spec(64, {"layers.0": Spec(), "x": HiddenStateCacheSpec()})
    assert hidden_states_group(config((Spec(), ["layers.1"]), (merged, ["layers.0", "x"]))) == (1, 64)


def test_the_group_is_known_by_its_layer_where_the_scheduler_sees_another_spec():
    assert hidden_states_group(config((Spec(), ["layers.1"]), (Spec(64), ["layers.0", "cache_only_layers.61"]))) == (1, 64)


def test_a_single_group_is_it():
    assert hidden_states_group(config((Spec(32), ["layers.0"]))) == (0, 32)
    assert hidden_states_group(None) == (0, None)


def test_no_group_is_refused():
    with pytest.raises(ValueError, match="none of the 2 groups"):
        hidden_states_group(config((Spec(), ["layers.0"]), (Spec(), ["layers.1"])))
