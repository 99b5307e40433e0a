"""A training, as a process of its own, whose source is slow and may lack rows; see test_flow_processes.

python slow_source.py FOLDER RUN [--delay SECONDS] [--lacks ROW ...] [settings of the training, as JSON]
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from speculators.data import Row
from speculators.errors import SpeculatorsError
from speculators.train import train
from speculators.verifiers.source import HiddenStates
from tests.train.helpers import RowByRowSource, loaded_verifier, settings, tiny_rows


class SlowSource(RowByRowSource):
    """Some milliseconds a request, more for some, several at once."""

    concurrency = 3

    def __init__(self, verifier, delay: float, lacks: Sequence[int]) -> None:
        super().__init__(verifier)
        self.delay, self.lacks = delay, set(lacks)

    def fetch(self, rows: Sequence[Row]) -> list[HiddenStates]:
        time.sleep(self.delay * (1 + rows[0].row_id % 3))
        # The self-check, which is done in the main thread, needs a row.
        lacks = set() if threading.current_thread() is threading.main_thread() else self.lacks
        return super().fetch([row for row in rows if row.row_id not in lacks])


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("run")
    parser.add_argument("changes", type=json.loads)
    parser.add_argument("--delay", type=float, default=0.0)
    parser.add_argument("--lacks", type=int, nargs="*", default=[])
    options = parser.parse_args()
    verifier = loaded_verifier(options.folder)
    config = settings(options.folder, save_path=str(options.folder / options.run), train_data_ratio=1.0, **options.changes)
    try:
        train(
            config,
            dataset=tiny_rows(),
            verifier=verifier,
            source=SlowSource(verifier, options.delay, options.lacks),
            progress=False,
        )
    except SpeculatorsError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
