"""docs/doctor.md lists every finding, as the code has it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from speculators.checks.catalogue import CATALOGUE, markdown_table

PAGE = Path(__file__).parents[2] / "docs" / "doctor.md"


@pytest.mark.parametrize("topic", CATALOGUE)
def test_the_page_shows_the_topics_table(topic: str) -> None:
    assert f"\n### {topic}\n\n{markdown_table(CATALOGUE[topic])}\n" in PAGE.read_text(encoding="utf-8")


def test_the_page_lists_no_other_findings() -> None:
    listed = re.findall(
        r"^\| `([a-z0-9-]+)` \| (?:error|warning|note) \|", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE
    )
    assert sorted(listed) == sorted(kind.id for kinds in CATALOGUE.values() for kind in kinds)


def test_ids_and_texts_are_written_as_they_should_be() -> None:
    for kind in (kind for kinds in CATALOGUE.values() for kind in kinds):
        assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", kind.id)
        for text in (kind.what, kind.causes, kind.fix):
            assert text.endswith("."), f"{kind.id}: {text}"
            assert "|" not in text, f"{kind.id}: {text}"
