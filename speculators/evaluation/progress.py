"""The progress bar of a long step, with the time it still takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

__all__ = ["progress_bar", "progress_share"]


@contextmanager
def progress_bar(name: str, total: float, console: Console | None) -> Iterator[Callable[[], None]]:
    """Show a bar of ``total`` units while the body runs, and give a function that advances it by one.

    :param console: where to draw; None draws nothing. On a console that is no terminal a line is printed at the end only.
    """
    if console is None:
        yield lambda: None
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("eta"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(name, total=total)
        yield lambda: progress.advance(task)


@contextmanager
def progress_share(name: str, console: Console | None) -> Iterator[Callable[[float], None]]:
    """Show a bar for work whose amount is not known beforehand, and give a function that sets the share done, 0 to 1."""
    if console is None:
        yield lambda _: None
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeElapsedColumn(),
        TextColumn("eta"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(name, total=1.0)
        yield lambda share: progress.update(task, completed=share)
