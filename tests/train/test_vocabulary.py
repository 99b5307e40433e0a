"""Which ids the draft may say, and which id is its mask token."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from speculators.data import (
    DataManifest,
    Row,
    RowDataset,
    TokenCounts,
    build_mapping,
    save_counts,
    save_mapping,
    save_token_frequencies,
)
from speculators.data.vocabulary_files import MappingOrigin
from speculators.errors import ConfigError, DataError
from speculators.train.config import TrainConfig
from speculators.train.vocabulary import choose_mapping, choose_mask_token

VOCAB = 12
ROWS = RowDataset.from_rows(
    [Row(0, np.array([1, 7, 7, 5]), np.array([0, 1, 1, 1], bool)), Row(1, np.array([9, 9]), np.ones(2, bool))]
)


def kept(dataset: RowDataset = ROWS, **settings: Any) -> list[int] | None:
    config = TrainConfig.from_flat(speculator_type="dspark", verifier_name_or_path="v", **settings)
    mapping = choose_mapping(config, vocab_size=VOCAB, eos_ids=(2,), dataset=dataset, train_ids=np.array([0]))
    return None if mapping is None else mapping.draft_to_verifier.tolist()


def test_the_whole_vocabulary_unless_asked() -> None:
    assert kept() is None
    assert kept(draft_vocab_size=VOCAB) is None


def test_the_training_rows_are_counted_and_the_end_of_text_is_kept(tmp_path: Path) -> None:
    # 9 is in a row that is not trained on, 1 is not supervised; 0 fills up.
    assert kept(draft_vocab_size=4, data_path=str(tmp_path)) == [0, 2, 5, 7]


def some_counts() -> np.ndarray:
    counts = np.zeros(VOCAB, np.int64)
    counts[[8, 9, 10]] = 3, 2, 1
    return counts


def test_counts_beside_the_data_and_named_ones_go_before(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Counts of rows are used for these rows; for rows in memory, and rows that were replaced since, others are not."""
    counts, settings = some_counts(), {"draft_vocab_size": 4, "data_path": str(tmp_path)}
    rows = RowDataset.save(tmp_path, ROWS, DataManifest(tokenizer_hash="0a"))
    save_counts(tmp_path / "token_freq.pt", TokenCounts(counts, 2, "0a", (rows.fingerprint,)))
    assert kept(rows, **settings) == [2, 8, 9, 10]
    assert kept(ROWS, **settings) == [0, 2, 5, 7]
    counts[11] = 9
    save_token_frequencies(tmp_path / "other.pt", counts)
    assert kept(rows, **settings, token_freq_path=str(tmp_path / "other.pt")) == [2, 8, 9, 11]
    assert not caplog.records
    replaced = RowDataset.save(tmp_path, [*ROWS, ROWS[0]], DataManifest(tokenizer_hash="0a"), overwrite=True)
    assert kept(replaced, **settings) == [0, 2, 5, 7]
    assert "counts other rows than those" in caplog.text
    save_token_frequencies(tmp_path / "token_freq.pt", counts)
    assert kept(replaced, **settings) == [0, 2, 5, 7]
    assert "does not say which rows it counts; count them again; the training rows are counted instead" in caplog.text


def test_counts_of_others_beside_rows_of_others_are_a_pair(tmp_path: Path) -> None:
    rows = RowDataset.save(tmp_path, ROWS, DataManifest())
    save_token_frequencies(tmp_path / "token_freq.pt", some_counts())
    assert kept(rows, draft_vocab_size=4, data_path=str(tmp_path)) == [2, 8, 9, 10]


def test_counts_of_another_tokenizer_are_refused(tmp_path: Path) -> None:
    save_counts(tmp_path / "other.pt", TokenCounts(some_counts(), 2, "0b", ("f",)))
    named = {"draft_vocab_size": 4, "token_freq_path": str(tmp_path / "other.pt")}
    with pytest.raises(DataError, match="counted with the tokenizer 0b, but this one is 0a"):
        kept(RowDataset.from_rows(ROWS, DataManifest(tokenizer_hash="0a")), **named)
    assert kept(RowDataset.from_rows(ROWS, DataManifest(schema=1, tokenizer_hash="0a")), **named) == [2, 8, 9, 10]


def test_a_mapping_left_in_the_folder_is_not_picked_up_unasked(tmp_path: Path) -> None:
    counts = np.zeros(VOCAB, np.int64)
    counts[[3, 4]] = 1
    save_mapping(tmp_path, build_mapping(counts, 2, VOCAB))
    files = {"d2t_path": str(tmp_path / "d2t-2.npy"), "t2d_path": str(tmp_path / "t2d-2.npy")}
    assert kept(draft_vocab_size=2, data_path=str(tmp_path)) == [2, 7]
    assert kept(draft_vocab_size=2, data_path=str(tmp_path), **files) == [3, 4]
    assert kept(data_path=str(tmp_path), **files) == [3, 4]


def test_a_mapping_that_was_made_for_these_rows_is_used(tmp_path: Path) -> None:
    rows = RowDataset.save(tmp_path, ROWS, DataManifest())
    settings: dict[str, Any] = {"draft_vocab_size": 4, "data_path": str(tmp_path)}
    mapping = build_mapping(some_counts(), 4, VOCAB)
    for sources, expected in ((("other",), [0, 2, 5, 7]), ((), [0, 2, 5, 7]), (("other", rows.fingerprint), [0, 8, 9, 10])):
        save_mapping(tmp_path, mapping, MappingOrigin(sources=sources))
        assert kept(rows, **settings) == expected
    # Rows in memory have no folder to look into, another size has no mapping, and counts that are named go before it.
    assert kept(ROWS, **settings) == [0, 2, 5, 7]
    assert kept(rows, draft_vocab_size=3, data_path=str(tmp_path)) == [2, 5, 7]
    save_token_frequencies(tmp_path / "other.pt", some_counts())
    assert kept(rows, **settings, token_freq_path=str(tmp_path / "other.pt")) == [2, 8, 9, 10]
    # Tables that were swapped since are no mapping of these rows.
    for table, other in (("d2t", build_mapping(some_counts(), 4, VOCAB, [1]).d2t), ("t2d", mapping.t2d)):
        (tmp_path / f"{table}-4.npy").unlink()
        np.save(tmp_path / f"{table}-4.npy", other)
    with pytest.raises(DataError, match="do not describe the same ids"):
        kept(rows, **settings)


def test_a_size_without_anything_to_count_is_an_error() -> None:
    config = TrainConfig.from_flat(
        speculator_type="dspark", verifier_name_or_path="v", draft_vocab_size=4, data_path="/nowhere"
    )
    with pytest.raises(ConfigError, match="--draft-vocab-size needs token counts"):
        choose_mapping(config, vocab_size=VOCAB, eos_ids=(2,), dataset=None, train_ids=None)


class Tokenizer(SimpleNamespace):
    def __len__(self) -> int:
        return self.size


def test_mask_token_order() -> None:
    full = Tokenizer(size=VOCAB, mask_token_id=None, pad_token_id=4, eos_token_id=2, unk_token_id=None)
    assert choose_mask_token(11, full, VOCAB) == 11
    assert choose_mask_token(None, Tokenizer(size=VOCAB, mask_token_id=6), VOCAB) == 6
    assert choose_mask_token(None, Tokenizer(size=10, mask_token_id=None, pad_token_id=4), VOCAB) == 10
    with pytest.warns(UserWarning, match="pad token 4 becomes the mask token"):
        assert choose_mask_token(None, full, VOCAB) == 4
    bare = Tokenizer(size=VOCAB, mask_token_id=None, pad_token_id=None, eos_token_id=None, unk_token_id=None)
    with pytest.raises(ConfigError, match="--mask-token-id"):
        choose_mask_token(None, bare, VOCAB)
    with pytest.raises(ConfigError, match="outside the verifier's vocabulary"):
        choose_mask_token(VOCAB, full, VOCAB)
