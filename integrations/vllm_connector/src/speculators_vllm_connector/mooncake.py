"""States as objects of a Mooncake store: for servers and clients that share no folder.

One request's tensors are packed into one object, each at a multiple of 64 bytes, and put whole under the ticket as its key;
where there are none, the reason lies under ``<ticket>:error``. Objects live in the memory of the store's members, which evict
the oldest when it is full.
"""

from __future__ import annotations

import math
import os
import re
import socket
import uuid
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

__all__ = ["MooncakeTransport", "pack", "tensor_layout"]

ALIGNMENT = 64
VERSION = 1
_DEFAULTS: dict[str, Any] = {
    "mooncake_master": "127.0.0.1:50051",
    "mooncake_metadata_server": "P2PHANDSHAKE",
    "mooncake_protocol": "tcp",
    "mooncake_device": "",
    "mooncake_global_segment_gib": 4.0,
    "mooncake_local_buffer_gib": 2.0,
}
_CONNECT_SECONDS = 5.0
_REASON_BYTES = 300


def tensor_layout(shapes: Mapping[str, tuple[str, tuple[int, ...]]]) -> tuple[dict[str, dict[str, Any]], int]:
    """Where tensors lie in the object, and its size in bytes.

    :param shapes: dtype name and shape of every tensor.
    """
    places, at = {}, 0
    for name, (dtype, shape) in sorted(shapes.items()):
        nbytes = math.prod(shape) * getattr(torch, dtype).itemsize
        places[name] = {"shape": list(shape), "dtype": dtype, "nbytes": nbytes, "offset": at}
        at += -(-nbytes // ALIGNMENT) * ALIGNMENT
    return places, at


def pack(tensors: Mapping[str, Tensor]) -> Tensor:
    """Tensors of host memory in one ``[total] uint8`` tensor, as :func:`tensor_layout` places them."""
    shapes = {name: (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)) for name, tensor in tensors.items()}
    places, total = tensor_layout(shapes)
    packed = torch.zeros(total, dtype=torch.uint8)
    for name, place in places.items():
        flat = tensors[name].contiguous().reshape(-1).view(torch.uint8)
        packed[place["offset"] : place["offset"] + place["nbytes"]] = flat
    return packed


class MooncakeTransport:
    """See :class:`speculators_vllm_connector.transport.Transport`.

    :param settings: ``mooncake_*`` of ``kv_connector_extra_config``.
    :param engine: vLLM's name for this server; part of every ticket.
    :param header: what the client is told of the states beside their layout.
    :raises ValueError: for a setting that means nothing here.
    """

    def __init__(self, settings: Mapping[str, Any], engine: str, header: Mapping[str, str]) -> None:
        unknown = sorted(set(settings) - set(_DEFAULTS))
        if unknown:
            raise ValueError(f"kv_connector_extra_config has {', '.join(unknown)}; of Mooncake it takes {', '.join(_DEFAULTS)}")
        self._settings = {**_DEFAULTS, **settings}
        self._engine = re.sub(r"[^A-Za-z0-9_-]", "-", engine)[:64]
        self._header = dict(header)
        self._store: Any = None

    def ticket(self, request_id: str) -> str:
        return f"hs-{self._engine}-{uuid.uuid4().hex}"  # the client chooses request ids, which may repeat

    def announcement(self, ticket: str, shapes: Mapping[str, tuple[str, tuple[int, ...]]]) -> dict[str, Any]:
        places, total = tensor_layout(shapes)
        metadata = {**self._header, "total_aligned_bytes": total}
        return {"handle": ticket, "version": VERSION, "tensors": places, "metadata": metadata}

    def open(self) -> None:
        self._store = _connect(self._settings)

    def expect(self, ticket: str) -> None:
        """Nothing to do: a client waits for one of the two keys."""

    def deliver(self, ticket: str, tensors: Mapping[str, Tensor], header: Mapping[str, str]) -> None:
        self._put(ticket, pack(tensors))

    def fail(self, ticket: str, reason: str) -> None:
        self._put(f"{ticket}:error", torch.frombuffer(bytearray(reason.encode()[:_REASON_BYTES] or b"?"), dtype=torch.uint8))

    def forget(self, ticket: str) -> None:
        """Nothing was put: states are delivered when a request has ended."""

    def close(self) -> None:
        if self._store is not None:
            with suppress(Exception):
                self._store.close()
            self._store = None

    def _put(self, key: str, content: Tensor) -> None:
        code = self._store.put(key, content.numpy())
        if code:
            raise OSError(
                f"Mooncake's put of {content.numel()} bytes failed with code {code}; is the master at "
                f"{self._settings['mooncake_master']} up, and mooncake_global_segment_gib enough?"
            )


def _connect(settings: Mapping[str, Any]) -> Any:
    try:
        from mooncake.store import MooncakeDistributedStore
    except ImportError as error:
        raise OSError(
            f"Mooncake cannot be loaded ({error}); install mooncake-transfer-engine (mooncake-transfer-engine-non-cuda where "
            "there is no CUDA) beside vLLM, and the system's libibverbs1"
        ) from error
    master = str(settings["mooncake_master"])
    host, _, port = master.rpartition(":")
    try:  # Mooncake itself does not give up soon
        socket.create_connection((host, int(port)), _CONNECT_SECONDS).close()
    except (OSError, ValueError) as error:
        raise OSError(f"no Mooncake master answers at {master} ({error}); start mooncake_master there first") from error
    own = os.environ.get("MOONCAKE_LOCAL_HOSTNAME") or (
        "127.0.0.1" if host in ("127.0.0.1", "localhost") else socket.gethostname()
    )
    store = MooncakeDistributedStore()
    code = store.setup(
        own,
        str(settings["mooncake_metadata_server"]),
        int(float(settings["mooncake_global_segment_gib"]) * 2**30),
        int(float(settings["mooncake_local_buffer_gib"]) * 2**30),
        str(settings["mooncake_protocol"]),
        str(settings["mooncake_device"]),
        master,
    )
    if code:
        raise OSError(f"Mooncake's set-up failed with code {code}; its log above says why")
    return store
