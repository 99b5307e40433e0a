"""What a store says of itself: the record of the whole, and one line per shard.

Every line carries its own checksum, so that a line torn by a kill or changed on the disk is told from a whole one. The record
of a shard stands in the shard's header as well: the index only spares opening every shard.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from speculators.errors import ConfigError
from speculators.verifiers.source import StatesDescription
from speculators.verifiers.state_dtypes import StateDtype, torch_dtype

__all__ = ["FORMAT", "OnFull", "ShardRecord", "StoreRecord", "StoredRow", "hash_ids", "line_of", "read_line"]

#: Of the files; a reader refuses a number that it does not know.
FORMAT = 1

OnFull = Literal["evict", "stop"]

#: Dtypes in which sources give states, and in which a store gives them back.
_GIVEN = ("float32", "bfloat16", "float16")


def hash_ids(ids: np.ndarray) -> str:
    """Hash of a row's token ids: 16 hex digits of the SHA-256 of them as 64-bit little-endian integers."""
    return hashlib.sha256(np.ascontiguousarray(ids, dtype="<i8").data).hexdigest()[:16]


class StoredRow(NamedTuple):
    """One row of a shard."""

    row_id: int
    tokens: int
    ids_hash: str  #: of :func:`hash_ids`
    checksum: int  #: CRC-32 of the bytes of its tensors in the order token ids, scales, states


@dataclass(frozen=True, slots=True)
class ShardRecord:
    """One shard: which rows it holds, and which of them went through the verifier together.

    :param name: of its file, in the folder ``shards``.
    :param passes: the rows, in the groups in which they were asked of the source; the same groups give the same bits again.
    """

    name: str
    passes: tuple[tuple[StoredRow, ...], ...]

    def rows(self) -> Iterator[StoredRow]:
        for group in self.passes:
            yield from group

    def to_json(self) -> dict[str, Any]:
        return {"shard": self.name, "passes": [[list(row) for row in group] for group in self.passes]}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> ShardRecord:
        """:raises ValueError: for anything else than :meth:`to_json` gives."""
        try:
            passes = tuple(tuple(_row(*row) for row in group) for group in values["passes"])
            if set(values) != {"shard", "passes"} or not _is_name(values["shard"]):
                raise ValueError("not the record of a shard")
        except (KeyError, TypeError) as error:
            raise ValueError("not the record of a shard") from error
        return cls(values["shard"], passes)


def _row(row_id: Any, tokens: Any, ids_hash: Any, checksum: Any) -> StoredRow:
    if not all(type(value) is int and value >= 0 for value in (row_id, tokens, checksum)) or not isinstance(ids_hash, str):
        raise ValueError("not the record of a row")
    return StoredRow(row_id, tokens, ids_hash, checksum)


def _is_name(name: Any) -> bool:
    """Whether it is a file's name and no path: an index may not lead out of the folder."""
    return isinstance(name, str) and name.endswith(".safetensors") and "/" not in name and not name.startswith(".")


def line_of(values: Mapping[str, Any]) -> str:
    """A line of an index: JSON whose last key is the CRC-32 of the line without it. Without the line's end."""
    text = json.dumps(values, separators=(",", ":"), sort_keys=True)
    return f'{text[:-1]},"crc32":{zlib.crc32(text.encode())}}}'


def read_line(line: bytes | str) -> dict[str, Any]:
    """What :func:`line_of` wrote.

    :raises ValueError: for a line that is not whole.
    """
    try:
        values = json.loads(line)
        checksum = values.pop("crc32")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError("not a line of an index") from error
    if (
        not isinstance(values, dict)
        or zlib.crc32(json.dumps(values, separators=(",", ":"), sort_keys=True).encode()) != checksum
    ):
        raise ValueError("its checksum does not fit")
    return values


@dataclass(frozen=True, slots=True)
class StoreRecord:
    """``hidden_states.json``: what the states of a store are, and how its rows were grouped.

    :param states: of what is read from the store; its dtype is the one that reading gives.
    :param dtype: in which the states are stored.
    :param captured_dtype: in which the source gave them.
    :param dataset: fingerprint of the data set whose row ids are used.
    :param seq_length: rows are stored up to this many tokens.
    :param token_budget: tokens of a pass; rows of the data set that are asked of the source together are
        ``length_groups(min(lengths, seq_length), token_budget)``.
    :param max_bytes: most bytes of all shards together; None: no limit.
    :param on_full: what happens then.
    """

    states: StatesDescription
    dtype: StateDtype
    captured_dtype: str
    dataset: str
    seq_length: int
    token_budget: int
    max_bytes: int | None = None
    on_full: OnFull = "stop"

    def to_json(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "states": self.states.to_json(),
            "dtype": self.dtype,
            "captured_dtype": self.captured_dtype,
            "dataset": self.dataset,
            "seq_length": self.seq_length,
            "token_budget": self.token_budget,
            "max_bytes": self.max_bytes,
            "on_full": self.on_full,
        }

    @classmethod
    def from_json(cls, values: Any) -> StoreRecord:
        """:raises ConfigError: for a record of another format or with other fields."""
        if not isinstance(values, dict) or values.get("format") != FORMAT:
            found = values.get("format") if isinstance(values, dict) else None
            raise ConfigError(f"its format is {found!r}, and this version reads format {FORMAT}; fill a new store")
        fields = {key: value for key, value in values.items() if key != "format"}
        try:
            record = cls(**(fields | {"states": StatesDescription.from_json(fields["states"])}))
        except (KeyError, TypeError) as error:
            raise ConfigError(f"it is no record of a store ({error}); fill a new store") from error
        torch_dtype(record.dtype)
        if not all(dtype in _GIVEN for dtype in (record.captured_dtype, record.states.dtype)):
            raise ConfigError("it is no record of a store (a dtype is wrong); fill a new store")
        numbers = (record.seq_length, record.token_budget, 1 if record.max_bytes is None else record.max_bytes)
        if not all(type(number) is int and number > 0 for number in numbers) or record.on_full not in get_args(OnFull):
            raise ConfigError("it is no record of a store (a number or --on-full is wrong); fill a new store")
        return record

    def differences(self, other: StoreRecord) -> list[str]:
        """What is not the same in ``other``, quotas aside; each as a clause of a sentence."""
        ours, theirs = self.to_json(), other.to_json()
        pairs: list[tuple[str, Any, Any]] = [
            (f"states.{key}", ours["states"][key], theirs["states"][key]) for key in ours["states"] if key != "verifier"
        ]
        pairs += [(key, ours[key], theirs[key]) for key in ours if key not in ("states", "max_bytes", "on_full")]
        return [f"{key} {mine} there, {yours} asked for" for key, mine, yours in pairs if mine != yours]
