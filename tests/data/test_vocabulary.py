"""The pruned vocabulary: selection, the offset convention, the files, and mappings that do not fit."""

from __future__ import annotations

import errno
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from speculators.data import (
    TokenCounts,
    VocabularyMapping,
    build_mapping,
    load_mapping,
    load_mapping_files,
    mapping_for,
    save_mapping,
)
from speculators.data.vocabulary import coverage_curve, mandatory_ids, size_for_coverage
from speculators.data.vocabulary_files import find_mapping_files, mapping_beside, read_record
from speculators.errors import ConfigError, DataError
from tests.tiny import tiny_tokenizer

COUNTS = np.array([0, 5, 2, 0, 9, 2, 0, 2, 0, 1])


def test_the_most_frequent_ids_are_kept_ascending_and_ties_go_to_the_smaller_id() -> None:
    mapping = build_mapping(COUNTS, 4, 10)
    assert mapping.draft_to_verifier.tolist() == [1, 2, 4, 5]
    assert mapping.d2t.tolist() == [1, 1, 2, 2]  # offsets
    assert np.flatnonzero(mapping.t2d).tolist() == [1, 2, 4, 5]
    assert mapping.verifier_to_draft.tolist() == [-1, 0, 1, -1, 2, 3, -1, -1, -1, -1]
    assert mapping.coverage(COUNTS) == (18, 21)
    assert (mapping.draft_vocab_size, mapping.verifier_vocab_size) == (4, 10)
    assert mapping.d2t.dtype == np.int64


def test_unseen_ids_fill_up_from_the_smallest() -> None:
    assert build_mapping(COUNTS, 8, 10).draft_to_verifier.tolist() == [0, 1, 2, 3, 4, 5, 7, 9]
    # Counts may end before the vocabulary does.
    assert build_mapping(np.array([0, 3]), 3, 10).draft_to_verifier.tolist() == [0, 1, 2]


def test_the_whole_vocabulary_is_the_identity() -> None:
    mapping = build_mapping(COUNTS, 10, 10)
    assert not mapping.d2t.any()
    assert mapping.t2d.all()


def test_mandatory_ids_are_kept() -> None:
    assert build_mapping(COUNTS, 4, 10, mandatory_ids=[8, 6, 8]).draft_to_verifier.tolist() == [1, 4, 6, 8]


def test_the_example_of_the_documentation() -> None:
    mapping = build_mapping(COUNTS, 4, 10, mandatory_ids=[9])
    assert mapping.draft_to_verifier.tolist() == [1, 2, 4, 9]
    assert mapping.d2t.tolist() == [1, 1, 2, 6]
    assert mapping.coverage(COUNTS) == (17, 21)


def test_impossible_mappings() -> None:
    with pytest.raises(ConfigError, match="draft vocabulary of 11 does not fit a verifier of 10"):
        build_mapping(COUNTS, 11, 10)
    with pytest.raises(ConfigError, match="does not fit"):
        build_mapping(COUNTS, 0, 10)
    with pytest.raises(ConfigError, match="cannot hold 2 mandatory"):
        build_mapping(COUNTS, 1, 10, mandatory_ids=[1, 2])
    with pytest.raises(DataError, match="mandatory"):
        build_mapping(COUNTS, 4, 10, mandatory_ids=[10])
    with pytest.raises(DataError, match="reach id 9, beyond"):
        build_mapping(COUNTS, 4, 8)


def test_tables_that_are_no_pair_are_refused() -> None:
    good = build_mapping(COUNTS, 4, 10)
    # Field report verl-SpeCo#67: absolute ids instead of offsets.
    for d2t in (good.draft_to_verifier, good.d2t[:3], good.d2t[None]):
        with pytest.raises(DataError, match="do not describe the same ids"):
            VocabularyMapping(d2t, good.t2d)


def test_mapping_files(tmp_path: Path) -> None:
    mapping = build_mapping(COUNTS, 4, 10)
    save_mapping(tmp_path, mapping)
    loaded = load_mapping(tmp_path, 4, 10)
    assert loaded.hash == mapping.hash
    assert np.array_equal(loaded.d2t, mapping.d2t)
    assert {path.name for path in tmp_path.iterdir()} == {
        *(f"{table}-4{key}.npy" for table in ("d2t", "t2d") for key in ("", f"-{mapping.hash[:8]}")),
        "vocabulary-4.json",
    }
    d2t, t2d = tmp_path / "d2t-4.npy", tmp_path / "t2d-4.npy"
    assert load_mapping_files(d2t, t2d, None, 10).hash == mapping.hash
    with pytest.raises(DataError, match="asked for"):
        load_mapping_files(d2t, t2d, 5, 10)
    with pytest.raises(DataError, match="the verifier has 11"):
        load_mapping_files(d2t, t2d, 4, 11)
    with pytest.raises(DataError, match="no vocabulary table"):
        load_mapping(tmp_path, 5, 10)
    # Tables swapped under the record.
    other = build_mapping(COUNTS, 4, 10, mandatory_ids=[0])
    np.save(d2t, other.d2t)
    np.save(t2d, other.t2d)
    with pytest.raises(DataError, match="not those that"):
        load_mapping(tmp_path, 4, 10)
    np.save(d2t, mapping.d2t.astype(float))
    with pytest.raises(DataError, match="integers"):
        load_mapping_files(d2t, t2d, 4, 10)
    d2t.write_bytes(b"torn")
    with pytest.raises(DataError, match="cannot be read"):
        load_mapping(tmp_path, 4, 10)


def test_a_mapping_of_other_data_is_never_picked_up(tmp_path: Path) -> None:
    counts = TokenCounts(COUNTS, 3, "t", ("f",))
    other = TokenCounts(COUNTS[::-1].copy(), 3, "t", ("g",))
    first = mapping_for(tmp_path, counts, 4, 10)
    written = (tmp_path / "vocabulary-4.json").stat().st_mtime_ns
    assert mapping_for(tmp_path, counts, 4, 10).hash == first.hash
    assert (tmp_path / "vocabulary-4.json").stat().st_mtime_ns == written
    second = mapping_for(tmp_path, other, 4, 10, mandatory_ids=[3])
    assert second.hash != first.hash
    assert load_mapping(tmp_path, 4, 10).hash == second.hash
    # The first one's tables are still there, for a run that names them.
    key = first.hash[:8]
    assert load_mapping_files(tmp_path / f"d2t-4-{key}.npy", tmp_path / f"t2d-4-{key}.npy", 4, 10).hash == first.hash
    # Another size lies beside it.
    mapping_for(tmp_path, counts, 5, 10)
    assert load_mapping(tmp_path, 4, 10).hash == second.hash
    assert mapping_beside(tmp_path, 4, 10, "g").hash == second.hash  # type: ignore[union-attr]
    for fingerprint in ("f", ""):
        assert mapping_beside(tmp_path, 4, 10, fingerprint) is None
    assert mapping_beside(tmp_path, 6, 10, "g") is None


def test_the_same_tables_for_other_data_are_recorded_anew(tmp_path: Path) -> None:
    mapping_for(tmp_path, TokenCounts(COUNTS, 3, "t", ("f",)), 4, 10)
    mapping_for(tmp_path, TokenCounts(COUNTS, 3, "t", ("g",)), 4, 10)
    record = read_record(tmp_path, 4)
    assert record is not None
    assert (record.sources, record.covered, record.tokens) == (("g",), 18, 21)
    assert mapping_beside(tmp_path, 4, 10, "f") is None


@pytest.mark.parametrize("damage", ["d2t-4.npy", "vocabulary-4.json", "named"])
def test_a_damaged_mapping_is_written_again(tmp_path: Path, damage: str) -> None:
    counts = TokenCounts(COUNTS, 3, "t", ("f",))
    mapping = mapping_for(tmp_path, counts, 4, 10)
    (tmp_path / (f"t2d-4-{mapping.hash[:8]}.npy" if damage == "named" else damage)).unlink()
    assert mapping_for(tmp_path, counts, 4, 10).hash == load_mapping(tmp_path, 4, 10).hash
    assert len(list(tmp_path.iterdir())) == 5


def test_without_links_the_names_of_upstream_are_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise OSError(errno.EPERM, "no links here")

    monkeypatch.setattr("os.symlink", refused)
    mapping = build_mapping(COUNTS, 4, 10)
    save_mapping(tmp_path, mapping)
    assert not (tmp_path / "d2t-4.npy").is_symlink()
    assert load_mapping(tmp_path, 4, 10).hash == mapping.hash
    assert len(list(tmp_path.iterdir())) == 5


def test_a_full_disk_leaves_the_old_mapping(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = build_mapping(COUNTS, 4, 10)
    save_mapping(tmp_path, old)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("numpy.save", full)
    with pytest.raises(DataError, match="disk is full"):
        save_mapping(tmp_path, build_mapping(COUNTS, 4, 10, mandatory_ids=[0]))
    assert load_mapping(tmp_path, 4, 10).hash == old.hash
    assert len(list(tmp_path.iterdir())) == 5


def test_tables_in_a_folder_are_found_by_any_name(tmp_path: Path) -> None:
    assert find_mapping_files(tmp_path) is None
    mapping = build_mapping(COUNTS, 4, 10)
    save_mapping(tmp_path, mapping)
    assert find_mapping_files(tmp_path) == (tmp_path / "d2t-4.npy", tmp_path / "t2d-4.npy")
    save_mapping(tmp_path, build_mapping(COUNTS, 5, 10))
    assert find_mapping_files(tmp_path, 5) == (tmp_path / "d2t-5.npy", tmp_path / "t2d-5.npy")
    with pytest.raises(ConfigError, match=r"several mappings \(d2t-4.npy, d2t-5.npy\)"):
        find_mapping_files(tmp_path)
    assert find_mapping_files(tmp_path, 6) is None
    np.save(tmp_path / "d2t.npy", mapping.d2t)
    np.save(tmp_path / "t2d.npy", mapping.t2d)
    assert find_mapping_files(tmp_path, 6) == (tmp_path / "d2t.npy", tmp_path / "t2d.npy")


counts_of_ten = st.lists(st.integers(0, 5), min_size=10, max_size=10).map(np.array)


@given(counts_of_ten, st.integers(1, 10), st.sets(st.integers(0, 9), max_size=3))
@settings(max_examples=200, deadline=None)
def test_offsets_resolve_to_the_best_ids(counts: np.ndarray, size: int, mandatory: set[int]) -> None:
    size = max(size, len(mandatory))
    if not size:
        return
    mapping = build_mapping(counts, size, 10, mandatory)
    kept = [draft_id + int(offset) for draft_id, offset in enumerate(mapping.d2t)]
    order = sorted(range(10), key=lambda token: (token not in mandatory, -counts[token], token))
    assert kept == sorted(order[:size])
    assert np.flatnonzero(mapping.t2d).tolist() == kept
    assert sorted([*kept, *mapping.lost(counts + 1).tolist()]) == list(range(10))


@given(counts_of_ten, st.sampled_from([0.1, 0.5, 0.9, 0.99, 1.0]), st.sets(st.integers(0, 9), max_size=3), st.integers(1, 4))
@settings(max_examples=200, deadline=None)
def test_the_size_for_a_coverage_is_the_smallest(counts: np.ndarray, share: float, mandatory: set[int], multiple: int) -> None:
    if not counts.sum():
        with pytest.raises(DataError, match="no supervised token"):
            size_for_coverage(counts, share, mandatory)
        return
    size = size_for_coverage(counts, share, mandatory)
    covers = [build_mapping(counts, d, 10, mandatory).coverage(counts)[0] for d in range(max(1, len(mandatory)), 11)]
    enough = [covered * 100 >= round(share * 100) * counts.sum() for covered in covers]
    assert size == max(1, len(mandatory)) + enough.index(True)
    rounded = size_for_coverage(counts, share, mandatory, multiple)
    assert rounded == min(10, next(value for value in range(size, 20) if value % multiple == 0))


def test_the_coverage_curve() -> None:
    points = coverage_curve(COUNTS, sizes=(1, 2, 4, 10, 50))
    assert [(point.size, point.covered) for point in points] == [(1, 9), (2, 14), (4, 18), (10, 21)]
    assert points[1].share == 14 / 21
    # Mandatory ids take room from frequent ones; sizes that cannot hold them are left out.
    points = coverage_curve(COUNTS, mandatory=[0, 9], sizes=(1, 2, 4))
    assert [(point.size, point.covered) for point in points] == [(2, 1), (4, 15), (10, 21)]
    with pytest.raises(DataError, match="no supervised token"):
        coverage_curve(np.zeros(4, np.int64))
    large = np.ones(200_000, np.int64)
    assert [point.size for point in coverage_curve(large)] == [1000, 2000, 4000, 8000, 16000, 32000, 64000, 128000, 200_000]


def test_a_size_that_cannot_be_asked_for() -> None:
    for share in (0, -1, 1.01):
        with pytest.raises(ConfigError, match="--coverage"):
            size_for_coverage(COUNTS, share)
    with pytest.raises(ConfigError, match="--multiple-of"):
        size_for_coverage(COUNTS, 0.9, multiple_of=0)
    # 0.9 of 10 tokens are 9 of them, though the float is above it.
    assert size_for_coverage(np.array([1] * 10), 0.9) == 9


def test_mandatory_ids_of_a_tokenizer() -> None:
    tokenizer = tiny_tokenizer()
    counts = np.zeros(64, np.int64)
    counts[[1, 2, 30]] = 1  # <|im_start|>, <|im_end|>, a letter
    found = mandatory_ids(counts, tokenizer=tokenizer, eos_ids=[2, 0], keep_ids=[40])
    assert (found.end_of_turn, found.special, found.kept) == ((0, 2), (1,), (40,))
    assert found.ids == [0, 1, 2, 40]
    every = mandatory_ids(counts, tokenizer=tokenizer, eos_ids=[2], all_special=True)
    assert len(every.special) == len(tokenizer.added_tokens_decoder) - 1
    with pytest.raises(DataError, match=r"mandatory ids \[64\] reach outside the verifier's 64"):
        mandatory_ids(counts, keep_ids=[64])
