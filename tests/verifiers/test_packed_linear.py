import pytest
import torch
from torch import nn

from speculators.verifiers.packed_linear import PackedLinear, can_pack, pack_linears

pytestmark = pytest.mark.skipif(not can_pack(), reason="this PyTorch build has no oneDNN")


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(1, 1), (1, 2), (3, 1), (1, 4), (2, 9), (1, 0), (70,), ()])
def test_a_packed_layer_multiplies_as_the_layer_it_replaces(shape, bias):
    layer = nn.Linear(96, 160, bias=bias).requires_grad_(False)
    packed = PackedLinear(layer)
    x = torch.randn(*shape, 96)
    torch.testing.assert_close(packed(x), layer(x), atol=1e-5, rtol=1e-5)
    strided = torch.randn(96, *shape).movedim(0, -1)
    torch.testing.assert_close(packed(strided), layer(strided), atol=1e-5, rtol=1e-5)
    assert torch.equal(packed.weight, layer.weight)


def test_gradients_reach_the_input():
    layer = nn.Linear(64, 64).requires_grad_(False)
    x = torch.randn(5, 64, requires_grad=True)
    PackedLinear(layer)(x).square().sum().backward()
    found, x.grad = x.grad, None
    layer(x).square().sum().backward()
    torch.testing.assert_close(found, x.grad, atol=1e-4, rtol=1e-4)


def test_only_large_float32_layers_are_replaced():
    model = nn.ModuleDict(
        {
            "wide": nn.Linear(256, 256),
            "narrow": nn.Linear(8, 8),
            "float64": nn.Linear(256, 256).double(),
            "embedding": nn.Embedding(512, 256),
            "tied": nn.Linear(256, 512, bias=False),
        }
    ).requires_grad_(False)
    model["tied"].weight = model["embedding"].weight
    assert pack_linears(model) == 2
    assert {name for name, module in model.items() if isinstance(module, PackedLinear)} == {"wide", "tied"}
    assert torch.equal(model["tied"].weight, model["embedding"].weight)
