"""Asking a source ahead of the trainer: several requests under way, answers in the order of the plan, memory bounded."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass

from speculators.data.rows import Row
from speculators.verifiers.flow import FlowMeter, answer_bytes, request_bytes
from speculators.verifiers.source import HiddenStates, HiddenStateSource

__all__ = ["fetch_in_turn", "prefetch"]


@dataclass(slots=True, eq=False)
class _Asked:
    """A request that was taken from the plan and whose answer was not handed out yet."""

    rows: Sequence[Row]
    size: int  #: bytes its states will take
    answer: list[HiddenStates] | None = None
    error: BaseException | None = None

    @property
    def done(self) -> bool:
        return self.answer is not None or self.error is not None


class _Prefetcher:
    """What the workers and the reader of one :func:`prefetch` share; everything under one condition's lock."""

    def __init__(
        self,
        source: HiddenStateSource,
        requests: Iterable[Sequence[Row]],
        depth: int,
        max_bytes: float,
        meter: FlowMeter,
    ) -> None:
        self._source = source
        self._requests = iter(requests)
        self._depth, self._max_bytes = max(1, depth), max_bytes
        self._meter = meter
        self._changed = threading.Condition()
        self._asked: deque[_Asked] = deque()
        self._next: _Asked | None = None  # taken from the plan, and not asked for because there is no room
        self._exhausted = self._stopped = False
        self._in_flight = 0

    # -- the workers' side -------------------------------------------------------------------------------------------------

    def work(self) -> None:
        """Ask, one request after another, until there is none left or :meth:`stop` was called."""
        while self._ask_once():
            pass

    def _ask_once(self) -> bool:
        """One request; in a frame of its own, so that its states are not kept while the next one waits for room."""
        asked = self._take()
        if asked is None:
            return False
        try:
            answer = self._source.fetch(asked.rows)
        except BaseException as error:
            with self._changed:
                asked.error = error
                # What comes behind it will not be read.
                self._exhausted = True
                self._changed.notify_all()
            return False
        self._meter.answered(sum(states.token_ids.shape[0] for states in answer), answer_bytes(answer))
        with self._changed:
            asked.answer = answer
            self._report()
            self._changed.notify_all()
        return True

    def _take(self) -> _Asked | None:
        """The next request of the plan, once there is room for it; None when there will be no more."""
        with self._changed:
            while not self._stopped:
                if self._exhausted:
                    return None
                if self._next is None:
                    self._next = self._read_plan()
                    continue
                if self._has_room(self._next):
                    asked, self._next = self._next, None
                    self._asked.append(asked)
                    self._in_flight += asked.size
                    self._report()
                    return asked
                self._changed.wait()
        return None

    def _read_plan(self) -> _Asked | None:
        """One request more; an error of the plan itself takes a request's place."""
        try:
            rows = next(self._requests)
            return _Asked(rows, request_bytes(self._source.description, rows))
        except StopIteration:
            self._exhausted = True
        except BaseException as error:
            self._exhausted = True
            self._asked.append(_Asked((), 0, error=error))
        self._changed.notify_all()
        return None

    def _has_room(self, asked: _Asked) -> bool:
        """One request is always let through: one that is larger than the bound would wait for ever."""
        return not self._asked or (len(self._asked) < self._depth and self._in_flight + asked.size <= self._max_bytes)

    # -- the reader's side -------------------------------------------------------------------------------------------------

    def answers(self) -> Iterator[list[HiddenStates]]:
        """The answers in the order of the plan."""
        while True:
            begun = time.monotonic()
            with self._changed:
                while not (self._asked and self._asked[0].done) and not (self._exhausted and not self._asked):
                    self._changed.wait()
                self._meter.waited(time.monotonic() - begun)
                if not self._asked:
                    return
                first = self._asked.popleft()
                self._in_flight -= first.size
                self._report()
                self._changed.notify_all()
            if first.error is not None:
                raise first.error
            assert first.answer is not None
            yield first.answer

    def stop(self) -> None:
        """Let the workers end after the request each of them is in."""
        with self._changed:
            self._stopped = True
            self._asked.clear()
            self._in_flight = 0
            self._report()
            self._changed.notify_all()

    def _report(self) -> None:
        self._meter.level(len(self._asked), sum(asked.done for asked in self._asked), self._in_flight)


def prefetch(
    source: HiddenStateSource,
    requests: Iterable[Sequence[Row]],
    *,
    depth: int,
    max_bytes: float = float("inf"),
    workers: int = 1,
    meter: FlowMeter | None = None,
) -> Generator[list[HiddenStates], None, None]:
    """Answers to ``requests``, in their order, computed ahead in threads.

    However many requests are under way, and whichever is done first, answers come in the order of the plan. An exception of
    the source is raised at its place. Closing the iterator stops the threads after the request each of them is in.

    :param depth: most requests made and not yet handed out.
    :param max_bytes: most bytes of their states together; one request is always allowed, however large.
    :param workers: requests under way at once; the source's ``concurrency`` says how many make sense.
    :param meter: told what flows.
    """
    shared = _Prefetcher(source, requests, depth, max_bytes, meter or FlowMeter())
    threads = [
        threading.Thread(target=shared.work, name=f"hidden-states-{index}", daemon=True)
        for index in range(max(1, min(workers, depth)))
    ]
    for thread in threads:
        thread.start()
    try:
        yield from shared.answers()
    finally:
        shared.stop()
        for thread in threads:
            thread.join()


def fetch_in_turn(
    source: HiddenStateSource, requests: Iterable[Sequence[Row]], meter: FlowMeter | None = None
) -> Generator[list[HiddenStates], None, None]:
    """The same answers without a thread, each computed when it is asked for."""
    meter = meter or FlowMeter()
    for rows in requests:
        size, begun = request_bytes(source.description, rows), time.monotonic()
        meter.level(1, 0, size)
        answer = source.fetch(rows)
        meter.waited(time.monotonic() - begun)
        meter.answered(sum(states.token_ids.shape[0] for states in answer), answer_bytes(answer))
        meter.level(0, 0, 0)
        yield answer
