"""Rows that come as token ids and loss mask instead of text."""

from __future__ import annotations

from typing import Any

import numpy as np

from speculators.errors import DataError

__all__ = ["is_row", "parse_row"]


def is_row(record: Any) -> bool:
    """Whether a record means to be a row of token ids."""
    return isinstance(record, dict) and record.get("input_ids") is not None


def parse_row(record: dict[str, Any], where: str = "the record", vocab_size: int = 1 << 31) -> tuple[np.ndarray, np.ndarray]:
    """(ids int64 ``[T]``, loss mask bool ``[T]``) of a record ``{"input_ids": [...], "loss_mask": [...]}``.

    :param vocab_size: ids that the verifier has.
    :raises DataError: for ids that are no whole numbers below ``vocab_size``, a mask that is not 0 and 1, or two lengths.
    """
    ids, mask = record.get("input_ids"), record.get("loss_mask")
    # By type, not by value: 1.0 and true equal 1 but mean that the columns are not what they are taken for.
    if not isinstance(ids, list) or set(map(type, ids)) != {int}:
        raise DataError(f"{where} has input_ids that are no list of whole numbers; write token ids")
    if not isinstance(mask, list) or not set(map(type, mask)) <= {int, bool} or not set(mask) <= {0, 1}:
        raise DataError(f"{where} has no loss_mask that is a list of 0 and 1; write one number for every token")
    if len(ids) != len(mask):
        raise DataError(f"{where} has {len(ids)} input_ids and {len(mask)} values of loss_mask; write one for every token")
    wrong = next((token for token in (min(ids), max(ids)) if not 0 <= token < vocab_size), None)
    if wrong is not None:
        raise DataError(f"{where} has the token id {wrong}, which is none of the verifier's; make it with its tokenizer")
    return np.asarray(ids, dtype=np.int64), np.asarray(mask, dtype=bool)
