"""``account.jsonl``: which rows every optimiser step used, so that a run that was killed can be shown to have lost none."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from speculators.errors import DataError
from speculators.train.run_folder import MetricsFile

__all__ = ["ACCOUNT", "Account", "AccountCheck", "check_account"]

ACCOUNT = "account.jsonl"

#: Steps by which a row may be used earlier or later than planned. Answers are taken in the order of the plan, whichever
#: of them comes first, so there is no window.
REORDER_WINDOW = 0


class Account:
    """The account of a run folder, written by the main process: a head, then one line per optimiser step."""

    def __init__(self, folder: Path, replay: int, window: int) -> None:
        """:param replay: uses of a row in an epoch; ``window``: optimiser steps whose states are kept for that."""
        self._file = MetricsFile(folder / ACCOUNT)
        self._head = {"replay": replay, "replay_window": window, "reorder_window": REORDER_WINDOW}

    def rewind(self, global_step: int) -> None:
        """Drop the steps after ``global_step``, which are about to be repeated; begin the account where there is none."""
        self._file.rewind(global_step)
        if not self._file.path.exists() or not self._file.path.stat().st_size:
            self._file.append(self._head)

    def append(
        self, *, global_step: int, epoch: int, step: int, use: int, rows: Iterable[int], left_out: Iterable[int] = ()
    ) -> None:
        """One optimiser step that was done.

        :param global_step: steps done, this one included.
        :param step: which of the epoch's different steps; ``use``: the how-manieth use of its rows, from 0 on.
        :param rows: planned, of all processes together; ``left_out``: those of them without states.
        """
        place = {"global_step": global_step, "epoch": epoch, "step": step, "use": use}
        self._file.append({**place, "rows": [int(row) for row in rows], "left_out": sorted(int(row) for row in left_out)})


@dataclass(slots=True)
class AccountCheck:
    """What :func:`check_account` found."""

    steps: int = 0  #: that survive
    epochs: int = 0  #: complete ones
    uses: int = 0  #: of rows, without those left out
    left_out: int = 0  #: planned uses whose row had no states
    reorder_window: int = 0
    faults: list[str] = field(default_factory=list)  #: one sentence each; empty when the account is exact

    @property
    def exact(self) -> bool:
        return not self.faults


def check_account(path: Path, planned: Collection[int], *, replay: int = 1) -> AccountCheck:
    """Whether the surviving steps plan every row of ``planned`` exactly ``replay`` times in every epoch.

    The last epoch may be cut by ``--max-steps``, a time limit or a kill; then no row may be used more often than that. A use
    without states counts as a use that was left out, not as a fault.

    :param path: ``account.jsonl``, or the run folder it is in.
    :param planned: row ids to train on.
    :raises DataError: when the file is not an account.
    """
    head, *steps = _lines(path / ACCOUNT if path.is_dir() else path)
    found = AccountCheck(steps=len(steps))
    try:
        found.reorder_window = int(head["reorder_window"])
        if head["replay"] != replay:
            found.faults.append(f"the run used rows {head['replay']} times, not {replay}")
        _check_order(steps, found)
        last = max((int(step["epoch"]) for step in steps), default=0)
        for epoch in range(last + 1 if steps else 0):
            mine = [step for step in steps if step["epoch"] == epoch]
            complete = _check_epoch(epoch, mine, set(planned), replay, found)
            found.epochs += complete
            if not complete and epoch < last:
                found.faults.append(f"epoch {epoch} is over and did not use every row")
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"{path} is not an account of optimiser steps ({error}); was it written by a training?") from error
    return found


def _check_order(steps: list[dict[str, Any]], found: AccountCheck) -> None:
    numbers = [step["global_step"] for step in steps]
    if numbers != list(range(1, len(steps) + 1)):
        wrong = next(place for place, number in enumerate(numbers) if number != place + 1)
        found.faults.append(f"step {wrong + 1} is missing, double or out of order: there is {numbers[wrong]} in its place")
    epochs = [step["epoch"] for step in steps]
    if epochs != sorted(epochs):
        found.faults.append("epochs are out of order")


def _check_epoch(epoch: int, steps: list[dict[str, Any]], planned: set[int], replay: int, found: AccountCheck) -> bool:
    """Whether the epoch is complete; faults go to ``found``."""
    uses: Counter[tuple[int, int]] = Counter()  # of (row, use)
    for step in steps:
        rows, left_out = step["rows"], step["left_out"]
        uses.update((row, step["use"]) for row in rows)
        found.uses += len(rows) - len(left_out)
        found.left_out += len(left_out)
        if not set(left_out) <= set(rows):
            found.faults.append(f"step {step['global_step']} left out rows that it did not plan")
    for (row, use), times in sorted(uses.items()):
        if times > 1:
            found.faults.append(f"epoch {epoch} used row {row} {times} times as its use {use}")
        if row not in planned or not 0 <= use < replay:
            found.faults.append(f"epoch {epoch} used row {row} as use {use}, which nobody planned")
    return len(uses) == len(planned) * replay


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        records = [json.loads(line) for line in lines]
    except (OSError, ValueError) as error:
        raise DataError(f"{path} is not a readable account ({error})") from error
    if not records or not all(isinstance(record, dict) for record in records):
        raise DataError(f"{path} holds no account; was it written by a training?")
    yield from records
