"""Progress bars with an estimate of the time left, on every long step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from rich.console import Console, RenderableType
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

__all__ = ["Bar", "bar"]


class Bar:
    """One bar; silent where it is not wanted."""

    def __init__(self, progress: Progress | None, task: int = 0) -> None:
        self._progress = progress
        self._task = task

    def update(self, completed: float, note: str = "") -> None:
        """Move to ``completed``, with a note such as the loss behind the times."""
        if self._progress is not None:
            self._progress.update(self._task, completed=completed, note=note)  # type: ignore[arg-type]

    def advance(self) -> None:
        """Move by one."""
        if self._progress is not None:
            self._progress.advance(self._task)  # type: ignore[arg-type]


class _WithMoreBelow(Progress):
    """Bars, and something under them."""

    below: RenderableType | None = None

    def get_renderables(self) -> Iterable[RenderableType]:
        yield from super().get_renderables()
        if self.below is not None:
            yield self.below


@contextmanager
def bar(
    label: str,
    total: float | None,
    *,
    shown: bool = True,
    passing: bool = False,
    share: bool = False,
    console: Console | None = None,
    below: RenderableType | None = None,
) -> Iterator[Bar]:
    """A bar of ``total`` units while the body runs; of None, when nobody knows how many.

    :param shown: False for a bar that does nothing, as on all processes but the main one.
    :param passing: take the bar away when it is full.
    :param share: show a percentage, for work whose amount is not known beforehand, instead of units done.
    :param console: where to draw; standard error by default. A console that is no terminal gets one line, at the end.
    :param below: what a terminal shows under the bar; drawn anew with it.
    """
    console = console or Console(stderr=True)
    # In a log file a bar that passes would leave nothing but an empty line.
    if not shown or (passing and not console.is_terminal):
        yield Bar(None)
        return
    amount: ProgressColumn = TextColumn("{task.percentage:>3.0f}%") if share else MofNCompleteColumn()
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        amount,
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with _WithMoreBelow(*columns, console=console, transient=passing) as progress:
        progress.below = below if console.is_terminal else None
        yield Bar(progress, progress.add_task(label, total=total, note=""))
