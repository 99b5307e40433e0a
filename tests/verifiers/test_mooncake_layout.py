"""What a server says of an object in Mooncake's store is believed only where it can be so; and what the connector says can."""

import copy
import sys

import pytest
import torch
from speculators_vllm_connector.mooncake import MooncakeTransport, pack

from speculators.errors import ConfigError
from speculators.verifiers.vllm.mooncake import MooncakeReader, layout_of, unpack
from speculators.verifiers.vllm.readers import BadStates
from speculators.verifiers.vllm.settings import MooncakeSettings

TENSORS = {"hidden_states": torch.randn(5, 3, 7).to(torch.bfloat16), "token_ids": torch.arange(5)}
SHAPES = {"hidden_states": ("bfloat16", (5, 3, 7)), "token_ids": ("int64", (5,))}


def announced() -> dict:
    transport = MooncakeTransport({}, "an engine/0", {"layer_ids": "[1, 2]"})
    return transport.announcement(transport.ticket("request"), SHAPES)


def test_what_the_connector_packs_is_what_the_client_unpacks():
    layout = layout_of(announced(), 1 << 20)
    got = unpack(layout, pack(TENSORS))
    assert set(got) == set(TENSORS)
    assert all(torch.equal(got[name], TENSORS[name]) and got[name].dtype == TENSORS[name].dtype for name in TENSORS)
    assert layout.record == {"layer_ids": "[1, 2]"}
    with pytest.raises(BadStates, match="object has 64 bytes"):
        unpack(layout, torch.zeros(64, dtype=torch.uint8))


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (("handle",), None, "names no object"),
        (("handle",), "../x:error", "names no object"),
        (("version",), True, "version 'True'"),
        (("version",), 2, "version '2'"),
        (("tensors",), [], "where hidden_states and token_ids"),
        (("tensors", "more"), {}, "where hidden_states and token_ids"),
        (("tensors", "token_ids"), 3, "begin at byte None"),
        (("tensors", "token_ids", "offset"), 0, "overlap"),
        (("tensors", "token_ids", "offset"), 8, "no multiple"),
        (("tensors", "token_ids", "offset"), -64, "no multiple"),
        (("tensors", "token_ids", "offset"), 1024, "leave gaps"),
        (("tensors", "token_ids", "dtype"), "float64", "cannot be"),
        (("tensors", "hidden_states", "nbytes"), 211, "needs 210 bytes"),
        (("tensors", "hidden_states", "shape"), [5, 3, 2**40], "by its shape"),
        (("tensors", "hidden_states", "shape"), [5, -3, -7], "cannot be"),
        (("tensors", "hidden_states", "shape"), [105], "cannot be"),
        (("metadata",), None, "how many bytes"),
        (("metadata", "total_aligned_bytes"), 256, "take 320 bytes, but it speaks of 256"),
        (("metadata", "total_aligned_bytes"), 1 << 40, "more than the"),
    ],
)
def test_answers_that_cannot_be_are_refused(path, value, words):
    params = copy.deepcopy(announced())
    entry = params
    for key in path[:-1]:
        entry = entry[key]
    entry[path[-1]] = value
    with pytest.raises(BadStates, match=words):
        layout_of(params, 1 << 20)


def test_mooncake_that_is_not_installed_is_named_with_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "mooncake", None)
    with pytest.raises(ConfigError, match=r"pip install mooncake-transfer-engine-non-cuda .* libibverbs1"):
        MooncakeReader(MooncakeSettings())
