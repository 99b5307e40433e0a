"""The draft spread over the processes of a job: a copy on each (DDP), or a part on each (FSDP2).

Sharded, every decoder layer is one unit, whose weights are gathered for its forward and again for its backward pass; the rest
that is trained (``fc``, norms, heads) is another. The frozen embedding and output head stay whole on every process: they have
neither gradients nor optimiser states, and gathering tables of that size for every batch would cost more than they weigh.
Weights are gathered in float32 and gradients averaged in it, so a sharded training computes what a DDP one does. Checkpoints
hold whole tensors either way.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor

__all__ = ["average_gradients", "clip_gradients", "gathered", "is_sharded", "part_of", "placed", "release", "spread", "whole"]


def spread(model: Any, accelerator: Accelerator, shard: bool) -> Any:
    """What to call instead of ``model``, a block draft on this process's device; its parameters may be replaced.

    The draft must be the same on every process, as one that is a function of the seed or of a file is.

    :param shard: a part of the draft on each process instead of a copy; one process trains it whole, with a warning.
    """
    if shard and accelerator.num_processes > 1:
        return _shard(model, accelerator)
    if shard:
        warnings.warn(
            "--fsdp-shard: one process has nothing to shard with and trains the whole draft; start several with torchrun",
            UserWarning,
            stacklevel=3,
        )
    # Buffers are the vocabulary's tables, the same on every process: nothing to exchange.
    buffers = [name for name, _ in model.named_buffers()]
    nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, buffers)
    return accelerator.prepare_model(model)


def _shard(model: Any, accelerator: Accelerator) -> Any:
    mesh = init_device_mesh(accelerator.device.type, (accelerator.num_processes,))
    frozen = {parameter for parameter in model.parameters() if not parameter.requires_grad}
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
        if hasattr(layer, "over_context"):
            register_fsdp_forward_method(layer, "over_context")
    fully_shard(model, mesh=mesh, ignored_params=frozen)
    model.uniform_calls = True
    register_fsdp_forward_method(model, "with_weights")
    return model


def average_gradients(wrapped: Any, accelerator: Accelerator, now: bool) -> AbstractContextManager[Any]:
    """Context of a forward and backward pass of what :func:`spread` gave: processes average gradients ``now``, or later."""
    if isinstance(wrapped, FSDPModule):
        wrapped.set_requires_gradient_sync(now)
        return nullcontext()
    return nullcontext() if now else accelerator.no_sync(wrapped)


def release(wrapped: Any) -> None:
    """Let go of weights that a forward pass without a backward one gathered."""
    if isinstance(wrapped, FSDPModule):
        wrapped.reshard()


def clip_gradients(parameters: list[nn.Parameter], max_norm: float) -> Tensor:
    """Scale the gradients to a common norm of at most ``max_norm`` and return the norm they had, of all processes' parts."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norm = whole(nn.utils.get_total_norm(gradients))
    nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return norm


def is_sharded(tensor: Tensor) -> bool:
    """Whether this process holds only a part of the tensor."""
    return isinstance(tensor, DTensor)


def whole(tensor: Tensor) -> Tensor:
    """The whole tensor; every process must ask for a sharded one."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def gathered(tensors: Mapping[str, Tensor], keep: bool) -> dict[str, Tensor]:
    """Whole tensors; sharded ones are gathered one after another, onto the CPU if ``keep`` and else for nothing."""
    out: dict[str, Tensor] = {}
    # By name: every process must ask for the same tensor at the same time, however its dictionary came to be.
    for name, tensor in sorted(tensors.items()):
        if not is_sharded(tensor):
            out[name] = tensor
            continue
        value = whole(tensor.detach())
        if keep:
            out[name] = value.cpu()
    return out


def part_of(tensor: Tensor, pattern: Tensor) -> Tensor:
    """This process's part of a whole tensor that all processes hold, sharded as ``pattern`` is; not always a copy."""
    if not isinstance(pattern, DTensor):
        return tensor
    # No process is the source: each cuts its part out of its own.
    return distribute_tensor(tensor, pattern.device_mesh, pattern.placements, src_data_rank=None)


def placed(tensor: Tensor, pattern: Tensor) -> Tensor:
    """A copy of a whole tensor on the device of ``pattern``, sharded as it is; scalars are never sharded.

    The memory is of torch's own alignment, so that arithmetic on it is bit for bit that of a tensor which was never saved.
    """
    tensor = tensor.to(pattern.device)
    part = part_of(tensor, pattern) if tensor.ndim > 0 else tensor
    return torch.empty_like(part).copy_(part)
