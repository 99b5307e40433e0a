"""The worker's side: states from the cache into host memory, and writers that hand them over."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from logging import Logger

import torch
from torch import Tensor

from speculators_vllm_connector.states import TOKEN_IDS, HostCopy, StatesRecord, copy_to_host
from speculators_vllm_connector.transport import Transport

__all__ = ["Save", "Saver"]


@dataclass(frozen=True)
class Save:
    """A finished request whose states are to be handed over."""

    request_id: str
    ticket: str
    token_ids: list[int]
    blocks: list[int]


class Saver:
    """Takes states out of the cache while there is room for them, in the order in which requests finished.

    A request's blocks stay the request's until its states are copied. So a client or a disk that is slower than the model fills
    first ``max_bytes`` of host memory and then the cache, and the scheduler stops taking requests: nothing grows without bound.

    :param cache: of the hidden-states layer.
    :param block_size: tokens of one entry of a request's block table.
    :param max_bytes: of states copied and not yet handed over; one request is always allowed.
    """

    def __init__(
        self,
        cache: Tensor,
        block_size: int,
        record: StatesRecord,
        transport: Transport,
        threads: int,
        max_bytes: float,
        logger: Logger,
    ) -> None:
        self._cache = cache
        self._block_size = block_size
        self._record = record
        self._header = record.header()
        self._transport = transport
        self._max_bytes = max_bytes
        self._log = logger
        self._stream = torch.cuda.Stream(cache.device) if cache.device.type == "cuda" else None
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="hidden-states-writer")
        self._waiting: deque[Save] = deque()
        self._copies: dict[str, HostCopy | None] = {}  # request id -> its copy; None where there was nothing to copy
        self._bytes = 0
        self._changed = threading.Condition()

    def add(self, saves: Iterable[Save]) -> None:
        self._waiting.extend(saves)

    def advance(self, patience: float = 0.0) -> set[str]:
        """Start what there is room for.

        :param patience: seconds to wait for room or for a copy, when there is nothing else to do.
        :returns: requests whose blocks are free now.
        """
        self._start()
        done = self._done()
        if not done and patience > 0 and (self._waiting or self._copies):
            with self._changed:
                self._changed.wait(patience)
            self._start()
            done = self._done()
        return done

    def close(self) -> None:
        """Wait for the writers. Requests that wait for room get no states any more."""
        self._pool.shutdown(wait=True)
        while self._waiting:
            self._transport.fail(self._waiting.popleft().ticket, "the server stopped")

    def _done(self) -> set[str]:
        done = {request_id for request_id, copy in self._copies.items() if copy is None or copy.done()}
        for request_id in done:
            del self._copies[request_id]
        return done

    def _start(self) -> None:
        while self._waiting and (self._bytes == 0 or self._bytes + self._expected(self._waiting[0]) <= self._max_bytes):
            save = self._waiting.popleft()
            try:
                copy = copy_to_host(
                    self._cache,
                    save.blocks,
                    self._block_size,
                    len(save.token_ids),
                    len(self._record.layer_ids),
                    self._record.encoding != "plain",
                    self._stream,
                )
            except (ValueError, RuntimeError) as error:  # such as no memory; the server lives on
                self._copies[save.request_id] = None
                self._fail(save, error)
                continue
            self._copies[save.request_id] = copy
            with self._changed:
                self._bytes += copy.nbytes
            self._pool.submit(self._write, save, copy)

    def _expected(self, save: Save) -> int:
        size = torch.float8_e4m3fn if self._record.encoding != "plain" else self._cache.dtype
        return len(save.token_ids) * len(self._record.layer_ids) * self._record.hidden_size * size.itemsize

    def _write(self, save: Save, copy: HostCopy) -> None:
        try:
            copy.wait()
            tensors = copy.tensors | {TOKEN_IDS: torch.tensor(save.token_ids, dtype=torch.int64)}
            self._transport.deliver(save.ticket, tensors, self._header)
        except Exception as error:  # a full disk, a folder that is gone: this request fails, the server lives on
            self._fail(save, error)
        finally:
            with self._changed:
                self._bytes -= copy.nbytes
                self._changed.notify_all()

    def _fail(self, save: Save, error: Exception) -> None:
        self._log.error("no hidden states for request %s: %s", save.request_id, error)
        try:
            self._transport.fail(save.ticket, str(error) or type(error).__name__)
        except Exception as further:  # nothing that a backend does may end the server
            self._log.error("the client of request %s cannot be told: %s", save.request_id, further)
