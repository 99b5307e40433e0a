"""The split is by text, deterministic, and no prompt stands on both sides."""

from __future__ import annotations

from pathlib import Path

import pytest

from speculators.data.prompts import Prompt, find_prompt_files, load_human_eval, read_prompts
from speculators.errors import DataError
from speculators.pipelines.prompt_split import interleave, split_prompts


def prompts(count: int, word: str = "question") -> list[Prompt]:
    return [Prompt([{"role": "user", "content": f"{word} {index}"}], "file", index) for index in range(count)]


def texts(messages: list[list[dict[str, str]]]) -> set[str]:
    return {" ".join(prompt[-1]["content"].lower().split()) for prompt in messages}


def test_both_sides_are_disjoint_and_complete() -> None:
    split = split_prompts({"a": prompts(200), "b": prompts(50, "other")}, held_out_share=0.1, seed=0)
    for domain, count in (("a", 200), ("b", 50)):
        assert not texts(split.train[domain]) & texts(split.held_out[domain])
        assert len(split.train[domain]) + len(split.held_out[domain]) == count
    assert 8 <= len(split.held_out["a"]) <= 35


def test_order_and_company_do_not_matter_but_the_seed_does() -> None:
    one = split_prompts({"a": prompts(100)}, held_out_share=0.1, seed=0)
    other = split_prompts({"a": prompts(120)[::-1]}, held_out_share=0.1, seed=0)
    assert texts(one.held_out["a"]) <= texts(other.held_out["a"])
    assert texts(split_prompts({"a": prompts(100)}, held_out_share=0.1, seed=1).held_out["a"]) != texts(one.held_out["a"])


def test_the_same_words_are_one_prompt_across_files() -> None:
    shouted = [Prompt([{"role": "user", "content": f"QUESTION   {index}"}], "file", index) for index in range(150)]
    split = split_prompts({"a": prompts(100), "b": shouted}, held_out_share=0.1, seed=0)
    every = [*split.train["a"], *split.train["b"], *split.held_out["a"], *split.held_out["b"]]
    assert len(every) == len(texts(every)) == 150


def test_a_small_file_still_holds_one_out() -> None:
    split = split_prompts({"a": prompts(2)}, held_out_share=0.01, seed=0)
    assert (len(split.train["a"]), len(split.held_out["a"])) == (1, 1)
    with pytest.raises(DataError, match="at least 2"):
        split_prompts({"a": prompts(1)}, held_out_share=0.1, seed=0)


def test_interleaving_mixes_every_head_of_the_list() -> None:
    split = split_prompts({"a": prompts(300), "b": prompts(100, "other")}, held_out_share=0.1, seed=0)
    head = [domain for domain, _ in interleave(split.train, limit=80)]
    assert 50 <= head.count("a") <= 70


def test_the_repository_has_prompts_enough() -> None:
    files = {file.stem: read_prompts(file) for file in find_prompt_files()}
    split = split_prompts({**files, "humaneval": load_human_eval()}, held_out_share=0.1, seed=0)
    assert sum(map(len, split.train.values())) >= 400
    assert all(split.held_out.values())


def test_a_folder_without_prompts(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no prompt files \(\*\.jsonl\)"):
        find_prompt_files(tmp_path)
