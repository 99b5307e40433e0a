"""What a worker makes of one block of records, and the two files that hold it until the data set is put together.

``<name>.rows`` holds the tokens of the block's rows end to end, ``<name>.npz`` everything else. The account is written last:
where it is, and the rows fit it, the block is done.
"""

from __future__ import annotations

import json
import os
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from speculators.errors import DataError
from speculators.files import atomic_write

__all__ = [
    "LARGEST_ID",
    "BlockAccount",
    "BlockRows",
    "is_finished",
    "pack_tokens",
    "read_account",
    "read_reasons",
    "read_tokens",
    "unpack_tokens",
    "write_block",
]

#: Ids have one bit less than a signed number of four bytes: the lowest bit of a token says whether it is supervised.
LARGEST_ID = 2**31 - 1


@dataclass(eq=False)
class BlockAccount:
    """The records of a block (R of them) and its rows (N), without their tokens."""

    source: int  #: place in the list of sources
    first: int  #: index of the first record in its source
    broken: str  #: where the source breaks off behind the block; empty if it does not
    outcomes: np.ndarray  #: uint8 ``[R]``, codes of :data:`speculators.data.accounting.CODES`
    keys: np.ndarray  #: int64 ``[R]``, the order of conversations
    digests: np.ndarray  #: uint64 ``[R, 2]``, of the content; zeros where there is none
    left_out: np.ndarray  #: int32 ``[R]``, turns of a kept record that gave no row
    row_record: np.ndarray  #: int32 ``[N]``, place of its record in the block; rows are in the order of the data set
    row_turn: np.ndarray  #: int32 ``[N]``
    row_length: np.ndarray  #: int32 ``[N]``, tokens
    row_flags: np.ndarray  #: uint8 ``[N]``, bits of :data:`speculators.data.accounting.WARNINGS`


@dataclass(eq=False)
class BlockRows:
    """A finished block."""

    account: BlockAccount
    tokens: np.ndarray  #: uint32, of all rows end to end, as :func:`pack_tokens` makes them
    reasons: Mapping[int, str]  #: place of a record in the block -> why it gave no row


_ARRAYS = ("outcomes", "keys", "digests", "left_out", "row_record", "row_turn", "row_length", "row_flags")


def pack_tokens(input_ids: np.ndarray, loss_mask: np.ndarray) -> np.ndarray:
    """Ids (0 .. 2^31 - 1) and mask of T tokens as one array, uint32 ``[T]``."""
    return (input_ids.astype(np.uint32) << np.uint32(1)) | loss_mask.astype(np.uint32)


def unpack_tokens(tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The ids (int64 ``[T]``) and the mask (bool ``[T]``) of :func:`pack_tokens`."""
    return (tokens >> np.uint32(1)).astype(np.int64), (tokens & np.uint32(1)).astype(bool)


def write_block(path: Path, block: BlockRows, facts: Mapping[str, Any]) -> None:
    """Write ``<path>.rows`` and then ``<path>.npz``, each by rename.

    :param facts: of how the block was made, for :func:`is_finished` to compare.
    :raises DataError: on a full disk.
    """
    content = np.ascontiguousarray(block.tokens, dtype="<u4")
    atomic_write(_rows(path), lambda file: file.write_bytes(content.data))
    account = block.account
    head = {
        "source": account.source,
        "first": account.first,
        "broken": account.broken,
        "facts": dict(facts),
        "bytes": content.nbytes,
        "checksum": zlib.crc32(content.data),
    }
    arrays = {name: getattr(account, name) for name in _ARRAYS}
    arrays["head"] = _as_bytes(head)
    arrays["reasons"] = _as_bytes({str(place): reason for place, reason in block.reasons.items()})
    atomic_write(_npz(path), lambda file: np.savez(file, **arrays))


def is_finished(path: Path, facts: Mapping[str, Any]) -> bool:
    """Whether :func:`write_block` was done with ``path`` and these facts, and nothing has befallen the files since."""
    try:
        with np.load(_npz(path), allow_pickle=False) as arrays:
            head = _from_bytes(arrays["head"])
        content = _rows(path).read_bytes()
        return bool(head["facts"] == dict(facts) and head["checksum"] == zlib.crc32(content))
    except Exception:  # torn or foreign files raise whatever the readers run into; the block is made again
        return False


def read_account(path: Path) -> BlockAccount:
    """The account of a finished block.

    :raises DataError: when the file is gone or damaged.
    """
    with _reading(path) as arrays:
        head = _from_bytes(arrays["head"])
        return BlockAccount(head["source"], head["first"], head["broken"], *(arrays[name] for name in _ARRAYS))


def read_reasons(path: Path) -> dict[int, str]:
    """Why records of a finished block gave no row, by their place in it.

    :raises DataError: as :func:`read_account`.
    """
    with _reading(path) as arrays:
        return {int(place): reason for place, reason in _from_bytes(arrays["reasons"]).items()}


def read_tokens(path: Path, start: int, stop: int) -> np.ndarray:
    """Tokens ``start`` to ``stop`` of a finished block's rows, uint32 ``[stop - start]``.

    :raises DataError: when the file is gone or too short.
    """
    try:
        with open(_rows(path), "rb", buffering=0) as file:
            content = os.pread(file.fileno(), 4 * (stop - start), 4 * start)
    except OSError as error:
        raise _damaged(path, error) from error
    if len(content) != 4 * (stop - start):
        raise _damaged(path, EOFError("too short"))
    return np.frombuffer(content, dtype="<u4")


def _rows(path: Path) -> Path:
    return path.with_name(path.name + ".rows")


def _npz(path: Path) -> Path:
    return path.with_name(path.name + ".npz")


@contextmanager
def _reading(path: Path) -> Iterator[Mapping[str, Any]]:
    try:
        with np.load(_npz(path), allow_pickle=False) as arrays:
            yield arrays
    except (OSError, ValueError, KeyError, TypeError, zipfile.BadZipFile) as error:
        raise _damaged(path, error) from error


def _damaged(path: Path, error: Exception) -> DataError:
    return DataError(f"{path} cannot be read ({error}); delete the folder {path.parent} and run the command again")


def _as_bytes(content: Any) -> np.ndarray:
    return np.frombuffer(json.dumps(content).encode(), dtype=np.uint8)


def _from_bytes(content: np.ndarray) -> Any:
    return json.loads(content.tobytes())
