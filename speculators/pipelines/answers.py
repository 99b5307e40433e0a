"""The verifier's own answers to the training prompts, as many as fit into a time budget, each kept as soon as it is done."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from speculators.data.rendering import on_policy_row
from speculators.data.rows import Row
from speculators.pipelines.run_folder import AppendedRecords

__all__ = ["RenderedPrompt", "collect_answers", "rows_of"]

#: Answers a list of prompts: yields (place in the list, answer ids) in any order. The second argument is to be called now and
#: then, for the progress bar.
AnswerBatch = Callable[[Sequence[list[int]], Callable[[], None]], Iterable[tuple[int, Sequence[int]]]]

#: A batch smaller than this costs nearly as much as a full one and is not worth the time.
MIN_BATCH = 8


@dataclass(frozen=True)
class RenderedPrompt:
    """A training prompt ready for the verifier."""

    index: int  #: place in the run's list of training prompts
    domain: str
    ids: list[int]


def collect_answers(
    path: Path,
    prompts: Sequence[RenderedPrompt],
    answer: AnswerBatch,
    *,
    batch: int,
    seconds: float,
    advance: Callable[[float], None] = lambda _: None,
) -> list[dict[str, Any]]:
    """Answer prompts, batch after batch in the given order, until all are answered or the time is up.

    Every answer is appended to the JSONL file ``path`` when it is done; a rerun goes on behind those, its time counted from
    what they had used. A batch is begun only if the slowest one so far would still fit, smaller if need be.

    :param answer: answers a batch of prompts.
    :param advance: told the share of the work done so far, 0 to 1 (of the prompts or of the time, whichever is further).
    :returns: all records: ``index``, ``domain``, ``prompt_ids``, ``answer_ids``, ``seconds`` used so far.
    """
    with AppendedRecords(path) as log:
        done = {record["index"] for record in log.records}
        used_before = max((record["seconds"] for record in log.records), default=0.0)
        began = time.monotonic()
        waiting = [prompt for prompt in prompts if prompt.index not in done]

        def used_seconds() -> float:
            return used_before + time.monotonic() - began

        def tick() -> None:
            advance(min(1.0, max(used_seconds() / seconds, len(log.records) / len(prompts))))

        per_prompt = 0.0
        while waiting:
            used = used_seconds()
            size = min(batch, len(waiting))
            if log.records and per_prompt > 0:
                # Time goes with the steps of a batch more than with its rows, so a half batch saves less than half.
                size = min(size, int((seconds - used) / per_prompt))
            if used >= seconds or size < min(MIN_BATCH, len(waiting)):
                break
            chosen, waiting = waiting[:size], waiting[size:]
            batch_began = time.monotonic()
            for place, ids in answer([prompt.ids for prompt in chosen], tick):
                prompt = chosen[place]
                if len(ids):
                    record = {"index": prompt.index, "domain": prompt.domain, "prompt_ids": prompt.ids}
                    log.append(record | {"answer_ids": [int(token) for token in ids], "seconds": round(used_seconds(), 2)})
                tick()
            per_prompt = max(per_prompt, (time.monotonic() - batch_began) / size)
        return log.records


def rows_of(records: Sequence[dict[str, Any]]) -> list[Row]:
    """Training rows in the order of the prompts, whatever order the answers came in; ids as generated."""
    ordered = sorted(records, key=lambda record: record["index"])
    return [on_policy_row(place, record["prompt_ids"], record["answer_ids"]) for place, record in enumerate(ordered)]
