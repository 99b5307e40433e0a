"""One flag with several values."""

from __future__ import annotations

import pytest

from speculators.cli.arguments import parse_counts, repeat_flag
from speculators.errors import ConfigError

FLAG = "--num-speculative-tokens"


@pytest.mark.parametrize(
    ("given", "read"),
    [
        (["ck", FLAG, "3", "7"], ["ck", FLAG, "3", FLAG, "7"]),
        (["ck", FLAG, "3", FLAG, "7"], ["ck", FLAG, "3", FLAG, "7"]),
        (["ck", FLAG, "3,7", "--limit", "2"], ["ck", FLAG, "3,7", "--limit", "2"]),
        ([FLAG, "3", "7", "ck"], [FLAG, "3", FLAG, "7", "ck"]),
        ([FLAG, "3", "--", "7"], [FLAG, "3", "--", "7"]),
        ([FLAG, "three", "7"], [FLAG, "three", FLAG, "7"]),
        ([FLAG], [FLAG]),
        (["--limit", "3", "7"], ["--limit", "3", "7"]),
    ],
)
def test_repeat_flag(given: list[str], read: list[str]) -> None:
    assert repeat_flag(given, FLAG) == read


def test_counts_are_sorted_and_unique() -> None:
    assert parse_counts(["7", "3,1", "3"], FLAG) == [1, 3, 7]


@pytest.mark.parametrize("bad", ["0", "-1", "x", "3,,7", ""])
def test_bad_counts_are_refused(bad: str) -> None:
    with pytest.raises(ConfigError, match="whole numbers of at least 1"):
        parse_counts([bad], FLAG)
