"""Answers of the verifier to many prompts, as fast as a batch allows.

Rows join and leave the running batch one by one: a finished row's place goes to the next prompt, so that the batch stays
full to the end of the list and no pass is spent on finished rows. Prompts are taken longest first. Their tokens but the
last are prefilled without padding on the left and without the output head; the last one is then an ordinary decoding step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from speculators.errors import DataError
from speculators.progress import bar
from speculators.sampling import SamplingParams, probabilities
from speculators.verifiers.loading import Verifier
from speculators.verifiers.running_batch import running_batch

__all__ = ["draw", "generate_answers"]

#: Called with the prompts finished and the tokens generated so far.
Progress = Callable[[int, int], None]

_STREAM = 0x616E73  # keeps these draws apart from every other use of the same seed
_NUCLEUS = 1024  # candidates to sort before sorting the whole vocabulary


@dataclass(slots=True)
class _Row:
    index: int
    prompt: list[int]
    limit: int  # most tokens to generate
    uniforms: np.ndarray | None  # one number in [0, 1) per generated token; None when greedy
    answer: list[int] = field(default_factory=list)

    @property
    def newest(self) -> int:
        return self.answer[-1] if self.answer else self.prompt[-1]

    @property
    def position(self) -> int:
        """Position of the newest token."""
        return len(self.prompt) + len(self.answer) - 1


def generate_answers(
    verifier: Verifier,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    sampling: SamplingParams | None = None,
    *,
    batch_size: int = 64,
    seed: int = 0,
    progress: bool | Progress = False,
    row_ids: Sequence[int] | None = None,
    stop: Callable[[], bool] | None = None,
) -> Iterator[tuple[int, list[int]]]:
    """Let the verifier answer prompts; yields ``(index of the prompt, token ids of the answer)`` as rows finish.

    An answer ends with one of the verifier's end-of-sequence ids, which is its last token, or after ``max_new_tokens`` tokens,
    or at the end of the context. Row i's draws are a pure function of (seed, row id, position of the token in the answer). Its
    logits depend on the rows beside it by rounding only; the same call gives the same answers.

    :param prompts: rendered prompts, verifier ids, at least one token each.
    :param sampling: greedy by default.
    :param batch_size: rows that run at once; memory for keys and values grows with it.
    :param progress: show a progress bar on standard error, or be called after every step.
    :param row_ids: what seeds each prompt's draws; by default its index.
    :param stop: asked before every step; once true, the answers begun are yielded as they are, cut, and no more are begun.
    :raises DataError: at once, when a prompt is empty or fills the context.
    """
    sampling = sampling if sampling is not None else SamplingParams()
    if max_new_tokens < 1 or batch_size < 1:
        raise DataError("generation needs at least one new token and one row a batch; raise max_new_tokens or batch_size")
    rows = []
    for index, prompt in enumerate(prompts):
        limit = _limit(verifier, index, len(prompt), max_new_tokens)
        row_id = index if row_ids is None else row_ids[index]
        rows.append(_Row(index, [int(token) for token in prompt], limit, _uniforms(sampling, seed, row_id, limit)))
    rows.sort(key=lambda row: (-len(row.prompt), row.index))
    return _answers(verifier, rows, sampling, batch_size, progress, stop)


def _limit(verifier: Verifier, index: int, length: int, max_new_tokens: int) -> int:
    if not length:
        raise DataError(f"prompt {index} is empty; give at least one token")
    if verifier.context_length is None:
        return max_new_tokens
    if length >= verifier.context_length:
        raise DataError(
            f"prompt {index} has {length} tokens, which leaves no room in the verifier's context of {verifier.context_length}; "
            "shorten it"
        )
    return min(max_new_tokens, verifier.context_length - length)


def _uniforms(sampling: SamplingParams, seed: int, row_id: int, count: int) -> np.ndarray | None:
    return None if sampling.greedy else np.random.default_rng([_STREAM, seed, row_id]).random(count)


def _answers(
    verifier: Verifier,
    rows: list[_Row],
    sampling: SamplingParams,
    batch_size: int,
    progress: bool | Progress,
    stop: Callable[[], bool] | None,
) -> Iterator[tuple[int, list[int]]]:
    waiting = deque(rows)
    running: list[_Row] = []
    batch = running_batch(verifier, min(batch_size, len(rows)))
    eos_ids = frozenset(verifier.eos_ids)
    finished = tokens = 0
    with _reporter(progress, len(rows)) as report:
        while waiting or running:
            if stop is not None and stop():
                yield from ((row.index, row.answer) for row in running if row.answer)
                return
            joining = [waiting.popleft() for _ in range(min(batch.room, len(waiting)))]
            if joining:
                batch.add([row.prompt[:-1] for row in joining])
                running += joining
            logits = batch.step([row.newest for row in running], [row.position for row in running])
            drawn = draw(logits, sampling, _next_uniforms(running)).tolist()
            done = []
            for place, (row, token) in enumerate(zip(running, drawn, strict=True)):
                row.answer.append(token)
                if token in eos_ids or len(row.answer) == row.limit:
                    done.append(place)
            leaving = [running[place] for place in done]
            for place in reversed(done):  # as the batch does: the last row takes the place of the one that leaves
                batch.remove(place)
                running[place] = running[-1]
                running.pop()
            tokens += len(drawn)
            finished += len(leaving)
            report(finished, tokens)
            for row in leaving:
                yield row.index, row.answer


def _next_uniforms(rows: list[_Row]) -> np.ndarray:
    return np.array([0.0 if row.uniforms is None else row.uniforms[len(row.answer)] for row in rows])


@torch.inference_mode()
def draw(logits: Tensor, sampling: SamplingParams, uniforms: np.ndarray) -> Tensor:
    """One token per row from the distribution that ``sampling`` makes of ``logits`` ``[B, V]``, by inverting its cumulative
    sum.

    :param uniforms: ``[B]`` numbers in [0, 1), the only randomness; not used when greedy.
    :returns: ids ``[B]``.
    """
    if sampling.greedy:
        return logits.argmax(dim=-1)
    candidates, ids = _candidates(logits, sampling)
    cumulative = candidates.double().cumsum(dim=-1)
    total = cumulative[:, -1]
    target = torch.minimum(torch.from_numpy(uniforms).to(total) * total, torch.nextafter(total, torch.zeros_like(total)))
    place = (cumulative <= target[:, None]).sum(dim=-1, keepdim=True)
    return ids.gather(1, place)[:, 0]


def _candidates(logits: Tensor, sampling: SamplingParams) -> tuple[Tensor, Tensor]:
    """The distribution over the tokens that can be drawn, and their ids: ``[B, C]`` both.

    The same as :func:`speculators.sampling.probabilities`, without sorting a whole vocabulary for a few candidates.
    """
    vocab_size = logits.shape[-1]
    if 0 < sampling.top_k < vocab_size:
        scores, ids = logits.topk(sampling.top_k, dim=-1)
        return probabilities(scores, sampling.model_copy(update={"top_k": 0})), ids
    if sampling.top_p < 1.0 and vocab_size > _NUCLEUS:
        likely, ids = probabilities(logits, sampling.without_filters()).topk(_NUCLEUS, dim=-1)
        mass = likely.cumsum(dim=-1)
        if bool((mass[:, -1] >= sampling.top_p).all()):
            kept = likely.masked_fill(mass - likely >= sampling.top_p, 0.0)
            return kept / kept.sum(dim=-1, keepdim=True), ids
    return probabilities(logits, sampling), torch.arange(vocab_size, device=logits.device).expand(logits.shape[0], -1)


@contextmanager
def _reporter(progress: bool | Progress, total: int) -> Iterator[Progress]:
    if callable(progress):
        yield progress
    elif not progress:
        yield lambda finished, tokens: None
    else:
        with bar("answers", total) as shown:
            yield lambda finished, tokens: shown.update(finished, f"{tokens} tokens")
