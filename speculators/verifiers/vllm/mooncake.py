"""States as objects of a Mooncake store: for servers and a trainer that share no folder.

The answer names the object and says where its tensors lie; the object, or the reason for there being none under
``<handle>:error``, follows. What an answer says is checked as strictly as a safetensors header is, before anything is fetched.
"""

from __future__ import annotations

import math
import os
import re
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import Tensor

from speculators.errors import ConfigError, VerifierError
from speculators.verifiers.state_dtypes import SCALES, STATES
from speculators.verifiers.vllm.readers import TOKEN_IDS, BadStates, Received
from speculators.verifiers.vllm.settings import MooncakeSettings

__all__ = ["Layout", "MooncakeReader", "layout_of", "unpack"]

ALIGNMENT = 64
VERSION = 1

_HANDLE = re.compile(r"[A-Za-z0-9._-]{1,256}")
_DTYPES = {
    STATES: (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn),
    SCALES: (torch.float32,),
    TOKEN_IDS: (torch.int64, torch.int32),
}
_RANKS = {STATES: 3, SCALES: 3, TOKEN_IDS: 1}
_POLL_SECONDS = (0.002, 0.05)  # first and longest
_CONNECT_SECONDS = 5.0
_REASON_BYTES = 300
_LONGEST_TEXT = 4096


@dataclass(frozen=True, slots=True)
class Layout:
    """What an answer says of an object.

    :param places: dtype, shape and first byte of every tensor.
    """

    handle: str
    places: Mapping[str, tuple[torch.dtype, tuple[int, ...], int]]
    total: int
    record: Mapping[str, str]


def layout_of(params: Mapping[str, Any], most_bytes: int) -> Layout:
    """:raises BadStates: when the answer names no object, or one that cannot be as it says."""
    handle, tensors, metadata = _handle(params), params.get("tensors"), params.get("metadata")
    if type(params.get("version")) is not int or params["version"] != VERSION:
        raise BadStates(f"its states are packed in version {str(params.get('version'))[:40]!r}; version {VERSION} is read")
    if not isinstance(tensors, dict) or not {STATES, TOKEN_IDS} <= set(tensors) <= set(_DTYPES):
        raise BadStates(f"it packs {str(tensors)[:80]}, where {STATES} and {TOKEN_IDS} are read")
    if not isinstance(metadata, dict) or not _natural(metadata.get("total_aligned_bytes")):
        raise BadStates("its answer does not say how many bytes its states take")
    total = metadata["total_aligned_bytes"]
    if total > most_bytes:
        raise BadStates(f"its states would take {total} bytes, more than the {most_bytes} that were asked for")
    places, at = {}, 0
    for name, entry in sorted(tensors.items(), key=lambda item: _offset(item[1])):
        dtype, shape, begin, nbytes = _entry(name, entry)
        if begin != at:
            raise BadStates(
                f"{name} would begin at byte {begin} of its object, where {at} is next: tensors overlap, or leave gaps"
            )
        places[name] = (dtype, shape, begin)
        at += -(-nbytes // ALIGNMENT) * ALIGNMENT
    if at != total:
        raise BadStates(f"its tensors take {at} bytes, but it speaks of {total}")
    record = {key: text for key, text in metadata.items() if isinstance(text, str) and len(text) <= _LONGEST_TEXT}
    return Layout(handle, places, total, record)


def unpack(layout: Layout, content: Tensor) -> dict[str, Tensor]:
    """Views of the tensors in ``content [total] uint8``.

    :raises BadStates: when the object has another size than was announced.
    """
    if content.numel() != layout.total:
        raise BadStates(f"its object has {content.numel()} bytes, but it spoke of {layout.total}")
    return {
        name: content[begin : begin + math.prod(shape) * dtype.itemsize].view(dtype).reshape(shape)
        for name, (dtype, shape, begin) in layout.places.items()
    }


class MooncakeReader:
    """See :class:`speculators.verifiers.vllm.readers.StatesReader`.

    :raises ConfigError: when Mooncake is not installed.
    :raises VerifierError: when no master answers.
    """

    def __init__(self, settings: MooncakeSettings) -> None:
        self._master = settings.master
        self._store = _connect(settings)

    def read(self, params: Mapping[str, Any], timeout: float, most_bytes: int) -> Received:
        layout = layout_of(params, most_bytes)
        self._wait(layout.handle, time.monotonic() + timeout)
        size = self._store.get_size(layout.handle)  # asked first: whatever lies there, no more than announced is fetched
        if size != layout.total:
            raise BadStates(f"its object has {max(size, 0)} bytes, but it spoke of {layout.total}")
        return Received(unpack(layout, self._fetch(layout.handle)), layout.record)

    def forget(self, params: Mapping[str, Any]) -> None:
        with suppress(Exception):
            handle = _handle(params)
            for key in (handle, f"{handle}:error"):
                self._store.remove(key, True)  # at once: what was read is else kept for ten seconds

    def close(self) -> None:
        with suppress(Exception):
            self._store.close()

    def _wait(self, handle: str, until: float) -> None:
        """Until the object is there.

        :raises BadStates: when it will not be, or is not in time.
        """
        pause, longest = _POLL_SECONDS
        while not self._exists(handle):
            if self._exists(f"{handle}:error"):
                small = 0 <= self._store.get_size(f"{handle}:error") <= _REASON_BYTES
                words = bytes(self._fetch(f"{handle}:error").tolist()).decode(errors="replace").split() if small else []
                raise BadStates(f"the server wrote no states: {' '.join(words) or 'its log says why'}")
            if time.monotonic() >= until:
                raise BadStates("the server's states were not in Mooncake's store at the end of --request-timeout")
            time.sleep(pause)
            pause = min(2 * pause, longest)

    def _exists(self, key: str) -> bool:
        code = self._store.is_exist(key)
        if code < 0:
            raise VerifierError(
                f"the Mooncake master at {self._master} does not answer any more (code {code}); start mooncake_master and the "
                "vLLM servers again, then resume the run"
            )
        return code == 1

    def _fetch(self, key: str) -> Tensor:
        buffer = self._store.get_buffer(key)
        if buffer is None:
            raise BadStates(
                "its object cannot be fetched: it was evicted, its server is gone, or --mooncake-local-buffer-gib is small"
            )
        return torch.frombuffer(memoryview(buffer), dtype=torch.uint8).clone()  # the buffer goes back to Mooncake


def _connect(settings: MooncakeSettings) -> Any:
    try:
        from mooncake.store import MooncakeDistributedStore
    except ImportError as error:
        raise ConfigError(
            f"--hidden-states-backend mooncake needs Mooncake, which cannot be loaded ({error}); pip install "
            "mooncake-transfer-engine-non-cuda (with CUDA mooncake-transfer-engine) and install the system's libibverbs1"
        ) from error
    host, _, port = settings.master.rpartition(":")
    try:  # Mooncake itself does not give up soon
        socket.create_connection((host, int(port)), _CONNECT_SECONDS).close()
    except (OSError, ValueError, OverflowError) as error:
        raise VerifierError(
            f"no Mooncake master answers at {settings.master} ({error}); start mooncake_master there, or give --mooncake-master"
        ) from error
    loopback = host in ("127.0.0.1", "localhost")
    store = MooncakeDistributedStore()
    code = store.setup(
        os.environ.get("MOONCAKE_LOCAL_HOSTNAME") or ("127.0.0.1" if loopback else socket.gethostname()),
        settings.metadata_server,
        int(settings.global_segment_gib * 2**30),
        int(settings.local_buffer_gib * 2**30),
        settings.protocol,
        settings.device,
        settings.master,
    )
    if code:
        raise VerifierError(f"Mooncake's set-up with the master at {settings.master} failed with code {code}; its log says why")
    return store


def _handle(params: Mapping[str, Any]) -> str:
    handle = params.get("handle")
    if not isinstance(handle, str) or not _HANDLE.fullmatch(handle):
        raise BadStates("its answer names no object of Mooncake's store; is it started with --hidden-states-backend mooncake?")
    return handle


def _entry(name: str, entry: Any) -> tuple[torch.dtype, tuple[int, ...], int, int]:
    if not isinstance(entry, dict):
        raise BadStates(f"{name} is placed by {str(entry)[:80]}")
    dtype = {str(known).removeprefix("torch."): known for known in _DTYPES[name]}.get(str(entry.get("dtype")))
    shape, nbytes = entry.get("shape"), entry.get("nbytes")
    if dtype is None or not isinstance(shape, list) or len(shape) != _RANKS[name] or not all(map(_natural, shape)):
        raise BadStates(f"{name} is {str(entry.get('dtype'))[:40]} {str(shape)[:80]}, which cannot be")
    if not _natural(nbytes) or nbytes != math.prod(shape) * dtype.itemsize:
        raise BadStates(f"{name} needs {math.prod(shape) * dtype.itemsize} bytes by its shape, but takes {str(nbytes)[:40]}")
    return dtype, tuple(shape), _offset(entry), nbytes


def _offset(entry: Any) -> int:
    offset = entry.get("offset") if isinstance(entry, dict) else None
    if not _natural(offset) or offset % ALIGNMENT:
        raise BadStates(f"a tensor would begin at byte {str(offset)[:40]} of its object, which is no multiple of {ALIGNMENT}")
    return offset


def _natural(value: Any) -> TypeGuard[int]:
    return type(value) is int and 0 <= value < 2**62
