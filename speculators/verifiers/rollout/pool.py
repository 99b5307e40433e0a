"""The actors of a rollout as one: work goes where least is under way; a lost actor's work is done again, another is started.

An actor is lost when its process or its node is gone, or when it takes longer than a pass may. The pool grows with the cluster
where nobody said how many actors there are to be.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, TypeVar

from speculators.errors import SpeculatorsError, VerifierError, last_line
from speculators.verifiers.rollout.settings import RolloutSettings

__all__ = ["ActorPool", "Member"]

logger = logging.getLogger("speculators.verifiers")

Result = TypeVar("Result")

#: Seconds between two looks for room, and from an actor's start to its first answer.
_GROW_SECONDS = 5.0
_START_SECONDS = 1800.0
_PATIENCE = 1.0


@dataclass(slots=True, eq=False)
class Member:
    """One actor."""

    handle: Any
    ready: Any  #: reference to its description, which it gives when its verifier is loaded
    tokens: int = 0  #: under way
    process: int | None = None  #: its process id, once it is ready
    description: Any = None
    lost: bool = False


@dataclass(slots=True)
class _Counts:
    restarts: int = 0
    redone: int = 0
    tokens: int = 0
    bytes: int = 0


@dataclass(eq=False)
class ActorPool:
    """:param start: starts an actor and gives its handle."""

    ray: ModuleType
    settings: RolloutSettings
    start: Callable[[], Any]
    members: list[Member] = field(default_factory=list)
    counts: _Counts = field(default_factory=_Counts)

    def __post_init__(self) -> None:
        self._lock = threading.Condition()
        self._looked = 0.0
        self._closed = False
        for _ in range(self._wanted()):
            self._add()

    def first_description(self) -> Any:
        """Of the first actor that is ready.

        :raises VerifierError: when none gets ready.
        """
        return self.call(0, lambda member: member.description)

    def call(self, tokens: int, work: Callable[[Member], Result]) -> Result:
        """The result of ``work`` with the actor that has least to do, and with another one after each that is lost meanwhile.

        :param tokens: that the work is, roughly.
        :raises SpeculatorsError: what the actor refuses.
        :raises VerifierError: when no actor is left.
        """
        while True:
            with self._borrowed(tokens) as member:
                try:
                    return work(member)
                except self._losses() as error:
                    self._lose(member, error)

    def ready(self) -> list[Member]:
        """The actors that can be given work now; none while all are starting.

        :raises VerifierError: when no actor is left.
        """
        self._grow()
        self._settle()
        with self._lock:
            self._refuse_none()
            return [member for member in self.members if member.process is not None]

    def collect(self, member: Member, reference: Any, seconds: float | None = None) -> Any:
        """What an actor answered; None when it is lost, and then taken out.

        :raises SpeculatorsError: what the actor refuses.
        """
        try:
            return self.get(reference, seconds)
        except self._losses() as error:
            self._lose(member, error)
            return None

    def get(self, reference: Any, seconds: float | None = None) -> Any:
        """What an actor answered; its refusals are raised as they are.

        :raises Exception: one of Ray's when the actor is lost.
        """
        try:
            return self.ray.get(reference, timeout=self.settings.request_timeout if seconds is None else seconds)
        except self.ray.exceptions.RayTaskError as error:
            cause = getattr(error, "cause", None)
            if isinstance(cause, SpeculatorsError):
                raise type(cause)(*cause.args) from None
            raise VerifierError(f"an actor of the rollout failed ({last_line(cause or error)}); see Ray's log of it") from error

    def status(self) -> dict[str, int]:
        """Actors alive, those started in place of lost ones, passes done again, tokens and bytes received."""
        with self._lock:
            counts = self.counts
            alive = sum(member.process is not None for member in self.members)
            return {
                "actors": len(self.members),
                "actors_alive": alive,
                "restarts": counts.restarts,
                "redone": counts.redone,
                "tokens": counts.tokens,
                "bytes": counts.bytes,
            }

    def received(self, tokens: int, size: int) -> None:
        """Count what came."""
        with self._lock:
            self.counts.tokens += tokens
            self.counts.bytes += size

    def close(self) -> None:
        """End all actors."""
        with self._lock:
            self._closed = True
            members, self.members = self.members, []
            self._lock.notify_all()
        for member in members:
            self._end(member)

    # -- members -------------------------------------------------------------------------------------------------------------

    @contextmanager
    def _borrowed(self, tokens: int) -> Iterator[Member]:
        member = self._least_busy(tokens)
        try:
            yield member
        finally:
            with self._lock:
                member.tokens -= tokens

    def _least_busy(self, tokens: int) -> Member:
        """An actor that is ready; one that still waits for its place on the cluster gets no work that others could do."""
        until = time.monotonic() + _START_SECONDS
        while True:
            self._grow()
            self._settle()
            with self._lock:
                members = list(self.members)
                ready = [member for member in members if member.process is not None]
                if ready:
                    member = min(ready, key=lambda one: one.tokens)
                    member.tokens += tokens
                    return member
                self._refuse_none()
            if time.monotonic() > until:
                raise VerifierError(
                    f"no actor of the rollout has started in {_START_SECONDS:.0f} s; has the cluster room for "
                    f"{self._need()}? See `ray status`"
                )
            self.ray.wait([member.ready for member in members], timeout=_PATIENCE)

    def _refuse_none(self) -> None:
        if self._closed or not self.members:
            raise VerifierError(
                f"no actor of the rollout is left after {self.counts.restarts} restarts; see Ray's logs, raise "
                "--ray-max-restarts, and run the same command again, which goes on from what is done"
            )

    def _settle(self) -> None:
        """See which of those that were started are ready."""
        with self._lock:
            waiting = [member for member in self.members if member.process is None]
        for member in waiting:
            if not self.ray.wait([member.ready], timeout=0)[0]:
                continue
            try:
                description, process = self.get(member.ready)
            except self._losses() as error:
                self._lose(member, error)
                continue
            with self._lock:
                member.description, member.process = description, process

    def _add(self) -> None:
        handle = self.start()
        self.members.append(Member(handle, handle.describe.remote()))

    def _lose(self, member: Member, error: Exception) -> None:
        """Take an actor out, once for all who had work with it, and start another one."""
        with self._lock:
            self.counts.redone += 1
            if member.lost or self._closed:
                return
            member.lost = True
            self.members.remove(member)
            again = self.counts.restarts < self.settings.max_restarts
            logger.warning(
                "an actor of the rollout is lost (%s); its work is done again%s",
                type(error).__name__,
                ", and another one is started" if again else "; no further ones are started (--ray-max-restarts)",
            )
            if again:
                self.counts.restarts += 1
                self._add()
        self._end(member)

    def _end(self, member: Member) -> None:
        with suppress(Exception):  # it may be gone, or its node
            self.ray.kill(member.handle, no_restart=True)

    def _losses(self) -> tuple[type[Exception], ...]:
        """What Ray raises when an actor, its node or what it left in the object store is gone, or it is silent for too long."""
        found = self.ray.exceptions
        return (
            found.RayActorError,
            found.ActorUnavailableError,
            found.ObjectLostError,
            found.NodeDiedError,
            found.GetTimeoutError,
            found.WorkerCrashedError,
        )

    # -- how many ------------------------------------------------------------------------------------------------------------

    def _need(self) -> dict[str, float]:
        need = {"CPU": self.settings.cpus, "GPU": self.settings.gpus, **self.settings.resources}
        return {name: amount for name, amount in need.items() if amount > 0}

    def _room(self) -> int:
        """Actors that the cluster has room for beside what is in use.

        Where they take nothing but processors it is one per node: they would take all that the trainer and others live on.
        """
        need, settings = self._need(), self.settings
        if not settings.gpus and not settings.resources:
            nodes = sum(1 for node in self.ray.nodes() if node["Alive"])
            return max(0, nodes - len(self.members))
        free = self.ray.available_resources()
        return int(min((free.get(name, 0.0) + 1e-6) // amount for name, amount in need.items()))

    def _wanted(self) -> int:
        return max(1, self._room()) if self.settings.workers is None else self.settings.workers

    def _grow(self) -> None:
        if self.settings.workers is not None:
            return
        with self._lock:
            now = time.monotonic()
            if self._closed or now - self._looked < _GROW_SECONDS:
                return
            self._looked = now
            # Those that wait for a place have not taken theirs from what is free yet.
            if any(member.process is None for member in self.members):
                return
            for _ in range(self._room()):
                self._add()
