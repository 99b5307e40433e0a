"""Upstream's reading of a data set, run in its environment.

    python upstream_rows.py FOLDER TRAIN_RATIO

Prints what its training reads of every row, for both sides of the split. The hidden states that it reads along with a row are
those that the folder holds.
"""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from typing import Any

from speculators.train.data import ArrowDataset


def read(folder: str, ratio: float, split: str) -> dict[str, Any]:
    dataset = ArrowDataset(4096, folder, train_ratio=ratio, split=split, on_missing="raise")
    rows = [dataset[index] for index in range(len(dataset))]
    return {
        "lengths": [int(length) for length in dataset.approx_lengths],
        "input_ids": [row["input_ids"].tolist() for row in rows],
        "loss_mask": [row["loss_mask"].tolist() for row in rows],
    }


if __name__ == "__main__":
    found: dict[str, Any] = {split: read(sys.argv[1], float(sys.argv[2]), split) for split in ("train", "val")}
    print(json.dumps(found | {"version": version("speculators"), "datasets": version("datasets")}))
