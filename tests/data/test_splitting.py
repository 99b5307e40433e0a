"""Which rows are trained on: a share of them, never a part of a conversation."""

from __future__ import annotations

import warnings
from pathlib import Path

import datasets
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from speculators.data import DataManifest, Row, RowDataset, split_rows
from speculators.errors import ConfigError, DataError


def rows_of(conversations: list[int] | None, count: int = 0) -> RowDataset:
    """A row of one token for every entry."""
    count = count if conversations is None else len(conversations)
    rows = [Row(index, np.array([index]), np.ones(1, bool)) for index in range(count)]
    return RowDataset.from_rows(rows, conversations=conversations)


@given(
    st.lists(st.integers(1, 6), min_size=1, max_size=30),
    st.floats(0.05, 1.0),
    st.randoms(use_true_random=False),
    st.booleans(),
)
def test_no_conversation_is_on_both_sides(sizes: list[int], ratio: float, random, shuffled: bool) -> None:
    names = [random.randint(-(2**40), 2**40) * 64 + place for place in range(len(sizes))]
    conversations = [name for name, size in zip(names, sizes) for _ in range(size)]
    if shuffled:
        random.shuffle(conversations)
    wanted = int(len(conversations) * ratio)
    if not wanted:
        with pytest.raises(DataError, match="none to train on"):
            split_rows(rows_of(conversations), ratio)
        return
    train, held_out = split_rows(rows_of(conversations), ratio)
    assert sorted([*train, *held_out]) == list(range(len(conversations)))
    assert list(train) == sorted(train)
    assert list(held_out) == sorted(held_out)
    of = np.array(conversations)
    assert not set(of[train]) & set(of[held_out])
    assert len(train)
    assert len(held_out) or ratio == 1 or len(sizes) == 1
    assert abs(len(train) - wanted) < max(sizes) or len(sizes) == 1
    if not shuffled:
        assert train.tolist() == list(range(len(train)))


def test_the_border_moves_to_the_nearer_end_of_a_conversation() -> None:
    assert [len(part) for part in split_rows(rows_of([7, 7, 7, 7, 3, 3, 3, 3]), 0.4)] == [4, 4]
    assert [len(part) for part in split_rows(rows_of([7, 3, 3, 3, 3, 3, 3, 5]), 0.4)] == [1, 7]
    assert [len(part) for part in split_rows(rows_of([1, 1, 2, 2]), 0.75)] == [2, 2]  # as near, and something to validate on
    assert [len(part) for part in split_rows(rows_of([1, 1, 1]), 0.9)] == [3, 0]


def test_rows_of_a_conversation_apart_from_the_others_go_with_them() -> None:
    train, held_out = split_rows(rows_of([4, 4, 9, 9, 4]), 0.6)
    assert train.tolist() == [0, 1, 4]
    assert held_out.tolist() == [2, 3]


def test_rows_without_conversations_are_cut_as_upstream_cuts_them() -> None:
    ten = rows_of(None, 10)
    train, held_out = split_rows(ten, 0.9)
    assert train.tolist() == list(range(9))
    assert held_out.tolist() == [9]
    assert split_rows(ten, 1.0)[1].tolist() == []
    assert [len(part) for part in split_rows(rows_of(None, 3), 0.5)] == [1, 2]
    for ratio in (0.0, 1.1, -0.5):
        with pytest.raises(ConfigError, match="ratio"):
            split_rows(ten, ratio)
    with pytest.raises(DataError, match="none to train on"):
        split_rows(rows_of(None, 1), 0.9)


def test_what_may_leak_is_said(tmp_path: Path) -> None:
    records = {"input_ids": [[1, 2]] * 4, "loss_mask": [[0, 1]] * 4, "seq_len": [2] * 4}
    datasets.Dataset.from_dict(records).save_to_disk(str(tmp_path / "theirs"))
    theirs = RowDataset.load(tmp_path / "theirs")
    with pytest.warns(UserWarning, match="does not say which conversation a row is of"):
        split_rows(theirs, 0.5)
    rows = list(theirs)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        split_rows(theirs, 1.0)
        # One row of every record, by the account of the run that wrote them.
        split_rows(RowDataset.save(tmp_path / "single", rows, DataManifest(counts={"kept": 3, "kept_cut": 1})), 0.5)
        split_rows(RowDataset.save(tmp_path / "known", rows, DataManifest(), conversations=[1, 1, 2, 2]), 0.5)
