"""prepare-data: every record accounted for, the same run done once, on-policy rows, and the command line."""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import pytest

from speculators.cli.prepare_data import main
from speculators.data import AnswerRecord, RowDataset, load_token_frequencies, render_prompt
from speculators.data.prepare import OUTCOMES, PrepareConfig, prepare_data
from speculators.data.prompts import find_data_files
from speculators.errors import ConfigError, DataError, SpeculatorsError, VerifierError
from speculators.files import locked_folder
from tests.tiny import END_OF_TURN, tiny_tokenizer, tiny_verifier


def chat(question: str, *answers: str) -> dict[str, object]:
    messages = [{"role": "user", "content": question}]
    for answer in answers:
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "and?"}]
    return {"messages": messages[:-1] if answers else messages}


#: One record for every outcome that does not need generation.
RECORDS: list[tuple[object, str]] = [
    (chat("hi", "hello there"), "kept"),
    ({"conversations": [{"from": "human", "value": "two"}, {"from": "gpt", "value": "turns"}]}, "kept"),
    (chat("hi", "x" * 80), "kept_cut"),
    (chat("q" * 80, "never reached"), "nothing_supervised"),
    (chat("hi", "a"), "too_few_supervised"),
    (chat("hi"), "no_assistant_turn"),
    ({"prompt": "hi"}, "no_assistant_turn"),
    ({"messages": [{"role": "narrator", "content": "x"}]}, "not_a_conversation"),
    ({"input_ids": [5, 6, 7, 8, 9], "loss_mask": [0, 1, 1, 1, 1]}, "kept"),
    ({"input_ids": [5, 6, 7], "loss_mask": [0, 0, 1]}, "too_few_supervised"),
    ({"input_ids": [5, 6], "loss_mask": [0, 0]}, "nothing_supervised"),
    ({"input_ids": [5, 6], "loss_mask": [1]}, "not_a_conversation"),
    ({"input_ids": ["a"], "loss_mask": [1]}, "not_a_conversation"),
    ("{broken", "not_json"),
]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "data.jsonl"
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r, _ in RECORDS), encoding="utf-8")
    return path


def config(data: Path, tmp_path: Path, **changes: object) -> PrepareConfig:
    settings = {"data": [data], "output": tmp_path / "output", "seq_length": 60, "minimum_valid_tokens": 3, **changes}
    return PrepareConfig.model_validate(settings)


def test_every_record_has_one_outcome(data: Path, tmp_path: Path) -> None:
    report = prepare_data(config(data, tmp_path), tiny_tokenizer())
    expected = {key: sum(outcome == key for _, outcome in RECORDS) for key in OUTCOMES}
    assert report.outcomes == expected
    assert report.records == len(RECORDS)
    assert len(report.dataset) == 4
    assert not report.reused
    rejected = [json.loads(line) for line in (tmp_path / "output" / "rejected.jsonl").read_text().splitlines()]
    assert {(line["index"], line["outcome"]) for line in rejected} == {
        (index, outcome) for index, (_, outcome) in enumerate(RECORDS) if not outcome.startswith("kept")
    }
    assert any("unknown role 'narrator'" in line["reason"] for line in rejected)
    loaded = RowDataset.load(tmp_path / "output")
    assert loaded.manifest.counts == expected
    assert loaded.manifest.answers == AnswerRecord(on_policy=False)
    assert loaded.lengths.max() == 60
    counts = load_token_frequencies(tmp_path / "output" / "token_freq.pt")
    assert counts.sum() == loaded.supervised_tokens
    text = "\n".join(report.lines())
    assert "14 records -> 4 rows" in text
    assert "1 kept, cut at --seq-length" in text


def test_rows_are_in_the_order_of_the_seed_and_cut_to_max_samples(data: Path, tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    everything = [prepare_data(config(data, tmp_path / str(seed), seed=seed), tokenizer) for seed in range(3)]
    orders = {tuple(tuple(row.input_ids.tolist()) for row in report.dataset) for report in everything}
    assert len(orders) > 1
    assert len({frozenset(order) for order in orders}) == 1
    few = prepare_data(config(data, tmp_path / "few", max_samples=2), tokenizer)
    assert len(few.dataset) == 2
    assert few.records == len(RECORDS)
    assert few.outcomes["not_needed"] >= 2
    for row in range(2):
        assert few.dataset.row(row).input_ids.tolist() == everything[0].dataset.row(row).input_ids.tolist()


def test_the_same_run_is_done_once_and_another_is_refused(data: Path, tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    first = prepare_data(config(data, tmp_path), tokenizer)
    (tmp_path / "output" / "token_freq.pt").unlink()
    again = prepare_data(config(data, tmp_path), tokenizer)
    assert again.reused
    assert again.dataset.fingerprint == first.dataset.fingerprint
    assert again.outcomes == first.outcomes
    assert (tmp_path / "output" / "token_freq.pt").is_file()
    for other in (config(data, tmp_path, seq_length=50), config(data, tmp_path, seed=1)):
        with pytest.raises(ConfigError, match="rows of other data or settings"):
            prepare_data(other, tokenizer)
    data.write_text(json.dumps(chat("hi", "other data")) + "\n")
    with pytest.raises(ConfigError, match="rows of other data or settings"):
        prepare_data(config(data, tmp_path), tokenizer)
    assert RowDataset.load(tmp_path / "output").fingerprint == first.dataset.fingerprint
    replaced = prepare_data(config(data, tmp_path, overwrite=True), tokenizer)
    assert len(replaced.dataset) == 1


def test_nothing_left_keeps_what_was_there(data: Path, tmp_path: Path) -> None:
    first = prepare_data(config(data, tmp_path), tiny_tokenizer())
    with pytest.raises(DataError, match="no row is left of 14 records"):
        prepare_data(config(data, tmp_path, minimum_valid_tokens=1000, overwrite=True), tiny_tokenizer())
    assert RowDataset.load(tmp_path / "output").fingerprint == first.dataset.fingerprint
    questions = tmp_path / "questions.jsonl"
    questions.write_text('{"prompt": "hi"}\n')
    with pytest.raises(DataError, match="answer them with --generate"):
        prepare_data(config(questions, tmp_path / "new"), tiny_tokenizer())


def test_files_and_folders(data: Path, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    (folder / "deep").mkdir(parents=True)
    (folder / "b.jsonl").write_text("{}")
    (folder / "deep" / "a.json").write_text("[]")
    (folder / "notes.txt").write_text("")
    empty = tmp_path / "empty"
    empty.mkdir()
    assert find_data_files([folder, data]) == [folder / "b.jsonl", folder / "deep" / "a.json", data]
    with pytest.raises(DataError, match="no data file"):
        find_data_files([tmp_path / "missing.jsonl"])
    with pytest.raises(DataError, match="of a hub"):
        find_data_files([Path("hf:org/set")])
    with pytest.raises(DataError, match="holds no data file"):
        find_data_files([empty])


def test_a_template_that_refuses_is_counted_and_a_missing_one_is_an_error(data: Path, tmp_path: Path) -> None:
    refusal = "{% if messages[0]['content'] == 'hi' %}{{ raise_exception('no greetings') }}{% endif %}"
    template = refusal + "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    report = prepare_data(config(data, tmp_path), tiny_tokenizer(template))
    assert report.outcomes["template_refused"] == 3
    with pytest.raises(DataError, match="no chat template"):
        prepare_data(config(data, tmp_path / "other"), tiny_tokenizer(None))


def test_answers_by_the_verifier(data: Path, tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    end = tokenizer.convert_tokens_to_ids(END_OF_TURN)
    seen: list[list[int]] = []

    def answer(prompts: list[list[int]], numbers: list[int]) -> Iterable[tuple[int, list[int]]]:
        assert numbers == list(range(len(prompts)))
        seen.extend(prompts)
        # Out of order, one of them empty.
        for index in reversed(range(len(prompts))):
            yield index, [] if index == 0 else [10 + index, 11, 12, end]

    record = AnswerRecord(on_policy=True, temperature=0.7, max_new_tokens=4)
    report = prepare_data(config(data, tmp_path), tokenizer, answer=answer, answers=record)
    assert report.records == len(RECORDS)
    assert report.outcomes["empty_answer"] == 1
    assert report.outcomes["prompt_too_long"] == 1
    assert report.outcomes["kept"] == len(seen) - 1 == len(report.dataset)
    assert render_prompt(tokenizer, [{"role": "user", "content": "hi"}]) in seen
    loaded = RowDataset.load(tmp_path / "output")
    assert loaded.manifest.answers == record
    for number, row in enumerate(loaded, start=1):
        assert row.input_ids[~row.loss_mask].tolist() == seen[number]
        assert row.input_ids[row.loss_mask].tolist() == [10 + number, 11, 12, end]
    limited = prepare_data(config(data, tmp_path / "few", max_samples=2), tokenizer, answer=answer, answers=record)
    assert limited.outcomes["not_needed"] > 0
    assert limited.records == len(RECORDS)


def test_command_line(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tmp_path / "model"
    tiny_tokenizer().save_pretrained(model)
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 0]}))
    (model / "config.json").write_text(json.dumps({"model_type": "llama"}))
    output = tmp_path / "rows"
    arguments = ["--model", str(model), "--data", str(data), "--output", str(output), "--seq-length", "60"]
    for said in ("14 records -> 6 rows", "already holds these rows"):
        with pytest.raises(SystemExit) as exit_:
            main(arguments)
        assert exit_.value.code == 0
        assert said in capsys.readouterr().out
    assert RowDataset.load(output).manifest.verifier == str(model)
    with pytest.raises(ConfigError, match="--seq-length is 1"):
        main([*arguments, "--seq-length", "1"])
    with pytest.raises(ConfigError, match="pass --overwrite"):
        main([*arguments, "--seed", "3"])
    with pytest.raises(VerifierError, match="there is no verifier folder"):
        main(["--model", str(tmp_path / "none"), "--data", str(data)])
    with pytest.raises(VerifierError, match="cannot be loaded"):
        main(["--model", str(tmp_path), "--data", str(data), "--output", str(tmp_path / "new")])
    with pytest.raises(SystemExit) as exit_:
        main(["--model", str(model)])
    assert exit_.value.code == 2


def test_the_verifier_is_compared_by_what_it_is_not_by_its_spelling(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = tiny_tokenizer()
    record = AnswerRecord(on_policy=True, max_new_tokens=2)
    monkeypatch.chdir(tmp_path)
    for name in ("model", "other"):
        tokenizer.save_pretrained(tmp_path / name)
    (tmp_path / "link").symlink_to("model")

    def reused(verifier: str, output: str, **generation: object) -> bool:
        return prepare_data(config(data, tmp_path, verifier=verifier, output=Path(output)), tokenizer, **generation).reused

    generation = {"answer": lambda prompts, _: ((place, [7, 8, 9]) for place in range(len(prompts))), "answers": record}
    assert not reused("model", "rendered")
    assert not reused("model", "answered", **generation)
    for spelling in ("./model/", str(tmp_path / "model"), "link"):
        assert reused(spelling, "rendered")
        assert reused(spelling, "answered", **generation)
    assert reused("other", "rendered")  # the same tokenizer, therefore the same rows
    with pytest.raises(ConfigError, match="rows of other data or settings"):
        reused("other", "answered", **generation)  # other weights answer otherwise


def test_a_kill_while_answering_costs_the_answers_that_were_not_done(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    questions = tmp_path / "questions.jsonl"
    questions.write_text("".join(json.dumps({"prompt": f"question {number}"}) + "\n" for number in range(9)))
    record = AnswerRecord(on_policy=True, temperature=0.7, max_new_tokens=4)
    asked: list[list[int]] = []

    def answer(prompts: list[list[int]], numbers: list[int], most: int = 99) -> Iterable[tuple[int, list[int]]]:
        asked.append(numbers)
        for place in list(reversed(range(len(prompts))))[:most]:
            yield place, [10 + numbers[place], 11]
        if most < len(prompts):
            raise KeyboardInterrupt  # as a kill: nothing of the library catches it

    settings = config(questions, tmp_path, minimum_valid_tokens=1)
    whole = prepare_data(settings.model_copy(update={"output": tmp_path / "whole"}), tokenizer, answer=answer, answers=record)
    with pytest.raises(KeyboardInterrupt):
        prepare_data(settings, tokenizer, answer=partial(answer, most=4), answers=record)
    # What kills in the middle of a write leave.
    (tmp_path / "output" / ".token_freq.77.tmp.pt").write_bytes(b"torn")
    (tmp_path / ".output.77.tmp").mkdir()
    for other in (".output2.77.tmp", ".output.77.tmp.v2"):
        (tmp_path / other).mkdir()  # of another data set, which may be in the making
    report = prepare_data(settings, tokenizer, answer=answer, answers=record)
    assert asked == [list(range(9)), list(range(9)), [0, 1, 2, 3, 4]]
    assert report.dataset.fingerprint == whole.dataset.fingerprint
    names = {entry.name for entry in tmp_path.iterdir() if entry.name.startswith(".")}
    names |= {entry.name for entry in (tmp_path / "output").iterdir() if entry.name.startswith(".")}
    assert names == {".output2.77.tmp", ".output.77.tmp.v2", ".prepare.lock"}


@pytest.mark.parametrize("behind_the_rows", [True, False])
def test_a_kill_beside_the_rows_costs_no_list_of_rejected_records(
    behind_the_rows: bool, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = tiny_tokenizer()
    output = tmp_path / "output"
    prepare_data(config(data, tmp_path, minimum_valid_tokens=1), tokenizer)
    old = (output / "rejected.jsonl").read_text()
    whole = prepare_data(config(data, tmp_path, output=tmp_path / "whole"), tokenizer)
    listed = (tmp_path / "whole" / "rejected.jsonl").read_text()
    assert old != listed
    save = RowDataset.save

    def killed(*arguments: object, **flags: object) -> None:
        if behind_the_rows:
            save(*arguments, **flags)
        raise KeyboardInterrupt  # as a kill: nothing of the library catches it

    monkeypatch.setattr(RowDataset, "save", killed)
    with pytest.raises(KeyboardInterrupt):
        prepare_data(config(data, tmp_path, overwrite=True), tokenizer)
    monkeypatch.setattr(RowDataset, "save", save)
    assert (output / "rejected.jsonl").read_text() == old
    report = prepare_data(config(data, tmp_path, overwrite=not behind_the_rows), tokenizer)
    assert report.reused == behind_the_rows
    assert report.dataset.fingerprint == whole.dataset.fingerprint
    assert (output / "rejected.jsonl").read_text() == listed
    assert [entry.name for entry in output.iterdir() if entry.name.startswith(".")] == [".prepare.lock"]


def test_another_runs_answers_outlive_a_run_that_changes_nothing(data: Path, tmp_path: Path) -> None:
    prepare_data(config(data, tmp_path), tiny_tokenizer())
    others = tmp_path / "output" / ".answers-0123456789abcdef.jsonl"
    others.write_text('{"number": 0, "ids": [5]}\n')
    assert prepare_data(config(data, tmp_path), tiny_tokenizer()).reused
    assert others.exists()
    prepare_data(config(data, tmp_path, seed=1, overwrite=True), tiny_tokenizer())
    assert not others.exists()


def test_a_second_process_is_refused(data: Path, tmp_path: Path) -> None:
    with locked_folder(tmp_path / "output", "--output", ".prepare.lock"), pytest.raises(SpeculatorsError, match="is in use by"):
        prepare_data(config(data, tmp_path), tiny_tokenizer())


def test_generation_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("speculators.verifiers.generation")
    model = tiny_verifier(tmp_path)
    questions = tmp_path / "questions.jsonl"
    questions.write_text("".join(json.dumps({"prompt": f"question {number}"}) + "\n" for number in range(5)))
    arguments = ["--model", str(model), "--data", str(questions), "--seq-length", "64", "--generate", "--max-new-tokens", "8"]
    fingerprints = []
    for name in ("a", "b"):
        with pytest.raises(SystemExit) as exit_:
            main([*arguments, "--output", str(tmp_path / name)])
        assert exit_.value.code == 0
        assert "5 records -> 5 rows" in capsys.readouterr().out
        dataset = RowDataset.load(tmp_path / name)
        assert dataset.manifest.answers == AnswerRecord(on_policy=True, max_new_tokens=8)
        assert all(1 <= row.loss_mask.sum() <= 8 for row in dataset)
        fingerprints.append(dataset.fingerprint)
    assert fingerprints[0] == fingerprints[1]
