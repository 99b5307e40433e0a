"""How often every id is supervised: counting in parallel, merging, and the files that say which rows were counted.

On disk counts are upstream's ``token_freq.pt``, a torch file of ``{id: count}``, with a record ``token_freq.json`` beside: of
which rows, made with which tokenizer. A file without a record is somebody else's, and counts nobody knows what.
"""

from __future__ import annotations

import hashlib
import io
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from speculators.errors import DataError, SpeculatorsError
from speculators.files import atomic_write
from speculators.progress import bar

if TYPE_CHECKING:
    from speculators.data.rows import Row, RowDataset

__all__ = [
    "TOKEN_FREQUENCIES",
    "StaleCountsError",
    "TokenCounter",
    "TokenCounts",
    "count_dataset",
    "count_tokens",
    "load_counts",
    "load_token_frequencies",
    "merge_counts",
    "save_counts",
    "save_token_frequencies",
]

#: Name of the frequency file that prepare-data writes and upstream reads.
TOKEN_FREQUENCIES = "token_freq.pt"

#: Supervised ids counted at once: the cost of a pass over the vocabulary is spread over that many.
_BATCH = 1 << 20

#: Larger ids and counts than any tokenizer and any data have; a file with larger ones is no frequency file.
_ID_LIMIT, _COUNT_LIMIT = 1 << 24, 1 << 48

#: Tokens that are worth a process of their own: fewer are counted in less time than a process takes to start.
_TOKENS_PER_PROCESS = 50_000_000


class StaleCountsError(DataError):
    """A frequency file that does not count the rows it was taken for."""


@dataclass(frozen=True, slots=True, eq=False)
class TokenCounts:
    """Counts of supervised tokens, and of what."""

    counts: np.ndarray  #: int64 ``[V]``
    rows: int  #: rows counted; 0 when not known
    tokenizer_hash: str = ""  #: of the tokenizer that made the rows; empty when not known
    sources: tuple[str, ...] = ()  #: fingerprints of the data sets counted; empty when not known

    @property
    def vocab_size(self) -> int:
        """V."""
        return len(self.counts)

    @property
    def supervised_tokens(self) -> int:
        return int(self.counts.sum())

    def merge(self, other: TokenCounts) -> TokenCounts:
        """The counts of both.

        :raises DataError: as :func:`merge_counts`.
        """
        return merge_counts([self, other])

    def resized(self, vocab_size: int) -> TokenCounts:
        """The same counts for a verifier of ``vocab_size`` ids: zeros added, or unused ids past its end cut off.

        :raises DataError: when an id past the end was counted.
        """
        if self.counts[vocab_size:].any():
            raise DataError(
                f"token counts reach id {int(np.flatnonzero(self.counts)[-1])}, beyond the verifier's {vocab_size} ids; "
                "count them with the verifier's own tokenizer"
            )
        counts = np.zeros(vocab_size, dtype=np.int64)
        counts[: len(self.counts)] = self.counts[:vocab_size]
        return TokenCounts(counts, self.rows, self.tokenizer_hash, self.sources)


def merge_counts(parts: Sequence[TokenCounts]) -> TokenCounts:
    """The sum of all parts; their order does not matter, but for the order in which sources are listed.

    :raises DataError: without parts, for parts of different tokenizers or vocabulary sizes, and for rows counted twice.
    """
    if not parts:
        raise DataError("there are no token counts to merge; give at least one")
    hashes = {part.tokenizer_hash for part in parts} - {""}
    if len(hashes) > 1:
        raise DataError(
            f"token counts of different tokenizers ({' and '.join(sorted(hashes))}) cannot be merged; prepare all data with one"
        )
    sizes = sorted({part.vocab_size for part in parts})
    if len(sizes) > 1:
        raise DataError(f"token counts of {sizes[0]} and of {sizes[-1]} ids cannot be merged; count both for one verifier")
    sources = [source for part in parts for source in part.sources]
    twice = next((source for number, source in enumerate(sources) if source in sources[:number]), None)
    if twice is not None:
        raise DataError(f"the rows with fingerprint {twice} would be counted twice; name each data set once")
    counts = np.asarray(np.sum([part.counts for part in parts], axis=0, dtype=np.int64))
    return TokenCounts(counts, sum(part.rows for part in parts), next(iter(hashes), ""), tuple(sorted(sources)))


class TokenCounter:
    """Counts rows that are made one after the other and never held together.

    :param vocab_size: V.
    """

    def __init__(self, vocab_size: int) -> None:
        self.counts = np.zeros(vocab_size, dtype=np.int64)
        self.rows = 0
        self._waiting: list[np.ndarray] = []
        self._tokens = 0

    def add(self, input_ids: np.ndarray, loss_mask: np.ndarray, rows: int = 1) -> None:
        """Count the supervised ones of ids ``[T]``.

        :param loss_mask: bool ``[T]``.
        :param rows: how many rows these are, end to end.
        :raises DataError: for a supervised id outside the vocabulary; nothing of this call is counted then.
        """
        ids = input_ids[loss_mask]
        if len(ids) and (ids.min() < 0 or ids.max() >= len(self.counts)):
            wrong = int(ids.max() if ids.max() >= len(self.counts) else ids.min())
            raise DataError(f"token id {wrong} lies outside the vocabulary of {len(self.counts)}; render the rows again")
        self.rows += rows
        self._tokens += len(ids)
        self._waiting.append(ids)
        if self._tokens >= _BATCH or len(self._waiting) >= _BATCH:
            self._flush()

    def result(self, tokenizer_hash: str = "", sources: Iterable[str] = ()) -> TokenCounts:
        """What was counted so far."""
        self._flush()
        return TokenCounts(self.counts.copy(), self.rows, tokenizer_hash, tuple(sources))

    def _flush(self) -> None:
        if self._tokens:
            counted = np.bincount(np.concatenate(self._waiting))
            self.counts[: len(counted)] += counted
        self._waiting.clear()
        self._tokens = 0


def count_tokens(rows: Iterable[Row], vocab_size: int) -> np.ndarray:
    """How often every id is supervised in these rows, int64 ``[V]``.

    :raises DataError: for a supervised id outside the vocabulary.
    """
    counter = TokenCounter(vocab_size)
    for row in rows:
        counter.add(row.input_ids, row.loss_mask)
    return counter.result().counts


def count_dataset(dataset: RowDataset, vocab_size: int, *, processes: int | None = None, shown: bool = False) -> TokenCounts:
    """Count a whole data set, in processes that each take a range of its rows.

    :param processes: by default one for every 50 million tokens, at most one per core. Where processes cannot share the
        rows (elsewhere than on Linux) there is one.
    :param shown: draw a progress bar.
    :raises DataError: for a supervised id outside the vocabulary.
    """
    offsets = np.concatenate([[0], np.cumsum(dataset.lengths)])
    if processes is None:
        processes = min(os.cpu_count() or 1, int(offsets[-1]) // _TOKENS_PER_PROCESS)
    processes = max(1, min(processes, len(dataset))) if sys.platform == "linux" else 1
    # Ranges of about equally many tokens.
    bounds = np.searchsorted(offsets, np.linspace(0, offsets[-1], processes + 1)).tolist()
    bounds[0], bounds[-1] = 0, len(dataset)
    with bar("counting tokens", len(dataset), shown=shown, passing=True) as progress:
        if processes == 1:
            counts = _count_range(dataset, vocab_size, 0, len(dataset), progress.update)
        else:
            counts = _count_apart(dataset, vocab_size, bounds, progress.update)
    return TokenCounts(counts, len(dataset), dataset.manifest.tokenizer_hash, (dataset.fingerprint,))


def _count_range(dataset: RowDataset, vocab_size: int, first: int, end: int, note: Callable[[int], object]) -> np.ndarray:
    counter = TokenCounter(vocab_size)
    for batch in dataset.batches(first, end):
        counter.add(batch.input_ids, batch.loss_mask, len(batch.lengths))
        note(counter.rows)
    return counter.result().counts


def _count_apart(dataset: RowDataset, vocab_size: int, bounds: Sequence[int], note: Callable[[int], object]) -> np.ndarray:
    """Counts of the ranges between ``bounds``, each by a forked process, which inherits the rows without a copy."""
    context = multiprocessing.get_context("fork")
    running: dict[Connection, Any] = {}
    done: dict[Connection, int] = {}
    total = np.zeros(vocab_size, dtype=np.int64)
    try:
        for first, end in pairwise(bounds):
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=_send_counts, args=(dataset, vocab_size, first, end, sender), daemon=True)
            process.start()
            sender.close()  # so that a process that dies is noticed as the end of what it sends
            running[receiver] = process
        while running:
            for receiver in cast("list[Connection]", wait(list(running))):
                try:
                    answer = receiver.recv()
                except EOFError:
                    raise SpeculatorsError(
                        "a process that counted tokens was killed; run again, with fewer --workers"
                    ) from None
                if isinstance(answer, str):
                    raise DataError(answer)
                if isinstance(answer, int):
                    done[receiver] = answer
                    note(sum(done.values()))
                    continue
                total += answer
                running.pop(receiver).join()
                receiver.close()
    finally:
        for receiver, process in running.items():
            process.terminate()
            process.join()
            receiver.close()
    return total


def _send_counts(dataset: RowDataset, vocab_size: int, first: int, end: int, sender: Connection) -> None:
    """In a process of its own: send how many rows are done every now and then, at last the counts, or what is wrong."""
    try:
        sender.send(_count_range(dataset, vocab_size, first, end, sender.send))
    except DataError as error:
        sender.send(str(error))


class _CountsRecord(BaseModel):
    """What ``token_freq.json`` says of the ``token_freq.pt`` beside it."""

    model_config = ConfigDict(populate_by_name=True)

    schema_version: int = Field(default=1, alias="schema")
    tokenizer_hash: str
    vocab_size: int = Field(ge=0, le=_ID_LIMIT)
    rows: int
    supervised_tokens: int
    sources: tuple[str, ...]
    sha256: str  #: of the file beside


def save_counts(path: str | Path, counts: TokenCounts) -> None:
    """Write ``path`` (``token_freq.pt``) and its record. A crash between the two leaves a pair that is refused."""
    path = Path(path)
    content = _write_frequencies(path, counts.counts)
    record = _CountsRecord(
        tokenizer_hash=counts.tokenizer_hash,
        vocab_size=counts.vocab_size,
        rows=counts.rows,
        supervised_tokens=counts.supervised_tokens,
        sources=counts.sources,
        sha256=hashlib.sha256(content).hexdigest(),
    )
    text = record.model_dump_json(indent=2, by_alias=True) + "\n"
    atomic_write(_record_path(path), lambda file: file.write_text(text, encoding="utf-8"))


def load_counts(path: str | Path, expect: str | None = None, tokenizer_hash: str = "") -> TokenCounts:
    """Read counts and, where there is one, their record.

    :param expect: fingerprint of the data set that must have been counted, it alone; None takes any.
    :param tokenizer_hash: of the tokenizer that must have made the rows; empty takes any, and so does a file that does not say.
    :raises StaleCountsError: for counts of other rows than expected or of nobody knows which, and a record of another file.
    :raises DataError: for a missing or broken file, and another tokenizer.
    """
    path = Path(path)
    counts = load_token_frequencies(path)
    record = _read_record(path)
    if record is None:
        if expect is not None:
            raise StaleCountsError(f"{path} does not say which rows it counts; count them again")
        return TokenCounts(counts, 0)
    if hashlib.sha256(path.read_bytes()).hexdigest() != record.sha256:
        raise StaleCountsError(
            f"{path} is not the file that {_record_path(path).name} describes; count again or delete the record"
        )
    if expect is not None and record.sources != (expect,):
        raise StaleCountsError(f"{path} counts other rows than those with fingerprint {expect}; count them again")
    if "" not in (tokenizer_hash, record.tokenizer_hash) and tokenizer_hash != record.tokenizer_hash:
        raise DataError(
            f"{path} was counted with the tokenizer {record.tokenizer_hash}, but this one is {tokenizer_hash}; "
            "count rows that the verifier's own tokenizer made"
        )
    known = TokenCounts(counts, record.rows, record.tokenizer_hash, record.sources)
    return known.resized(record.vocab_size)


def _record_path(path: Path) -> Path:
    return path.with_suffix(".json")


def _read_record(path: Path) -> _CountsRecord | None:
    file = _record_path(path)
    try:
        return _CountsRecord.model_validate_json(file.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValidationError) as error:
        raise StaleCountsError(f"{file} cannot be read; count again or delete it") from error


def save_token_frequencies(path: str | Path, counts: np.ndarray) -> None:
    """Write counts (int64 ``[V]``) of unknown origin, as upstream does: without a record; one of an earlier file goes."""
    _write_frequencies(Path(path), counts)
    _record_path(Path(path)).unlink(missing_ok=True)


def _write_frequencies(path: Path, counts: np.ndarray) -> bytes:
    """Write a torch file of ``{id: count}`` with the ids that occur, most frequent first; returns its bytes."""
    import torch

    ids = np.flatnonzero(counts)
    ids = ids[np.argsort(-counts[ids], kind="stable")]
    frequencies = {int(token): int(counts[token]) for token in ids}
    buffer = io.BytesIO()  # torch.save into a file reports a full disk as something else than an OSError
    torch.save(frequencies, buffer)
    content = buffer.getvalue()
    atomic_write(path, lambda file: file.write_bytes(content))
    return content


def load_token_frequencies(path: str | Path) -> np.ndarray:
    """Counts from a frequency file, int64 up to the largest id in it; nothing but plain numbers is unpickled.

    :raises DataError: for a missing file or one that is no mapping of ids to counts.
    """
    import torch

    try:
        frequencies = torch.load(path, weights_only=True)
    except FileNotFoundError:
        raise DataError(f"there is no token frequency file {path}; make it with prepare-data") from None
    except Exception as error:  # on foreign bytes the unpickler raises whatever it happens to run into
        raise DataError(f"the token frequency file {path} cannot be read; make it again with prepare-data") from error
    numbers = isinstance(frequencies, dict) and all(
        type(token) is type(count) is int and 0 <= token < _ID_LIMIT and 0 <= count < _COUNT_LIMIT
        for token, count in frequencies.items()
    )
    if not numbers:
        raise DataError(f"the token frequency file {path} does not map ids to counts; make it again with prepare-data")
    counts = np.zeros(max(frequencies, default=-1) + 1, dtype=np.int64)
    counts[list(frequencies.keys())] = list(frequencies.values())
    return counts
