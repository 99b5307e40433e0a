"""Processes that work through a stream of items, and survive the death of one of them.

A worker is a fresh Python process (nothing is forked from a process with threads, and the caller's ``__main__`` is not run
again) that talks over one socket: it is told its task once, then gets items and answers each with something small. It ends
when the socket does, so that no kill of the parent leaves it behind.
"""

from __future__ import annotations

import json
import os
import pickle
import queue
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from typing import Any, Generic, TypeVar

from speculators.errors import SpeculatorsError

__all__ = ["WorkerDiedError", "WorkerPool"]

Item = TypeVar("Item")
Result = TypeVar("Result")

#: Items a worker holds: one it works on and one waiting, lest it idle while the parent makes the next.
IN_HAND = 2

#: What a worker runs; the parent's import path comes first, for what the task was made of.
_START = "import json, sys; sys.path[:] = json.loads(sys.argv[2]); from speculators.data.workers import serve; serve()"


class WorkerDiedError(SpeculatorsError):
    """A worker process ended twice over the same item."""


class WorkerPool(Generic[Item, Result]):
    """Processes that all have one task. They start when there is something to do; with 0 of them the work is done here.

    :param task: picklable; every worker unpickles it once. What it returns should be small.
    :param describe: names an item in the error about a worker that died.
    """

    def __init__(
        self, task: Callable[[Item], Result], workers: int, describe: Callable[[Item], str] = lambda _: "its work"
    ) -> None:
        self._task = task
        self._sent = pickle.dumps(task, protocol=pickle.HIGHEST_PROTOCOL) if workers else b""
        self._describe = describe
        self._most = workers
        self._workers: list[_Worker[Item]] = []
        self._again: deque[tuple[Item, int]] = deque()  # items of workers that died

    def __enter__(self) -> WorkerPool[Item, Result]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all workers at once, whatever they are at."""
        for worker in self._workers:
            worker.close()
        self._workers.clear()
        self._again.clear()

    def map(self, items: Iterable[Item]) -> Iterator[Result]:
        """``task(item)`` of every item, as they are done; one call at a time.

        Items are drawn as workers come free, so that only a few are in memory. When a worker dies (the system kills it for
        its memory), a new one tries the item once more. If this ends early, the workers end with it.

        :raises WorkerDiedError: when an item's second worker died, too.
        :raises Exception: what ``task`` raised, or drawing items.
        """
        if not self._most:
            yield from map(self._task, items)
            return
        try:
            yield from self._run(iter(items))
        except BaseException:
            self.close()
            raise

    def _run(self, items: Iterator[Item]) -> Iterator[Result]:
        exhausted = False
        while True:
            while not exhausted or self._again:
                worker = self._free()
                if worker is None:
                    break
                if self._again:
                    item, attempts = self._again.popleft()
                else:
                    try:
                        item, attempts = next(items), 0
                    except StopIteration:
                        exhausted = True
                        continue
                self._give(worker, item, attempts)
            busy = {worker.connection: worker for worker in self._workers if worker.given}
            if not busy:
                return
            # Only what has arrived, so that no worker waits for an item while this process waits for another.
            for connection in wait(list(busy)):
                yield from self._answer(busy[connection])  # type: ignore[index]

    def _free(self) -> _Worker[Item] | None:
        """The worker with the least in hand, a new one if all have something and there may be more."""
        least = min(self._workers, key=lambda worker: len(worker.given), default=None)
        if least is not None and not least.given:
            return least
        if len(self._workers) < self._most:
            self._workers.append(_Worker(self._sent))
            return self._workers[-1]
        return least if least is not None and len(least.given) < IN_HAND else None

    def _give(self, worker: _Worker[Item], item: Item, attempts: int) -> None:
        try:
            worker.give(item, attempts)
        except OSError:
            self._bury(worker)

    def _answer(self, worker: _Worker[Item]) -> Iterator[Result]:
        try:
            done, answer = worker.connection.recv()
        except (EOFError, OSError):
            self._bury(worker)
            return
        if not done:
            raise answer
        worker.given.popleft()
        yield answer

    def _bury(self, worker: _Worker[Item]) -> None:
        """A worker has died: what it worked on is tried once more, what only waited for it is as good as new."""
        worker.connection.close()
        worker.process.kill()
        code = worker.process.wait()
        self._workers.remove(worker)
        first = True
        for item, attempts in worker.given:
            if first and attempts:
                reason = f"killed by signal {-code}" if code < 0 else f"ended with code {code}"
                hint = "it may need more memory than there is: lower --num-preprocessing-workers"
                raise WorkerDiedError(f"two worker processes died over {self._describe(item)} ({reason}); {hint}")
            self._again.append((item, attempts + first))
            first = False


class _Worker(Generic[Item]):
    """One process and what it has been given and not answered yet."""

    def __init__(self, task: bytes) -> None:
        ours, theirs = socket.socketpair()
        with theirs, _no_interrupt():
            fd = theirs.fileno()
            arguments = [sys.executable, "-c", _START, str(fd), json.dumps(sys.path)]
            self.process = subprocess.Popen(arguments, stdin=subprocess.DEVNULL, pass_fds=[fd])
        self.connection = Connection(ours.detach())
        self.given: deque[tuple[Item, int]] = deque()
        self._task = task

    def give(self, item: Item, attempts: int) -> None:
        """:raises OSError: when the process is gone; the item counts as given."""
        self.given.append((item, attempts))
        if self._task:
            self.connection.send_bytes(self._task)
            self._task = b""
        self.connection.send(item)

    def close(self) -> None:
        """End the process at once; an item it works on is lost."""
        self.connection.close()
        self.process.kill()
        self.process.wait()


@contextmanager
def _no_interrupt() -> Iterator[None]:
    """What is started in the body never sees Ctrl-C, which a terminal sends to all of a group: the parent ends its workers."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def serve() -> None:
    """The life of a worker process: the task, then items for as long as there is a parent."""
    # One process a core: threads below would only get into each other's way.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    connection = Connection(int(sys.argv[1]))
    received: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(connection, received), daemon=True).start()
    task: Callable[[Any], Any] | None = None
    while True:
        content = received.get()
        try:
            if task is None:
                task = pickle.loads(content)
            else:
                connection.send((True, task(pickle.loads(content))))
        except Exception as error:
            connection.send((False, _portable(error)))
            return


def _receive(connection: Connection, received: queue.SimpleQueue[bytes]) -> None:
    """Take in what the parent sends while the worker works, so that the parent never waits for one worker alone."""
    try:
        while True:
            received.put(connection.recv_bytes())
    except (EOFError, OSError):
        os._exit(1)  # the parent is gone: nobody wants what this process is still at


def _portable(error: Exception) -> Exception:
    """The error itself if it survives the way to the parent, else what it says."""
    error.add_note("in a worker process:\n" + "".join(traceback.format_exception(error)).rstrip())
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}\n{traceback.format_exc()}")
    return error
