"""What flows from a source of hidden states to whoever trains on them: rates, queues, waiting."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

from speculators.data.rows import Row
from speculators.verifiers.source import HiddenStates, StatesDescription

__all__ = ["FlowMeter", "ReportsStatus", "answer_bytes", "request_bytes", "status_of"]


@runtime_checkable
class ReportsStatus(Protocol):
    """A source that has something to say of itself beside its states, such as how many of its servers are alive."""

    def status(self) -> Mapping[str, float | str]:
        """Short names and their values; called from the training's thread, so it must answer at once."""
        ...


def status_of(source: object) -> dict[str, float | str]:
    """What the source says of itself; empty for one that says nothing."""
    return dict(source.status()) if isinstance(source, ReportsStatus) else {}


def request_bytes(description: StatesDescription, rows: Sequence[Row]) -> int:
    """Bytes that the states of ``rows`` will take."""
    return sum(len(row) for row in rows) * description.bytes_per_token


def answer_bytes(answer: Sequence[HiddenStates]) -> int:
    """Bytes that the states of an answer do take."""
    return sum(states.features.nbytes + states.final.nbytes for states in answer)


class FlowMeter:
    """Counts what a source gives and how long the trainer waited for it; any thread may tell it, one asks it.

    Rates and shares are over the time since the last :meth:`take`, largest values since then too.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._begun = time.monotonic()
        self._tokens = self._bytes = 0
        self._waited = 0.0
        self._in_flight = self._in_flight_max = 0
        self._asked = self._ready = 0

    def answered(self, tokens: int, size: int) -> None:
        """The source gave states of ``tokens`` tokens in ``size`` bytes."""
        with self._lock:
            self._tokens += tokens
            self._bytes += size

    def waited(self, seconds: float) -> None:
        """The trainer stood still."""
        with self._lock:
            self._waited += seconds

    def level(self, asked: int, ready: int, in_flight: int) -> None:
        """How much is under way now.

        :param asked: requests made and not yet handed to the trainer; ``ready``: those of them that are answered.
        :param in_flight: bytes of all of ``asked``.
        """
        with self._lock:
            self._asked, self._ready, self._in_flight = asked, ready, in_flight
            self._in_flight_max = max(self._in_flight_max, in_flight)

    def take(self) -> dict[str, float]:
        """The numbers since the last call:

        ``tokens_per_s``, ``bytes_per_s``
            what the source gave.
        ``asked``, ``queue``
            requests under way or waiting to be trained on, and how many of them are answered; as it is now.
        ``in_flight_bytes``, ``in_flight_bytes_max``
            states asked for and not yet handed to the trainer, now and at most.
        ``waited_share``
            of the time, how much the trainer waited for states.
        """
        with self._lock:
            now = time.monotonic()
            seconds = max(now - self._begun, 1e-9)
            found = {
                "tokens_per_s": self._tokens / seconds,
                "bytes_per_s": self._bytes / seconds,
                "queue": float(self._ready),
                "asked": float(self._asked),
                "in_flight_bytes": float(self._in_flight),
                "in_flight_bytes_max": float(self._in_flight_max),
                "waited_share": min(1.0, self._waited / seconds),
            }
            self._begun, self._tokens, self._bytes, self._waited = now, 0, 0, 0.0
            self._in_flight_max = self._in_flight
        return found
