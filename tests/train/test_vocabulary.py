"""Which ids the draft may say, and which id is its mask token."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from speculators.data import Row, RowDataset, build_mapping, save_mapping, save_token_frequencies
from speculators.errors import ConfigError
from speculators.train.config import TrainConfig
from speculators.train.vocabulary import choose_mapping, choose_mask_token

VOCAB = 12
ROWS = RowDataset.from_rows(
    [Row(0, np.array([1, 7, 7, 5]), np.array([0, 1, 1, 1], bool)), Row(1, np.array([9, 9]), np.ones(2, bool))]
)


def kept(**settings: Any) -> list[int] | None:
    config = TrainConfig.from_flat(speculator_type="dspark", verifier_name_or_path="v", **settings)
    mapping = choose_mapping(config, vocab_size=VOCAB, eos_ids=(2,), dataset=ROWS, train_ids=np.array([0]))
    return None if mapping is None else mapping.draft_to_verifier.tolist()


def test_the_whole_vocabulary_unless_asked() -> None:
    assert kept() is None
    assert kept(draft_vocab_size=VOCAB) is None


def test_the_training_rows_are_counted_and_the_end_of_text_is_kept(tmp_path: Path) -> None:
    # 9 is in a row that is not trained on, 1 is not supervised; 0 fills up.
    assert kept(draft_vocab_size=4, data_path=str(tmp_path)) == [0, 2, 5, 7]


def test_counts_beside_the_data_and_named_ones_go_before(tmp_path: Path) -> None:
    counts = np.zeros(VOCAB, np.int64)
    counts[[8, 9, 10]] = 3, 2, 1
    save_token_frequencies(tmp_path / "token_freq.pt", counts)
    assert kept(draft_vocab_size=4, data_path=str(tmp_path)) == [2, 8, 9, 10]
    counts[11] = 9
    save_token_frequencies(tmp_path / "other.pt", counts)
    assert kept(draft_vocab_size=4, data_path=str(tmp_path), token_freq_path=str(tmp_path / "other.pt")) == [2, 8, 9, 11]


def test_a_mapping_left_in_the_folder_is_not_picked_up_unasked(tmp_path: Path) -> None:
    counts = np.zeros(VOCAB, np.int64)
    counts[[3, 4]] = 1
    save_mapping(tmp_path, build_mapping(counts, 2, VOCAB))
    files = {"d2t_path": str(tmp_path / "d2t-2.npy"), "t2d_path": str(tmp_path / "t2d-2.npy")}
    assert kept(draft_vocab_size=2, data_path=str(tmp_path)) == [2, 7]
    assert kept(draft_vocab_size=2, data_path=str(tmp_path), **files) == [3, 4]
    assert kept(data_path=str(tmp_path), **files) == [3, 4]


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
