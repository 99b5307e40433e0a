"""Answers are kept one by one, within a time budget, and a rerun goes on behind them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from speculators.pipelines.answers import RenderedPrompt, collect_answers, rows_of

PROMPTS = [RenderedPrompt(index, "chat", [index, 1]) for index in range(20)]


def echo(prompts: Sequence[list[int]], tick: Callable[[], bool]) -> Iterator[tuple[int, list[int]]]:
    """Answers in reverse order."""
    for place in reversed(range(len(prompts))):
        yield place, [prompts[place][0], 7]


def test_all_are_answered_and_rows_are_in_the_prompts_order(tmp_path: Path) -> None:
    records = collect_answers(tmp_path / "a.jsonl", PROMPTS, echo, batch=8, seconds=60)
    rows = rows_of(records)
    assert [row.input_ids.tolist() for row in rows] == [[index, 1, index, 7] for index in range(20)]
    assert rows[3].loss_mask.tolist() == [False, False, True, True]
    assert [row.row_id for row in rows] == list(range(20))


def test_a_kill_loses_only_what_was_not_done(tmp_path: Path) -> None:
    asked: list[int] = []

    def dies(prompts: Sequence[list[int]], tick: Callable[[], bool]) -> Iterator[tuple[int, list[int]]]:
        for place, prompt in enumerate(prompts):
            if len(asked) == 11:
                raise KeyboardInterrupt
            asked.append(prompt[0])
            yield place, [prompt[0], 7]

    with pytest.raises(KeyboardInterrupt):
        collect_answers(tmp_path / "a.jsonl", PROMPTS, dies, batch=8, seconds=60)
    again: list[int] = []

    def counted(prompts: Sequence[list[int]], tick: Callable[[], bool]) -> Iterator[tuple[int, list[int]]]:
        again.extend(prompt[0] for prompt in prompts)
        return echo(prompts, tick)

    records = collect_answers(tmp_path / "a.jsonl", PROMPTS, counted, batch=8, seconds=60)
    assert len(records) == 20
    assert sorted(again) == list(range(11, 20))


def test_the_time_is_kept_over_reruns_and_cut_answers_are_kept(tmp_path: Path) -> None:
    stopped: list[bool] = []

    def slow(prompts: Sequence[list[int]], tick: Callable[[], bool]) -> Iterator[tuple[int, list[int]]]:
        for answer in echo(prompts, tick):
            time.sleep(0.01)
            yield answer
            if tick():
                stopped.append(True)
                return

    prompts = [RenderedPrompt(index, "chat", [index, 1]) for index in range(200)]
    first = collect_answers(tmp_path / "a.jsonl", prompts, slow, batch=10, seconds=0.4)
    assert 10 <= len(first) <= 45
    assert stopped == [True]
    assert len(collect_answers(tmp_path / "a.jsonl", prompts, slow, batch=10, seconds=0.4)) == len(first)


def test_nothing_to_answer(tmp_path: Path) -> None:
    collect_answers(tmp_path / "a.jsonl", PROMPTS[:3], echo, batch=8, seconds=60)
    assert len(collect_answers(tmp_path / "a.jsonl", [], echo, batch=8, seconds=60)) == 3


def test_an_empty_answer_is_left_out(tmp_path: Path) -> None:
    def silent(prompts: Sequence[list[int]], tick: Callable[[], bool]) -> Iterator[tuple[int, list[int]]]:
        for place in range(len(prompts)):
            yield place, [] if place == 0 else [5]

    records = collect_answers(tmp_path / "a.jsonl", PROMPTS[:4], silent, batch=8, seconds=60)
    assert [record["index"] for record in records] == [1, 2, 3]
