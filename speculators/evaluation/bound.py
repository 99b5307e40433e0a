"""The machine's own bound on drafting: what a round costs, in units of one plain decoding step.

A round that drafts n tokens takes one verifier pass over n + 1 tokens and the drafting itself. If the pass costs v and the
drafting d plain steps, drafting pays as soon as a round yields more than v + d tokens, whatever the draft.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import TYPE_CHECKING

import torch

from speculators.evaluation.results import CostBound
from speculators.sampling import SamplingParams

if TYPE_CHECKING:
    from speculators.models.drafter import Drafter
    from speculators.verifiers.session import VerifierSession

__all__ = ["measure_bound", "seconds_per_step"]


@torch.no_grad()
def measure_bound(
    name: str,
    session: VerifierSession,
    drafter: Drafter,
    prompt: Sequence[int],
    counts: Sequence[int],
    *,
    sampling: SamplingParams | None = None,
    full_block: bool = False,
    repeats: int = 7,
) -> list[CostBound]:
    """Time verifier passes over 1 and n + 1 tokens, and drafting n tokens, in turn behind one prompt.

    :param session: a fresh session that captures the drafter's layers.
    :param prompt: token ids ``[T]``; its length is the context the costs hold for.
    :param counts: the numbers of draft tokens n.
    :returns: one bound per n; the medians of ``repeats`` timings each.
    """
    sampling = sampling if sampling is not None else SamplingParams()
    ids = torch.as_tensor(prompt, dtype=torch.long)
    output = session.prefill([ids])[0]
    device = output.logits.device
    anchor = int(output.logits[-1].argmax())
    features = output.features
    length = session.lengths[0]
    generator = torch.Generator(device)
    generator.manual_seed(0)
    drafter.start(1)
    drafter.extend([ids.to(device)], [features])

    def verify(tokens: int) -> None:
        session.verify([torch.full((tokens,), anchor, device=device)])
        session.rollback([length])

    def draft(n: int) -> None:
        # Two tokens are a typical round's; the drafter's context thus grows by two with every timing, which is nothing.
        drafter.extend([ids[:2].to(device)], [features[:2]])
        drafter.propose([anchor], n, sampling, generator, full_block=full_block)

    tasks: dict[tuple[str, int], Callable[[], None]] = {("verify", 0): lambda: verify(1)}
    for n in counts:
        tasks["verify", n] = lambda n=n: verify(n + 1)  # type: ignore[misc]
        tasks["draft", n] = lambda n=n: draft(n)  # type: ignore[misc]
    seconds: dict[tuple[str, int], list[float]] = {key: [] for key in tasks}
    for repeat in range(repeats + 1):
        for key, task in tasks.items():
            elapsed = _timed(task, device)
            if repeat > 0:  # the first turn warms up
                seconds[key].append(elapsed)
    one = median(seconds["verify", 0])
    bounds = []
    for n in counts:
        verify_ratio, draft_ratio = median(seconds["verify", n]) / one, median(seconds["draft", n]) / one
        bounds.append(
            CostBound(
                draft=name,
                n=n,
                verify_cost_ratio=verify_ratio,
                draft_cost_ratio=draft_ratio,
                break_even_acceptance_length=verify_ratio + draft_ratio,
            )
        )
    return bounds


@torch.no_grad()
def seconds_per_step(session: VerifierSession, context: int, repeats: int = 5) -> float:
    """Median time of one plain decoding step behind ``context`` tokens.

    :param session: a fresh session.
    """
    output = session.prefill([torch.zeros(context, dtype=torch.long)])[0]
    device, token = output.logits.device, torch.zeros(1, dtype=torch.long, device=output.logits.device)
    times = [_timed(lambda: session.verify([token]), device) for _ in range(repeats + 1)]
    return median(times[1:])


def _timed(task: Callable[[], object], device: torch.device) -> float:
    began = time.perf_counter()
    task()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began
