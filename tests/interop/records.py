"""What the conformance tests measured, as rows of the table in ``docs/conformance.md``.

Every test calls :func:`record` with what it measured, *before* it asserts anything about it. ``python -m
tests.interop.records`` writes the table from these rows; of a peer that no row is about, the table keeps what it has.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

__all__ = ["Direction", "Measurement", "record"]

REPOSITORY = Path(__file__).parents[2]
ROWS = REPOSITORY / "build" / "conformance.jsonl"
TABLE = REPOSITORY / "docs" / "conformance.md"
START, END = "<!-- measured: start -->", "<!-- measured: end -->"

Direction = Literal["ours -> peer", "peer -> ours", "served"]


@dataclass(frozen=True)
class Measurement:
    """One row of the table."""

    family: str
    direction: Direction
    peer: str  #: name and version, as the peer reported it
    case: str  #: the options that were set
    what: str  #: what was compared, such as "draft logits"
    measured: str  #: the measured figure, such as "max error 3.1e-06" or "20 of 20 drafts equal"


def record(measurement: Measurement) -> None:
    """Append a row."""
    path = Path(os.environ.get("SPECULATORS_CONFORMANCE_ROWS", ROWS))
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(measurement)) + "\n")


def read_rows() -> list[Measurement]:
    """The latest row of every (family, direction, peer, case, what)."""
    rows = {}
    for line in Path(os.environ.get("SPECULATORS_CONFORMANCE_ROWS", ROWS)).read_text(encoding="utf-8").splitlines():
        row = Measurement(**json.loads(line))
        rows[row.family, row.direction, row.peer, row.case, row.what] = row
    return [rows[key] for key in sorted(rows)]


def table(rows: list[Measurement]) -> str:
    """The rows in Markdown."""
    lines = ["| family | direction | peer | case | compared | measured |", "|---|---|---|---|---|---|"]
    for row in rows:
        lines.append(f"| {row.family} | {row.direction} | {row.peer} | {row.case} | {row.what} | {row.measured} |")
    return "\n".join(lines)


def kept_rows(written: str, rows: list[Measurement]) -> list[Measurement]:
    """Rows of a written table that are about other peers than ``rows``."""
    peers = {row.peer for row in rows}
    found = []
    for line in written.strip().splitlines()[2:]:
        row = Measurement(*(cell.strip() for cell in line.strip("|").split(" | ")))  # type: ignore[arg-type]
        if row.peer not in peers:
            found.append(row)
    return found


def merged(text: str, rows: list[Measurement]) -> str:
    """The document with these rows in its table."""
    head, rest = text.split(START)
    written, tail = rest.split(END)
    everything = sorted([*kept_rows(written, rows), *rows], key=lambda row: (row.peer, *asdict(row).values()))
    return f"{head}{START}\n{table(everything)}\n{END}{tail}"


def write_table() -> None:
    """Put the table between the marks of the document."""
    TABLE.write_text(merged(TABLE.read_text(encoding="utf-8"), read_rows()), encoding="utf-8")


if __name__ == "__main__":
    write_table()
