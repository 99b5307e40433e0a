"""Threads that wait for servers, and that nobody waits for: a server that hangs must not keep the process from ending."""

from __future__ import annotations

import queue
import threading
import time
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
        self._threads = [threading.Thread(target=self._work, name=f"{name}-{number}", daemon=True) for number in range(count)]
        for thread in self._threads:
            thread.start()

    def submit(self, work: Callable[[], T]) -> Future[T]:
        task = _Task(work)
        self._tasks.put(task)
        return task.future

    def close(self, seconds: float = 2.0) -> None:
        """Threads end once they are done with what they are at.

        :param seconds: that are waited for them. A thread that lets a tensor go while the interpreter ends aborts the process,
            so only those that a server keeps for longer are left behind.
        """
        for _ in self._threads:
            self._tasks.put(None)
        until = time.monotonic() + seconds
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, until - time.monotonic()))

    def _work(self) -> None:
        while self._work_once():
            pass

    def _work_once(self) -> bool:
        """One task; in a frame of its own, so that nothing of it is kept while there is no other."""
        task = self._tasks.get()
        if task is not None:
            task.run()
        return task is not None
