"""Settings that another one leaves without effect are said, not swallowed."""

import warnings
from pathlib import Path
from typing import Any

import pytest

from tests.train.helpers import settings


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"from_pretrained": "draft", "draft_init": "verifier", "num_layers": ...}, "--draft-init has no effect"),
        ({"token_freq_path": "f.pt", "d2t_path": "d", "t2d_path": "t"}, "--token-freq-path has no effect"),
        ({"short_block_share": 0.3}, "--short-block-share has no effect without --short-block-size"),
    ],
)
def test_it_is_said(tmp_path: Path, changes: dict[str, Any], sentence: str) -> None:
    with pytest.warns(UserWarning, match=sentence):
        settings(tmp_path, **changes)


def test_nothing_is_said_otherwise(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        settings(tmp_path, short_block_size=2, short_block_share=0.3)
