"""Rows rendered by an inference server, for a tokenizer that is not at hand: vLLM's render endpoint."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from typing import Any

import httpx

from speculators.data.encoding import Encoded
from speculators.data.rendered import History, Rendered, RenderError, find_rows
from speculators.data.turns import Messages, TurnFinder
from speculators.errors import ConfigError, VerifierError

__all__ = ["EndpointRenderer", "refuse_credentials"]

PATH = "/v1/chat/completions/render"
#: Answers of a server that may pass: too many requests, and what proxies say while it restarts.
PASSING = frozenset({408, 429, 500, 502, 503, 504})


def refuse_credentials(address: str, flag: str) -> None:
    """An address is written into what is made with it, and shown in errors.

    :raises ConfigError: for one with a name or password in it, which is not repeated in the error.
    """
    if "@" in address.partition("://")[2].partition("/")[0] or "@" in address.partition("/")[0]:
        raise ConfigError(f"{flag} has a name or password in its address, which would be written beside the rows; leave it out")


class EndpointRenderer:
    """Renders through ``POST {endpoint}/v1/chat/completions/render``; the mask is found as with a tokenizer at hand.

    Without the tokenizer nothing is known of texts. So ``{% generation %}`` tags are not looked at, and where a generation
    prompt is no beginning of the turn, exactly one token is left unsupervised.

    :param endpoint: URL of the server, without ``/v1``.
    :param model: name of the model, for a server that has several.
    :param eos_ids: end-of-turn ids, the tokenizer's and those of the generation config.
    :param special_ids: ids that can end a turn when no eos id does.
    :param history: as :class:`speculators.data.rendering.TemplateRenderer` has it, and so are ``last_turn_only``, ``options``.
    :param timeout: seconds that the server may take to answer.
    :param retries: further tries when the server cannot be reached or is busy.
    :param pause: seconds before the first of them; the pause doubles from one to the next.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        model: str | None = None,
        eos_ids: Collection[int],
        special_ids: Collection[int] = (),
        history: History = "auto",
        last_turn_only: bool = False,
        options: Mapping[str, Any] | None = None,
        timeout: float = 120.0,
        retries: int = 3,
        pause: float = 0.5,
    ) -> None:
        refuse_credentials(endpoint, "--render-endpoint")
        self.url = endpoint.rstrip("/").removesuffix("/v1") + PATH
        self.model = model
        self.history: History = history
        self.last_turn_only = last_turn_only
        self.options = dict(options or {})
        self.timeout = timeout
        self.retries = retries
        self.pause = pause
        self._finder = TurnFinder(eos_ids, special_ids)
        self._client: httpx.Client | None = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_client": None}  # every process has connections of its own

    def close(self) -> None:
        """Close the connections to the server."""
        if self._client is not None:
            self._client.close()
            self._client = None

    def prompt(self, messages: Messages, tools: list[Any] | None = None, options: Mapping[str, Any] | None = None) -> list[int]:
        """Ids after which the assistant is to speak: the messages and the template's generation prompt.

        :raises RenderError: when the template refuses the messages.
        :raises VerifierError: when the server is not there or answers something else.
        """
        return self._render(messages, True, tools, options).ids()

    def rows(
        self, messages: Messages, tools: list[Any] | None = None, options: Mapping[str, Any] | None = None
    ) -> list[Rendered]:
        """The rows of a conversation, at least one. What follows the last assistant turn is left out of them.

        :raises RenderError: for a conversation that gives none.
        :raises VerifierError: when the server is not there or answers something else.
        """

        def render(part: Messages, generate: bool) -> Encoded:
            return self._render(part, generate, tools, options)

        found = find_rows(render, messages, self._finder, self.history, self.last_turn_only, _difference)
        return [row.rendered() for row in found]

    def _render(
        self, messages: Messages, generate: bool, tools: list[Any] | None, options: Mapping[str, Any] | None
    ) -> Encoded:
        body: dict[str, Any] = {"messages": [dict(message) for message in messages], "add_generation_prompt": generate}
        body |= {"model": self.model} if self.model else {}
        body |= {"tools": tools} if tools else {}
        template_options = {**self.options, **(options or {})}
        body |= {"chat_template_kwargs": template_options} if template_options else {}
        return Encoded([self._token_ids(self._post(body))])

    def _post(self, body: dict[str, Any]) -> httpx.Response:
        """The server's answer, after as many tries as are allowed.

        :raises RenderError: when it refuses the messages.
        :raises VerifierError: when there is no answer, or another refusal.
        """
        self._client = self._client or httpx.Client(timeout=self.timeout)
        pause, fault = self.pause, ""
        for further in range(self.retries, -1, -1):
            try:
                response = self._client.post(self.url, json=body)
            except httpx.InvalidURL as error:
                raise VerifierError(f"{self.url} is no URL ({error}); check --render-endpoint") from error
            except httpx.TransportError as error:
                fault = f"cannot be reached ({str(error) or type(error).__name__})"
            except ValueError as error:  # messages that are no JSON
                raise RenderError("template_refused", f"the conversation cannot be sent ({error}); leave it out") from error
            else:
                if response.status_code in (400, 422):
                    reason = f"the server's chat template refuses the conversation ({_words(response)})"
                    raise RenderError("template_refused", f"{reason}; leave it out or change its messages")
                if response.is_success:
                    return response
                fault = f"answers with status {response.status_code} ({_words(response)})"
                if response.status_code not in PASSING:
                    break
            if further:
                time.sleep(pause)
                pause *= 2
        raise VerifierError(f"the server's render endpoint {self.url} {fault}; check that it runs and has that endpoint")

    def _token_ids(self, response: httpx.Response) -> list[int]:
        try:
            ids = response.json()["token_ids"]
        except (ValueError, KeyError, TypeError):
            ids = None
        if not isinstance(ids, list) or not all(isinstance(token, int) for token in ids):
            raise VerifierError(f"{self.url} answers without token_ids; give --render-endpoint a server that renders chats")
        return ids


def _words(response: httpx.Response) -> str:
    """What the server says is wrong, shortened."""
    try:
        said = response.json()
        said = said.get("error", said) if isinstance(said, dict) else said
        said = said.get("message", said.get("detail", said)) if isinstance(said, dict) else said
    except ValueError:
        said = response.text
    return " ".join(str(said).split())[:300]


def _difference(before: Encoded, after: Encoded) -> str:
    """Where two renderings part, as ids."""
    place = before.common(after)
    old, new = (encoded.ids(max(0, place - 2))[:8] for encoded in (before, after))
    return f"ids ...{old}... become ...{new}..."
