"""Runs in vLLM's environment: one engine, greedy answers to given prompts, and its counters of speculative decoding.

    python vllm_serve.py JOB.json

The job: ``engine``, the arguments of ``LLM`` (a draft in the speculators format is the ``model``), ``prompts`` as token ids and
``max_tokens``. Prints, as JSON, each answer's tokens, how many of them each step of the engine brought, and the counters.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import vllm
from vllm import LLM, SamplingParams, TokensPrompt


def spec_decode_counts(llm: LLM) -> dict[str, Any]:
    """The engine's counters since it started."""
    counts: dict[str, Any] = {}
    for metric in llm.get_metrics():
        if metric.name.startswith("vllm:spec_decode"):
            counts[metric.name.removeprefix("vllm:spec_decode_")] = getattr(metric, "values", getattr(metric, "value", None))
    return counts


def main(path: Path) -> None:
    job = json.loads(path.read_text(encoding="utf-8"))
    llm = LLM(
        dtype="float32",
        enforce_eager=True,
        enable_prefix_caching=False,
        disable_log_stats=False,
        seed=0,
        **job["engine"],
    )
    sampling = SamplingParams(temperature=0.0, max_tokens=job["max_tokens"], ignore_eos=True, detokenize=False)
    engine = llm.llm_engine
    for index, ids in enumerate(job["prompts"]):
        engine.add_request(str(index), TokensPrompt(prompt_token_ids=ids), sampling)
    answers: list[list[int]] = [[] for _ in job["prompts"]]
    steps: list[list[int]] = [[] for _ in job["prompts"]]
    while engine.has_unfinished_requests():
        for output in engine.step():
            tokens = list(output.outputs[0].token_ids)
            index = int(output.request_id)
            if len(tokens) > len(answers[index]):
                steps[index].append(len(tokens) - len(answers[index]))
                answers[index] = tokens
    counts = spec_decode_counts(llm)
    print(json.dumps({"version": vllm.__version__, "answers": answers, "steps": steps, "counts": counts}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
