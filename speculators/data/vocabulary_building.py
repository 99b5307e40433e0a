"""Building a draft vocabulary from data: counts, the coverage curve, the choice, its files, and what it leaves out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from speculators.data.provenance import require_tokenizer
from speculators.data.rows import RowDataset
from speculators.data.token_counts import (
    TOKEN_FREQUENCIES,
    TokenCounts,
    count_dataset,
    load_counts,
    merge_counts,
    save_counts,
)
from speculators.data.tokenizers import LoadedTokenizer
from speculators.data.vocabulary import (
    CURVE_SIZES,
    CurvePoint,
    MandatoryIds,
    VocabularyMapping,
    build_mapping,
    coverage_curve,
    mandatory_ids,
    size_for_coverage,
)
from speculators.data.vocabulary_files import MappingOrigin, MappingRecord, keep_mapping, source_hash
from speculators.data.vocabulary_reuse import ReusedMapping, check_same_tokenizer, mapping_of_checkpoint, mapping_of_files
from speculators.errors import ConfigError, DataError

__all__ = ["BuiltVocabulary", "ExcludedToken", "SourceCoverage", "VocabularySettings", "build_vocabulary"]


@dataclass(frozen=True, slots=True)
class VocabularySettings:
    """What ``speculators build-vocab`` is asked for.

    :raises ConfigError: for settings that contradict each other, or leave the size open.
    """

    output: Path  #: folder for the mapping
    data: tuple[Path, ...] = ()  #: folders of rows to count
    token_freq_paths: tuple[Path, ...] = ()  #: counts made before
    draft_vocab_size: int | None = None
    coverage: float | None = None
    multiple_of: int = 1
    keep_ids: tuple[int, ...] = ()
    all_special: bool = False
    from_checkpoint: str | None = None
    d2t_path: Path | None = None
    t2d_path: Path | None = None
    save_counts: Path | None = None
    workers: int | None = None

    def __post_init__(self) -> None:
        if not self.data and not self.token_freq_paths:
            raise ConfigError("there is nothing to count; give --data with a folder of prepared rows, or --token-freq-path")
        if (self.d2t_path is None) != (self.t2d_path is None):
            raise ConfigError("--d2t-path and --t2d-path are a pair; give both or neither")
        if self.from_checkpoint is not None and self.d2t_path is not None:
            raise ConfigError("--from-checkpoint and --d2t-path both name a mapping to reuse; give one")
        if self.reuses:
            idle = {"--coverage": self.coverage, "--keep-ids": self.keep_ids, "--all-special": self.all_special}
            for flag, value in idle.items():
                if value:
                    raise ConfigError(f"a mapping is reused as it is, so {flag} has no effect; drop it, or build a new one")
        elif (self.draft_vocab_size is None) == (self.coverage is None):
            raise ConfigError("say how large the draft vocabulary should be: either --draft-vocab-size or --coverage")
        if self.save_counts is not None and self.save_counts.suffix == ".json":
            raise ConfigError(f"--save-counts {self.save_counts} is the name of the record beside the counts; end it in .pt")
        if self.multiple_of != 1 and self.coverage is None:
            raise ConfigError("--multiple-of rounds the size that --coverage asks for; add --coverage or drop it")

    @property
    def reuses(self) -> bool:
        """Whether a mapping is taken over instead of built."""
        return self.from_checkpoint is not None or self.d2t_path is not None


@dataclass(frozen=True, slots=True)
class ExcludedToken:
    """A supervised token that the draft cannot say."""

    id: int
    count: int
    text: str | None  #: None without a tokenizer


@dataclass(frozen=True, slots=True)
class SourceCoverage:
    """How much the draft can say of one source."""

    name: str
    covered: int
    tokens: int


@dataclass(frozen=True, slots=True, eq=False)
class BuiltVocabulary:
    """A mapping with its files, and what there is to know about it."""

    mapping: VocabularyMapping
    record: MappingRecord
    folder: Path
    counts: TokenCounts
    curve: list[CurvePoint]  #: of the best mappings of every size; the chosen size is among them
    mandatory: MandatoryIds  #: what was kept, or for a reused mapping would have been
    excluded: list[ExcludedToken]  #: most frequent first, as far as asked for
    excluded_ids: int  #: how many different ids occur and cannot be said
    special_excluded: list[ExcludedToken]  #: mandatory ids that a reused mapping lacks
    sources: list[SourceCoverage]
    best_covered: int  #: tokens that the best mapping of this size covers; for a built one, its own
    notes: list[str]

    @property
    def d2t_path(self) -> Path:
        """The table's file of which the content never changes."""
        return self.folder / self.record.d2t

    @property
    def t2d_path(self) -> Path:
        """See :attr:`d2t_path`."""
        return self.folder / self.record.t2d

    def to_json(self) -> dict[str, Any]:
        """Everything but the tables."""
        record = self.record.model_dump(mode="json", by_alias=True, exclude={"d2t", "t2d", "covered", "tokens", "mandatory"})
        return {
            **record,
            "files": {"d2t": str(self.d2t_path), "t2d": str(self.t2d_path)},
            "rows": self.counts.rows,
            "covered": self.record.covered,
            "tokens": self.record.tokens,
            "best_covered": self.best_covered,
            "curve": [asdict(point) | {"share": point.share} for point in self.curve],
            "mandatory": asdict(self.mandatory),
            "excluded_ids": self.excluded_ids,
            "excluded": [asdict(token) for token in self.excluded],
            "special_excluded": [asdict(token) for token in self.special_excluded],
            "coverage_by_source": [asdict(source) for source in self.sources],
            "notes": self.notes,
        }


def build_vocabulary(
    settings: VocabularySettings,
    vocab_size: int,
    tokenizer: LoadedTokenizer | None = None,
    *,
    most_excluded: int = 20,
    shown: bool = False,
) -> BuiltVocabulary:
    """Count, choose, write, and say what is left out.

    :param vocab_size: V, rows of the verifier's embedding.
    :param tokenizer: of the verifier, for special tokens and texts; None keeps no id but those named.
    :param most_excluded: how many excluded tokens to list.
    :param shown: draw progress bars.
    :raises ConfigError: when the size cannot be had.
    :raises DataError: for rows or counts of another tokenizer, counts that are not what they say, nothing counted, and a
        mapping that does not fit.
    """
    counted = _count(settings, vocab_size, tokenizer, shown)
    counts = merge_counts(counted.parts)
    mandatory = mandatory_ids(
        counts.counts,
        tokenizer=tokenizer.tokenizer if tokenizer is not None else None,
        eos_ids=tokenizer.eos_ids if tokenizer is not None else (),
        keep_ids=settings.keep_ids,
        all_special=settings.all_special,
    )
    mapping, reused = _choose(settings, counts.counts, vocab_size, mandatory)
    notes = _notes(settings, counted, reused, tokenizer)
    size = mapping.draft_vocab_size
    curve = coverage_curve(counts.counts, mandatory.ids, (*CURVE_SIZES, size))
    origin = MappingOrigin(
        source_hash=source_hash(counts.counts, size, vocab_size, mandatory.ids) if reused is None else "",
        tokenizer_hash=tokenizer.hash if tokenizer is not None else counts.tokenizer_hash,
        sources=counts.sources,
        covered=mapping.coverage(counts.counts)[0],
        tokens=counts.supervised_tokens,
        mandatory=tuple(mandatory.ids) if reused is None else (),
        reused_from=reused.source if reused is not None else None,
    )
    record = keep_mapping(settings.output, mapping, origin)
    if settings.save_counts is not None:
        save_counts(settings.save_counts, counts)
    lost = mapping.lost(counts.counts)
    special = [token for token in mandatory.ids if not mapping.t2d[token]]
    return BuiltVocabulary(
        mapping=mapping,
        record=record,
        folder=settings.output,
        counts=counts,
        curve=curve,
        mandatory=mandatory,
        excluded=_tokens(lost[:most_excluded], counts.counts, tokenizer),
        excluded_ids=len(lost),
        special_excluded=_tokens(special, counts.counts, tokenizer),
        sources=counted.coverage(mapping),
        best_covered=_best(counts.counts, size, vocab_size, mandatory),
        notes=notes,
    )


@dataclass(frozen=True, slots=True)
class _Counted:
    """Counts of every data set, then of every file of counts."""

    datasets: list[RowDataset]
    names: list[str]
    parts: list[TokenCounts]

    def coverage(self, mapping: VocabularyMapping) -> list[SourceCoverage]:
        """Of every part, and of every source of a data set that tells its sources apart."""
        result: list[SourceCoverage] = []
        for number, (name, part) in enumerate(zip(self.names, self.parts)):
            dataset = self.datasets[number] if number < len(self.datasets) else None
            told = _of_dataset(dataset, mapping.t2d) if dataset is not None and len(dataset.manifest.sources) > 1 else None
            if dataset is None or told is None:
                result.append(SourceCoverage(name, *mapping.coverage(part.counts)))
                continue
            folder = f"{name}: " if len(self.names) > 1 else ""
            result += [
                SourceCoverage(folder + source.name, *told[place]) for place, source in enumerate(dataset.manifest.sources)
            ]
        return result


def _count(settings: VocabularySettings, vocab_size: int, tokenizer: LoadedTokenizer | None, shown: bool) -> _Counted:
    datasets = [RowDataset.load(folder) for folder in settings.data]
    parts = [_counts_of(dataset, vocab_size, settings.workers, tokenizer, shown) for dataset in datasets]
    expected = tokenizer.hash if tokenizer is not None else ""
    parts += [load_counts(path, tokenizer_hash=expected).resized(vocab_size) for path in settings.token_freq_paths]
    return _Counted(datasets, [*map(str, settings.data), *map(str, settings.token_freq_paths)], parts)


def _counts_of(
    dataset: RowDataset, vocab_size: int, workers: int | None, tokenizer: LoadedTokenizer | None, shown: bool
) -> TokenCounts:
    """Counts of a data set: those beside it, if they are of these very rows, else made now."""
    assert dataset.path is not None
    if tokenizer is not None:
        require_tokenizer(dataset.manifest, tokenizer.tokenizer, tokenizer.name, f"the rows in {dataset.path}")
    try:
        return load_counts(dataset.path / TOKEN_FREQUENCIES, expect=dataset.fingerprint).resized(vocab_size)
    except DataError:  # none, of other rows, or torn: the rows themselves say
        return count_dataset(dataset, vocab_size, processes=workers, shown=shown)


def _notes(
    settings: VocabularySettings, counted: _Counted, reused: ReusedMapping | None, tokenizer: LoadedTokenizer | None
) -> list[str]:
    """What a reader of the result should know.

    :raises DataError: when a reused mapping is of another tokenizer.
    """
    unknown = [name for name, part in zip(counted.names, counted.parts) if not part.tokenizer_hash]
    notes = [f"{name} does not say which tokenizer made its rows, so that was not checked" for name in unknown]
    if reused is not None:
        return [*notes, *reused.notes, *check_same_tokenizer(reused, tokenizer)]
    if tokenizer is None and not settings.keep_ids:
        notes.append("without --model no end-of-turn id is known, so none is sure to be kept; name them with --keep-ids")
    return notes


def _choose(
    settings: VocabularySettings, counts: np.ndarray, vocab_size: int, mandatory: MandatoryIds
) -> tuple[VocabularyMapping, ReusedMapping | None]:
    if settings.from_checkpoint is not None:
        reused = mapping_of_checkpoint(settings.from_checkpoint, settings.draft_vocab_size, vocab_size)
        return reused.mapping, reused
    if settings.d2t_path is not None and settings.t2d_path is not None:
        reused = mapping_of_files(settings.d2t_path, settings.t2d_path, settings.draft_vocab_size, vocab_size)
        return reused.mapping, reused
    size = settings.draft_vocab_size
    if size is None:
        assert settings.coverage is not None
        size = size_for_coverage(counts, settings.coverage, mandatory.ids, settings.multiple_of)
    return build_mapping(counts, size, vocab_size, mandatory.ids), None


def _best(counts: np.ndarray, size: int, vocab_size: int, mandatory: MandatoryIds) -> int:
    """Tokens that a mapping of this size could cover; without mandatory ids where it cannot hold them."""
    kept = mandatory.ids if len(mandatory.ids) <= size else []
    return build_mapping(counts, size, vocab_size, kept).coverage(counts)[0]


def _tokens(ids: Sequence[int] | np.ndarray, counts: np.ndarray, tokenizer: LoadedTokenizer | None) -> list[ExcludedToken]:
    return [ExcludedToken(int(token), int(counts[token]), _text(int(token), tokenizer)) for token in ids]


def _text(token: int, tokenizer: LoadedTokenizer | None) -> str | None:
    if tokenizer is None:
        return None
    text = str(tokenizer.tokenizer.decode([token]))
    # Bytes that are no character alone: the tokenizer's own spelling of them.
    return str(tokenizer.tokenizer.convert_ids_to_tokens(token)) if "\ufffd" in text else text


def _of_dataset(dataset: RowDataset, t2d: np.ndarray) -> list[tuple[int, int]] | None:
    """Covered and all supervised tokens of every source in the manifest; None when rows do not say which they are of."""
    count = len(dataset.manifest.sources)
    covered, tokens = np.zeros(count, np.int64), np.zeros(count, np.int64)
    for batch in dataset.batches():
        if batch.source is None or not ((batch.source >= 0) & (batch.source < count)).all():
            return None
        of = np.repeat(batch.source, batch.lengths)[batch.loss_mask]
        said = t2d[batch.input_ids[batch.loss_mask]]
        tokens += np.bincount(of, minlength=count)
        covered += np.bincount(of[said], minlength=count)
    return list(zip(covered.tolist(), tokens.tolist()))
