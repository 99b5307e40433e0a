"""The verifier's own next-token predictions for some rows, kept beside the states: a training that reads a store checks what it
reads by them, with no verifier at hand."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from speculators.data.rows import Row
from speculators.errors import DataError
from speculators.files import read_json, write_text_atomically, writing
from speculators.verifiers.source import NextTokens

__all__ = ["PROBES", "PROBE_ROWS", "Probe", "read_probes", "write_probes"]

#: Name of their file.
PROBES = "next_tokens.json"

#: Rows that are probed, most tokens of one, positions of each, and predictions per position.
PROBE_ROWS, PROBE_TOKENS, PROBE_POSITIONS, PROBE_COUNT = 4, 512, 32, 32


@dataclass(frozen=True, slots=True)
class Probe:
    """Predictions for a row that begins with the tokens that were run."""

    row_id: int
    token_ids: Tensor  #: int64 ``[T]``, that were run
    predictions: NextTokens

    def fits(self, row: Row) -> bool:
        """Whether the row begins with the tokens that were run, or these with the row's."""
        length = min(len(row), len(self.token_ids))
        return row.row_id == self.row_id and np.array_equal(self.token_ids[:length].numpy(), row.input_ids[:length])

    def within(self, length: int, count: int) -> NextTokens:
        """Of the positions before ``length``, at most ``count`` predictions each."""
        kept = self.predictions.positions < length
        return NextTokens(
            self.predictions.positions[kept],
            self.predictions.ids[kept, :count].contiguous(),
            self.predictions.logprobs[kept, :count].contiguous(),
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "row": self.row_id,
            "token_ids": self.token_ids.tolist(),
            "positions": self.predictions.positions.tolist(),
            "ids": self.predictions.ids.tolist(),
            "logprobs": self.predictions.logprobs.tolist(),
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Probe:
        """:raises ValueError: for anything else than :meth:`to_json` gives."""
        try:
            positions = torch.tensor(values["positions"], dtype=torch.int64)
            ids = torch.tensor(values["ids"], dtype=torch.int64)
            logprobs = torch.tensor(values["logprobs"], dtype=torch.float32)
            row_id, token_ids = int(values["row"]), torch.tensor(values["token_ids"], dtype=torch.int64)
        except (KeyError, TypeError, RuntimeError, OverflowError) as error:
            raise ValueError(f"not a record of predictions ({error})") from error
        if ids.dim() != 2 or ids.shape != logprobs.shape or positions.shape != ids.shape[:1]:
            raise ValueError("positions, ids and logprobs do not fit together")
        if positions.numel() and not (
            int(positions.min()) >= 0 and int(positions.max()) < len(token_ids) and int(ids.min()) >= 0
        ):
            raise ValueError("a position lies outside its row")
        return cls(row_id, token_ids, NextTokens(positions, ids, logprobs))


def probe_positions(length: int) -> list[int]:
    """Up to :data:`PROBE_POSITIONS` positions, spread over a row of ``length`` tokens."""
    count = min(PROBE_POSITIONS, length)
    return sorted({math.floor(place * (length - 1) / max(1, count - 1)) for place in range(count)})


def read_probes(folder: Path) -> list[Probe]:
    """Those of a store; none when it has none.

    :raises DataError: the file is damaged.
    """
    path = folder / PROBES
    try:
        values = read_json(path)
        return [Probe.from_json(one) for one in values["rows"]]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"the predictions in {path} cannot be read ({error}); remove the file and run generate-offline-data again"
        ) from error


def write_probes(folder: Path, probes: list[Probe]) -> None:
    """:raises DataError: on a full disk."""
    with writing(folder / PROBES):
        write_text_atomically(folder / PROBES, json.dumps({"rows": [probe.to_json() for probe in probes]}) + "\n")
