"""The pruned vocabulary: selection, the offset convention, the files, and mappings that do not fit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from speculators.data import (
    VocabularyMapping,
    build_mapping,
    load_mapping,
    load_mapping_files,
    mapping_for,
    save_mapping,
)
from speculators.errors import ConfigError, DataError

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
    assert {path.name for path in tmp_path.iterdir()} == {"d2t-4.npy", "t2d-4.npy", "vocabulary-4.json"}
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
    first = mapping_for(tmp_path, COUNTS, 4, 10)
    written = (tmp_path / "d2t-4.npy").stat().st_mtime_ns
    assert mapping_for(tmp_path, COUNTS, 4, 10).hash == first.hash
    assert (tmp_path / "d2t-4.npy").stat().st_mtime_ns == written
    second = mapping_for(tmp_path, COUNTS[::-1].copy(), 4, 10, mandatory_ids=[3])
    assert second.hash != first.hash
    assert load_mapping(tmp_path, 4, 10).hash == second.hash
    # Another size lies beside it.
    mapping_for(tmp_path, COUNTS, 5, 10)
    assert load_mapping(tmp_path, 4, 10).hash == second.hash
