"""Settings and tokenizers for tests of prepare-data."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from speculators.data.prepare_config import PrepareConfig
from speculators.data.tokenizers import LoadedTokenizer, template_hash, tokenizer_hash
from tests.tiny import tiny_tokenizer


def loaded(tokenizer: Any = None) -> LoadedTokenizer:
    """A tokenizer as ``load_tokenizer`` gives it, without a folder."""
    tokenizer = tiny_tokenizer() if tokenizer is None else tokenizer
    return LoadedTokenizer(tokenizer, "tiny", (tokenizer.eos_token_id,), tokenizer_hash(tokenizer), template_hash(tokenizer))


def config(data: Path | list[Path], output: Path, **changes: Any) -> PrepareConfig:
    paths = data if isinstance(data, list) else [data]
    return PrepareConfig.model_validate({"data": [str(path) for path in paths], "output": output, **changes})


def chat(question: str, *answers: str, **beside: Any) -> dict[str, Any]:
    """A conversation in which the same question comes before each answer; without an answer, the question alone."""
    messages = [{"role": "user", "content": question}]
    for answer in answers:
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "and?"}]
    return {"messages": messages[:-1] if answers else messages, **beside}


def write_lines(path: Path, records: Iterable[Any]) -> Path:
    """JSON Lines; texts are written as they are."""
    lines = (record if isinstance(record, str) else json.dumps(record) for record in records)
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return path
