"""Conversations answered again: the rows are what was generated, every record has one end, and no run loses or doubles one."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import AddedToken

from speculators.errors import ConfigError, DataError
from speculators.pipelines.regenerate_settings import RegenerateSettings, parse_distribution
from speculators.verifiers.answering import Answer, Failure, Outcome, Question
from speculators.verifiers.generation import generate_answers
from speculators.verifiers.loading import load_verifier
from speculators.verifiers.local_answers import LocalEngine
from tests.pipelines.scripted import (
    CONVERSATIONS,
    END,
    OLD,
    TOKENIZER,
    ScriptedEngine,
    by_id,
    echo,
    errors,
    rows,
    run,
    spell,
    user,
)
from tests.tiny import CHATML, tiny_tokenizer, tiny_verifier


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


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"there are no records in data.jsonl"):
        run(tmp_path / "out.jsonl", given=[])
    with pytest.raises(DataError, match="no chat template"):
        run(tmp_path / "out.jsonl", tokenizer=tiny_tokenizer(None))


def test_echo_depends_on_all_that_was_said() -> None:
    """The scripted engine would not notice a wrong history otherwise."""
    assert echo(Question(0, [1, 2, 3], 9)) != echo(Question(0, [1, 3, 2], 9))
