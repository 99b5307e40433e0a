"""The examples and tables of docs/layouts.md are what the code prints."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

import pytest

from speculators.layout import BlockLayout, truth_table

PAGE = Path(__file__).parent.parent / "docs" / "layouts.md"


def run_examples(text: str) -> doctest.TestResults:
    """Run the page's ``python`` blocks in one namespace."""
    code = "\n".join(re.findall(r"^```python\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE))
    examples = doctest.DocTestParser().get_doctest(code, {}, PAGE.name, str(PAGE), 0)
    return doctest.DocTestRunner(verbose=False).run(examples, out=lambda _: None)


@pytest.mark.parametrize("sample_from_anchor", [True, False])
def test_the_page_shows_the_layouts_truth_table(sample_from_anchor: bool) -> None:
    layout = BlockLayout(block_size=8, sample_from_anchor=sample_from_anchor)
    assert f"\n{truth_table(layout, anchor=10)}\n" in PAGE.read_text(encoding="utf-8")


def test_the_pages_examples_print_what_it_says() -> None:
    text = PAGE.read_text(encoding="utf-8")
    results = run_examples(text)
    assert results.attempted == text.count("\n>>> ")
    assert results.failed == 0


def test_a_wrong_line_on_the_page_is_noticed() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert run_examples(text.replace("\n1 | 11 | x12", "\n1 | 11 | x13", 1)).failed == 1
