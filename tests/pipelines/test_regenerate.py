"""Conversations answered again: the rows are what was generated, every record has one end, and no run loses or doubles one."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import shutil
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

from speculators.errors import ConfigError, DataError, VerifierError
from speculators.pipelines.answer_files import errors_file, run_file
from speculators.pipelines.regenerate import Records, regenerate
from speculators.pipelines.regenerate_inputs import open_records
from speculators.pipelines.regenerate_report import RegenerationReport
from speculators.pipelines.regenerate_settings import RegenerateSettings, parse_distribution, parse_sampling, temperature_of
from speculators.sampling import SamplingParams
from speculators.verifiers.answering import Answer, Failure, Outcome, Question
from speculators.verifiers.generation import generate_answers
from speculators.verifiers.loading import load_verifier
from speculators.verifiers.local_answers import LocalEngine
from tests.pipelines.scripted import END, TOKENIZER, ScriptedEngine, echo, spell
from tests.tiny import CHATML, tiny_tokenizer, tiny_verifier

Record = dict[str, Any]


def user(text: str) -> Record:
    return {"role": "user", "content": text}


OLD = {"role": "assistant", "content": "old"}
CONVERSATIONS: list[Any] = [
    {"id": "one", "messages": [user("hello"), OLD, user("and"), OLD, user("so")]},
    {"id": "two", "messages": [{"role": "system", "content": "be kind"}, user("hi"), OLD]},
    {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}, {"from": "human", "value": "c"}]},
    {"turns": ["first", "second", "third"]},
    {"prompt": "what is it"},
    *({"id": number, "messages": [user(f"number {number}"), OLD, user("more"), OLD]} for number in range(6)),
]


def records(given: list[Any] | None = None) -> Records:
    given = CONVERSATIONS if given is None else given
    digest = hashlib.sha256(json.dumps(given, default=str).encode()).hexdigest()
    return Records([("data.jsonl", index, record) for index, record in enumerate(given)], {"data.jsonl": digest}, len(given))


def run(
    outfile: Path,
    engine: Any = None,
    given: list[Any] | None = None,
    how: RegenerateSettings | None = None,
    *,
    resume: bool = False,
    eos_ids: tuple[int, ...] = (END,),
    tokenizer: Any = TOKENIZER,
) -> RegenerationReport:
    how = how or RegenerateSettings(max_tokens=20)
    engine = engine or ScriptedEngine()
    return regenerate(records(given), engine, tokenizer, outfile, how, eos_ids=eos_ids, resume=resume, progress=False)


def rows(outfile: Path) -> list[Record]:
    return [json.loads(line) for line in outfile.read_text(encoding="utf-8").splitlines()]


def by_id(outfile: Path) -> dict[str, Record]:
    found = rows(outfile)
    named = {row["id"]: row for row in found}
    assert len(named) == len(found), "a row is there twice"
    return named


def errors(outfile: Path) -> list[Record]:
    return rows(errors_file(outfile)) if errors_file(outfile).exists() else []


def test_rows_are_what_the_verifier_says_to_its_own_history(tmp_path: Path) -> None:
    """Against a plain loop over turns and conversations, in float64."""
    verifier = load_verifier(tiny_verifier(tmp_path, max_positions=200), dtype=torch.float64)
    outfile = tmp_path / "out.jsonl"
    report = run(outfile, LocalEngine(verifier, 3), eos_ids=verifier.eos_ids, how=RegenerateSettings(max_tokens=40))
    expected: dict[str, tuple[list[int], int]] = {}
    for index, record in enumerate(CONVERSATIONS):
        messages = record.get("messages", record.get("conversations", []))
        turns = [message.get("content", message.get("value")) for message in messages]
        turns = [text for text in turns if text not in ("old", "b", "be kind")] or record.get("turns") or [record["prompt"]]
        history = [{"role": "system", "content": "be kind"}] if index == 1 else []
        primary_id = hashlib.sha256(json.dumps(record, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
        for turn, text in enumerate(turns):
            history.append(user(text))
            prompt = TOKENIZER.apply_chat_template(history, add_generation_prompt=True, tokenize=True, return_dict=False)
            ((_, ids),) = generate_answers(verifier, [prompt], 40)
            expected[f"{record.get('id', primary_id)}_gen{turn}"] = ([*prompt, *ids], len(prompt))
            if ids[-1] not in verifier.eos_ids:
                break
            history.append({"role": "assistant", "content": TOKENIZER.decode(ids[:-1], skip_special_tokens=False)})
    found = by_id(outfile)
    assert found.keys() == expected.keys()
    for name, (ids, start) in expected.items():
        row = found[name]
        assert row["input_ids"] == ids
        assert row["loss_mask"] == [0] * start + [1] * (len(ids) - start)
        assert name == f"{row['primary_id']}_gen{row['metadata']['turn']}"
        assert row["metadata"]["usage"] == {
            "prompt_tokens": start,
            "completion_tokens": len(ids) - start,
            "total_tokens": len(ids),
        }
        assert row["metadata"]["exact_ids"] is True
        assert row["metadata"]["verifier"] == verifier.name
    assert report.records == len(CONVERSATIONS)
    assert report.finish_reasons == Counter(row["metadata"]["finish_reason"] for row in found.values())
    assert {"stop", "length"} <= report.finish_reasons.keys()
    assert report.tokens == report.new_tokens == sum(sum(row["loss_mask"]) for row in found.values())


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing interrupted, with drawn settings."""
    outfile = tmp_path_factory.mktemp("whole") / "out.jsonl"
    run(outfile, how=DRAWN)
    return outfile


DRAWN = RegenerateSettings(
    max_tokens=9, temperature=parse_distribution('{"0.0": 1, "0.7": 3}', "--temperature", temperature_of)
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(share=st.floats(0, 1), died=st.one_of(st.none(), st.integers(0, 12)))
def test_a_run_goes_on_behind_any_cut(share: float, died: int | None, whole: Path, tmp_path: Path) -> None:
    """Cut at any byte, perhaps a second time by a lost engine: the rows are those of the run that nothing interrupted."""
    outfile = tmp_path / "out.jsonl"
    for name in (outfile, errors_file(outfile)):
        name.unlink(missing_ok=True)
    shutil.copy(run_file(whole), run_file(outfile))
    content = whole.read_bytes()
    outfile.write_bytes(content[: int(share * len(content))])
    if died is not None:
        engine = ScriptedEngine(dies_after=died)
        try:
            run(outfile, engine, how=DRAWN)
        except VerifierError as error:
            assert "what is done is kept" in str(error)  # noqa: PT017
    kept = outfile.read_bytes().count(b"\n")
    engine = ScriptedEngine()
    report = run(outfile, engine, how=DRAWN)
    assert by_id(outfile) == by_id(whole)
    assert len(engine.asked) == len(by_id(whole)) - kept, "an answer that was there was asked for again"
    assert report.records == len(CONVERSATIONS)


def _slowly(outfile: Path) -> None:
    run(outfile, ScriptedEngine(seconds=0.01), how=DRAWN)


def test_kill_minus_nine(whole: Path, tmp_path: Path) -> None:
    outfile = tmp_path / "out.jsonl"
    context = multiprocessing.get_context("fork")
    kills = 0
    for _ in range(30):
        child = context.Process(target=_slowly, args=(outfile,))
        child.start()
        child.join(0.03 + 0.02 * kills)
        if child.exitcode is not None:
            break
        assert child.pid is not None
        os.kill(child.pid, signal.SIGKILL)
        child.join()
        kills += 1
    assert kills >= 2
    assert child.exitcode == 0
    assert by_id(outfile) == by_id(whole)


def test_other_settings_are_refused_unless_they_are_wanted(tmp_path: Path) -> None:
    outfile = tmp_path / "out.jsonl"
    with pytest.raises(VerifierError):
        run(outfile, ScriptedEngine(dies_after=4))
    before = outfile.read_bytes()
    more = RegenerateSettings(max_tokens=30)
    with pytest.raises(ConfigError, match=r"begun with other settings \(max_tokens\); .*--resume"):
        run(outfile, how=more)
    with pytest.raises(ConfigError, match=r"answers of another verifier or tokenizer \(verifier\)"):
        run(outfile, ScriptedEngine(name="other"), resume=True)
    with pytest.raises(ConfigError, match=r"other settings \(data\)"):
        run(outfile, given=CONVERSATIONS[:8])
    assert outfile.read_bytes() == before
    run(outfile, how=more, resume=True)
    assert Counter(row["metadata"]["sampling_params"]["max_tokens"] for row in rows(outfile))[20] == 4
    run(outfile, how=more)
    run_file(outfile).unlink()
    with pytest.raises(ConfigError, match=r"no out.run.json beside it says how it was made"):
        run(outfile, how=more)


def test_a_file_that_is_no_file_of_ours_is_refused(tmp_path: Path) -> None:
    outfile = tmp_path / "out.jsonl"
    run(outfile)
    lines = outfile.read_bytes().splitlines(keepends=True)
    for wrong in (b"{}\n", lines[0], b"[1]\n", b"\0\0\n"):
        outfile.write_bytes(b"".join([*lines[:3], wrong, *lines[3:]]))
        before = outfile.read_bytes()
        with pytest.raises(DataError, match=r"line 4 of .* is no row that this run could go on behind"):
            run(outfile)
        assert outfile.read_bytes() == before


def test_every_record_has_one_end(tmp_path: Path) -> None:
    def answer(question: Question) -> Outcome:
        text = TOKENIZER.decode(question.prompt)
        return Failure("no luck") if "fail" in text else spell("long " * 9 if "long" in text else "short", question.limit)

    tool = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    given = [
        {"prompt": "short"},
        {"messages": [user("long"), OLD, user("more")]},
        {"messages": [user("x"), tool, {"role": "tool", "content": "y"}, OLD]},
        {"prompt": "word " * 40},
        {"messages": [user("ok"), OLD, user("fail"), OLD]},
        DataError("record 5 is not JSON; repair it"),
        {"messages": [{"role": "alien", "content": "x"}]},
        {"messages": [OLD]},
        {"prompt": "short"},
        [1, 2],
    ]
    outfile = tmp_path / "out.jsonl"
    report = run(outfile, ScriptedEngine(answer, context_length=100), given)
    ends = {end: count for end, count in report.ends.items() if count}
    assert ends == {
        "answered": 1,
        "cut": 1,
        "tools_differ": 1,
        "prompt_too_long": 1,
        "failed": 1,
        "unreadable": 1,
        "not_a_conversation": 2,
        "nothing_to_answer": 1,
        "duplicate": 1,
    }
    assert report.records == len(given)
    assert report.finish_reasons == {"stop": 3, "length": 1, "error": 1}
    listed = {error["idx"]: error["outcome"] for error in errors(outfile)}
    assert listed == {
        2: "tools_differ",
        3: "prompt_too_long",
        4: "failed",
        5: "unreadable",
        6: "not_a_conversation",
        7: "nothing_to_answer",
        9: "not_a_conversation",
    }
    assert next(error for error in errors(outfile) if error["idx"] == 4)["reason"] == "no luck"
    lines = report.lines()
    assert lines[0] == "10 records -> 4 rows, 38 answer tokens"  # three times "short" and its end, and 20
    assert "finish reasons: stop 3, length 1, tool_calls 0, dropped 0, error 1" in lines

    # What failed is tried again, behind the answer that there was; all else stays.
    again = run(outfile, ScriptedEngine(lambda question: spell("now", question.limit), context_length=100), given)
    assert dict(again.ends) == {**report.ends, "answered": 2, "failed": 0}
    assert again.records == len(given)
    assert {error["idx"] for error in errors(outfile)} == listed.keys() - {4}
    assert len(errors(outfile)) == 6


def test_answers_that_the_limit_cuts(tmp_path: Path) -> None:
    def answer(question: Question) -> Outcome:
        return spell("much too long" if "long" in TOKENIZER.decode(question.prompt) else "ok", question.limit)

    given = [{"id": "x", "messages": [user("go"), OLD, user("long"), OLD, user("never asked")]}]
    for drop in (False, True):
        outfile = tmp_path / f"{drop}.jsonl"
        how = RegenerateSettings(max_tokens=5, drop_cut=drop)
        report = run(outfile, ScriptedEngine(answer), given, how)
        assert [row["id"] for row in rows(outfile)] == (["x_gen0"] if drop else ["x_gen0", "x_gen1"])
        assert report.ends["dropped" if drop else "cut"] == 1
        assert report.finish_reasons == ({"stop": 1, "dropped": 1} if drop else {"stop": 1, "length": 1})
        again = ScriptedEngine(answer)
        assert run(outfile, again, given, how).ends == report.ends
        assert not again.asked
    assert rows(tmp_path / "False.jsonl")[1]["text"] == "much "


def test_the_limit_is_of_the_answer_and_the_context_of_both(tmp_path: Path) -> None:
    """A prompt longer than --max-tokens is answered; prompt and answer never pass the context."""
    given = [{"id": length, "prompt": "x" * length} for length in (3, 60, 100, 104, 105, 300)]
    engine = ScriptedEngine(lambda question: spell("y" * 50, question.limit), context_length=128)
    report = run(tmp_path / "out.jsonl", engine, given, RegenerateSettings(max_tokens=16))
    around = len(TOKENIZER.apply_chat_template([user("")], add_generation_prompt=True, tokenize=True, return_dict=False))
    assert {len(question.prompt) - around: question.limit for question in engine.asked} == {
        length: min(16, 128 - around - length) for length in (3, 60, 100, 104, 105) if around + length < 128
    }
    assert report.ends["prompt_too_long"] == sum(around + length >= 128 for length in (3, 60, 100, 104, 105, 300)) > 0


def test_recorded_tool_results_are_spliced(tmp_path: Path) -> None:
    tokenizer = _with_tools()
    call = '<tool_call>{"name": "f", "arguments": {"a": 2}}</tool_call>'
    recorded = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]}
    given = [{"id": "t", "messages": [user("go"), recorded, {"role": "tool", "content": "result"}, OLD]}]
    outfile = tmp_path / "out.jsonl"

    def answer(question: Question) -> Outcome:
        ids = tokenizer("done" if "result" in tokenizer.decode(question.prompt) else call, add_special_tokens=False)[
            "input_ids"
        ]
        return Answer([*ids, END], "stop", 0, len(ids) + 1)

    report = run(outfile, ScriptedEngine(answer), given, RegenerateSettings(max_tokens=99), tokenizer=tokenizer)
    first, second = rows(outfile)
    assert (first["text"], first["metadata"]["is_tool_call"], first["metadata"]["finish_reason"]) == (call, True, "tool_calls")
    prompt = tokenizer.decode(second["input_ids"])
    assert "<|im_start|>assistant\nf 2<|im_end|>" in prompt  # the new call as the template writes calls, with its argument
    assert "tool\nresult<|im_end|>" in prompt
    assert report.ends["answered"] == 1
    assert report.finish_reasons == {"tool_calls": 1, "stop": 1}


def _with_tools() -> Any:
    tokenizer = tiny_tokenizer(
        "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
        "{% for call in message.tool_calls or [] %}{{ call.function.name }} {{ call.function.arguments.a }}{% endfor %}"
        "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    extra = ["tool", "<tool_call>", "</tool_call>", "{", "}", '"', ":"]
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in extra])
    return tokenizer


def test_ids_that_are_not_unique(tmp_path: Path) -> None:
    given = [
        {"id": 0, "prompt": "a"},
        {"id": 0, "prompt": "b"},
        {"id": 0, "prompt": "a"},
        {"id": 0, "prompt": "b"},
        {"uuid": "u", "prompt": "a"},
        {"prompt": "a"},
        {"prompt": "a"},
    ]
    outfile = tmp_path / "out.jsonl"
    report = run(outfile, given=given)
    assert report.ends["duplicate"] == 3
    names = list(by_id(outfile))
    assert {"0_gen0", "u_gen0"} < set(names)
    assert sum(name.startswith("0-") for name in names) == 1
    assert len(names) == 4
    again = ScriptedEngine()
    run(outfile, again, given=given)
    assert not again.asked


def test_draws_are_a_function_of_seed_conversation_and_turn(tmp_path: Path, whole: Path) -> None:
    shuffled = tmp_path / "shuffled.jsonl"
    run(shuffled, given=CONVERSATIONS[::-1], how=DRAWN)
    drawn = {name: row["metadata"]["sampling_params"] for name, row in by_id(whole).items()}
    assert drawn == {name: row["metadata"]["sampling_params"] for name, row in by_id(shuffled).items()}
    assert {params["temperature"] for params in drawn.values()} == {0.0, 0.7}
    assert len({params["seed"] for params in drawn.values()}) == len(drawn)
    other = tmp_path / "other.jsonl"
    run(other, how=RegenerateSettings(max_tokens=9, seed=1, temperature=DRAWN.temperature))
    assert drawn != {name: row["metadata"]["sampling_params"] for name, row in by_id(other).items()}


def test_distributions() -> None:
    half = parse_distribution('{"0.0": 3, "0.7": 1, "1.0": 0}', "--temperature", temperature_of)
    assert half is not None
    assert Counter(half.draw(place / 1000) for place in range(1000)) == {0.0: 750, 0.7: 250}
    one = parse_distribution("0.7", "--temperature", temperature_of)
    assert one is not None
    assert one.draw(0.999) == 0.7
    for wrong in ("warm", "-1", '{"0.1": -1}', '{"0.1": 0}', "{}", '{"0.1": "x"}', '{"x": 1}', "{", '{"0.1": true}'):
        with pytest.raises(ConfigError, match="--temperature"):
            parse_distribution(wrong, "--temperature", temperature_of)


def test_sampling_parameters() -> None:
    assert parse_sampling(None) == (SamplingParams(), {})
    assert parse_sampling('{"temperature": 0.5, "top_k": -1, "min_p": 0.1}') == (
        SamplingParams(temperature=0.5),
        {"min_p": 0.1},
    )
    for wrong, said in {"[]": "no JSON object", '{"top_p": 2}': "top_p", '{"seed": 1}': "--seed", '{"n": 2}': "itself"}.items():
        with pytest.raises(ConfigError, match=said):
            parse_sampling(wrong)


def test_languages(tmp_path: Path) -> None:
    given = [{"prompt": "a", "language": "EN"}, {"prompt": "b", "language": "fr"}, {"prompt": "c"}]
    report = run(tmp_path / "out.jsonl", given=given, how=RegenerateSettings(max_tokens=9, language="en"))
    assert (report.ends["answered"], report.ends["other_language"]) == (1, 2)
    with pytest.raises(DataError, match="none of 3 records says that its language is de"):
        run(tmp_path / "none.jsonl", given=given, how=RegenerateSettings(language="de"))


def test_reasoning_effort_reaches_the_template_or_is_refused(tmp_path: Path) -> None:
    how = RegenerateSettings(max_tokens=9, reasoning_effort=parse_distribution('{"low": 1, "high": 1}', "--x", str))
    with pytest.raises(ConfigError, match="knows no reasoning_effort"):
        run(tmp_path / "no.jsonl", how=how)
    tokenizer = tiny_tokenizer("<|im_start|>{{ reasoning_effort }}<|im_end|>" + CHATML)
    run(tmp_path / "out.jsonl", how=how, tokenizer=tokenizer)
    efforts = set()
    for row in rows(tmp_path / "out.jsonl"):
        effort = row["metadata"]["sampling_params"]["reasoning_effort"]
        assert tokenizer.decode(row["input_ids"]).startswith(f"<|im_start|>{effort}<|im_end|>")
        efforts.add(effort)
    assert efforts == {"low", "high"}


def test_text_of_a_server_is_tokenised_again_and_marked(tmp_path: Path) -> None:
    def answer(question: Question) -> Outcome:
        turn = sum(message["role"] == "assistant" for message in question.chat.messages) if question.chat else 0
        message = {"role": "assistant", "content": f"answer {turn}"}
        return Answer([], "stop" if turn < 2 else "length", 9, 9, message)

    outfile = tmp_path / "out.jsonl"
    run(outfile, ScriptedEngine(answer), CONVERSATIONS[:1])
    found = rows(outfile)
    assert [row["text"] for row in found] == ["answer 0", "answer 1", "answer 2"]
    for turn, row in enumerate(found):
        answered = [token for token, kept in zip(row["input_ids"], row["loss_mask"], strict=True) if kept]
        assert TOKENIZER.decode(answered) == f"answer {turn}" + ("<|im_end|>" if turn < 2 else "")
        assert row["metadata"]["exact_ids"] is False
    assert "answer 0" in TOKENIZER.decode(found[2]["input_ids"])
    lines = outfile.read_bytes().splitlines(keepends=True)
    outfile.write_bytes(lines[0])
    run(outfile, ScriptedEngine(answer), CONVERSATIONS[:1])
    assert outfile.read_bytes() == b"".join(lines)


def test_limits_of_conversations(tmp_path: Path) -> None:
    outfile = tmp_path / "out.jsonl"
    assert run(outfile, how=RegenerateSettings(max_tokens=20, limit=3)).records == 3
    assert run(outfile, how=RegenerateSettings(max_tokens=20, limit=5)).records == 5
    assert len({row["primary_id"] for row in rows(outfile)}) == 5


def test_inputs(tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text('{"question": "why", "answer": "so"}\n{broken\n{"prompt": "x"}\n', encoding="utf-8")
    opened = open_records(str(data))
    assert opened.total == 3
    kinds = [type(record).__name__ for _, _, record in opened.records]
    assert kinds == ["dict", "DataError", "dict"]
    with pytest.raises(ConfigError, match="--split and --subset"):
        open_records(str(data), split="train")
    with pytest.raises(DataError, match=r"hf:openai/gsm8k:main:test cannot be (reached|read)"):
        open_records("gsm8k", split="test")
    with pytest.raises(DataError, match="there is no data file absent"):
        open_records("absent")


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"there are no records in data.jsonl"):
        run(tmp_path / "out.jsonl", given=[])
    with pytest.raises(DataError, match="no chat template"):
        run(tmp_path / "out.jsonl", tokenizer=tiny_tokenizer(None))


def test_echo_depends_on_all_that_was_said() -> None:
    """The scripted engine would not notice a wrong history otherwise."""
    assert echo(Question(0, [1, 2, 3], 9)) != echo(Question(0, [1, 3, 2], 9))
