"""What travels: the states of one request as tensors, the record beside them, and how they leave the key-value cache.

Shape letters: T tokens, n captured layers (the last layer included), H hidden size.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from speculators_vllm_connector import __version__

__all__ = [
    "FORMAT",
    "FORMAT_VERSION",
    "HIDDEN_STATES",
    "SCALES",
    "TOKEN_IDS",
    "HostCopy",
    "StatesRecord",
    "copy_to_host",
    "encode_fp8",
    "gather_states",
    "tensor_shapes",
    "verifier_hash",
]

FORMAT = "speculators-hidden-states"
FORMAT_VERSION = "1"

HIDDEN_STATES = "hidden_states"
SCALES = "hidden_states_scales"
TOKEN_IDS = "token_ids"

_FP8 = torch.float8_e4m3fn
_FP8_MAX = torch.finfo(_FP8).max

#: Block 0 is vLLM's placeholder of blocks that hold nothing.
_NULL_BLOCK = 0


@dataclass(frozen=True)
class StatesRecord:
    """What a server's states are; goes into the header of every file.

    :param layer_ids: in the order of the states; id k is the residual stream after k decoder layers.
    :param num_layers: of the verifier. The state of this id is taken before the verifier's final norm.
    :param dtype: torch dtype name in which the verifier computed the states.
    :param encoding: ``plain``, or ``fp8_e4m3`` with one scale a token.
    """

    model: str
    layer_ids: tuple[int, ...]
    num_layers: int
    hidden_size: int
    dtype: str
    encoding: str
    verifier_hash: str | None
    vllm_version: str

    def header(self) -> dict[str, str]:
        """Metadata of a safetensors file, which takes texts alone."""
        values = {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "producer": f"speculators-vllm-connector {__version__}",
            "vllm_version": self.vllm_version,
            "model": self.model,
            "layer_ids": json.dumps(list(self.layer_ids)),
            "layer_id_convention": "after_k_layers",
            "num_layers": str(self.num_layers),
            "dtype": self.dtype,
            "encoding": self.encoding,
        }
        if self.layer_ids[-1:] == (self.num_layers,):
            values["final_state"] = "pre_norm"
        if self.verifier_hash is not None:
            values["verifier_hash"] = self.verifier_hash
        return values


def verifier_hash(model: str) -> str | None:
    """The hash by which the trainer knows the verifier in folder ``model``: config, names and sizes of weight files.

    None for what is no folder of a user's own. (A hub's cache is left out too: there the trainer hashes the id and the commit.)
    """
    folder = Path(model)
    if not (folder / "config.json").is_file() or folder.parent.name == "snapshots":
        return None
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for pattern in ("*.safetensors", "pytorch_model*.bin"):
        for file in sorted(folder.glob(pattern)):
            digest.update(f"{file.name}:{file.stat().st_size};".encode())
    return digest.hexdigest()[:16]


def tensor_shapes(record: StatesRecord, tokens: int) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Dtype names and shapes of the tensors of a request, before there are any."""
    states = (tokens, len(record.layer_ids), record.hidden_size)
    if record.encoding == "plain":
        return {HIDDEN_STATES: (record.dtype, states), TOKEN_IDS: ("int64", (tokens,))}
    return {
        HIDDEN_STATES: (str(_FP8).removeprefix("torch."), states),
        SCALES: ("float32", (tokens, 1, 1)),
        TOKEN_IDS: ("int64", (tokens,)),
    }


def encode_fp8(states: Tensor) -> dict[str, Tensor]:
    """States in eight bits, scaled so that a token's largest value is the largest of the format.

    :param states: ``[T, n, H]`` of any floating dtype.
    :returns: ``hidden_states`` in float8_e4m3fn and ``hidden_states_scales``, float32 ``[T, 1, 1]``: states = their product.
    """
    wide = states.float()
    largest = wide.abs().amax(dim=(1, 2), keepdim=True)
    # A token of zeros has any scale; one below the normal numbers would lose digits. What is not finite stays so in the
    # product, for the reader to refuse.
    scales = (largest / _FP8_MAX).clamp_min(torch.finfo(torch.float32).tiny)
    scales = torch.where(largest == 0, torch.ones_like(scales), scales)
    return {HIDDEN_STATES: (wide / scales).clamp(-_FP8_MAX, _FP8_MAX).to(_FP8).contiguous(), SCALES: scales}


def gather_states(cache: Tensor, blocks: Sequence[int], block_size: int, tokens: int, count: int) -> Tensor:
    """The states of a request's first ``tokens`` tokens, as a copy.

    :param cache: the hidden-states layer's cache, ``[blocks, n, slots, H]``, or ``[blocks, slots, n, H]`` as older versions
        have it. Its blocks may be smaller than the block table's: a kernel's size divides the manager's.
    :param blocks: the request's block table.
    :param block_size: tokens of one entry of the block table.
    :param count: n.
    :returns: ``[T, n, H]`` on the cache's device.
    :raises ValueError: when the cache has not got them.
    """
    needed = blocks[: -(-tokens // block_size)]
    if len(needed) * block_size < tokens or _NULL_BLOCK in needed:
        raise ValueError(f"the cache holds no states for some of the {tokens} tokens")
    if cache.dim() != 4 or count not in cache.shape[1:3]:
        raise ValueError(f"a cache of shape {tuple(cache.shape)} cannot hold {count} states a token")
    layers_first = cache.shape[1] == count
    inner = cache.shape[2 if layers_first else 1]
    starts = torch.tensor(needed, dtype=torch.int64).unsqueeze(1) * block_size
    slots = (starts + torch.arange(block_size)).flatten()[:tokens].to(cache.device, non_blocking=True)
    if layers_first:
        return cache[slots // inner, :, slots % inner]
    return cache[slots // inner, slots % inner]


class HostCopy:
    """Tensors on their way to host memory."""

    def __init__(self, tensors: dict[str, Tensor], event: torch.cuda.Event | None) -> None:
        self.tensors = tensors
        self._event = event
        self.nbytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())

    def done(self) -> bool:
        """Whether the cache's blocks may be used for something else."""
        return self._event is None or self._event.query()

    def wait(self) -> None:
        if self._event is not None:
            self._event.synchronize()


def copy_to_host(
    cache: Tensor, blocks: Sequence[int], block_size: int, tokens: int, count: int, fp8: bool, stream: torch.cuda.Stream | None
) -> HostCopy:
    """Start copying a request's states out of the cache; see :func:`gather_states`.

    On a CUDA device the copy runs on ``stream``, behind what the model's stream has been given so far, into pinned memory; on
    any other it is done on return.
    """

    def gathered() -> dict[str, Tensor]:
        states = gather_states(cache, blocks, block_size, tokens, count)
        return encode_fp8(states) if fp8 else {HIDDEN_STATES: states}

    if stream is None:
        return HostCopy({name: tensor.cpu().contiguous() for name, tensor in gathered().items()}, None)
    stream.wait_stream(torch.cuda.current_stream(cache.device))
    with torch.cuda.stream(stream):
        host: dict[str, Tensor] = {}
        for name, tensor in gathered().items():
            host[name] = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
            host[name].copy_(tensor, non_blocking=True)
        event = torch.cuda.Event()
        event.record(stream)
    return HostCopy(host, event)
