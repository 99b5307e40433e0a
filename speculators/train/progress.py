"""Progress bars with an estimate of the time left, on every long step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

__all__ = ["Bar", "bar"]


class Bar:
    """One bar; silent where it is not wanted."""

    def __init__(self, progress: Progress | None, task: int = 0) -> None:
        self._progress = progress
        self._task = task

    def update(self, completed: int, note: str = "", total: int | None = None) -> None:
        """Move to ``completed``, with a note such as the loss behind the times."""
        if self._progress is not None:
            options = {} if total is None else {"total": total}
            self._progress.update(self._task, completed=completed, note=note, **options)  # type: ignore[arg-type]


@contextmanager
def bar(label: str, total: int, *, shown: bool = True, passing: bool = False) -> Iterator[Bar]:
    """A bar on standard error.

    :param shown: False for a bar that does nothing, as on all processes but the main one.
    :param passing: take the bar away when it is full.
    """
    console = Console(stderr=True)
    # In a log file a bar that passes would leave nothing but an empty line.
    if not shown or (passing and not console.is_terminal):
        yield Bar(None)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with Progress(*columns, console=console, transient=passing) as progress:
        yield Bar(progress, progress.add_task(label, total=total, note=""))
