"""The files of a vocabulary mapping: keyed by size and content, found by upstream, and never taken for another's.

In a folder, for a mapping of D ids whose content hash begins with ``1a2b3c4d``:

- ``d2t-<D>-1a2b3c4d.npy`` and ``t2d-<D>-1a2b3c4d.npy``: the tables. No file of that name ever has another content, so several
  mappings of one size lie side by side and a run that names them goes on with the same ones.
- ``d2t-<D>.npy`` and ``t2d-<D>.npy``: links to the current ones, under the names that upstream looks for.
- ``vocabulary-<D>.json``: which are current, by hash, and what they were made from.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Collection
from pathlib import Path

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from speculators.data.token_counts import TokenCounts
from speculators.data.vocabulary import VocabularyMapping, build_mapping
from speculators.errors import ConfigError, DataError
from speculators.files import atomic_write, temporary_beside, writing

__all__ = [
    "MappingOrigin",
    "MappingRecord",
    "find_mapping_files",
    "keep_mapping",
    "load_mapping",
    "load_mapping_files",
    "mapping_beside",
    "mapping_for",
    "read_record",
    "save_mapping",
    "source_hash",
]

#: Tables in a folder: of this size, or - as older releases of upstream name them - of any.
_TABLE = re.compile(r"d2t(?:-(\d+))?\.npy")


class MappingOrigin(BaseModel):
    """What a mapping was made from; empty where it is not known."""

    source_hash: str = ""  #: of counts, size and mandatory ids: equal means that building again would give the same
    tokenizer_hash: str = ""
    sources: tuple[str, ...] = ()  #: fingerprints of the data sets that it was made for
    covered: int = 0  #: supervised tokens of them that the draft can say
    tokens: int = 0  #: all of them
    mandatory: tuple[int, ...] = ()  #: ids kept whatever their count
    reused_from: str | None = None  #: the checkpoint or files whose mapping it is, when not built from these sources


class MappingRecord(MappingOrigin):
    """What ``vocabulary-<D>.json`` holds."""

    model_config = ConfigDict(populate_by_name=True)

    schema_version: int = Field(default=2, alias="schema")
    draft_vocab_size: int
    verifier_vocab_size: int
    hash: str  #: of the mapping
    d2t: str = ""  #: names of the tables' files; empty in records of schema 1
    t2d: str = ""


def _names(draft_vocab_size: int, content: str = "") -> tuple[str, str]:
    key = f"{draft_vocab_size}-{content}" if content else f"{draft_vocab_size}"
    return f"d2t-{key}.npy", f"t2d-{key}.npy"


def _record_path(folder: str | Path, draft_vocab_size: int) -> Path:
    return Path(folder) / f"vocabulary-{draft_vocab_size}.json"


def save_mapping(folder: str | Path, mapping: VocabularyMapping, origin: MappingOrigin | None = None) -> MappingRecord:
    """Write the tables, point the names that upstream knows to them, and say what they were made from.

    :raises DataError: on a full disk, or a folder that cannot be written.
    """
    folder = Path(folder)
    size = mapping.draft_vocab_size
    names = _names(size, mapping.hash[:8])
    for name, table in zip(names, (mapping.d2t, mapping.t2d)):
        atomic_write(folder / name, lambda file, table=table: np.save(file, table))  # type: ignore[misc]
    for alias, name in zip(_names(size), names):
        _point(folder / alias, name)
    record = MappingRecord(
        **(origin or MappingOrigin()).model_dump(),
        draft_vocab_size=size,
        verifier_vocab_size=mapping.verifier_vocab_size,
        hash=mapping.hash,
        d2t=names[0],
        t2d=names[1],
    )
    text = record.model_dump_json(indent=2, by_alias=True) + "\n"
    atomic_write(_record_path(folder, size), lambda file: file.write_text(text, encoding="utf-8"))
    return record


def _point(alias: Path, name: str) -> None:
    """Make ``alias`` a link to the file ``name`` beside it; a copy where the file system has no links."""
    with writing(alias):
        temporary = temporary_beside(alias)
        temporary.unlink(missing_ok=True)
        try:
            try:
                os.symlink(name, temporary)
            except OSError:
                shutil.copyfile(alias.with_name(name), temporary)
            os.replace(temporary, alias)
        finally:
            temporary.unlink(missing_ok=True)


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
    if not all(isinstance(array, np.ndarray) for array in arrays):
        raise DataError(f"{d2t_path} and {t2d_path} are no single arrays; build the mapping again")
    d2t, t2d = arrays
    sizes = f"{d2t_path} and {t2d_path} map {d2t.size} of {t2d.size} ids"
    if t2d.shape != (verifier_vocab_size,):
        raise DataError(f"{sizes}, but the verifier has {verifier_vocab_size}; build the mapping for this verifier")
    if draft_vocab_size is not None and d2t.shape != (draft_vocab_size,):
        raise DataError(f"{sizes}, but a draft vocabulary of {draft_vocab_size} was asked for; build it for that size")
    if not np.issubdtype(d2t.dtype, np.integer):
        raise DataError(f"{d2t_path} does not hold integers; build the mapping again")
    return VocabularyMapping(d2t.astype(np.int64), t2d.astype(bool))


def read_record(folder: str | Path, draft_vocab_size: int) -> MappingRecord | None:
    """What a folder says of its mapping of this size; None when it says nothing that can be read."""
    try:
        return MappingRecord.model_validate_json(_record_path(folder, draft_vocab_size).read_bytes())
    except (OSError, ValidationError):
        return None


def load_mapping(folder: str | Path, draft_vocab_size: int, verifier_vocab_size: int) -> VocabularyMapping:
    """Read the mapping of this size from ``folder``.

    :raises DataError: as :func:`load_mapping_files`, and when the tables are not those their record was written for.
    """
    d2t, t2d = _names(draft_vocab_size)
    mapping = load_mapping_files(Path(folder) / d2t, Path(folder) / t2d, draft_vocab_size, verifier_vocab_size)
    record = read_record(folder, draft_vocab_size)
    if record is not None and record.hash != mapping.hash:
        name = _record_path(folder, draft_vocab_size).name
        raise DataError(f"the vocabulary tables in {folder} are not those that {name} describes; build them again")
    return mapping


def mapping_beside(
    folder: str | Path, draft_vocab_size: int, verifier_vocab_size: int, fingerprint: str
) -> VocabularyMapping | None:
    """The mapping of this size in ``folder``, if its record says that it was made for the rows with this fingerprint.

    A mapping of other rows, or of nobody knows which, is left alone: None.

    :raises DataError: when the tables are not those that the record describes.
    """
    record = read_record(folder, draft_vocab_size)
    if record is None or not fingerprint or fingerprint not in record.sources:
        return None
    return load_mapping(folder, draft_vocab_size, verifier_vocab_size)


def find_mapping_files(folder: str | Path, draft_vocab_size: int | None = None) -> tuple[Path, Path] | None:
    """The pair of tables in a folder, under the names of this library, of upstream, or of upstream's older releases.

    :param draft_vocab_size: which one, when the folder holds several.
    :raises ConfigError: when it holds several and none is named.
    """
    found: dict[str, tuple[Path, Path]] = {}
    for d2t in sorted(Path(folder).glob("d2t*.npy")):
        match = _TABLE.fullmatch(d2t.name)
        t2d = d2t.with_name(d2t.name.replace("d2t", "t2d"))
        if match and t2d.is_file():
            found[match[1] or ""] = (d2t, t2d)
    if draft_vocab_size is not None:
        return found.get(str(draft_vocab_size)) or found.get("")
    if len(found) > 1:
        names = ", ".join(d2t.name for d2t, _ in found.values())
        raise ConfigError(f"{folder} holds several mappings ({names}); say which with --draft-vocab-size, or give --d2t-path")
    return next(iter(found.values()), None)


def source_hash(counts: np.ndarray, draft_vocab_size: int, verifier_vocab_size: int, mandatory: Collection[int]) -> str:
    """Hash of all that :func:`build_mapping` is a function of."""
    nonzero = np.flatnonzero(counts)
    content = [nonzero.tolist(), counts[nonzero].tolist(), draft_vocab_size, verifier_vocab_size, sorted(set(mandatory))]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]


def mapping_for(
    folder: str | Path,
    counts: TokenCounts,
    draft_vocab_size: int,
    verifier_vocab_size: int,
    mandatory_ids: Collection[int] = (),
) -> VocabularyMapping:
    """The mapping for these counts, which ``folder`` holds afterwards, with a record that names what was counted.

    A mapping left there by other data is thus never picked up, and one of the same data not written again.
    """
    mapping = build_mapping(counts.counts, draft_vocab_size, verifier_vocab_size, mandatory_ids)
    covered, tokens = mapping.coverage(counts.resized(verifier_vocab_size).counts)
    origin = MappingOrigin(
        source_hash=source_hash(counts.counts, draft_vocab_size, verifier_vocab_size, mandatory_ids),
        tokenizer_hash=counts.tokenizer_hash,
        sources=counts.sources,
        covered=covered,
        tokens=tokens,
        mandatory=tuple(sorted(set(mandatory_ids))),
    )
    keep_mapping(folder, mapping, origin)
    return mapping


def keep_mapping(folder: str | Path, mapping: VocabularyMapping, origin: MappingOrigin) -> MappingRecord:
    """:func:`save_mapping`, unless ``folder`` holds this very mapping already, intact and with this origin."""
    known = read_record(folder, mapping.draft_vocab_size)
    if known is not None and _holds(folder, mapping, origin, known):
        return known
    return save_mapping(folder, mapping, origin)


def _holds(folder: str | Path, mapping: VocabularyMapping, origin: MappingOrigin, record: MappingRecord) -> bool:
    known = MappingOrigin.model_validate(record.model_dump(include=set(MappingOrigin.model_fields)))
    if record.hash != mapping.hash or known != origin:
        return False
    size = mapping.draft_vocab_size
    try:
        tables = [
            load_mapping_files(Path(folder) / d2t, Path(folder) / t2d, size, mapping.verifier_vocab_size)
            for d2t, t2d in (_names(size), (record.d2t, record.t2d))
        ]
    except DataError:
        return False
    return all(table.hash == mapping.hash for table in tables)
