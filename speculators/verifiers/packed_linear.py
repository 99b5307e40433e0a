"""Linear layers whose weights are laid out for the CPU once, at loading.

A pass over a few tokens is what speculative decoding verifies with, and PyTorch's default float32 product for 2 to 16
rows re-reads and re-packs the weight on every call: 8 rows then cost several times one row. oneDNN multiplies by a weight
that was packed beforehand at nearly the cost of one row (PyTorch's own compiler uses the same operator).
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad

__all__ = ["PackedLinear", "can_pack", "pack_linears"]

# Looked up once: each of these names costs a microsecond, and a decoding step has hundreds of products.
_product: Any = getattr(getattr(torch.ops.mkldnn, "_linear_pointwise", None), "default", None)

# Rows the weight is packed for; oneDNN's layouts for 8 to 1000 rows are one and the same, the one for 1 row is slower
# at every other size.
_PACKED_ROWS = 64
# Four rows take oneDNN less time than one or two, for which it has other kernels; and a row's result then has the same bits
# however many rows are beside it.
_MIN_ROWS = 4
# Below this a layer is all overhead, and small test models keep PyTorch's own bits.
_MIN_WEIGHTS = 2**15


class PackedLinear(nn.Module):
    """``x W^T + b`` with a packed float32 weight, in place of an :class:`torch.nn.Linear` that is not trained.

    ``weight`` gives the weight back as an ordinary tensor, unpacked anew on every access.
    """

    def __init__(self, source: nn.Linear) -> None:
        super().__init__()
        self.in_features = source.in_features
        self.out_features = source.out_features
        self.bias = source.bias
        # Not a buffer: a packed tensor cannot be moved, cast or saved.
        self._packed = torch.ops.mkldnn._reorder_linear_weight(source.weight.detach(), _PACKED_ROWS)

    @property
    def weight(self) -> Tensor:
        return self._packed.to_dense()

    def forward(self, x: Tensor) -> Tensor:
        rows = x.numel() // self.in_features
        if rows == 0 or (x.requires_grad and torch.is_grad_enabled()):
            return linear(x, self.weight, self.bias)  # the packed product has no gradient and takes no empty input
        if rows >= _MIN_ROWS:
            return _product(x, self._packed, self.bias, "none", [], "")
        flat = x.reshape(rows, self.in_features)
        # One row, the plain decoding step, is repeated by a stride; padding costs an operation more.
        padded = flat.expand(_MIN_ROWS, -1) if rows == 1 else pad(flat, (0, 0, 0, _MIN_ROWS - rows))
        result = _product(padded, self._packed, self.bias, "none", [], "")
        return result.narrow(0, 0, rows).view(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


@cache
def can_pack() -> bool:
    """Whether this PyTorch build packs float32 weights and multiplies by them correctly."""
    if _product is None:
        return False
    try:
        with torch.no_grad():
            layer = nn.Linear(32, 48)
            x = torch.linspace(-1, 1, 5 * 32).view(1, 5, 32)
            return torch.allclose(PackedLinear(layer)(x), layer(x), atol=1e-5)
    except (AttributeError, RuntimeError, NotImplementedError):
        return False


def pack_linears(model: nn.Module) -> int:
    """Replace the linear layers of a float32 model on the CPU by :class:`PackedLinear`; returns how many.

    A replaced layer's own weight is freed, layer by layer, unless it is shared (a tied embedding stays).
    """
    if not can_pack():
        return 0
    found = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if type(child) is nn.Linear
        and child.weight.numel() >= _MIN_WEIGHTS
        and child.weight.dtype == torch.float32
        and child.weight.device.type == "cpu"
    ]
    while found:
        parent, name, child = found.pop()
        with torch.no_grad():
            setattr(parent, name, PackedLinear(child))
    return sum(isinstance(module, PackedLinear) for module in model.modules())
