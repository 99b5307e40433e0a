"""Answers of the verifier to many prompts, as fast as a batch allows.

Rows join and leave the running batch one by one: a finished row's place goes to the next prompt, so that the batch stays
full to the end of the list and no pass is spent on finished rows. Prompts are taken longest first. Their tokens but the
last are prefilled without padding on the left and without the output head; the last one is then an ordinary decoding step.
"""

from __future__ import annotations

import heapq
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
from speculators.verifiers.running_batch import RunningBatch, running_batch

__all__ = ["Generation", "GenerationRow", "draw", "generate_answers"]

#: Called with the prompts finished and the tokens generated so far.
Progress = Callable[[int, int], None]

_STREAM = 0x616E73  # keeps these draws apart from every other use of the same seed
_NUCLEUS = 1024  # candidates to sort before sorting the whole vocabulary


@dataclass(slots=True, eq=False)
class GenerationRow:
    """A prompt and what has been generated behind it."""

    index: int  #: which prompt it is, for the caller
    prompt: Sequence[int]
    limit: int  #: most tokens to generate
    sampling: SamplingParams
    seed: tuple[int, ...]  #: seeds the draws, of which token t of the answer takes the t-th
    answer: list[int] = field(default_factory=list)
    _draws: np.random.Generator | None = None

    @property
    def newest(self) -> int:
        return self.answer[-1] if self.answer else self.prompt[-1]

    @property
    def position(self) -> int:
        """Position of the newest token."""
        return len(self.prompt) + len(self.answer) - 1

    def uniform(self) -> float:
        """A number in [0, 1) for the next token."""
        if self.sampling.greedy:
            return 0.0
        if self._draws is None:
            self._draws = np.random.default_rng([_STREAM, *self.seed])
        return float(self._draws.random())


class Generation:
    """Rows that wait for a place in the running batch, and those that have one; more may be added at any time.

    :param batch_size: rows that run at once; memory for keys and values grows with it.
    :param eos_ids: ids that end an answer; by default the verifier's end-of-sequence ids.
    """

    def __init__(self, verifier: Verifier, batch_size: int, eos_ids: Sequence[int] | None = None) -> None:
        self.verifier = verifier
        self.batch_size = batch_size
        self.tokens = 0  #: generated so far
        self.running: list[GenerationRow] = []
        self._waiting: list[tuple[int, int, GenerationRow]] = []
        self._added = 0
        self.eos_ids = frozenset(verifier.eos_ids if eos_ids is None else eos_ids)
        self._batch: RunningBatch | None = None

    def __len__(self) -> int:
        """Rows that are not finished."""
        return len(self.running) + len(self._waiting)

    def add(self, row: GenerationRow) -> None:
        """Let a row wait; the longest prompt is taken first, among equals the one that was added first."""
        heapq.heappush(self._waiting, (-len(row.prompt), self._added, row))
        self._added += 1

    def step(self) -> list[GenerationRow]:
        """Give free places to waiting rows, generate one token for every running row, and return those it finishes.

        A row is finished by one of :attr:`eos_ids`, which is its last token, or by its limit.
        """
        if self._batch is None:
            self._batch = running_batch(self.verifier, self.batch_size)
        batch, running = self._batch, self.running
        joining = [heapq.heappop(self._waiting)[2] for _ in range(min(batch.room, len(self._waiting)))]
        if joining:
            batch.add([row.prompt[:-1] for row in joining])
            running += joining
        if not running:
            return []
        logits = batch.step([row.newest for row in running], [row.position for row in running])
        drawn = _draw_rows(logits, running)
        self.tokens += len(drawn)
        done = []
        for place, (row, token) in enumerate(zip(running, drawn, strict=True)):
            row.answer.append(token)
            if token in self.eos_ids or len(row.answer) == row.limit:
                done.append(place)
        finished = [running[place] for place in done]
        for place in reversed(done):  # as the batch does: the last row takes the place of the one that leaves
            batch.remove(place)
            running[place] = running[-1]
            running.pop()
        return finished


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
    generation = Generation(verifier, min(batch_size, len(prompts)))
    for index, prompt in enumerate(prompts):
        limit = _limit(verifier, index, len(prompt), max_new_tokens)
        row_seed = (seed, index if row_ids is None else row_ids[index])
        generation.add(GenerationRow(index, [int(token) for token in prompt], limit, sampling, row_seed))
    return _answers(generation, len(prompts), progress, stop)


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


def _answers(
    generation: Generation, total: int, progress: bool | Progress, stop: Callable[[], bool] | None
) -> Iterator[tuple[int, list[int]]]:
    finished = 0
    with _reporter(progress, total) as report:
        while len(generation):
            if stop is not None and stop():
                yield from ((row.index, row.answer) for row in generation.running if row.answer)
                return
            leaving = generation.step()
            finished += len(leaving)
            report(finished, generation.tokens)
            for row in leaving:
                yield row.index, row.answer


def _draw_rows(logits: Tensor, rows: Sequence[GenerationRow]) -> list[int]:
    """The next token of every row, each from its own distribution: logits ``[rows, V]``."""
    uniforms = np.array([row.uniform() for row in rows])
    alike: dict[SamplingParams, list[int]] = {}
    for place, row in enumerate(rows):
        alike.setdefault(row.sampling, []).append(place)
    if len(alike) == 1:
        return draw(logits, rows[0].sampling, uniforms).tolist()
    drawn = [0] * len(rows)
    for sampling, places in alike.items():
        chosen = draw(logits[torch.tensor(places, device=logits.device)], sampling, uniforms[places])
        for place, token in zip(places, chosen.tolist(), strict=True):
            drawn[place] = token
    return drawn


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
