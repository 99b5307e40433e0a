"""Verifier sessions: what a lossless decoder needs of a verifier - prefill, verify, roll back, per request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from transformers import Cache

from speculators.errors import DataError
from speculators.verifiers.cache import new_cache, truncate
from speculators.verifiers.capture import StateCapture
from speculators.verifiers.loading import Verifier
from speculators.verifiers.recurrent import RecurrentStates

__all__ = ["TransformersSession", "VerifierOutput", "VerifierSession"]


@dataclass(slots=True)
class VerifierOutput:
    """What one request's pass gives."""

    logits: Tensor  #: ``[n, V]``, of the last token of a prefill, of every token of a verification
    features: Tensor  #: ``[t, M, H]``, captured states of every token of the pass


class VerifierSession(Protocol):
    """The verifier's side of decoding a list of requests."""

    @property
    def lengths(self) -> list[int]:
        """Tokens of each request that the verifier has seen and not rolled back."""

    def prefill(self, prompts: list[Tensor]) -> list[VerifierOutput]:
        """Start one request per prompt ``[t]``; logits of the last token only, ``[1, V]``, features of all tokens."""

    def verify(self, tokens: list[Tensor]) -> list[VerifierOutput]:
        """Append tokens ``[n_i]`` to each request; logits ``[n_i, V]`` and features of each appended token.

        n_i may be 0: a finished request keeps its place and costs nothing.
        """

    def rollback(self, lengths: list[int]) -> None:
        """Forget every token of request i from position ``lengths[i]`` on."""


class TransformersSession:
    """A session on a verifier in this process.

    Several requests are run one after another; the interface allows a batch behind it.

    :param layer_ids: layers whose states are returned as features, M of them; may be empty.
    :param max_length: most tokens of a request; by default the verifier's context length.
    :raises VerifierError: when a layer id is not one of the verifier's, or its cache cannot be rolled back.
    """

    def __init__(self, verifier: Verifier, layer_ids: Sequence[int] = (), max_length: int | None = None) -> None:
        limits = [limit for limit in (max_length, verifier.context_length) if limit is not None]
        self._limit = min(limits) if limits else None
        # A stated maximum is allocated at once; a context length of 100k tokens is not.
        self._reserve = min(limits) if max_length is not None else 0
        self._verifier = verifier
        self._has_features = bool(layer_ids)
        self._capture = StateCapture(verifier.parts, layer_ids)
        self._caches: list[Cache] = []
        self._lengths: list[int] = []
        #: Per request: its recurrent layers before the last pass, and the tokens of it.
        self._before: list[tuple[RecurrentStates | None, Tensor]] = []
        self._device = verifier.device

    @property
    def lengths(self) -> list[int]:
        return list(self._lengths)

    @torch.inference_mode()
    def prefill(self, prompts: list[Tensor]) -> list[VerifierOutput]:
        """See :meth:`VerifierSession.prefill`; requests of an earlier prefill are dropped.

        :raises DataError: when a prompt is empty or longer than the context.
        """
        for prompt in prompts:
            if not prompt.numel():
                raise DataError("an empty prompt cannot be answered; give at least one token")
        self._caches = [new_cache(self._verifier.config, max(256, self._reserve)) for _ in prompts]
        self._lengths = [0] * len(prompts)
        self._before = [(None, prompt) for prompt in prompts]
        return [self._append(request, prompt, keep=1) for request, prompt in enumerate(prompts)]

    @torch.inference_mode()
    def verify(self, tokens: list[Tensor]) -> list[VerifierOutput]:
        """See :meth:`VerifierSession.verify`.

        :raises DataError: when a request would outgrow the context; nothing is appended to it then.
        """
        if len(tokens) != len(self._caches):
            raise ValueError(f"{len(tokens)} lists of tokens for {len(self._caches)} requests")
        return [self._append(request, ids, keep=0) for request, ids in enumerate(tokens)]

    def rollback(self, lengths: list[int]) -> None:
        """See :meth:`VerifierSession.rollback`. Recurrent layers run the last pass again over the tokens that stay.

        :raises VerifierError: recurrent layers are to go back behind the last pass.
        """
        for request, length in enumerate(lengths):
            if not 0 <= length <= self._lengths[request]:
                raise ValueError(f"request {request} has {self._lengths[request]} tokens and cannot be cut to {length}")
            saved, ids = self._before[request]
            if saved is not None and saved.length <= length < self._lengths[request]:
                saved.put_back(self._caches[request], self._lengths[request] - saved.length)
                self._lengths[request] = saved.length
                self._run_again(request, ids[: length - saved.length])
            truncate(self._caches[request], length)
            self._lengths[request] = length

    @torch.inference_mode()
    def _run_again(self, request: int, ids: Tensor) -> None:
        """Bring a request's cache up to ``ids`` ``[t]`` more tokens."""
        if ids.shape[0]:
            positions = torch.arange(ids.shape[0], device=self._device) + self._lengths[request]
            with self._verifier.lock:
                self._verifier.states(ids.to(self._device)[None], cache=self._caches[request], position_ids=positions[None])

    def _append(self, request: int, ids: Tensor, keep: int) -> VerifierOutput:
        cache, length, count = self._caches[request], self._lengths[request], ids.shape[0]
        if self._limit is not None and length + count > self._limit:
            raise DataError(
                f"a request of {length + count} tokens does not fit the verifier's context of {self._limit}; "
                "shorten the prompt or generate fewer tokens"
            )
        verifier = self._verifier
        if count == 0:
            empty = torch.empty(0, verifier.vocab_size, dtype=verifier.dtype, device=self._device)
            return VerifierOutput(empty, _no_features(verifier, 0))
        self._before[request] = (RecurrentStates.of(cache, length) if length else None, ids)
        inputs = ids.to(self._device).view(1, count)
        positions = torch.arange(length, length + count, device=self._device).view(1, count)
        with verifier.lock, self._capture.recording():
            logits = verifier.logits(inputs, keep=keep, cache=cache, position_ids=positions)[0]
            features = self._capture.stacked()[0] if self._has_features else _no_features(verifier, count)
        self._lengths[request] = length + count
        return VerifierOutput(logits, features)


def _no_features(verifier: Verifier, tokens: int) -> Tensor:
    return torch.empty(tokens, 0, verifier.hidden_size, dtype=verifier.dtype, device=verifier.device)
