"""prepare-data: every record accounted for, the order and the choice of rows, the same run done once, nothing lost."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from speculators.cli.prepare_data import main
from speculators.data import AnswerRecord, RowDataset, load_token_frequencies
from speculators.data import prepare as prepare_module
from speculators.data.accounting import OUTCOMES
from speculators.data.prepare import PrepareReport, prepare_data
from speculators.data.rendering import TemplateRenderer
from speculators.data.token_counts import load_counts
from speculators.errors import ConfigError, DataError, SpeculatorsError, VerifierError
from speculators.files import locked_folder
from tests.data.preparing import chat, config, loaded, write_lines
from tests.tiny import CHATML, tiny_tokenizer

#: One record for every outcome that the tiny tokenizer can bring about at a length of 60 and 3 supervised tokens.
RECORDS: list[tuple[object, str]] = [
    (chat("hi", "hello there"), "kept"),
    ({"conversations": [{"from": "human", "value": "two"}, {"from": "gpt", "value": "turns"}]}, "kept"),
    (chat("hi", "x" * 80), "truncated"),
    (chat("q" * 80, "never reached"), "prompt_too_long"),
    (chat("hi", "a"), "too_short"),
    (chat("hi"), "no_assistant_turn"),
    ({"prompt": "hi"}, "no_assistant_turn"),
    ({"messages": [{"role": "narrator", "content": "x"}]}, "not_a_conversation"),
    ({"input_ids": [5, 6, 7, 8, 9], "loss_mask": [0, 1, 1, 1, 1]}, "kept"),
    ({"input_ids": [5, 6, 7], "loss_mask": [0, 0, 1]}, "too_short"),
    ({"input_ids": [5, 6], "loss_mask": [0, 0]}, "nothing_supervised"),
    ({"input_ids": [5, 6], "loss_mask": [1]}, "not_a_conversation"),
    ({"input_ids": ["a"], "loss_mask": [1]}, "not_a_conversation"),
    ({"input_ids": [5, -6], "loss_mask": [0, 1]}, "not_a_conversation"),
    ("{broken", "unreadable"),
    ({"messages": [{"content": "hi", "role": "user"}, {"role": "assistant", "content": "hello there"}]}, "duplicate"),
    ({"input_ids": [5, 6, 7, 8, 9], "loss_mask": [0, 1, 1, 1, 1], "id": "x"}, "duplicate"),
    ({"messages": [{"role": "assistant", "content": "nobody asked"}]}, "nothing_supervised"),
]
LIMITS = {"seq_length": 60, "minimum_valid_tokens": 3}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_lines(tmp_path / "data.jsonl", [record for record, _ in RECORDS])


def prepared(data: Path | list[Path], output: Path, **changes: object) -> PrepareReport:
    return prepare_data(config(data, output, **{**LIMITS, **changes}), loaded())


def rows_of(report: PrepareReport) -> list[tuple[int, ...]]:
    assert report.dataset is not None
    return [tuple(row.input_ids.tolist()) for row in report.dataset]


def test_every_record_has_one_outcome(data: Path, tmp_path: Path) -> None:
    report = prepared(data, tmp_path / "output")
    expected = {key: sum(outcome == key for _, outcome in RECORDS) for key in OUTCOMES}
    assert report.account.totals() == expected
    assert report.account.records == len(RECORDS)
    assert not report.reused
    assert f"{len(RECORDS)} records -> 4 rows" in report.summary()

    listed = [json.loads(line) for line in (tmp_path / "output" / "rejected.jsonl").read_text().splitlines()]
    told = [(index, outcome) for index, (_, outcome) in enumerate(RECORDS) if outcome not in ("kept", "truncated")]
    assert [(line["index"], line["outcome"]) for line in listed] == told
    assert {line["source"] for line in listed} == {str(data)}
    reasons = {line["index"]: line["reason"] for line in listed}
    assert "unknown role 'narrator'" in reasons[7]
    assert reasons[15] == f"the same as record 0 of {data}"
    assert reasons[16] == f"the same as record 8 of {data}"

    stored = RowDataset.load(tmp_path / "output")
    manifest = stored.manifest
    assert manifest.counts == expected
    assert manifest.answers == AnswerRecord(on_policy=False)
    assert [(source.name, source.records, source.broken) for source in manifest.sources] == [(str(data), len(RECORDS), None)]
    assert manifest.tokenizer_hash == loaded().hash
    assert manifest.options["seq_length"] == 60
    assert stored.lengths.max() == 60
    counts = load_counts(tmp_path / "output" / "token_freq.pt", expect=stored.fingerprint, tokenizer_hash=loaded().hash)
    assert counts.counts.sum() == stored.supervised_tokens
    assert sorted(stored.origin(row).record for row in range(4)) == [0, 1, 2, 8]
    assert not list((tmp_path / "output").glob(".prepare-*"))


def test_the_account_by_source_and_in_words(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    array = tmp_path / "[" / "cut].json"  # markup, to a table
    array.parent.mkdir()
    array.write_text(json.dumps([chat("first", "answer one"), chat("second", "answer two")])[:-40])
    report = prepared([data, array], tmp_path / "output")
    account = report.account
    assert account.of_source(0) == {key: sum(outcome == key for _, outcome in RECORDS) for key in OUTCOMES}
    assert account.of_source(1) == dict.fromkeys(OUTCOMES, 0) | {"kept": 1, "unreadable": 1}
    assert any("cut].json" in remark and "breaks off" in remark for remark in account.remarks())
    sources = RowDataset.load(tmp_path / "output").manifest.sources
    assert sources[1].records == 2
    assert "breaks off" in str(sources[1].broken)
    from rich.console import Console

    Console(width=200).print(account.table())
    printed = capsys.readouterr().out
    assert str(len(RECORDS) + 2) in printed
    assert "the same as an earlier record" in printed


def test_rows_are_in_the_order_of_the_seed_with_conversations_together(data: Path, tmp_path: Path) -> None:
    orders = {tuple(rows_of(prepared(data, tmp_path / str(seed), seed=seed))) for seed in range(3)}
    assert len(orders) > 1
    assert len({frozenset(order) for order in orders}) == 1
    # Rows of one conversation, whether turns of one record or records with one id, stand together, in their order.
    records = [chat(f"question {number}", "answer a", "answer b", id=str(number % 4)) for number in range(8)]
    report = prepared(write_lines(tmp_path / "turns.jsonl", records), tmp_path / "turns", rows="turn", seq_length=200)
    dataset = report.dataset
    assert dataset is not None
    assert dataset.conversations is not None
    origins = [dataset.origin(row) for row in range(len(dataset))]
    assert len(origins) == 16
    assert [origin.record % 4 for origin in origins[::4]] == [origin.record % 4 for origin in origins[3::4]]
    assert [(origin.record >= 4, origin.turn) for origin in origins] == 4 * [(False, 1), (False, 3), (True, 1), (True, 3)]
    assert (dataset.conversations[:-1] <= dataset.conversations[1:]).all()


def test_max_samples_gives_the_first_rows_of_all(tmp_path: Path) -> None:
    records = [chat(f"question {number % 37}", *["answer"] * (1 + number % 3), id=str(number)) for number in range(60)]
    records[13] = "{broken"
    records[17] = chat("q" * 300, "too long")
    data = write_lines(tmp_path / "data.jsonl", records)
    limits = {"rows": "turn", "seq_length": 150, "minimum_valid_tokens": 1}
    everything = prepared(data, tmp_path / "all", **limits)
    whole, kept = rows_of(everything), {"kept", "truncated"}
    for most in (1, 7, 30, len(whole), len(whole) + 5):
        report = prepared(data, tmp_path / str(most), max_samples=most, **limits)
        assert rows_of(report) == whole[:most]
        totals = report.account.totals()
        assert sum(totals.values()) == len(records)
        assert totals["unreadable"] == 1
        if most <= 30:
            assert totals["not_needed"] > 10
            assert sum(totals[key] for key in kept) <= most
    assert not any("not_needed" in line for line in (tmp_path / "1" / "rejected.jsonl").read_text().splitlines())


@settings(max_examples=12, deadline=None)
@given(
    chosen=st.lists(st.integers(0, len(RECORDS) - 1), min_size=1, max_size=30),
    most=st.none() | st.integers(1, 8),
    rows=st.sampled_from(["auto", "turn"]),
    keep=st.booleans(),
    seed=st.integers(0, 3),
)
def test_buckets_always_add_up(chosen: list[int], most: int | None, rows: str, keep: bool, seed: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        data = write_lines(Path(folder) / "data.jsonl", [RECORDS[place][0] for place in chosen])
        changes = {"max_samples": most, "rows": rows, "keep_duplicates": keep, "seed": seed, "skip_token_freq": True}
        report = prepared(data, Path(folder) / "output", allow_empty_output=True, **changes)
        totals = report.account.totals()
        assert sum(totals.values()) == len(chosen)
        assert totals["unreadable"] == sum(RECORDS[place][1] == "unreadable" for place in chosen)
        told = [json.loads(line)["index"] for line in (Path(folder) / "output" / "rejected.jsonl").read_text().splitlines()]
        assert told == sorted(set(told))
        assert len(told) == len(chosen) - totals["kept"] - totals["truncated"] - totals["not_needed"]
        assert (report.dataset is None) == (totals["kept"] + totals["truncated"] == 0)


def test_duplicates_stay_where_that_is_wanted(data: Path, tmp_path: Path) -> None:
    report = prepared(data, tmp_path / "output", keep_duplicates=True)
    assert report.account.totals()["duplicate"] == 0
    assert len(rows_of(report)) == 6


def test_role_order_is_the_templates_or_ours(tmp_path: Path) -> None:
    twice = {"messages": [{"role": "user", "content": word} for word in ("one", "two")]}
    twice["messages"].append({"role": "assistant", "content": "answer"})
    data = write_lines(tmp_path / "data.jsonl", [twice, chat("hi", "hello")])
    outcomes = {}
    for policy in ("template", "merge", "strict"):
        report = prepared(data, tmp_path / policy, role_order=policy)
        outcomes[policy] = (report.account.totals()["kept"], report.account.totals()["role_order"])
    assert outcomes == {"template": (2, 0), "merge": (2, 0), "strict": (1, 1)}
    merged = set(rows_of(prepared(data, tmp_path / "merge", role_order="merge")))
    assert merged != set(rows_of(prepared(data, tmp_path / "template")))


def test_odd_rows_are_counted(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer("{{ bos_token }}{{ bos_token }}" + CHATML)
    tokenizer.bos_token = "<|unk|>"
    records = [
        chat("hi", "hello"),
        {"input_ids": [7, 8], "loss_mask": [1, 1]},
        {"input_ids": [7, 2], "loss_mask": [0, 1]},
    ]
    report = prepare_data(config(write_lines(tmp_path / "data.jsonl", records), tmp_path / "output"), loaded(tokenizer))
    assert dict(report.account.warnings) == {"two_bos": 1, "no_prompt": 1, "no_end_of_turn": 1}
    assert len(report.account.remarks()) == 3


def test_the_same_run_is_done_once_and_another_is_refused(data: Path, tmp_path: Path) -> None:
    output = tmp_path / "output"
    first = prepared(data, output)
    for name in ("token_freq.pt", "token_freq.json"):
        (output / name).unlink()
    again = prepared(data, output, num_preprocessing_workers=0)
    assert again.reused
    assert rows_of(again) == rows_of(first)
    assert again.account.totals() == first.account.totals()
    assert (output / "token_freq.pt").is_file()
    for change in ({"seq_length": 50}, {"seed": 1}, {"rows": "turn"}, {"chat_template_kwargs": {"x": 1}}, {"max_samples": 2}):
        with pytest.raises(ConfigError, match="rows of other data or settings"):
            prepared(data, output, **change)
    write_lines(data, [chat("hi", "other data")])
    with pytest.raises(ConfigError, match="rows of other data or settings"):
        prepared(data, output)
    (output / "notes.txt").write_text("mine")
    assert rows_of(first) == [tuple(row.input_ids.tolist()) for row in RowDataset.load(output)]
    assert len(rows_of(prepared(data, output, overwrite=True))) == 1
    assert (output / "notes.txt").read_text() == "mine"


def test_nothing_left_keeps_what_was_there_and_says_why(data: Path, tmp_path: Path) -> None:
    output = tmp_path / "output"
    first = prepared(data, output)
    listed = (output / "rejected.jsonl").read_text()
    with pytest.raises(DataError, match=r"no row is left of 18 records \(.*; the first: "):
        prepared(data, output, minimum_valid_tokens=1000, overwrite=True)
    assert not list(output.glob(".prepare-*"))
    assert rows_of(first) == [tuple(row.input_ids.tolist()) for row in RowDataset.load(output)]
    assert (output / "rejected.jsonl").read_text() == listed
    questions = write_lines(tmp_path / "questions.jsonl", [{"prompt": "hi"}])
    with pytest.raises(DataError, match="answer them with --generate"):
        prepared(questions, tmp_path / "new")
    (tmp_path / "none.json").write_text("[]")
    with pytest.raises(DataError, match="there are no records in"):
        prepared(tmp_path / "none.json", tmp_path / "new")
    allowed = prepared(questions, tmp_path / "new", allow_empty_output=True)
    assert allowed.dataset is None
    assert allowed.summary() == "1 records -> no rows"
    foreign = write_lines(tmp_path / "foreign.jsonl", [{"input_ids": [1, 300_000_000], "loss_mask": [0, 1]}])
    with pytest.raises(DataError, match="the token id 300000000, which is none of the verifier's"):
        prepared(foreign, tmp_path / "ids")
    assert "no_assistant_turn" in (tmp_path / "new" / "rejected.jsonl").read_text()


def test_what_was_made_of_a_folder_is_not_read_with_it(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(data.parent)
    first = prepared(Path("."), Path("rows"))
    assert prepare_data(config(Path("."), Path("rows"), **LIMITS), loaded()).reused
    with pytest.raises(ConfigError, match="is the folder of --data"):
        prepared(data.parent, Path("."))
    Path("rows/mine.arrow").touch()
    again = prepared(Path("."), Path("rows"), seed=1, overwrite=True)
    assert sorted(rows_of(again)) == sorted(rows_of(first))
    assert Path("rows/mine.arrow").exists()
    Path("here").mkdir()
    monkeypatch.chdir("here")  # a folder without a name
    assert rows_of(prepared(data, Path("."))) == rows_of(first)


def test_a_template_that_refuses_is_counted_and_a_missing_one_is_an_error(data: Path, tmp_path: Path) -> None:
    refusal = "{% if messages[0]['content'] == 'hi' %}{{ raise_exception('no greetings') }}{% endif %}"
    report = prepare_data(config(data, tmp_path / "output", **LIMITS), loaded(tiny_tokenizer(refusal + CHATML)))
    assert report.account.totals()["template_refused"] == 4
    assert "no greetings" in (tmp_path / "output" / "rejected.jsonl").read_text()
    with pytest.raises(DataError, match="no chat template"):
        prepare_data(config(data, tmp_path / "other", **LIMITS), loaded(tiny_tokenizer(None)))


@pytest.mark.parametrize("behind_the_rows", [True, False])
def test_a_kill_beside_the_rows_costs_no_list_of_rejected_records(
    behind_the_rows: bool, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "output"
    prepared(data, output, minimum_valid_tokens=1)
    old = (output / "rejected.jsonl").read_text()
    whole = prepared(data, tmp_path / "whole")
    listed = (tmp_path / "whole" / "rejected.jsonl").read_text()
    assert old != listed
    write = prepare_module.write_rows

    def killed(*arguments: object, **flags: object) -> None:
        if behind_the_rows:
            write(*arguments, **flags)
        raise KeyboardInterrupt  # as a kill: nothing of the library catches it

    monkeypatch.setattr(prepare_module, "write_rows", killed)
    with pytest.raises(KeyboardInterrupt):
        prepared(data, output, overwrite=True)
    monkeypatch.setattr(prepare_module, "write_rows", write)
    assert (output / "rejected.jsonl").read_text() == old
    (output / ".prepare-0123456789abcdef").mkdir()  # of another run that was killed
    report = prepared(data, output, overwrite=not behind_the_rows)
    assert report.reused == behind_the_rows
    assert rows_of(report) == rows_of(whole)
    assert (output / "rejected.jsonl").read_text() == listed
    left = {entry.name for entry in output.iterdir() if entry.name.startswith(".")}
    # A run that changes nothing leaves alone what other runs have begun, but not what its own left behind.
    assert left == {".prepare.lock", *([".prepare-0123456789abcdef"] if behind_the_rows else [])}


def test_a_second_process_is_refused(data: Path, tmp_path: Path) -> None:
    with locked_folder(tmp_path / "output", "--output", ".prepare.lock"), pytest.raises(SpeculatorsError, match="is in use by"):
        prepared(data, tmp_path / "output")


def test_a_tokenizer_that_does_not_allow_pieces_is_given_whole_texts(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = prepared(data, tmp_path / "plain")
    render = TemplateRenderer.rows
    seen = []

    def mismatch(self: TemplateRenderer, *arguments: object) -> object:
        seen.append(self._encoder is not None)
        if self._encoder is not None and len(seen) == 3:
            raise prepare_module.PieceMismatchError("pieces differ")
        return render(self, *arguments)

    monkeypatch.setattr(TemplateRenderer, "rows", mismatch)
    report = prepared(data, tmp_path / "output")
    assert report.whole
    assert seen[:3] == [True] * 3
    assert not any(seen[3:])
    assert rows_of(report) == rows_of(plain)


def test_command_line(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tmp_path / "model"
    tiny_tokenizer().save_pretrained(model)
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 0]}))
    (model / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 64}))
    output = tmp_path / "rows"
    arguments = ["--model", str(model), "--data", str(data), "--output", str(output), "--seq-length", "60"]
    elsewhere = ["--token-freq-path", str(tmp_path / "counts.pt")]
    for said in ("18 records -> 6 rows", "already holds these rows"):
        with pytest.raises(SystemExit) as exit_:
            main([*arguments, *elsewhere])
        assert exit_.value.code == 0
        printed = capsys.readouterr().out
        assert said in printed
        assert "refused" not in printed
        assert "not a conversation" in printed
    stored = RowDataset.load(output)
    assert stored.manifest.verifier == str(model)
    assert load_token_frequencies(tmp_path / "counts.pt").sum() == stored.supervised_tokens
    assert not (output / "token_freq.pt").exists()
    wrong = {
        "--seq-length is 1": ["--seq-length", "1"],
        "--rows is 'column'": ["--rows", "column"],
        "--role-order is 'any'": ["--role-order", "any"],
        "--chat-template-kwargs 3 is no JSON object": ["--chat-template-kwargs", "3"],
        "--num-preprocessing-workers is 999": ["--num-preprocessing-workers", "999"],
        '--chat-template-kwargs {"a": "': ["--chat-template-kwargs", '{"a": "\\ud800"}'],
        "--max-samples is 1000": ["--max-samples", "1" + "0" * 400],
        "--token-freq-path . is a folder": ["--token-freq-path", ""],
        "--render-endpoint has a name or password": ["--render-endpoint", "http://me:secret@localhost"],
        "--rows has no effect": ["--generate", "--rows", "turn"],
        "pass --overwrite": ["--seed", "3"],
    }
    for sentence, flags in wrong.items():
        with pytest.raises(ConfigError, match=sentence):
            main([*arguments, *flags])
    with pytest.raises(VerifierError, match="there is no verifier folder"):
        main(["--model", str(tmp_path / "none"), "--data", str(data)])
    with pytest.raises(VerifierError):
        main(["--model", str(tmp_path), "--data", str(data), "--output", str(tmp_path / "new")])
    with pytest.raises(SystemExit) as exit_:
        main(["--model", str(model)])
    assert exit_.value.code == 2
    with pytest.raises(SystemExit) as exit_:
        main([*arguments[:5], str(tmp_path / "few"), "--skip-token-freq", "--max-samples", "2", "--rows", "turn"])
    assert exit_.value.code == 0
    assert "18 records -> 2 rows" in capsys.readouterr().out
    assert not (tmp_path / "few" / "token_freq.pt").exists()
