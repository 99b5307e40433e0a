"""``speculators train``: settings from the command line and a file, then :func:`speculators.train.train`."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

__all__ = ["main"]


def main(arguments: Sequence[str]) -> int:
    """Run the command and return its exit code: 0 done, 1 failed, 2 bad settings, 128 + signal when it was stopped."""
    main_process = os.environ.get("RANK", "0") == "0"
    _speak_plainly(main_process)
    from speculators.errors import SpeculatorsError
    from speculators.train.config import TrainConfig

    config = TrainConfig.resolve(arguments)
    from speculators.train.run import train

    try:
        result = train(config)
    except SpeculatorsError as error:
        if not main_process:
            return error.exit_code
        raise
    if main_process and config.dry_run:
        print(f"first draft saved to {result.checkpoint}")
    elif main_process:
        _report(result.reason, result.global_step, result.checkpoint, result.best)
    if result.reason == "interrupted" and result.signal is not None:
        return 128 + result.signal
    return 0


def _report(reason: str, step: int, checkpoint: Path | None, best: Path | None) -> None:
    how = {"finished": "trained", "interrupted": "stopped", "time limit": "reached the time limit"}[reason]
    where = f", checkpoint {checkpoint}" if checkpoint is not None else ""
    print(f"{how} at step {step}{where}{f', best {best}' if best is not None and best != checkpoint else ''}")
    if reason == "interrupted":
        print("run the same command again to go on")


def _speak_plainly(main_process: bool) -> None:
    """One line per note and per warning on standard error, from the main process only."""
    logger = logging.getLogger("speculators.train")
    logger.setLevel(logging.INFO if main_process else logging.ERROR)
    if not logger.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("%(message)s"))
        logger.addHandler(handler)
    logger.propagate = False

    def show(message: Warning | str, *_: object) -> None:
        if main_process:
            print(f"warning: {message}", file=sys.stderr)

    warnings.showwarning = show  # type: ignore[assignment]
