"""``speculators train``: settings from the command line and a file, then :func:`speculators.train.train`."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from speculators.train.results import TrainResult

__all__ = ["main"]


def main(arguments: Sequence[str]) -> int:
    """Run the command and return its exit code: 0 done, 1 failed, 2 bad settings, 128 + signal when it was stopped."""
    main_process = os.environ.get("RANK", "0") == "0"
    with _plain_speech(main_process):
        from speculators.errors import LostProcessError, SpeculatorsError
        from speculators.train.config import TrainConfig, check_runnable

        config = TrainConfig.resolve(arguments)
        try:
            check_runnable(config)
            from speculators.train.run import train

            result = train(config)
        except SpeculatorsError as error:
            if main_process or isinstance(error, LostProcessError):
                raise
            return error.exit_code
    if main_process:
        print(f"first draft saved to {result.checkpoint}" if config.dry_run else _report(result))
    return 128 + result.signal if result.signal is not None else 0


def _report(result: TrainResult) -> str:
    how = {"finished": "trained", "interrupted": "stopped", "time limit": "reached the time limit"}[result.reason]
    where = f", checkpoint {result.checkpoint}" if result.checkpoint is not None else ""
    best = f", best {result.best}" if result.best not in (None, result.checkpoint) else ""
    then = "; run the same command again to go on" if result.reason == "interrupted" else ""
    return f"{how} at step {result.global_step}{where}{best}{then}"


@contextmanager
def _plain_speech(main_process: bool) -> Iterator[None]:
    """One line per note and per warning on standard error, from the main process only."""
    logger = logging.getLogger("speculators.train")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(message)s"))
    before = (logger.level, logger.propagate)

    def show(message: Warning | str, *_: object) -> None:
        if main_process:
            print(f"warning: {message}", file=sys.stderr)

    with warnings.catch_warnings():
        warnings.showwarning = show  # type: ignore[assignment]
        logger.addHandler(handler)
        logger.setLevel(logging.INFO if main_process else logging.ERROR)
        logger.propagate = False
        try:
            yield
        finally:
            logger.removeHandler(handler)
            logger.setLevel(before[0])
            logger.propagate = before[1]
