"""How states reach the client: what a backend of the connector has to do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor

__all__ = ["Transport"]


class Transport(Protocol):
    """One way to the client. A ticket names one request's states, and is never used twice.

    ``ticket`` and ``announcement`` are called in the scheduler's process, everything else in the worker that has the states.
    """

    def ticket(self, request_id: str) -> str:
        """The name of a request's states."""
        ...

    def announcement(self, ticket: str, shapes: Mapping[str, tuple[str, tuple[int, ...]]]) -> dict[str, Any]:
        """What the client is told (``kv_transfer_params``), before the states are delivered.

        :param shapes: dtype name and shape of every tensor to come.
        """
        ...

    def open(self) -> None:
        """Make ready for :meth:`expect`, in the worker, before its first request.

        :raises OSError: when the backend cannot work here; the server then does not start.
        """
        ...

    def expect(self, ticket: str) -> None:
        """The request begins. Runs in the model's thread, before the client can have the announcement; must not block."""
        ...

    def deliver(self, ticket: str, tensors: Mapping[str, Tensor], header: Mapping[str, str]) -> None:
        """Hand over what was announced; called once, in a writer's thread.

        :raises Exception: whatever goes wrong; :meth:`fail` follows.
        """
        ...

    def fail(self, ticket: str, reason: str) -> None:
        """There will be no states: release a client that waits, and tell it why as far as the backend can."""
        ...

    def forget(self, ticket: str) -> None:
        """The request was aborted: leave nothing of it."""
        ...

    def close(self) -> None:
        """The server stops; every delivery is over. Leave nothing behind."""
        ...
