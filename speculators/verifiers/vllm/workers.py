"""Threads that wait for servers, and that nobody waits for: a server that hangs must not keep the process from ending."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

__all__ = ["DaemonWorkers"]

T = TypeVar("T")


class _Task(Generic[T]):
    def __init__(self, work: Callable[[], T]) -> None:
        self.work = work
        self.future: Future[T] = Future()

    def run(self) -> None:
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            self.future.set_result(self.work())
        except BaseException as error:
            self.future.set_exception(error)


class DaemonWorkers:
    """As concurrent.futures' thread pool, whose threads however are joined when the interpreter ends."""

    def __init__(self, count: int, name: str) -> None:
        self._tasks: queue.SimpleQueue[_Task[Any] | None] = queue.SimpleQueue()
        self._count = count
        for number in range(count):
            threading.Thread(target=self._work, name=f"{name}-{number}", daemon=True).start()

    def submit(self, work: Callable[[], T]) -> Future[T]:
        task = _Task(work)
        self._tasks.put(task)
        return task.future

    def close(self) -> None:
        """Threads end once they are done with what they are at."""
        for _ in range(self._count):
            self._tasks.put(None)

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            task.run()
