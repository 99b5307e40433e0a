"""What is asked of vLLM servers that extract hidden states, and what their answers mean."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from speculators.verifiers.source import NextTokens
from speculators.verifiers.vllm.readers import BadStates

__all__ = [
    "MAX_LOGPROBS",
    "Served",
    "params_of",
    "check_prompt",
    "logprobs_body",
    "next_tokens_of",
    "served_models",
    "states_body",
]

#: Most probable tokens that a server tells of, unless it was started with another --max-logprobs.
MAX_LOGPROBS = 20


@dataclass(frozen=True, slots=True)
class Served:
    """An entry of ``/models``.

    :param root: what the model was loaded from.
    :param max_model_len: most tokens of a request, the one it generates included; None when the server does not say.
    """

    name: str
    root: str
    max_model_len: int | None


def served_models(content: bytes) -> list[Served]:
    """:raises ValueError: for a body that lists no models."""
    try:
        entries = json.loads(content)["data"]
        found = [
            Served(str(entry["id"]), str(entry.get("root") or entry["id"]), _length(entry.get("max_model_len")))
            for entry in entries
        ]
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"its /models is {content[:80]!r}") from error
    if not found:
        raise ValueError("it serves no model")
    return found


def states_body(model: str, ids: Sequence[int]) -> dict[str, Any]:
    """Of ``/completions``: the prompt as it is, and one token, since a server generates at least that."""
    return {
        "model": model,
        "prompt": list(ids),
        "max_tokens": 1,
        "temperature": 0.0,
        "return_token_ids": True,
        "add_special_tokens": False,
    }


def logprobs_body(model: str, ids: Sequence[int], count: int) -> dict[str, Any]:
    """Of ``/completions``: the most probable tokens at every place of the prompt, too."""
    return {**states_body(model, ids), "prompt_logprobs": count}


def check_prompt(content: bytes, ids: Sequence[int]) -> None:
    """:raises BadStates: when an answer is not one to ``ids``, or says nothing of hidden states."""
    whole, choice = _choice(content)
    read = choice.get("prompt_token_ids", whole.get("prompt_token_ids"))
    if not isinstance(read, list):
        raise BadStates("its answer does not say which tokens it read")
    if read != list(ids):
        raise BadStates(f"it read {len(read)} tokens that are not the {len(ids)} sent to it")
    if not isinstance(whole.get("kv_transfer_params"), dict):
        raise BadStates("its answer says nothing of hidden states; is it started with a hidden-states connector?")


def params_of(content: bytes) -> Mapping[str, Any]:
    """The ``kv_transfer_params`` of an answer, whatever else it is; empty when there are none."""
    try:
        params = json.loads(content).get("kv_transfer_params")
    except (ValueError, AttributeError, RecursionError):
        return {}
    return params if isinstance(params, dict) else {}


def next_tokens_of(content: bytes, positions: Sequence[int], count: int) -> NextTokens:
    """The distributions in an answer to :func:`logprobs_body`.

    vLLM tells for every token of the prompt how probable it and the best ones were there: after position t is at t + 1.

    :raises BadStates: when they are not there.
    """
    _, choice = _choice(content)
    told = choice.get("prompt_logprobs")
    if not isinstance(told, list):
        raise BadStates("its answer has no prompt_logprobs")
    ids, logprobs = [], []
    for position in positions:
        best = _best(told[position + 1] if position + 1 < len(told) else None, count)
        ids.append([token for token, _ in best])
        logprobs.append([logprob for _, logprob in best])
    return NextTokens(
        positions=torch.tensor(list(positions), dtype=torch.int64),
        ids=torch.tensor(ids, dtype=torch.int64).view(len(ids), count),
        logprobs=torch.tensor(logprobs, dtype=torch.float32).view(len(ids), count),
    )


def _best(entries: Any, count: int) -> list[tuple[int, float]]:
    """The ``count`` most probable ids of one place, best first; the prompt's own token is told of beside them."""
    try:
        pairs = [(int(token), float(entry["logprob"])) for token, entry in entries.items()]
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise BadStates(f"its prompt_logprobs are {str(entries)[:80]}") from error
    if len(pairs) < count or any(math.isnan(logprob) or logprob > 1e-3 for _, logprob in pairs):
        raise BadStates(f"its prompt_logprobs have {len(pairs)} entries where {count} were asked for, or no probabilities")
    return sorted(pairs, key=lambda pair: (-pair[1], pair[0]))[:count]


def _choice(content: bytes) -> tuple[dict[str, Any], dict[str, Any]]:
    try:
        whole = json.loads(content)
        choice = whole["choices"][0]
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise BadStates(f"its answer is {content[:80]!r}") from error
    if not isinstance(choice, dict):
        raise BadStates(f"its answer is {content[:80]!r}")
    return whole, choice


def _length(value: Any) -> int | None:
    return value if type(value) is int and value > 0 else None
