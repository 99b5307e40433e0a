"""The verifier's own answers to the training prompts, as many as fit into a time budget, each kept as soon as it is done."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from speculators.data.rendering import on_policy_row
from speculators.data.rows import Row
from speculators.files import AppendedRecords

__all__ = ["RenderedPrompt", "collect_answers", "rows_of"]

#: Answers a list of prompts: yields (place in the list, answer ids) in any order. The second argument is to be asked before
#: every step; once it returns true, the answers begun are yielded as they are and no more are begun.
AnswerBatch = Callable[[Sequence[list[int]], Callable[[], bool]], Iterable[tuple[int, Sequence[int]]]]

#: Later calls get a little more than what the time is expected to hold, lest the batch run empty before the time is up.
SURPLUS = 1.1


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
    """Answer prompts in the given order until all are answered or the time is up.

    The first call answers one batch and shows the speed; later ones answer what the rest of the time is expected to hold,
    so that the running batch stays full. Answers that the end of the time cuts short are kept: a prefix of an answer is the
    verifier's own, too. Every answer is appended to the JSONL file ``path`` when it is done; a rerun goes on behind those,
    its time counted from what they had used.

    :param answer: answers some prompts.
    :param batch: prompts of the first call.
    :param advance: told the share of the work done so far, 0 to 1 (of the prompts or of the time, whichever is further).
    :returns: all records: ``index``, ``domain``, ``prompt_ids``, ``answer_ids``, ``seconds`` used so far.
    """
    with AppendedRecords(path) as log:
        done = {record["index"] for record in log.records}
        used_before = max((record["seconds"] for record in log.records), default=0.0)
        began = time.monotonic()

        def used() -> float:
            return used_before + time.monotonic() - began

        def tick() -> bool:
            advance(min(1.0, max(used() / seconds, len(log.records) / max(len(prompts), 1))))
            return used() >= seconds

        waiting = [prompt for prompt in prompts if prompt.index not in done]
        while waiting and (used() < seconds or not log.records):
            size = batch
            if log.records:
                size = max(batch, int(SURPLUS * len(log.records) * (seconds - used()) / max(used(), 1e-6)))
            chosen, waiting = waiting[:size], waiting[size:]
            for place, ids in answer([prompt.ids for prompt in chosen], tick):
                prompt = chosen[place]
                if len(ids):
                    record = {"index": prompt.index, "domain": prompt.domain, "prompt_ids": prompt.ids}
                    log.append(record | {"answer_ids": [int(token) for token in ids], "seconds": round(used(), 2)})
        tick()
        return log.records


def rows_of(records: Sequence[dict[str, Any]]) -> list[Row]:
    """Training rows in the order of the prompts, whatever order the answers came in; ids as generated."""
    ordered = sorted(records, key=lambda record: record["index"])
    return [on_policy_row(place, record["prompt_ids"], record["answer_ids"]) for place, record in enumerate(ordered)]
