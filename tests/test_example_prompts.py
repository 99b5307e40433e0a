"""The example prompts are valid, many, and no two of them come from one template."""

from __future__ import annotations

import json
import re
from collections import Counter
from itertools import combinations
from pathlib import Path

import pytest

PROMPTS = Path(__file__).parent.parent / "examples" / "prompts"
DOMAINS = ("chat", "math", "code", "writing", "knowledge")


def read(domain: str) -> list[dict[str, str]]:
    lines = (PROMPTS / f"{domain}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


@pytest.fixture(scope="module")
def prompts() -> list[str]:
    return [row["prompt"] for domain in DOMAINS for row in read(domain)]


def template_tokens(prompt: str) -> frozenset[str]:
    """The words of a prompt once what a template would fill in (numbers and capitalised words) is blanked out."""
    words = re.findall(r"[A-Za-z']+|\d[\d.,:]*", prompt)
    return frozenset("#" if word[0].isdigit() or word[0].isupper() else word for word in words)


def test_there_is_a_file_for_every_domain_and_no_other() -> None:
    assert {path.stem for path in PROMPTS.glob("*.jsonl")} == set(DOMAINS)


@pytest.mark.parametrize("domain", DOMAINS)
def test_rows_are_well_formed(domain: str) -> None:
    for row in read(domain):
        assert set(row) == {"prompt", "domain"}
        assert row["domain"] == domain
        assert row["prompt"].strip() == row["prompt"] != ""


def test_there_are_enough_and_none_twice(prompts: list[str]) -> None:
    assert len(prompts) >= 300
    assert len({" ".join(prompt.lower().split()) for prompt in prompts}) == len(prompts)


def test_no_opening_is_used_often(prompts: list[str]) -> None:
    openings = Counter(" ".join(prompt.lower().split()[:3]) for prompt in prompts)
    assert [opening for opening, count in openings.items() if count > 3] == []


def test_no_two_prompts_share_a_template(prompts: list[str]) -> None:
    tokens = [(prompt, template_tokens(prompt)) for prompt in prompts]
    alike = [(first, second) for (first, a), (second, b) in combinations(tokens, 2) if len(a & b) >= 0.6 * len(a | b)]
    assert alike == []


def test_the_template_check_catches_a_template() -> None:
    first = template_tokens("Write a poem of 4 lines about Paris in spring.")
    second = template_tokens("Write a poem of 12 lines about Rome in spring.")
    assert first == second
