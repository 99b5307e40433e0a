"""Answers by an OpenAI-compatible server: prompts go as token ids, and token ids are asked for in return.

Requests run in a thread with a loop of its own, at most so many at once. What may pass is tried again with growing waits: lost
connections, timeouts, overload, answers that make no sense. What will not pass ends the question, or, if no other question can
fare better, the run.
"""

from __future__ import annotations

import asyncio
import queue
import random
import threading
from collections.abc import Coroutine, Hashable
from concurrent.futures import Future
from typing import Any

import httpx

from speculators.errors import ConfigError, SpeculatorsError, VerifierError, last_line
from speculators.verifiers.answering import Answer, Failure, Outcome, Question
from speculators.verifiers.server_protocol import (
    PASSING,
    Garbled,
    NoTokenIds,
    answer_of_chat,
    answer_of_completion,
    base_address,
    chat_body,
    completion_body,
    refusal_of,
)

__all__ = ["MAX_RETRIES", "REQUEST_SECONDS", "ServerEngine"]

MAX_RETRIES = 3
REQUEST_SECONDS = 1800.0

#: Failures one after the other, none of them a lost connection, after which no question can be expected to fare better.
_HOPELESS = 20

_LONGEST_WAIT = 60.0  # seconds between two tries
_PATIENCE = 1.0  # seconds after which :meth:`ServerEngine.finished` returns with nothing
_CONNECT_SECONDS = 10.0


class ServerEngine:
    """The engine protocol over HTTP.

    :param endpoint: address of the server, with or without ``/v1`` and what follows it.
    :param model: name under which the server serves it; its only model by default.
    :param concurrency: requests under way at once.
    :param max_retries: further tries of a request that failed for a reason that may pass.
    :param timeout: seconds that an answer may take.
    :param eos_ids: ids that end an answer.
    :param allow_retokenized: take text from a server that gives no token ids; its answers then carry a message instead of ids.
    :param api_key: sent as bearer token.
    :param first_wait: seconds before the first further try; each wait is about twice the one before it.
    :raises VerifierError: when no such server answers, or it does not serve the model.
    """

    def __init__(
        self,
        endpoint: str,
        model: str | None = None,
        *,
        concurrency: int = 64,
        max_retries: int = MAX_RETRIES,
        timeout: float = REQUEST_SECONDS,
        eos_ids: tuple[int, ...] = (),
        allow_retokenized: bool = False,
        api_key: str | None = None,
        first_wait: float = 1.0,
    ) -> None:
        self.base = base_address(endpoint)
        self.concurrency = concurrency
        self.max_retries = max_retries
        self.eos_ids = tuple(eos_ids)
        self.allow_retokenized = allow_retokenized
        self.vocab_size: int | None = None  #: ids that the model can generate; None when it is not known
        self.exact = True  #: False once the server has shown that it gives no token ids
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._timeout = httpx.Timeout(timeout, connect=_CONNECT_SECONDS, pool=None)
        self._first_wait = first_wait
        self._served = self._choose(model)
        self._tokens = 0
        self._failures = 0  # since the last answer
        self._asked = 0
        self._done: queue.SimpleQueue[tuple[Hashable, Outcome | SpeculatorsError]] = queue.SimpleQueue()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="server answers", daemon=True)
        self._thread.start()
        self._places = asyncio.Semaphore(concurrency)
        limits = httpx.Limits(max_connections=concurrency, max_keepalive_connections=concurrency)
        self._client = httpx.AsyncClient(headers=self._headers, timeout=self._timeout, limits=limits)

    def _choose(self, model: str | None) -> dict[str, Any]:
        """The server's entry of the model."""
        address = f"{self.base}/models"
        try:
            response = httpx.get(address, headers=self._headers, timeout=_CONNECT_SECONDS)
        except (httpx.TransportError, httpx.InvalidURL, ValueError) as error:
            raise VerifierError(
                f"no server answers at {self.base} ({last_line(error)}); start it, or correct --endpoint"
            ) from error
        if response.status_code in (401, 403):
            raise VerifierError(f"the server at {self.base} wants a key; name the variable that holds it with --api-key-env")
        try:
            if response.status_code != 200:
                raise ValueError(f"status {response.status_code}")
            entries = {str(entry["id"]): entry for entry in response.json()["data"]}
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            raise VerifierError(
                f"{address} lists no models ({last_line(error)}); give the address of an OpenAI-compatible server"
            ) from error
        if model is None and len(entries) == 1:
            return dict(next(iter(entries.values())))
        if model is None:
            raise ConfigError(f"the server at {self.base} serves {', '.join(entries) or 'no model'}; choose one with --model")
        if model not in entries:
            raise VerifierError(f"the server at {self.base} serves {', '.join(entries) or 'no model'} and not {model}")
        return dict(entries[model])

    @property
    def model(self) -> str:
        """The model's name at the server."""
        return str(self._served["id"])

    @property
    def root(self) -> str:
        """What the server loaded the model from, as far as it says so."""
        return str(self._served.get("root") or self.model)

    @property
    def context_length(self) -> int | None:
        length = self._served.get("max_model_len")
        return length if type(length) is int and length > 0 else None

    @property
    def window(self) -> int:
        return 2 * self.concurrency

    @property
    def tokens(self) -> int:
        return self._tokens

    @property
    def origin(self) -> dict[str, str]:
        return {"endpoint": self.base, "model": self.model}

    def describe(self) -> dict[str, Any]:
        return {"model": self.model, "root": self.root}

    def ask(self, question: Question) -> None:
        self._asked += 1
        self._spawn(self._work(question))

    def finished(self) -> list[tuple[Hashable, Outcome]]:
        outcomes: list[tuple[Hashable, Outcome]] = []
        while self._asked:
            try:
                key, outcome = self._done.get(timeout=0 if outcomes else _PATIENCE)
            except queue.Empty:
                break
            if isinstance(outcome, SpeculatorsError):
                if outcomes:  # what is done is handed over first
                    self._done.put((key, outcome))
                    break
                raise outcome
            self._asked -= 1
            outcomes.append((key, outcome))
        return outcomes

    def close(self) -> None:
        """Give up what is under way; the server sees its connections close."""
        if self._loop.is_closed():
            return
        self._spawn(self._shut()).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _shut(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await self._client.aclose()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> Future[None]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def _work(self, question: Question) -> None:
        async with self._places:
            outcome: Outcome | SpeculatorsError
            try:
                outcome = await self._outcome(question)
            except SpeculatorsError as error:
                outcome = error
            except Exception as error:  # a bug of ours must not leave the caller waiting for ever
                outcome = self._failure(f"{type(error).__name__}: {error}")
            if isinstance(outcome, Answer):
                self._tokens += outcome.answer_tokens
            self._done.put((question.key, outcome))

    async def _outcome(self, question: Question) -> Outcome | VerifierError:
        """The answer, after as many tries as it takes.

        :raises SpeculatorsError: when the whole run is to end.
        """
        reason = ""
        wait: float | None = None
        for attempt in range(self.max_retries + 1):
            if attempt:
                await asyncio.sleep(self._wait(attempt) if wait is None else wait)
            wait = None
            try:
                answer = await self._try(question)
            except NoTokenIds:
                if not self.allow_retokenized:
                    raise ConfigError(
                        f"the server at {self.base} gives no token ids, without which rows are not what the verifier "
                        "generated; use a server that knows return_token_ids (vLLM), answer with --verifier, or accept its "
                        "text tokenised again with --allow-retokenized"
                    ) from None
                self.exact = False
                return await self._outcome(question)
            except _Passing as fault:
                reason, wait = str(fault), fault.wait
                continue
            except _Refused as fault:
                return self._failure(str(fault))
            self._failures = 0
            return answer
        if not await self._alive():
            raise VerifierError(
                f"the server at {self.base} is gone ({reason}); what is done is kept: start it and run the same command again"
            )
        return self._failure(f"{reason}, after {self.max_retries + 1} tries")

    def _failure(self, reason: str) -> Failure | VerifierError:
        """Of one question, or of the run after too many of them."""
        self._failures += 1
        if self._failures < _HOPELESS:
            return Failure(reason)
        return VerifierError(
            f"{self._failures} questions in a row failed at {self.base}, the last with: {reason}; what is done is kept"
        )

    async def _try(self, question: Question) -> Answer:
        exact = self.exact
        path = "completions" if exact else "chat/completions"
        body = completion_body(self.model, question, self.eos_ids) if exact else chat_body(self.model, question)
        try:
            async with asyncio.timeout(self._timeout.read):  # httpx's own begins anew with every byte that comes
                response = await self._client.post(f"{self.base}/{path}", json=body)
        except TimeoutError:
            raise _Passing("ReadTimeout") from None
        except httpx.RequestError as error:
            raise _Passing(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__) from error
        status = response.status_code
        if status in PASSING or status >= 500:
            raise _Passing(f"status {status}: {refusal_of(response.text)}", _retry_after(response))
        if status in (401, 403, 404):
            raise VerifierError(f"the server at {self.base} refuses {path} (status {status}: {refusal_of(response.text)})")
        if status != 200:
            raise _Refused(f"status {status}: {refusal_of(response.text)}")
        try:
            answer = answer_of_completion(response.content, question) if exact else answer_of_chat(response.content)
        except Garbled as error:
            raise _Passing(f"an answer that makes no sense ({error})") from error
        if self.vocab_size is not None and max(answer.ids, default=0) >= self.vocab_size:
            raise VerifierError(
                f"the server at {self.base} generated the id {max(answer.ids)}, but its model should have {self.vocab_size} "
                "ids; it serves another model, so correct --tokenizer"
            )
        return answer

    async def _alive(self) -> bool:
        try:
            response = await self._client.get(f"{self.base}/models", timeout=_CONNECT_SECONDS)
        except httpx.TransportError:
            return False
        return response.status_code < 500

    def _wait(self, attempt: int) -> float:
        """Seconds before a further try; never the same for all, or they would all come at once again."""
        return min(_LONGEST_WAIT, self._first_wait * 2 ** (attempt - 1)) * random.uniform(0.5, 1.5)


class _Passing(Exception):
    """What may be better next time; ``wait`` is how long the server asks for."""

    def __init__(self, reason: str, wait: float | None = None) -> None:
        super().__init__(reason)
        self.wait = wait


class _Refused(Exception):
    """What will be no better next time, for this question."""


def _retry_after(response: httpx.Response) -> float | None:
    try:
        return min(_LONGEST_WAIT, max(0.0, float(response.headers["retry-after"])))
    except (KeyError, ValueError):
        return None
