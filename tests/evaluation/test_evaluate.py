"""A tiny random verifier and a random draft through the whole of ``speculators evaluate``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from speculators.__main__ import main
from speculators.evaluation.results import EvaluationResults, read_results
from tests.evaluation.drafts import random_checkpoint
from tests.evaluation.test_results import RUN_KEYS
from tests.tiny import tiny_verifier


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("evaluate")
    verifier = tiny_verifier(folder)
    random_checkpoint(verifier, folder / "draft")
    chat = ["hello there", "what is 1+1?", "say a word", "a longer question, to be sure", "sing", "count to 9"]
    (folder / "chat.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in chat))
    (folder / "turns.jsonl").write_text('{"turns": ["first", "second"]}\n{"messages": [{"role": "user", "content": "m"}]}\n')
    return folder


def evaluate(folder: Path, output: str, *flags: str) -> EvaluationResults:
    arguments = ["evaluate", str(folder / "draft"), "--data", str(folder / "chat.jsonl"), "--output", str(folder / output)]
    assert main([*arguments, "--max-new-tokens", "24", *flags]) == 0
    return read_results(folder / output)


def test_greedy_in_float64_is_identical_and_the_file_is_whole(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = evaluate(
        folder,
        "greedy",
        *("--data", str(folder / "turns.jsonl"), "--num-speculative-tokens", "3", "7", "--repeats", "2", "--no-markov"),
        *("--dtype", "float64", "--limit", "6"),
    )
    assert [(benchmark.name, benchmark.prompts) for benchmark in results.benchmarks] == [("chat", 6), ("turns", 2)]
    assert results.verifier == str(folder / "verifier")
    assert [(draft.name, draft.family, draft.layout, draft.markov) for draft in results.drafts] == [
        ("dspark", "dspark", "anchor-first", True),
        ("dspark without Markov", "dspark", "anchor-first", False),
    ]
    for benchmark in results.benchmarks:
        assert benchmark.baseline.repeats == 2
        assert len(benchmark.baseline.tokens_per_second_of_repeats) == 2
        assert [(run.draft, run.n) for run in benchmark.runs] == [("dspark", 3), ("dspark", 7), ("dspark without Markov", 7)]
        for run in benchmark.runs:
            assert run.identical_to_baseline is True
            assert len(run.tokens_per_second_of_repeats) == (1 if "without" in run.draft else 2)
            assert run.near_ties == []
            assert run.acceptance_length == pytest.approx(1 + run.accepted / run.rounds, abs=0.2)
            assert 1 <= len(run.acceptance_by_position) <= run.n
            assert run.speedup == pytest.approx(run.tokens_per_second / run.baseline_tokens_per_second)
            assert run.generated <= 24 * benchmark.prompts
            assert (run.ci95 is None) == (benchmark.prompts < 5)
    assert {(item.draft, item.n) for item in results.bound} == {(run.draft, run.n) for run in results.benchmarks[0].runs}
    written = json.loads((folder / "greedy" / "results.json").read_text())
    assert written["benchmarks"][0]["runs"][0].keys() >= RUN_KEYS
    assert written["settings"]["dtype"] == "float64"
    printed = capsys.readouterr().out
    assert "average" in printed
    assert "drafting pays" in printed


def test_sampling_claims_no_equality_and_is_seeded(folder: Path) -> None:
    flags = ("--temperature", "1.0", "--top-k", "20", "--top-p", "0.9", "--num-speculative-tokens", "4", "--limit", "3")
    first, again, other = (evaluate(folder, f"s{index}", *flags, "--seed", seed) for index, seed in enumerate("778"))
    run = first.benchmarks[0].runs[0]
    assert run.identical_to_baseline is None
    assert run.temperature == 1.0
    assert first.settings["top_k"] == 20

    def counts(results: EvaluationResults) -> tuple[int, int, int]:
        run = results.benchmarks[0].runs[0]
        return run.rounds, run.accepted, run.generated

    assert counts(first) == counts(again)
    assert counts(first) != counts(other)


def test_the_whole_block_drafts_the_same_tokens_of_a_causal_block(folder: Path) -> None:
    cut = evaluate(folder, "full", "--num-speculative-tokens", "3", "--limit", "2", "--draft-full-block")
    exact = evaluate(folder, "exact", "--num-speculative-tokens", "3", "--limit", "2")
    assert (cut.settings["draft_full_block"], exact.settings["draft_full_block"]) == (True, False)
    one, other = cut.benchmarks[0].runs[0], exact.benchmarks[0].runs[0]
    assert one.n == other.n == 3
    assert (one.drafted, one.accepted, one.rounds) == (other.drafted, other.accepted, other.rounds)
    assert one.acceptance_by_position == other.acceptance_by_position


def test_one_token_is_no_round_and_no_crash(folder: Path) -> None:
    results = evaluate(folder, "one", "--num-speculative-tokens", "3", "--limit", "2", "--max-new-tokens", "1")
    assert results.benchmarks[0].runs[0].rounds == 0
    assert results.average == []


def test_an_output_that_cannot_be_written_is_refused_first(folder: Path, tmp_path: Path, capsys, monkeypatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr("speculators.evaluation.command.load_verifier", lambda *args, **options: pytest.fail("too late"))
    arguments = ["evaluate", str(folder / "draft"), "--data", str(folder / "chat.jsonl")]
    assert main([*arguments, "--output", str(tmp_path / "file" / "out")]) == 1
    assert "cannot write" in capsys.readouterr().err


def test_a_disk_that_fills_up_meanwhile_costs_the_file_only(folder: Path, tmp_path: Path, capsys, monkeypatch) -> None:
    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("speculators.evaluation.results.write_results", full)
    arguments = ["evaluate", str(folder / "draft"), "--data", str(folder / "chat.jsonl"), "--limit", "1"]
    assert main([*arguments, "--max-new-tokens", "8", "--output", str(tmp_path / "out")]) == 1
    printed = capsys.readouterr()
    assert "average" in printed.out
    assert "the disk is full while writing" in printed.err


def test_prompts_that_fill_the_context_leave_room_for_the_bound(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "long.jsonl").write_text(json.dumps({"prompt": "x" * 485}) + "\n")
    arguments = ["evaluate", str(folder / "draft"), "--data", str(tmp_path / "long.jsonl"), "--max-new-tokens", "4"]
    assert main([*arguments, "--output", str(tmp_path / "out"), "--num-speculative-tokens", "7"]) == 0
    assert read_results(tmp_path / "out").bound[0].n == 7
