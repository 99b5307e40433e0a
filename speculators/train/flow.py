"""What flows between source and trainer, as the log has it and as the terminal shows it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from accelerate import Accelerator
from rich.panel import Panel
from rich.table import Table

from speculators.train.feeder import Feeder
from speculators.verifiers.flow import status_of

__all__ = ["FlowReport", "FlowView"]

#: How a number of one process becomes the job's; what is not named here is the largest of any process.
_SUMMED, _AVERAGED = ("tokens_per_s", "bytes_per_s", "queue", "asked"), ("waited_share",)


class FlowReport:
    """The "source" part of a log record.

    :param kind: value of ``--hidden-states``.
    """

    def __init__(self, feeder: Feeder, accelerator: Accelerator, kind: str) -> None:
        self._feeder, self._accelerator, self._kind = feeder, accelerator, kind
        self._left_out = 0

    def left_out(self, rows: int) -> None:
        """So many rows of all processes had no states."""
        self._left_out += rows

    def record(self) -> dict[str, float | str]:
        """What :meth:`~speculators.verifiers.flow.FlowMeter.take` says, over all processes, since the last record; beside it

        ``replay_bytes``
            states kept for another use.
        ``rows_left_out``
            uses of rows, since this process began, for which the source had no states.

        and what the main process's source says of itself. Every process must call it.
        """
        numbers = self._feeder.meter.take()
        numbers["replay_bytes"] = float(self._feeder.replay.nbytes if self._feeder.replay is not None else 0)
        if self._accelerator.num_processes > 1:
            numbers = self._of_all(numbers)
        own: dict[str, float | str] = {"kind": self._kind, "rows_left_out": float(self._left_out)}
        return {**status_of(self._feeder.source), **numbers, **own}

    def _of_all(self, numbers: dict[str, float]) -> dict[str, float]:
        mine = torch.tensor([list(numbers.values())], dtype=torch.float32, device=self._accelerator.device)
        every: Any = self._accelerator.gather(mine)
        reduced = {}
        for name, column in zip(numbers, every.T, strict=True):
            how = torch.sum if name in _SUMMED else torch.mean if name in _AVERAGED else torch.amax
            reduced[name] = float(how(column))
        return reduced


class FlowView:
    """A panel under the training bar: what the last log record says of the flow."""

    def __init__(self) -> None:
        self._lines: list[str] = ["waiting for the first logged step"]

    def update(self, loss: float | None, steps_per_s: float, source: Mapping[str, float | str]) -> None:
        """Show another record.

        :param source: from :meth:`FlowReport.record`.
        """
        numbers = {name: value for name, value in source.items() if not isinstance(value, str)}
        known = {name: float(numbers.pop(name)) for name in _SHOWN}
        speed = [
            *([f"loss {loss:.4f}"] if loss is not None else []),
            f"{steps_per_s:.2f} steps/s",
            f"{short(known['tokens_per_s'])}tokens/s",
            f"{short(known['bytes_per_s'])}B/s",
        ]
        queue = [
            f"queue {known['queue']:.0f} of {known['asked']:.0f}",
            f"in flight {short(known['in_flight_bytes'])}B, most {short(known['in_flight_bytes_max'])}B",
            *([f"kept for replay {short(known['replay_bytes'])}B"] if known["replay_bytes"] else []),
            f"waited {100 * known['waited_share']:.1f} %",
        ]
        left_out = numbers.pop("rows_left_out", 0)
        words = [f"{_spoken(name)} {value}" for name, value in source.items() if isinstance(value, str) and name != "kind"]
        origin = [
            f"states from {source.get('kind', 'a source of the caller')}",
            *words,
            *(f"{_spoken(name)} {value:g}" for name, value in numbers.items()),
            *([f"rows left out {left_out:g}"] if left_out else []),
        ]
        self._lines = ["  ".join(part) for part in (speed, queue, origin)]

    def __rich__(self) -> Panel:
        lines = Table.grid()
        for line in self._lines:
            lines.add_row(line, style=None)
        return Panel(lines, expand=False, padding=(0, 1))


_SHOWN = (*_SUMMED, *_AVERAGED, "in_flight_bytes", "in_flight_bytes_max", "replay_bytes")


def short(number: float) -> str:
    """A number with three digits and the prefix of its size, with a space in front of what it counts."""
    for size, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g} {prefix}"
    return f"{number:.3g} "


def _spoken(name: str) -> str:
    return name.replace("_", " ")
