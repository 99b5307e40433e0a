"""HTTP to vLLM servers: requests with an end, bodies with a bound, and faults told apart."""

from __future__ import annotations

import os
import time
from typing import Any

import httpx

from speculators.errors import DataError, VerifierError, last_line
from speculators.verifiers.server_protocol import PASSING, refusal_of
from speculators.verifiers.vllm.endpoints import EndpointFault
from speculators.verifiers.vllm.protocol import Served, served_models

__all__ = ["API_KEY", "VllmClient"]

#: Environment variable with the key that servers were started with, as vLLM's own server reads it.
API_KEY = "VLLM_API_KEY"

_CONNECT_SECONDS = 10.0
_ASK_SECONDS = 10.0
_MOST_BYTES = 64 << 20


class VllmClient:
    """Thread-safe.

    :param timeout: seconds for an answer, from sending the request.
    :param connections: at most.
    """

    def __init__(self, timeout: float, connections: int) -> None:
        key = os.environ.get(API_KEY)
        self._timeout = timeout
        self._client = httpx.Client(
            headers={"Authorization": f"Bearer {key}"} if key else {},
            limits=httpx.Limits(max_connections=connections, max_keepalive_connections=connections),
        )

    def models(self, base: str) -> list[Served]:
        """What the server at ``base`` serves.

        :raises EndpointFault: when it does not answer as a living server does.
        :raises VerifierError: when it wants a key.
        """
        status, content = self._send("GET", f"{base}/models", None, min(self._timeout, _ASK_SECONDS))
        if status in (401, 403):
            raise VerifierError(f"the vLLM server at {base} wants a key; set {API_KEY} to it")
        if status != 200:
            raise EndpointFault(f"status {status} of /models")
        try:
            return served_models(content)
        except ValueError as error:
            raise EndpointFault(str(error)) from error

    def complete(self, base: str, body: dict[str, Any], row_id: int) -> bytes:
        """The body of an answer of ``/completions``.

        :raises EndpointFault: when the server does not answer as a living one does.
        :raises DataError: when it refuses this row.
        :raises VerifierError: when it refuses all.
        """
        status, content = self._send("POST", f"{base}/completions", body, self._timeout)
        if status == 200:
            return content
        reason = f"status {status}: {refusal_of(content.decode(errors='replace'))}"
        if status in PASSING or status >= 500:
            raise EndpointFault(reason)
        if status in (400, 413, 422):
            raise DataError(f"the vLLM server at {base} refuses row {row_id} ({reason})")
        raise VerifierError(f"the vLLM server at {base} refuses requests ({reason})")

    def close(self) -> None:
        self._client.close()

    def _send(self, method: str, url: str, body: dict[str, Any] | None, seconds: float) -> tuple[int, bytes]:
        until = time.monotonic() + seconds
        timeout = httpx.Timeout(seconds, connect=min(seconds, _CONNECT_SECONDS), pool=None)
        content = bytearray()
        try:
            with self._client.stream(method, url, json=body, timeout=timeout) as response:
                for part in response.iter_bytes():
                    content += part
                    # httpx's own timeout begins anew with every byte that comes.
                    if time.monotonic() > until:
                        raise EndpointFault(f"no whole answer in {seconds:g} s")
                    if len(content) > _MOST_BYTES:
                        raise EndpointFault("an answer without end")
        except httpx.TimeoutException:
            raise EndpointFault(f"no answer in {seconds:g} s") from None
        except (httpx.RequestError, httpx.InvalidURL) as error:
            raise EndpointFault(last_line(error)) from error
        except RuntimeError as error:  # the client was closed meanwhile
            raise EndpointFault(last_line(error)) from error
        return response.status_code, bytes(content)
