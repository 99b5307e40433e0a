from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest
from speculators_vllm_connector import fast_build


def builder_class():
    """A metadata builder as vLLM's: made for some layers, and asked to build fast or with a plan."""

    class Builder:
        def __init__(self, layers, method="dspark"):
            self.layer_names = layers
            speculative = None if method is None else SimpleNamespace(method=method)
            model = SimpleNamespace(get_total_num_hidden_layers=lambda: 61)
            self.vllm_config = SimpleNamespace(speculative_config=speculative, model_config=model)

        def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
            return "no plan" if fast_build else "plan"

    return Builder


@pytest.mark.parametrize(
    ("version", "fault"),
    [
        ("0.23.1rc1.dev786+g34b560b72", True),
        ("0.23.1rc1.dev700", True),
        ("0.23.1.dev800", True),
        ("0.23.1rc1.dev699", False),
        ("0.23.1", False),
        ("0.23.0", False),
        ("0.32.0", False),
        ("0.23.10rc1.dev786", False),
    ],
)
def test_versions(version, fault):
    assert fast_build.has_fault(version) is fault


def test_the_drafts_metadata_is_built_fast_and_the_verifiers_is_not():
    builder = builder_class()
    fast_build.build_drafts_fast(builder)
    fast_build.build_drafts_fast(builder)  # vLLM may load a plugin more than once
    draft = ["model.layers.61.self_attn.attn", "model.layers.63.self_attn.attn"]
    assert builder(draft).build(0, None) == "no plan"
    assert builder(draft, "dflash").build(common_prefix_len=0, common_attn_metadata=None) == "no plan"
    assert builder(["model.layers.0.self_attn.attn"]).build(0, None) == "plan"
    assert builder(["model.layers.0.self_attn.attn"]).build(0, None, fast_build=True) == "no plan"
    assert builder(draft, "eagle3").build(0, None) == "plan"
    assert builder(draft, None).build(0, None) == "plan"
    assert builder(["encoder"]).build(0, None) == "plan"


@pytest.mark.parametrize(
    ("version", "switch", "applied"),
    [
        ("0.23.1rc1.dev786", None, True),
        ("0.23.1rc1.dev786", "0", False),
        ("0.32.0", None, False),
        ("0.32.0", "1", True),
    ],
)
def test_the_plugin_is_active_on_versions_with_the_fault_alone(monkeypatch, version, switch, applied):
    names = ["vllm", "vllm.v1", "vllm.v1.attention", "vllm.v1.attention.backends", "vllm.v1.attention.backends.flash_attn"]
    for name in names:
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    builder = builder_class()
    sys.modules["vllm"].__version__ = version
    sys.modules[names[-1]].FlashAttentionMetadataBuilder = builder
    if switch is None:
        monkeypatch.delenv(fast_build.SWITCH, raising=False)
    else:
        monkeypatch.setenv(fast_build.SWITCH, switch)
    fast_build.register()
    built = builder(["model.layers.61.self_attn.attn"]).build(0, None)
    assert built == ("no plan" if applied else "plan")
