"""The mapping of another draft, taken over byte for byte: a draft for a verifier's next release can start from the last one.

Ids mean the same only under the same tokenizer, so a mapping of another vocabulary or another tokenizer is refused.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from speculators.data.tokenizers import LoadedTokenizer, load_tokenizer
from speculators.data.vocabulary import VocabularyMapping
from speculators.data.vocabulary_files import find_mapping_files, load_mapping_files, read_record
from speculators.errors import ConfigError, DataError, VerifierError
from speculators.files import read_json
from speculators.models.checkpoint_files import WeightFiles, has_weights, locate
from speculators.models.vocabulary import d2t_from_t2d, t2d_from_d2t

__all__ = ["ReusedMapping", "check_same_tokenizer", "mapping_of_checkpoint", "mapping_of_files"]


@dataclass(frozen=True, slots=True, eq=False)
class ReusedMapping:
    """A mapping and where it comes from."""

    mapping: VocabularyMapping
    source: str  #: the checkpoint, or the file of its d2t
    tokenizer_hash: str = ""  #: of the tokenizer it was made for; empty when not recorded
    verifier: str = ""  #: the verifier that the checkpoint names; empty when it names none
    notes: tuple[str, ...] = ()  #: what a reader should know, one sentence each


def mapping_of_files(
    d2t_path: str | Path, t2d_path: str | Path, draft_vocab_size: int | None, verifier_vocab_size: int
) -> ReusedMapping:
    """The mapping of a pair of .npy files.

    :raises DataError: as :func:`load_mapping_files`.
    """
    mapping = load_mapping_files(d2t_path, t2d_path, draft_vocab_size, verifier_vocab_size)
    record = read_record(Path(d2t_path).parent, mapping.draft_vocab_size)
    tokenizer = record.tokenizer_hash if record is not None and record.hash == mapping.hash else ""
    changed = _changed(np.load(d2t_path, allow_pickle=False).dtype, np.load(t2d_path, allow_pickle=False).dtype)
    return ReusedMapping(mapping, str(d2t_path), tokenizer, notes=changed)


def mapping_of_checkpoint(
    checkpoint: str | os.PathLike[str], draft_vocab_size: int | None, verifier_vocab_size: int
) -> ReusedMapping:
    """The mapping of a draft: the tables in its weights, else the pair of .npy files in the folder.

    :param checkpoint: folder, or a hub id.
    :param draft_vocab_size: D, or None to take what it has.
    :raises DataError: when it has none, or one of another verifier vocabulary or another size.
    """
    name = os.fspath(checkpoint)
    is_folder = Path(name).is_dir()
    if is_folder and not has_weights(name):
        pair = find_mapping_files(name, draft_vocab_size)
        if pair is None:
            raise DataError(f"{name} holds neither weights with d2t and t2d nor files d2t.npy and t2d.npy; name another folder")
        return mapping_of_files(*pair, draft_vocab_size, verifier_vocab_size)
    files = WeightFiles(name, error=DataError)
    found = files.read(table for table in ("d2t", "t2d") if table in files.index)
    if not found:
        raise DataError(f"the draft {name} has no vocabulary tables: it keeps the verifier's whole vocabulary; name another")
    d2t, t2d, notes = _both(name, found, verifier_vocab_size)
    if t2d.shape != (verifier_vocab_size,):
        raise DataError(
            f"the draft {name} maps into {t2d.size} verifier ids, but this verifier has {verifier_vocab_size}; "
            "a mapping can be reused only for the same vocabulary"
        )
    if draft_vocab_size is not None and d2t.shape != (draft_vocab_size,):
        raise DataError(f"the draft {name} keeps {d2t.size} ids, not {draft_vocab_size}; drop --draft-vocab-size")
    mapping = VocabularyMapping(d2t.astype(np.int64), t2d.astype(bool))
    return ReusedMapping(mapping, name, verifier=_verifier_of(name), notes=(*notes, *_changed(d2t.dtype, t2d.dtype)))


def _both(name: str, found: Mapping[str, Tensor], vocab_size: int) -> tuple[np.ndarray, np.ndarray, tuple[str, ...]]:
    """Both tables, the other made from the one that is there; with what is to be said of that."""
    for table, values in found.items():
        if values.dim() != 1 or values.is_floating_point():
            what = f"numbers of type {str(values.dtype).removeprefix('torch.')} and shape {list(values.shape)}"
            raise DataError(
                f"{table} of the draft {name} holds {what} and not a list of integers; `speculators doctor {name}` says how to "
                "mend it"
            )
    try:
        d2t = found["d2t"] if "d2t" in found else d2t_from_t2d(found["t2d"])
        t2d = found["t2d"] if "t2d" in found else t2d_from_d2t(found["d2t"], vocab_size)
    except ConfigError as error:
        raise DataError(f"d2t of the draft {name} does not fit a verifier of {vocab_size} ids ({error})") from error
    missing = [table for table in ("d2t", "t2d") if table not in found]
    return d2t.numpy(), t2d.numpy(), tuple(f"{name} has no {table}; it was made from the other table" for table in missing)


def _changed(d2t: Any, t2d: Any) -> tuple[str, ...]:
    """Said where the files written are not the source's bytes: readers need these types."""
    return tuple(
        f"{table} was {dtype} and is written as {wanted}, with the same values"
        for table, dtype, wanted in (("d2t", d2t, np.dtype(np.int64)), ("t2d", t2d, np.dtype(bool)))
        if dtype != wanted
    )


def _verifier_of(name: str) -> str:
    path = locate(name, "config.json")
    try:
        config = read_json(path) if path is not None else {}
        return str(config["speculators_config"]["verifier"]["name_or_path"] or "")
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def check_same_tokenizer(reused: ReusedMapping, tokenizer: LoadedTokenizer | None) -> list[str]:
    """Whether the mapping was made for this tokenizer.

    What it was made for is known from its record, from a tokenizer in the checkpoint's folder, or from the verifier that the
    checkpoint names. Code of another model's tokenizer is run only if this one's is trusted.

    :param tokenizer: None when there is none to compare.
    :returns: a sentence when it could not be compared.
    :raises DataError: when it was made for another.
    """
    if tokenizer is None:
        return [f"without --model it was not checked that {reused.source} was made for this verifier's tokenizer"]
    theirs, owner = reused.tokenizer_hash, reused.source
    other: LoadedTokenizer | None = None
    own = [reused.source] if locate(reused.source, "tokenizer_config.json") is not None else []
    for name in (*own, *filter(None, [reused.verifier])):
        if theirs:
            break
        try:
            other = load_tokenizer(name, trust_remote_code=tokenizer.trust_remote_code)
        except VerifierError:
            continue
        theirs, owner = other.hash, f"{reused.source} (of {name})"
    if not theirs:
        return [f"{reused.source} does not say which tokenizer it was made for, so that was not checked"]
    if theirs != tokenizer.hash:
        how = _difference(other, tokenizer)
        raise DataError(
            f"the mapping of {owner} was made for another tokenizer than {tokenizer.name}'s{how}; build one for this verifier"
        )
    return []


def _difference(other: LoadedTokenizer | None, this: LoadedTokenizer) -> str:
    """The first id that stands for something else, in brackets; empty when no id does or that is not known."""
    if other is None:
        return ""
    mine, theirs = ({index: token for token, index in each.tokenizer.get_vocab().items()} for each in (this, other))
    for index in sorted(mine.keys() | theirs.keys()):
        if mine.get(index) != theirs.get(index):
            return f" (id {index} is {theirs.get(index)!r} there and {mine.get(index)!r} here)"
    return ""
