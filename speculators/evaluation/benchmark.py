"""Plain decoding and drafting over the same prompts, by the same code, in turn.

Every prompt is decoded in every way before the next one is begun, each time starting with another way, so that a machine that
slows down or speeds up meanwhile does so for all of them. Each way is warmed up once, which is not counted.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from statistics import median

from speculators.decoding.decoder import Decoded, Decoder
from speculators.decoding.near_ties import compare_greedy
from speculators.decoding.statistics import AcceptanceStatistics
from speculators.evaluation.bootstrap import acceptance_interval
from speculators.evaluation.results import Baseline, BenchmarkResult, DraftDescription, NearTieRecord, RunResult
from speculators.sampling import SamplingParams

__all__ = ["BenchmarkSettings", "PromptSet", "Way", "count_decodes", "run_benchmark"]

#: Tokens of the decode that warms a way up.
WARM_UP_TOKENS = 8


@dataclass(frozen=True)
class PromptSet:
    """A benchmark: prompts as token ids, each ready for the verifier."""

    name: str
    prompts: list[list[int]]


@dataclass(frozen=True)
class BenchmarkSettings:
    """What all ways have in common."""

    max_new_tokens: int = 128
    sampling: SamplingParams = field(default_factory=SamplingParams)
    repeats: int = 1
    eos_ids: Collection[int] = ()
    #: Whether the verifier computes precisely enough (float32 at least) for its greedy outputs to be compared.
    exact: bool = True


@dataclass(frozen=True)
class Way:
    """One way to decode: plainly (``draft`` None, n 0) or with a draft at one n.

    :param once: take part in the first repeat only; for a way whose acceptance is wanted and not its speed.
    """

    decoder: Decoder
    draft: DraftDescription | None = None
    once: bool = False

    @property
    def n(self) -> int:
        return self.decoder.num_draft_tokens


@dataclass
class _Measured:
    """Decodes of one way: ``[repeat][prompt]``."""

    way: Way
    decodes: list[list[Decoded]] = field(default_factory=list)

    def tokens_per_second(self) -> list[float]:
        """Of each repeat: tokens after each prompt's first (which the prefill gives) over the seconds they took."""
        speeds = []
        for repeat in self.decodes:
            seconds = sum(decoded.seconds.decoding for decoded in repeat if decoded.rounds)
            tokens = sum(len(decoded.tokens) - 1 for decoded in repeat if decoded.rounds)
            speeds.append(tokens / seconds if seconds > 0 else 0.0)
        return speeds


def count_decodes(sets: Sequence[PromptSet], ways: Sequence[Way], settings: BenchmarkSettings) -> int:
    """How many times ``advance`` will be called, for a progress bar."""
    return sum(len(prompts.prompts) for prompts in sets) * sum(1 if way.once else settings.repeats for way in ways)


def run_benchmark(
    prompts: PromptSet,
    plain: Way,
    drafted: Sequence[Way],
    settings: BenchmarkSettings,
    advance: Callable[[], None] = lambda: None,
) -> BenchmarkResult:
    """Measure one benchmark.

    :param plain: the baseline, n = 0.
    :param drafted: the ways to compare with it.
    :param advance: called after every counted decode.
    """
    measured = [_Measured(way) for way in (plain, *drafted)]
    for entry in measured:
        entry.way.decoder.decode(prompts.prompts[0], min(WARM_UP_TOKENS, settings.max_new_tokens), settings.eos_ids)
    for repeat in range(settings.repeats):
        taking_part = [entry for entry in measured if repeat == 0 or not entry.way.once]
        for entry in taking_part:
            entry.decodes.append([])
        for index, prompt in enumerate(prompts.prompts):
            first = (index + repeat) % len(taking_part)
            for entry in taking_part[first:] + taking_part[:first]:
                decoded = entry.way.decoder.decode(prompt, settings.max_new_tokens, settings.eos_ids, index=index)
                entry.decodes[-1].append(decoded)
                advance()
    speeds = measured[0].tokens_per_second()
    baseline = Baseline(tokens_per_second=median(speeds), repeats=settings.repeats, tokens_per_second_of_repeats=speeds)
    runs = [_run_result(entry, measured[0], baseline, prompts, settings) for entry in measured[1:]]
    return BenchmarkResult(name=prompts.name, prompts=len(prompts.prompts), baseline=baseline, runs=runs)


def _run_result(
    entry: _Measured,
    plain: _Measured,
    baseline: Baseline,
    prompts: PromptSet,
    settings: BenchmarkSettings,
) -> RunResult:
    """Speeds from all repeats; acceptance from the first, which the others only repeat token for token."""
    answers = entry.decodes[0]
    total = sum((decoded.statistics for decoded in answers), AcceptanceStatistics())
    speeds = entry.tokens_per_second()
    speed = median(speeds)
    reference = baseline.tokens_per_second
    identical, near_ties = _compare_with_plain(entry, plain, prompts, settings)
    per_prompt = [decoded.statistics for decoded in answers]
    return RunResult(
        draft=entry.way.draft.name if entry.way.draft is not None else "plain",
        n=entry.way.n,
        temperature=settings.sampling.temperature,
        tokens_per_second=speed,
        baseline_tokens_per_second=reference,
        speedup=speed / reference if reference > 0 else 0.0,
        acceptance_length=total.acceptance_length or 0.0,
        acceptance_by_position=total.acceptance_by_position,
        conditional_acceptance_by_position=total.conditional_acceptance_by_position,
        drafted=total.drafted,
        accepted=total.accepted,
        rounds=total.rounds,
        generated=total.generated,
        identical_to_baseline=identical,
        near_ties=near_ties,
        ci95=acceptance_interval([one.emitted for one in per_prompt], [one.rounds for one in per_prompt]),
        tokens_per_second_of_repeats=speeds,
    )


def _compare_with_plain(
    entry: _Measured, plain: _Measured, prompts: PromptSet, settings: BenchmarkSettings
) -> tuple[bool | None, list[NearTieRecord]]:
    """Whether greedy answers equal plain decoding's, near ties excepted; outside every timing.

    None where the question has no answer: for sampling, and below float32, whose rounding alone exceeds a near tie.
    """
    if not settings.sampling.greedy or not settings.exact:
        return None, []
    comparisons = [
        compare_greedy(
            entry.way.decoder,
            prompt,
            expected.tokens,
            decoded.tokens,
            settings.max_new_tokens,
            eos_ids=settings.eos_ids,
            prompt_index=index,
        )
        for index, (prompt, expected, decoded) in enumerate(
            zip(prompts.prompts, plain.decodes[0], entry.decodes[0], strict=True)
        )
    ]
    ties = [
        NearTieRecord(prompt=tie.prompt, position=tie.position, margin=tie.margin)
        for comparison in comparisons
        for tie in comparison.near_ties
    ]
    return all(comparison.identical_to_baseline for comparison in comparisons), ties
