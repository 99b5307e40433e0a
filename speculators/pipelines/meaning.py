"""What a quickstart's figures mean, in a few sentences."""

from __future__ import annotations

from speculators.evaluation.results import Average, EvaluationResults

__all__ = ["what_it_means"]


def what_it_means(results: EvaluationResults) -> str:
    """Acceptance at the largest n, what the Markov head gives, the best n by wall clock, and what would have to be better."""
    drafts = {draft.name: draft for draft in results.drafts}
    whole = [entry for entry in results.average if drafts[entry.draft].markov is not False]
    if not whole:
        return "nothing was drafted"
    longest = max(whole, key=lambda entry: entry.n)
    sentences = [
        f"On held-out prompts a round of {longest.n} drafted tokens yields {longest.acceptance_length:.2f} tokens"
        + _markov_clause(results, longest)
        + "."
    ]
    best = max(whole, key=lambda entry: entry.speedup)
    baseline = sum(benchmark.baseline.tokens_per_second for benchmark in results.benchmarks) / len(results.benchmarks)
    if best.speedup > 1.0:
        sentences.append(f"It decodes fastest with n={best.n}: {best.speedup:.2f} times plain decoding's {baseline:.1f} tok/s.")
    else:
        sentences.append(
            f"It does not yet decode faster than plain decoding ({baseline:.1f} tok/s): {best.speedup:.2f} times at its best, "
            f"n={best.n}."
        )
    bound = next((one for one in results.bound if (one.draft, one.n) == (best.draft, best.n)), None)
    if bound is not None:
        sentences.append(
            f"Here a round with n={bound.n} costs as much as {bound.break_even_acceptance_length:.2f} plain steps, the "
            f"acceptance length from which it pays; this draft has {best.acceptance_length:.2f}."
        )
    runs = [run for benchmark in results.benchmarks for run in benchmark.runs]
    if all(run.identical_to_baseline for run in runs):
        sentences.append("Its output is the verifier's own, token by token.")
    sentences.append("More training (--minutes) raises the acceptance.")
    return " ".join(sentences)


def _markov_clause(results: EvaluationResults, longest: Average) -> str:
    off = {draft.name for draft in results.drafts if draft.markov is False}
    without = next((entry for entry in results.average if entry.draft in off and entry.n == longest.n), None)
    return f" ({without.acceptance_length:.2f} with the Markov head off)" if without is not None else ""
