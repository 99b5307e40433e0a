"""Looking at a data set: which rows to show, what it holds in numbers, and what looks wrong. Nothing is drawn here.

Lengths and origins are known for every row. What needs the rows' contents is looked at in a uniform sample of them when
there are more than a limit; :attr:`Survey.sampled` says so, and whoever shows a number of it must say it too.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from speculators.data.row_checks import FAULTS, SMALL_SHARE, TemplateFacts, faults_of
from speculators.data.rows import RowDataset
from speculators.data.token_text import TokenTexts, visible
from speculators.errors import ConfigError, DataError
from speculators.progress import bar

__all__ = ["DataWarning", "SourceShare", "Survey", "choose_rows", "rows_of_conversation", "rows_of_source", "survey"]

#: First word of the random streams that choose rows.
_ROWS_STREAM = 0x10C7

#: Row ids that a warning names.
_EXAMPLES = 5

#: Share of the rows whose answers begin with a line break from which on the template is suspected.
_NEWLINE_SHARE = 0.1


@dataclass(frozen=True, slots=True)
class DataWarning:
    """One thing that looks wrong, and where."""

    id: str  #: key of ``row_checks.FAULTS``
    text: str  #: what is seen
    meaning: str  #: what it does or how to mend it
    count: int  #: rows
    rows: tuple[int, ...]  #: some of them


@dataclass(frozen=True, slots=True)
class SourceShare:
    """What one source gave."""

    name: str
    rows: int
    tokens: int
    checked: int  #: rows whose contents were looked at
    supervised: int  #: supervised tokens of those


@dataclass(frozen=True, slots=True, eq=False)
class Survey:
    """A data set of R rows in numbers; of C of them the contents were looked at."""

    lengths: np.ndarray  #: int64 ``[R]``, tokens
    checked: np.ndarray  #: int64 ``[C]``, ids of the rows that were looked at, ascending
    supervised: np.ndarray  #: int64 ``[C]``, supervised tokens of each
    counts: np.ndarray  #: int64 ``[V]``, how often each id is supervised in them
    sources: tuple[SourceShare, ...]  #: empty when not known
    warnings: tuple[DataWarning, ...]

    @property
    def sampled(self) -> bool:
        """Whether the contents of some rows were not looked at."""
        return len(self.checked) < len(self.lengths)

    @property
    def supervised_share(self) -> float:
        """Supervised tokens by tokens, of the rows looked at."""
        return int(self.supervised.sum()) / max(1, int(self.lengths[self.checked].sum()))

    @property
    def scope(self) -> str:
        """Which rows were looked at, to be said beside every number of them."""
        return f"a sample of {len(self.checked):,} rows" if self.sampled else f"all {len(self.checked):,} rows"


def choose_rows(lengths: np.ndarray, count: int, seed: int = 0, among: np.ndarray | None = None) -> list[int]:
    """Row ids to look at: the shortest row, the longest one, and others at random.

    :param lengths: int64 ``[R]``.
    :param count: how many; fewer when there are fewer.
    :param among: the rows to choose from, ascending; by default all.
    """
    candidates = np.arange(len(lengths)) if among is None else np.asarray(among)
    if not len(candidates) or count < 1:
        return []
    ends = [int(candidates[np.argmin(lengths[candidates])]), int(candidates[np.argmax(lengths[candidates])])]
    chosen = list(dict.fromkeys(ends))[:count]
    rng = np.random.default_rng([_ROWS_STREAM, seed])
    wanted = min(len(candidates), count + len(chosen))  # two of them may be chosen already
    drawn = [int(row) for row in rng.choice(candidates, size=wanted, replace=False) if int(row) not in chosen]
    return [*chosen, *sorted(drawn[: count - len(chosen)])]


def rows_of_conversation(dataset: RowDataset, conversation: int) -> np.ndarray:
    """Ids of the rows of one conversation, ascending.

    :raises DataError: when there is none, or the data set does not say which rows belong together.
    """
    if dataset.conversations is None:
        raise DataError(
            "the data set does not say which conversation a row is of; name rows with --rows, or make it with this version's "
            "prepare-data"
        )
    rows = np.flatnonzero(dataset.conversations == conversation)
    if not len(rows):
        raise DataError(f"no row is of the conversation {conversation}; the headers of rows name their conversations")
    return rows


def rows_of_source(dataset: RowDataset, name: str) -> np.ndarray:
    """Ids of the rows of the sources whose name is ``name`` or ends with it, ascending.

    :raises ConfigError: when no source is called so.
    :raises DataError: when there is no row of it.
    """
    names = [source.name for source in dataset.manifest.sources]
    column = dataset.sources
    if column is None or not names:
        raise DataError("the data set does not say which source a row is from; make it with this version's prepare-data")
    places = [place for place, each in enumerate(names) if each == name]
    places = places or [place for place, each in enumerate(names) if each.endswith(name)]
    if not places:
        known = ", ".join(visible(each) for each in names[:8]) + (", ..." if len(names) > 8 else "")
        raise ConfigError(f"there is no source {visible(name)}; the data set has {known}")
    rows = np.flatnonzero(np.isin(column, places))
    if not len(rows):
        raise DataError(f"no row is from the source {visible(name)}; all its records were left out")
    return rows


def survey(
    dataset: RowDataset, facts: TemplateFacts, texts: TokenTexts, *, sample: int = 20_000, seed: int = 0, progress: bool = False
) -> Survey:
    """Look at a data set in constant memory.

    :param sample: most rows whose contents are looked at; 0 looks at all of them.
    :param seed: of the sample.
    :param progress: whether to draw a bar.
    """
    lengths = dataset.lengths
    checked = np.arange(len(dataset))
    if 0 < sample < len(dataset):
        rng = np.random.default_rng([_ROWS_STREAM, seed, 1])
        checked = np.sort(rng.choice(len(dataset), size=sample, replace=False))
    supervised = np.zeros(len(checked), dtype=np.int64)
    counts = np.zeros(facts.vocab_size or 0, dtype=np.int64)
    found = _Found()
    with bar("looking at rows", len(checked), shown=progress, passing=True) as shown:
        for place, row_id in enumerate(checked.tolist()):
            row = dataset.row(row_id)
            ids = np.asarray(row.input_ids)
            mask = np.asarray(row.loss_mask)
            supervised[place] = mask.sum()
            counts = _count(counts, ids[mask])
            found.add(row_id, ids, faults_of(ids, mask, facts))
            if place % 256 == 0:
                shown.update(place)
    copies, scope = _duplicates(dataset, lengths, sample, seed)
    whole = len(checked) == len(dataset)
    rows = Rows(len(checked), int((supervised > 0).sum()), "" if whole else f" of the {len(checked):,} sampled ones")
    warnings = [*found.warnings(rows, facts, texts), *([_duplicate_warning(copies, scope)] if len(copies) else [])]
    return Survey(lengths, checked, supervised, counts, _sources(dataset, lengths, checked, supervised), tuple(warnings))


def _count(counts: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """``counts`` with ``ids`` added; made longer where an id lies past its end."""
    ids = ids[ids >= 0]
    largest = int(ids.max(initial=-1))
    if largest >= len(counts):
        counts = np.concatenate([counts, np.zeros(largest + 1 - len(counts), dtype=np.int64)])
    np.add.at(counts, ids, 1)
    return counts


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows that were looked at, for sentences about them."""

    checked: int
    supervised: int  #: with a supervised token
    suffix: str  #: says of which rows, when not of all


class _Found:
    """Faults as they are found, row by row."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.examples: dict[str, list[int]] = {}
        self.after_end: Counter[tuple[int, int]] = Counter()  #: (end of turn, the supervised id behind it)
        self.first: Counter[int] = Counter()  #: supervised id that should be in the context
        self.role: Counter[int] = Counter()
        self.whole_masks = 0

    def add(self, row_id: int, ids: np.ndarray, faults: Iterable[tuple[str, int]]) -> None:
        for fault, place in faults:
            self.counts[fault] += 1
            examples = self.examples.setdefault(fault, [])
            if len(examples) < _EXAMPLES:
                examples.append(row_id)
            if fault == "after-end-supervised":
                self.after_end[int(ids[place]), int(ids[place + 1])] += 1
            elif fault == "header-supervised":
                self.first[int(ids[place])] += 1
            elif fault == "role-token-supervised":
                self.role[int(ids[place])] += 1

    def warnings(self, rows: Rows, facts: TemplateFacts, texts: TokenTexts) -> list[DataWarning]:
        """What to say of them, in the order of :data:`FAULTS`."""
        counts = dict(self.counts)
        with_span = rows.supervised - counts.get("all-supervised", 0)
        unended = counts.get("truncated", 0) + counts.get("end-not-supervised", 0)
        if with_span and unended >= with_span:
            counts["no-end-of-turn"] = with_span
            examples = [row for fault in ("truncated", "end-not-supervised") for row in self.examples.get(fault, ())]
            self.examples["no-end-of-turn"] = sorted(set(examples))[:_EXAMPLES]
            counts.pop("truncated", None)
            counts.pop("end-not-supervised", None)
        if counts.get("newline-first", 0) < _NEWLINE_SHARE * max(1, with_span):
            counts.pop("newline-first", None)
        return [
            DataWarning(
                fault,
                self._text(fault, counts[fault], facts, texts) + rows.suffix,
                FAULTS[fault],
                counts[fault],
                tuple(self.examples[fault]),
            )
            for fault in FAULTS
            if fault in counts
        ]

    def _text(self, fault: str, count: int, facts: TemplateFacts, texts: TokenTexts) -> str:
        rows = "1 row" if count == 1 else f"{count:,} rows"
        match fault:
            case "no-end-of-turn":
                ends = " or ".join(visible(texts.text(token)) for token in sorted(facts.ends))
                return f"no supervised text ends with an end-of-turn token ({ends}), in {rows}"
            case "truncated":
                return f"the supervised text of {rows} is cut off, without an end-of-turn token"
            case "end-not-supervised":
                return f"a supervised text inside {rows} ends before its end-of-turn token"
            case "after-end-supervised":
                end, after = self.after_end.most_common(1)[0][0]
                return f"{_named(after, texts)} after {visible(texts.text(end))} is supervised in {rows}"
            case "header-supervised":
                return f"the supervised text of {rows} begins with the role header ({_named(self.first, texts)})"
            case "newline-first":
                return f"the supervised text of {rows} begins with a line break"
            case "role-token-supervised":
                return f"the role token {_named(self.role, texts)} is supervised in {rows}"
            case "all-supervised":
                return f"every token of {rows} is supervised, the prompt too"
            case "nothing-supervised":
                return f"no token of {rows} is supervised"
            case "small-share":
                return f"less than {SMALL_SHARE:.0%} of the tokens of {rows} {'is' if count == 1 else 'are'} supervised"
            case "two-bos":
                return f"{rows} {'begins' if count == 1 else 'begin'} with two {visible(texts.text(facts.bos or 0))}"
            case _:
                return f"{rows} {'has' if count == 1 else 'have'} ids outside the tokenizer's {facts.vocab_size:,}"


def _named(token: int | Counter[int], texts: TokenTexts) -> str:
    """A token in a sentence; of counted ones the most frequent."""
    if isinstance(token, Counter):
        token = token.most_common(1)[0][0]
    text = texts.text(token)
    if text in ("\n", "\n\n"):
        return "the newline" if text == "\n" else "the empty line"
    return f"'{visible(text)}'".replace("\n", "")


def _duplicates(dataset: RowDataset, lengths: np.ndarray, sample: int, seed: int) -> tuple[list[np.ndarray], str]:
    """Groups of equal rows, and among which rows they were looked for.

    Equal rows have one length. In a data set larger than the sample all rows of some lengths are compared, so that what is
    found of them is complete.
    """
    rows = np.arange(len(lengths))
    scope = ""
    if 0 < sample < len(lengths):
        sizes, inverse, members = np.unique(lengths, return_inverse=True, return_counts=True)
        order = np.random.default_rng([_ROWS_STREAM, seed, 2]).permutation(len(sizes))
        order = order[members[order] <= sample]
        taken = order[np.cumsum(members[order]) <= sample]
        rows = np.flatnonzero(np.isin(inverse, taken))
        scope = f" (looked for among {len(rows):,} rows, all those of {len(taken):,} lengths)"
    digests = np.zeros(len(rows), dtype="S16")
    for place, row_id in enumerate(rows.tolist()):
        row = dataset.row(row_id)
        digest = hashlib.blake2b(np.ascontiguousarray(row.input_ids).tobytes(), digest_size=15)
        digest.update(np.ascontiguousarray(row.loss_mask).tobytes())
        digests[place] = digest.digest() + b"."  # numpy drops zero bytes at the end
    order = np.argsort(digests, kind="stable")
    ordered = digests[order]
    borders = np.flatnonzero(ordered[1:] != ordered[:-1]) + 1
    groups = np.split(rows[order], borders) if len(rows) else []
    return [group for group in groups if len(group) > 1], scope


def _duplicate_warning(groups: Sequence[np.ndarray], scope: str) -> DataWarning:
    copies = sum(len(group) - 1 for group in groups)
    first = min(groups, key=lambda group: int(group[0]))
    text = f"{copies:,} {'row is a copy' if copies == 1 else 'rows are copies'} of another row{scope}"
    return DataWarning("duplicate", text, FAULTS["duplicate"], copies, tuple(int(row) for row in first[:_EXAMPLES]))


def _sources(dataset: RowDataset, lengths: np.ndarray, checked: np.ndarray, supervised: np.ndarray) -> tuple[SourceShare, ...]:
    column, records = dataset.sources, dataset.manifest.sources
    if column is None or not records:
        return ()
    size = max(len(records), int(column.max(initial=-1)) + 1)
    rows, tokens = np.bincount(column, minlength=size), np.zeros(size, dtype=np.int64)
    np.add.at(tokens, column, lengths)
    looked = np.bincount(column[checked], minlength=size)
    answers = np.zeros(size, dtype=np.int64)
    np.add.at(answers, column[checked], supervised)
    names = [source.name for source in records] + [f"source {place}" for place in range(len(records), size)]
    return tuple(
        SourceShare(name, int(rows[place]), int(tokens[place]), int(looked[place]), int(answers[place]))
        for place, name in enumerate(names)
    )
