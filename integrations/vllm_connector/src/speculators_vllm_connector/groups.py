"""Which group of the key-value cache holds the hidden states.

vLLM keeps them in the cache of a layer of their own. Verifiers whose layers all cache alike have one group, with the states in
it; hybrid ones have several. The group is known by the spec of its layer, by one inside a merged spec, or by its layer's name:
of a merged group, as latent attention (MLA) has it, the scheduler sees the spec of the first layer alone.
"""

from __future__ import annotations

from typing import Any

__all__ = ["LAYER_NAME", "hidden_states_group"]

#: Part of the name of the layer that caches the states.
LAYER_NAME = "cache_only_layers."

_SPEC = "HiddenStateCacheSpec"


def hidden_states_group(kv_cache_config: Any) -> tuple[int, int | None]:
    """Index of the group, and the tokens of one entry of its block table (None where the config does not say).

    :param kv_cache_config: vLLM's ``KVCacheConfig``, or None.
    :raises ValueError: when no group, or more than one, can be it.
    """
    if kv_cache_config is None:
        return 0, None
    groups = list(kv_cache_config.kv_cache_groups)
    for is_it in (_has_spec, _has_layer):
        found = [index for index, group in enumerate(groups) if is_it(group)]
        if len(found) == 1:
            return found[0], int(groups[found[0]].kv_cache_spec.block_size)
    if len(groups) == 1:
        return 0, int(groups[0].kv_cache_spec.block_size)
    raise ValueError(
        f"none of the {len(groups)} groups of the key-value cache can be told to hold the hidden states; is the server's "
        "speculative method extract_hidden_states?"
    )


def _has_spec(group: Any) -> bool:
    spec = group.kv_cache_spec
    merged = getattr(spec, "kv_cache_specs", None) or {}
    return any(cls.__name__ == _SPEC for one in (spec, *merged.values()) for cls in type(one).__mro__)


def _has_layer(group: Any) -> bool:
    return any(LAYER_NAME in name for name in group.layer_names)
