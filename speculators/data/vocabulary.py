"""The pruned draft vocabulary: which verifier ids a draft can say, and the two tables that map between them.

A mapping of D ids out of V is a pair: ``d2t`` holds **offsets** (``verifier id = draft id + d2t[draft id]``), ``t2d`` is a mask
over the verifier's ids with exactly D true, and draft id k is the k-th true id. On disk: ``d2t-<D>.npy`` and
``t2d-<D>.npy``, with ``vocabulary-<D>.json`` saying what they were made from.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from speculators.errors import ConfigError, DataError
from speculators.files import atomic_write

__all__ = [
    "VocabularyMapping",
    "build_mapping",
    "load_mapping",
    "load_mapping_files",
    "mapping_for",
    "save_mapping",
]


@dataclass(frozen=True, slots=True, eq=False)
class VocabularyMapping:
    """Which D of the verifier's V ids a draft can say."""

    d2t: np.ndarray  #: int64 ``[D]``, offsets
    t2d: np.ndarray  #: bool ``[V]``

    def __post_init__(self) -> None:
        kept = self.draft_to_verifier
        valid = self.d2t.ndim == self.t2d.ndim == 1 and np.array_equal(np.flatnonzero(self.t2d), kept)
        if not valid:
            raise DataError("d2t and t2d do not describe the same ids in ascending order; build the mapping again")

    @property
    def draft_vocab_size(self) -> int:
        """D."""
        return len(self.d2t)

    @property
    def verifier_vocab_size(self) -> int:
        """V."""
        return len(self.t2d)

    @property
    def draft_to_verifier(self) -> np.ndarray:
        """Verifier id of every draft id, int64 ``[D]``, ascending."""
        return np.arange(len(self.d2t), dtype=np.int64) + self.d2t

    @property
    def verifier_to_draft(self) -> np.ndarray:
        """Draft id of every verifier id, -1 where the draft has none, int64 ``[V]``."""
        table = np.full(len(self.t2d), -1, dtype=np.int64)
        table[self.draft_to_verifier] = np.arange(len(self.d2t))
        return table

    @property
    def hash(self) -> str:
        """Hash of the kept ids and V."""
        content = self.draft_to_verifier.astype("<i8").tobytes() + str(self.verifier_vocab_size).encode()
        return hashlib.sha256(content).hexdigest()[:16]

    def coverage(self, counts: np.ndarray) -> tuple[int, int]:
        """Of the tokens counted in ``counts`` (int64 ``[V]``): how many the draft can say, and how many there are."""
        return int(counts[self.t2d].sum()), int(counts.sum())


def build_mapping(
    counts: np.ndarray, draft_vocab_size: int, verifier_vocab_size: int, mandatory_ids: Collection[int] = ()
) -> VocabularyMapping:
    """Keep the mandatory ids and the most frequent ones.

    Ties go to the smaller id, and ids never seen fill the rest from the smallest on, so the result is a pure function of
    its arguments.

    :param counts: int64 ``[V]`` (a shorter array counts as 0 beyond its end).
    :param mandatory_ids: ids kept whatever their count, such as the end-of-turn ids.
    :raises ConfigError: when the draft's vocabulary is not in 1 .. V or cannot hold the mandatory ids.
    :raises DataError: when counts or mandatory ids lie outside the verifier's vocabulary.
    """
    if not 1 <= draft_vocab_size <= verifier_vocab_size:
        raise ConfigError(
            f"a draft vocabulary of {draft_vocab_size} does not fit a verifier of {verifier_vocab_size} ids; "
            f"choose --draft-vocab-size between 1 and {verifier_vocab_size}"
        )
    if len(counts) > verifier_vocab_size and counts[verifier_vocab_size:].any():
        raise DataError(
            f"token counts reach id {int(np.flatnonzero(counts)[-1])}, beyond the verifier's {verifier_vocab_size} ids; "
            "count them with the verifier's own tokenizer"
        )
    mandatory = np.array(sorted(set(mandatory_ids)), dtype=np.int64)
    if len(mandatory) and (mandatory[0] < 0 or mandatory[-1] >= verifier_vocab_size):
        raise DataError(
            f"mandatory ids {mandatory.tolist()} reach outside the verifier's {verifier_vocab_size} ids; correct them"
        )
    if len(mandatory) > draft_vocab_size:
        raise ConfigError(
            f"a draft vocabulary of {draft_vocab_size} cannot hold {len(mandatory)} mandatory ids; raise --draft-vocab-size"
        )
    padded = np.zeros(verifier_vocab_size, dtype=np.int64)
    padded[: min(len(counts), verifier_vocab_size)] = counts[:verifier_vocab_size]
    padded[mandatory] = np.iinfo(np.int64).max
    # A stable sort of the negated counts leaves ties, and the unseen ids, in ascending order.
    kept = np.sort(np.argsort(-padded, kind="stable")[:draft_vocab_size])
    t2d = np.zeros(verifier_vocab_size, dtype=bool)
    t2d[kept] = True
    return VocabularyMapping(kept - np.arange(draft_vocab_size), t2d)


def _files(folder: str | Path, draft_vocab_size: int) -> tuple[Path, Path, Path]:
    names = (f"d2t-{draft_vocab_size}.npy", f"t2d-{draft_vocab_size}.npy", f"vocabulary-{draft_vocab_size}.json")
    return Path(folder) / names[0], Path(folder) / names[1], Path(folder) / names[2]


def save_mapping(folder: str | Path, mapping: VocabularyMapping, source_hash: str = "") -> None:
    """Write the two tables and what they were made from.

    :param source_hash: hash of the arguments of :func:`build_mapping`, as :func:`mapping_for` uses it.
    """
    d2t, t2d, record = _files(folder, mapping.draft_vocab_size)
    facts = {
        "schema": 1,
        "draft_vocab_size": mapping.draft_vocab_size,
        "verifier_vocab_size": mapping.verifier_vocab_size,
        "hash": mapping.hash,
        "source_hash": source_hash,
    }
    atomic_write(d2t, lambda file: np.save(file, mapping.d2t))
    atomic_write(t2d, lambda file: np.save(file, mapping.t2d))
    atomic_write(record, lambda file: file.write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8"))


def load_mapping_files(
    d2t_path: str | Path, t2d_path: str | Path, draft_vocab_size: int | None, verifier_vocab_size: int
) -> VocabularyMapping:
    """Read the two tables from any place.

    :param draft_vocab_size: D, or None to take what the files have.
    :raises DataError: for files that are missing, of another size, or not a pair.
    """
    arrays = []
    for path in (Path(d2t_path), Path(t2d_path)):
        try:
            arrays.append(np.load(path, allow_pickle=False))
        except FileNotFoundError:
            raise DataError(f"there is no vocabulary table {path}; check the path or leave it out to build one") from None
        except (OSError, ValueError, EOFError) as error:
            raise DataError(f"the vocabulary table {path} cannot be read ({error}); build it again") from error
    d2t, t2d = arrays
    sizes = f"{d2t_path} and {t2d_path} map {d2t.size} of {t2d.size} ids"
    if t2d.shape != (verifier_vocab_size,):
        raise DataError(f"{sizes}, but the verifier has {verifier_vocab_size}; build the mapping for this verifier")
    if draft_vocab_size is not None and d2t.shape != (draft_vocab_size,):
        raise DataError(f"{sizes}, but a draft vocabulary of {draft_vocab_size} was asked for; build it for that size")
    if not np.issubdtype(d2t.dtype, np.integer):
        raise DataError(f"{d2t_path} does not hold integers; build the mapping again")
    return VocabularyMapping(d2t.astype(np.int64), t2d.astype(bool))


def _record(folder: str | Path, draft_vocab_size: int) -> dict[str, Any]:
    path = _files(folder, draft_vocab_size)[2]
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return facts if isinstance(facts, dict) else {}


def load_mapping(folder: str | Path, draft_vocab_size: int, verifier_vocab_size: int) -> VocabularyMapping:
    """Read the mapping of this size from ``folder``.

    :raises DataError: as :func:`load_mapping_files`, and when the tables are not those their record was written for.
    """
    d2t, t2d, record = _files(folder, draft_vocab_size)
    mapping = load_mapping_files(d2t, t2d, draft_vocab_size, verifier_vocab_size)
    if _record(folder, draft_vocab_size).get("hash", mapping.hash) != mapping.hash:
        raise DataError(f"the vocabulary tables in {folder} are not those that {record.name} describes; delete them")
    return mapping


def mapping_for(
    folder: str | Path,
    counts: np.ndarray,
    draft_vocab_size: int,
    verifier_vocab_size: int,
    mandatory_ids: Collection[int] = (),
) -> VocabularyMapping:
    """The mapping for these counts: from ``folder`` if it was made from the same ones, else built and saved there.

    A mapping left by other data is thus never picked up.
    """
    mapping = build_mapping(counts, draft_vocab_size, verifier_vocab_size, mandatory_ids)
    nonzero = np.flatnonzero(counts)
    content = [nonzero.tolist(), counts[nonzero].tolist(), verifier_vocab_size, sorted(set(mandatory_ids))]
    source_hash = hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]
    known = _record(folder, draft_vocab_size)
    if (known.get("source_hash"), known.get("hash")) != (source_hash, mapping.hash) or not all(
        file.is_file() for file in _files(folder, draft_vocab_size)
    ):
        save_mapping(folder, mapping, source_hash)
    return mapping
