"""prepare-data --generate: the verifier answers the conversations, and its answers become the rows."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from speculators.data.conversations import record_id
from speculators.data.prepare import PrepareReport, check_output, prepare_data
from speculators.data.prepare_config import PrepareConfig
from speculators.data.readers import block_records, read_blocks
from speculators.data.render_blocks import order_key
from speculators.data.rows import AnswerRecord
from speculators.data.sources import Source, find_sources, source_hash
from speculators.data.tokenizers import LoadedTokenizer
from speculators.errors import ConfigError, DataError
from speculators.pipelines.answer_files import check_settings, errors_file, run_file
from speculators.pipelines.regenerate import Records, regenerate
from speculators.pipelines.regenerate_report import RegenerationReport
from speculators.pipelines.regenerate_settings import RegenerateSettings
from speculators.verifiers.answering import AnswerEngine

__all__ = ["ANSWERS", "prepare_answers"]

#: File of the answers, in the folder of the data set.
ANSWERS = "answers.jsonl"

#: More records than conversations wanted that are looked up at once, because some give none.
SPARE = 256


def prepare_answers(
    config: PrepareConfig,
    loaded: LoadedTokenizer,
    engine: AnswerEngine,
    settings: RegenerateSettings,
    *,
    progress: bool = False,
) -> tuple[RegenerationReport, PrepareReport]:
    """Let ``engine`` answer all assistant turns of the conversations into ``answers.jsonl``, and make rows of the answers.

    With ``max_samples``, as many conversations are answered, those that come first in the order of the data set. A run that
    was killed goes on behind its last answer.

    :raises DataError: as :func:`speculators.data.prepare.prepare_data`.
    :raises ConfigError: when the folder holds other rows or answers and ``overwrite`` is off; nothing was generated then.
    """
    sources = find_sources(config.data)
    hashes = {source.name: source_hash(source) for source in sources}
    settings = replace(settings, limit=config.max_samples)
    asked = {"sources": list(hashes.values()), **settings.record(), **engine.describe()}
    check_output(config, loaded, asked)
    answers = config.output / ANSWERS
    fixed = {"tokenizer": loaded.hash, "template": loaded.template_hash}
    if config.overwrite:
        _drop_other_answers(answers, {**engine.describe(), **fixed}, settings, hashes)
    few = config.max_samples
    records = _records(sources) if few is None else _first_records(sources, config.seed)
    total = sum(len(block) for block in read_blocks(sources)) if few is None else few
    answered = regenerate(
        Records(records, hashes, total),
        engine,
        loaded.tokenizer,
        answers,
        settings,
        eos_ids=loaded.eos_ids,
        hashes=fixed,
        progress=progress,
    )
    record = AnswerRecord(on_policy=True, max_new_tokens=settings.max_tokens, **settings.sampling.model_dump())
    rows = config.model_copy(update={"data": [str(answers)]})
    return answered, prepare_data(rows, loaded, answers=record, asked=asked, progress=progress)


def _drop_other_answers(
    answers: Path, fixed: Mapping[str, Any], settings: RegenerateSettings, sources: Mapping[str, str]
) -> None:
    """Remove answers that were generated otherwise; others are gone on with."""
    try:
        check_settings(answers, fixed, settings.record(), sources, resume=False)
    except ConfigError:
        for file in (answers, errors_file(answers), run_file(answers)):
            file.unlink(missing_ok=True)


def _records(sources: Sequence[Source]) -> Iterator[tuple[str, int, Any]]:
    for block in read_blocks(sources):
        for index, record in block_records(block):
            yield sources[block.source].name, index, record


def _key(seed: int, record: Any) -> int:
    """The key that the answers' rows will have in the data set."""
    own = record_id(record) if isinstance(record, dict) else None
    text = json.dumps(str(record) if isinstance(record, DataError) else record, sort_keys=True, separators=(",", ":"))
    return order_key(seed, own or hashlib.sha256(text.encode()).hexdigest(), "", 0)


def _first_records(sources: Sequence[Source], seed: int) -> Iterator[tuple[str, int, Any]]:
    """All records in the order of the data set, a few at a time in memory, as far as they are asked for."""
    keys = np.fromiter((_key(seed, record) for _, _, record in _records(sources)), dtype=np.int64)
    order = np.argsort(keys, kind="stable")
    first, size = 0, SPARE
    while first < len(order):
        wanted = {int(place): number for number, place in enumerate(order[first : first + size])}
        found = [(wanted[place], record) for place, record in enumerate(_records(sources)) if place in wanted]
        yield from (record for _, record in sorted(found, key=lambda each: each[0]))
        first, size = first + size, 4 * size
