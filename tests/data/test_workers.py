"""Worker processes: every item answered once, whoever dies; errors come back; nobody is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from speculators.data.workers import WorkerDiedError, WorkerPool
from speculators.errors import DataError


def pooled(task: Any, items: Iterable[int], workers: int, *describe: Any) -> list[Any]:
    with WorkerPool(task, workers, *describe) as pool:
        return list(pool.map(items))


def square(number: int) -> tuple[int, int]:
    return number * number, os.getpid()


@dataclass(frozen=True)
class Dying:
    """Kills its own process over the item 3, as the system does for memory, the first ``times`` times."""

    marks: Path
    times: int

    def __call__(self, number: int) -> int:
        if number == 3:
            marks = len(list(self.marks.iterdir()))
            if marks < self.times:
                (self.marks / str(marks)).touch()
                os.kill(os.getpid(), signal.SIGKILL)
        return number


def refuse(number: int) -> int:
    if number == 5:
        raise DataError("five is right out")
    return number


def report(folder: str) -> int:
    Path(folder, str(os.getpid())).touch()
    time.sleep(60)
    return 0


@pytest.mark.parametrize("workers", [0, 2])
def test_every_item_is_answered_once(workers: int) -> None:
    answers = pooled(square, range(50), workers)
    assert sorted(answer for answer, _ in answers) == [number * number for number in range(50)]
    processes = {process for _, process in answers}
    assert (os.getpid() in processes) == (workers == 0)
    assert len(processes) <= max(workers, 1)


def test_a_worker_that_dies_costs_nothing_and_one_that_dies_again_is_said(tmp_path: Path) -> None:
    (tmp_path / "once").mkdir()
    assert sorted(pooled(Dying(tmp_path / "once", 1), range(20), 2)) == list(range(20))
    assert len(list((tmp_path / "once").iterdir())) == 1
    (tmp_path / "always").mkdir()
    with pytest.raises(WorkerDiedError, match=r"two worker processes died over item 3 \(killed by signal 9\)"):
        pooled(Dying(tmp_path / "always", 9), range(20), 1, lambda item: f"item {item}")


def test_workers_are_kept_from_one_call_to_the_next() -> None:
    with WorkerPool(square, 1) as pool:
        processes = {process for _ in range(3) for _, process in pool.map(range(4))}
    assert len(processes) == 1
    assert not running(processes.pop())


def test_an_error_comes_back_and_items_are_drawn_as_they_are_needed() -> None:
    drawn = []

    def items() -> Iterator[int]:
        for number in range(1000):
            drawn.append(number)
            yield number

    with pytest.raises(DataError, match="five is right out") as caught:
        pooled(refuse, items(), 1)
    assert "in refuse" in caught.value.__notes__[0]
    assert len(drawn) <= 9


def running(process: int) -> bool:
    try:
        return ") Z " not in Path(f"/proc/{process}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.timeout(60)
def test_workers_end_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    code = "import sys; from tests.data.test_workers import pooled, report; pooled(report, [sys.argv[1]] * 2, 2)"
    parent = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], cwd=Path(__file__).parents[2])
    try:
        while len(list(tmp_path.iterdir())) < 2:
            assert parent.poll() is None
            time.sleep(0.02)
        workers = [int(entry.name) for entry in tmp_path.iterdir()]
    finally:
        parent.kill()
        parent.wait()
    deadline = time.monotonic() + 10
    while any(running(worker) for worker in workers):
        assert time.monotonic() < deadline, "a worker outlived its parent"
        time.sleep(0.02)
