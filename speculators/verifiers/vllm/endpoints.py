"""Several vLLM servers as one: work goes where least is under way; a server that fails is left, and rejoined when it is back.

A server is left after a fault for a wait that grows with every further one, and is then asked whether it lives; while it does
not, it is asked at least twice a minute. Work goes to it again when it answers, and the wait is short again when it has done
some. While no server is there, callers wait: as long as the retries would take altogether.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from speculators.errors import VerifierError
from speculators.verifiers.vllm.protocol import Served

__all__ = ["Endpoint", "EndpointFault", "Endpoints", "patience"]

logger = logging.getLogger("speculators.verifiers")

_LONGEST_WAIT = 30.0  # times the first one
#: Doublings of the wait for a server that lives and fails; a row's tries end sooner than a dead server's wait.
_FAULTY_DOUBLINGS = 3
_LONGEST_RETRY = 60.0
#: Answers in a row that were not what was asked for, after which a server is left though it answers.
_BAD_ANSWERS = 3


class EndpointFault(Exception):
    """A server does not answer as a living one does; another one, or the same one later, may."""


@dataclass(slots=True, eq=False)
class Endpoint:
    """One server, as far as it is known."""

    base: str  #: ``http://host:port/v1``
    served: Served | None = None  #: what it said last
    alive: bool = False
    tokens: int = 0  #: under way
    spell: int = 0  #: how often it was left; tells a fault of then from one of now
    faults: int = 0  #: in a row
    bad_answers: int = 0  #: in a row
    ask_at: float = 0.0  #: when to ask again whether it lives
    in_vain: bool = False  #: it was asked since it was left, or ever, and did not answer
    reason: str = ""  #: of its last fault


@dataclass(slots=True)
class Counts:
    """What happened so far."""

    left: int = 0
    rejoined: int = 0


def patience(max_retries: int, first_wait: float) -> float:
    """Seconds that the waits between ``max_retries`` tries take: 2, 4, 8, ... times ``first_wait``."""
    return sum(min(_LONGEST_RETRY, first_wait * 2**number) for number in range(1, max_retries + 1))


class Endpoints:
    """The servers; all of it may be called from several threads.

    :param bases: their addresses.
    :param ask: whether a server lives: what it serves.
        :raises EndpointFault: it does not.
        :raises VerifierError: it never will.
    :param max_retries: how long callers wait when none lives; see :func:`patience`.
    :param first_wait: seconds for which a server is left after its first fault.
    :param hint: what to do when none lives.
    """

    def __init__(
        self, bases: Sequence[str], ask: Callable[[str], Served], *, max_retries: int, first_wait: float, hint: str
    ) -> None:
        self.all = [Endpoint(base) for base in bases]
        self.counts = Counts()
        self._ask = ask
        self._patience = patience(max_retries, first_wait)
        self._first_wait = first_wait
        self._hint = hint
        self._changed = threading.Condition()
        self._none_since: float | None = time.monotonic()
        self._fatal: VerifierError | None = None
        self._closed = False
        self._asker: threading.Thread | None = None

    @contextmanager
    def one(self, tokens: int, avoid: Endpoint | None = None) -> Iterator[Endpoint]:
        """A living server for some work; waits for one if need be.

        An :class:`EndpointFault` of the body leaves the server.

        :param tokens: size of the work.
        :param avoid: taken only when it is the only one.
        :raises VerifierError: when none has lived for too long.
        """
        endpoint, spell = self._take(tokens, avoid)
        try:
            yield endpoint
        except EndpointFault as fault:
            self._leave(endpoint, spell, str(fault))
            raise
        finally:
            with self._changed:
                endpoint.tokens -= tokens

    def succeeded(self, endpoint: Endpoint) -> None:
        with self._changed:
            endpoint.faults = endpoint.bad_answers = 0

    def answered_badly(self, endpoint: Endpoint, reason: str) -> None:
        """A server answers, but not what was asked for."""
        with self._changed:
            endpoint.bad_answers += 1
            spell, enough = endpoint.spell, endpoint.bad_answers >= _BAD_ANSWERS
        if enough:
            self._leave(endpoint, spell, reason)

    @property
    def alive(self) -> int:
        return sum(endpoint.alive for endpoint in self.all)

    @property
    def reasons(self) -> str:
        """Why servers are not there."""
        return "; ".join(f"{endpoint.base}: {endpoint.reason}" for endpoint in self.all if not endpoint.alive)

    def close(self) -> None:
        """Callers that wait get an error."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._asker is not None and self._asker is not threading.current_thread():
            self._asker.join(timeout=1.0)

    def _take(self, tokens: int, avoid: Endpoint | None) -> tuple[Endpoint, int]:
        with self._changed:
            while True:
                self._check()
                living = [endpoint for endpoint in self.all if endpoint.alive]
                if living:
                    best = min(living, key=lambda endpoint: (endpoint is avoid, endpoint.tokens))
                    best.tokens += tokens
                    return best, best.spell
                self._start_asking()
                self._changed.wait(0.1)  # the patience may end without anything changing

    def _check(self) -> None:
        if self._closed:
            raise VerifierError("the vLLM client is closed")
        if self._fatal is not None:
            raise self._fatal
        if self._none_since is None or not all(endpoint.in_vain for endpoint in self.all):
            return
        if time.monotonic() - self._none_since > self._patience:
            raise VerifierError(f"no vLLM server answers ({self.reasons}); {self._hint}")

    def _leave(self, endpoint: Endpoint, spell: int, reason: str) -> None:
        with self._changed:
            if self._closed or not endpoint.alive or endpoint.spell != spell:
                return  # others noticed it before, or nobody asks any more
            endpoint.alive = endpoint.in_vain = False
            endpoint.spell += 1
            endpoint.bad_answers = 0
            self.counts.left += 1
            endpoint.faults = min(endpoint.faults, _FAULTY_DOUBLINGS)
            wait = self._put_off(endpoint, reason)
            if not self.alive:
                self._none_since = time.monotonic()
            self._start_asking()
            self._changed.notify_all()  # it may have to be asked sooner than those that are gone already
        logger.warning("the vLLM server at %s is left for %.1f s: %s", endpoint.base, wait, reason)

    def _put_off(self, endpoint: Endpoint, reason: str) -> float:
        wait = self._first_wait * min(_LONGEST_WAIT, 2.0**endpoint.faults)
        endpoint.faults = min(endpoint.faults + 1, 16)
        endpoint.ask_at = time.monotonic() + wait
        endpoint.reason = reason
        return wait

    def _start_asking(self) -> None:
        if self._asker is None or not self._asker.is_alive():
            self._asker = threading.Thread(target=self._look_after, name="vllm-endpoints", daemon=True)
            self._asker.start()

    def _look_after(self) -> None:
        """Ask those that are left until all are back."""
        while True:
            with self._changed:
                gone = [endpoint for endpoint in self.all if not endpoint.alive]
                if self._closed or self._fatal is not None or not gone:
                    self._asker = None
                    return
                due = [endpoint for endpoint in gone if endpoint.ask_at <= time.monotonic()]
                if not due:
                    soonest = min(endpoint.ask_at for endpoint in gone)
                    self._changed.wait(max(0.01, soonest - time.monotonic()))
                    continue
            # All at once: one that hangs must not keep the others from being found.
            threads = [threading.Thread(target=self._ask_one, args=(endpoint,), daemon=True) for endpoint in due]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

    def _ask_one(self, endpoint: Endpoint) -> None:
        try:
            served = self._ask(endpoint.base)
        except EndpointFault as fault:
            with self._changed:
                self._put_off(endpoint, str(fault))
                endpoint.in_vain = True
                self._changed.notify_all()
            return
        except VerifierError as error:
            with self._changed:
                self._fatal = error
                self._changed.notify_all()
            return
        with self._changed:
            endpoint.served, endpoint.alive, endpoint.in_vain = served, True, False
            self._none_since = None
            again = endpoint.spell > 0
            self.counts.rejoined += again
            self._changed.notify_all()
        if again:
            logger.warning("the vLLM server at %s is back", endpoint.base)
