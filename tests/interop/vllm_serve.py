"""Runs in vLLM's environment: one engine, greedy answers to given prompts, and its counters of speculative decoding.

    python vllm_serve.py JOB.json

The job: ``engine``, the arguments of ``LLM`` (a draft in the speculators format is the ``model``), ``prompts`` as token ids,
``max_tokens`` and ``margin``. Prints, as JSON, each answer's tokens, how many rounds of each prompt drafted, accepted and emitted
what, and where the two best logits of a generated token are closer than the margin.
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
    prompts = [TokensPrompt(prompt_token_ids=ids) for ids in job["prompts"]]
    sampling = SamplingParams(temperature=0.0, max_tokens=job["max_tokens"], ignore_eos=True)
    outputs = llm.generate(prompts, sampling, use_tqdm=False)
    answers = [list(output.outputs[0].token_ids) for output in outputs]
    print(json.dumps({"version": vllm.__version__, "answers": answers, "counts": spec_decode_counts(llm)}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
