"""The pruned draft vocabulary: which verifier ids a draft can say, and how many it should.

A mapping of D ids out of V is a pair: ``d2t`` holds **offsets** (``verifier id = draft id + d2t[draft id]``), ``t2d`` is a mask
over the verifier's ids with exactly D true, and draft id k is the k-th true id. Its files are those of
:mod:`speculators.data.vocabulary_files`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from speculators.errors import ConfigError, DataError

__all__ = [
    "CURVE_SIZES",
    "CurvePoint",
    "MandatoryIds",
    "VocabularyMapping",
    "build_mapping",
    "coverage_curve",
    "mandatory_ids",
    "ranked_ids",
    "size_for_coverage",
]

#: Draft vocabularies that the coverage curve has a point for, as far as the verifier has more ids.
CURVE_SIZES = (1000, 2000, 4000, 8000, 16000, 32000, 64000, 128000, 256000)


@dataclass(frozen=True, slots=True, eq=False)
class VocabularyMapping:
    """Which D of the verifier's V ids a draft can say."""

    d2t: np.ndarray  #: int64 ``[D]``, offsets
    t2d: np.ndarray  #: bool ``[V]``

    def __post_init__(self) -> None:
        valid = self.d2t.ndim == self.t2d.ndim == 1 and np.array_equal(np.flatnonzero(self.t2d), self.draft_to_verifier)
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

    def lost(self, counts: np.ndarray) -> np.ndarray:
        """Ids that occur in ``counts`` (int64 ``[V]``) and that the draft cannot say, most frequent first, int64 ``[n]``."""
        ids = np.flatnonzero((counts > 0) & ~self.t2d)
        return ids[np.argsort(-counts[ids], kind="stable")]


@dataclass(frozen=True, slots=True)
class MandatoryIds:
    """Ids that a draft must be able to say whatever their count, by reason; each list ascends."""

    end_of_turn: tuple[int, ...] = ()
    special: tuple[int, ...] = ()  #: other special and added tokens
    kept: tuple[int, ...] = ()  #: asked for by name

    @property
    def ids(self) -> list[int]:
        """All of them, ascending."""
        return sorted({*self.end_of_turn, *self.special, *self.kept})


def mandatory_ids(
    counts: np.ndarray,
    *,
    tokenizer: Any = None,
    eos_ids: Collection[int] = (),
    keep_ids: Collection[int] = (),
    all_special: bool = False,
) -> MandatoryIds:
    """What must be kept for these counts (int64 ``[V]``).

    :param tokenizer: whose special and added tokens are kept if they are supervised anywhere; None when there is none.
    :param eos_ids: ids that end an answer.
    :param all_special: keep special and added tokens that never occur, too.
    :raises DataError: when an id of ``eos_ids`` or ``keep_ids`` lies outside the verifier's vocabulary.
    """
    asked = {int(token) for token in (*eos_ids, *keep_ids)}
    wrong = sorted(token for token in asked if not 0 <= token < len(counts))
    if wrong:
        raise DataError(f"mandatory ids {wrong} reach outside the verifier's {len(counts)} ids; correct them")
    special = set() if tokenizer is None else {*tokenizer.added_tokens_decoder, *tokenizer.all_special_ids}
    occurring = {token for token in special if 0 <= token < len(counts) and (all_special or counts[token])}
    return MandatoryIds(tuple(sorted(set(eos_ids))), tuple(sorted(occurring - asked)), tuple(sorted(set(keep_ids))))


def ranked_ids(counts: np.ndarray, mandatory: Collection[int] = ()) -> np.ndarray:
    """All ids in the order in which a mapping keeps them, int64 ``[V]``.

    Mandatory ids come first, then the others by falling count; ties, and the ids never seen, go to the smaller id. So what
    is kept is a pure function of the arguments, and a smaller mapping's ids are always in the larger one.
    """
    keys = -counts.astype(np.int64)
    keys[sorted(set(mandatory))] = np.iinfo(np.int64).min
    return np.argsort(keys, kind="stable")


def build_mapping(
    counts: np.ndarray, draft_vocab_size: int, verifier_vocab_size: int, mandatory_ids: Collection[int] = ()
) -> VocabularyMapping:
    """Keep the mandatory ids and the most frequent ones, in the order of :func:`ranked_ids`.

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
    mandatory = sorted({int(token) for token in mandatory_ids})
    if mandatory and (mandatory[0] < 0 or mandatory[-1] >= verifier_vocab_size):
        raise DataError(f"mandatory ids {mandatory} reach outside the verifier's {verifier_vocab_size} ids; correct them")
    if len(mandatory) > draft_vocab_size:
        raise ConfigError(
            f"a draft vocabulary of {draft_vocab_size} cannot hold {len(mandatory)} mandatory ids; raise --draft-vocab-size"
        )
    padded = np.zeros(verifier_vocab_size, dtype=np.int64)
    padded[: min(len(counts), verifier_vocab_size)] = counts[:verifier_vocab_size]
    kept = np.sort(ranked_ids(padded, mandatory)[:draft_vocab_size])
    t2d = np.zeros(verifier_vocab_size, dtype=bool)
    t2d[kept] = True
    return VocabularyMapping(kept - np.arange(draft_vocab_size), t2d)


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """How much a draft vocabulary of this size can say of what was counted."""

    size: int
    covered: int  #: supervised tokens it has an id for
    tokens: int  #: all of them

    @property
    def share(self) -> float:
        """Of the tokens covered, in [0, 1]."""
        return self.covered / self.tokens


def coverage_curve(counts: np.ndarray, mandatory: Collection[int] = (), sizes: Sequence[int] = CURVE_SIZES) -> list[CurvePoint]:
    """The coverage of every size, and of the whole vocabulary; sizes that cannot hold the mandatory ids have no point.

    :param counts: int64 ``[V]``.
    :raises DataError: when nothing was counted.
    """
    covered = _covered(counts, mandatory)
    wanted = sorted({size for size in sizes if max(1, len(set(mandatory))) <= size < len(counts)} | {len(counts)})
    return [CurvePoint(size, int(covered[size]), int(covered[-1])) for size in wanted]


def size_for_coverage(counts: np.ndarray, coverage: float, mandatory: Collection[int] = (), multiple_of: int = 1) -> int:
    """The smallest draft vocabulary that can say at least this share of the counted tokens.

    :param counts: int64 ``[V]``.
    :param coverage: in (0, 1], taken as the decimal number that it is written as.
    :param multiple_of: round up to a multiple of it, but never beyond V.
    :raises ConfigError: for a share outside (0, 1], or a multiple below 1.
    :raises DataError: when nothing was counted.
    """
    if not 0 < coverage <= 1:
        raise ConfigError(f"--coverage is {coverage:g}; choose a share above 0 and at most 1, such as 0.99")
    if multiple_of < 1:
        raise ConfigError(f"--multiple-of is {multiple_of}; choose at least 1")
    covered = _covered(counts, mandatory)
    share = Fraction(str(coverage))
    wanted = -(-share.numerator * int(covered[-1]) // share.denominator)
    size = max(int(np.searchsorted(covered, wanted)), len(set(mandatory)), 1)
    return min(-(-size // multiple_of) * multiple_of, len(counts))


def _covered(counts: np.ndarray, mandatory: Collection[int]) -> np.ndarray:
    """Tokens that each size can say, int64 ``[V + 1]``."""
    covered = np.concatenate([[0], np.cumsum(counts[ranked_ids(counts, mandatory)])])
    if not covered[-1]:
        raise DataError("no supervised token was counted, so no vocabulary can be chosen; check the rows' loss masks")
    return covered
