"""Hidden states from live vLLM servers."""

from __future__ import annotations

import os
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import numpy as np

from speculators.data.rows import Row
from speculators.errors import DataError, VerifierError
from speculators.verifiers.capture import check_layer_ids
from speculators.verifiers.source import HiddenStates, NextTokens, StatesDescription
from speculators.verifiers.states_files import StatesFileError
from speculators.verifiers.vllm.checking import StatesCheck
from speculators.verifiers.vllm.client import VllmClient
from speculators.verifiers.vllm.endpoints import Endpoint, EndpointFault, Endpoints
from speculators.verifiers.vllm.files import KeptStates
from speculators.verifiers.vllm.protocol import (
    MAX_LOGPROBS,
    Served,
    check_prompt,
    logprobs_body,
    next_tokens_of,
    params_of,
    states_body,
)
from speculators.verifiers.vllm.readers import TOKEN_IDS, BadStates, Received, StatesReader, open_reader
from speculators.verifiers.vllm.settings import ServedVerifier, VllmSettings, launch_command
from speculators.verifiers.vllm.workers import DaemonWorkers

__all__ = ["VllmSource"]

T = TypeVar("T")

#: Calls of fetch, and requests, that are under way at each server at once: it runs them together.
CALLS_PER_SERVER = 4
REQUESTS_PER_SERVER = 16

#: Tokens of the request that finds out what a server's states are.
_PROBE_TOKENS = 4


class VllmSource:
    """Asks vLLM servers for the states of rows; see :class:`speculators.verifiers.source.HiddenStateSource`.

    States are the servers': about 1e-5 off those of another program, and not the same bits each time. The final state is taken
    before the verifier's norm.

    :param settings: where the servers are and what to do when they fail.
    :param layer_ids: captured layers, in the order that the draft reads; id k is the residual stream after k decoder layers.
    :param verifier: that the servers serve.
    :param reader: how states come; by default as the settings' backend says.
    :param first_wait: seconds before a server that failed is asked again.
    :raises VerifierError: when no server answers, or one captures other layers.
    :raises ConfigError: for settings that cannot work.
    """

    def __init__(
        self,
        settings: VllmSettings,
        layer_ids: Sequence[int],
        verifier: ServedVerifier,
        *,
        reader: StatesReader | None = None,
        first_wait: float = 1.0,
    ) -> None:
        self._settings = settings
        self._verifier = verifier
        layers = check_layer_ids(layer_ids, verifier.num_layers)
        bases = settings.endpoints
        hint = launch_command(verifier.name, layers, settings)
        self._check = StatesCheck(layers, verifier, hint)
        self._kept = KeptStates(settings.folder)
        self._reader = open_reader(settings) if reader is None else reader
        self.concurrency = CALLS_PER_SERVER * len(bases)
        requests = REQUESTS_PER_SERVER * len(bases)
        self._client = VllmClient(settings.request_timeout, requests + len(bases))
        self._endpoints = Endpoints(
            bases,
            self._served,
            max_retries=settings.max_retries,
            first_wait=first_wait,
            hint=f"start one with `{hint}`, or correct --vllm-endpoint, and run the same command again",
        )
        self._workers = DaemonWorkers(requests, "vllm-states")
        self._lock = threading.Lock()
        self._counts = {"tokens": 0, "rows": 0, "retries": 0, "failures": 0, "kept": 0}
        self._failed_in_a_row = 0
        self._warned_of: set[str] = set()
        try:
            self._description = StatesDescription(
                layer_ids=layers,
                final_state="pre_norm",
                dtype=self._find_dtype(),
                hidden_size=verifier.hidden_size,
                verifier=verifier.name,
                verifier_hash=verifier.hash,
                precision=self._check.precision,
            )
        except BaseException:
            self.close()
            raise

    @property
    def description(self) -> StatesDescription:
        return self._description

    def fetch(self, rows: Sequence[Row]) -> list[HiddenStates]:
        """See :meth:`speculators.verifiers.source.HiddenStateSource.fetch`. Rows without states are left out.

        :raises DataError: for a row that a server refuses, or without kept states where that is to be an error.
        :raises VerifierError: when no server answers for as long as the retries take, one does not fit, or too many rows in a
            row fail.
        """
        futures = [self._workers.submit(partial(self._row, row)) for row in rows]
        try:
            answers = [future.result() for future in futures]
        except BaseException:
            for future in futures:
                future.cancel()
            raise
        return [answer for answer in answers if answer is not None]

    def next_tokens(self, row: Row, positions: Sequence[int], count: int) -> NextTokens:
        """The verifier's own next-token distributions, as the server tells them.

        :param count: most probable ids of each position; at most 20 are told.
        :returns: of ``positions``, less the row's last where the server's context has no room for a token behind it.
        :raises VerifierError: when no server answers.
        """
        # What follows a position is told at the next token of the prompt; behind the last one any will do.
        ids = [*row.input_ids.tolist(), int(row.input_ids[-1])]
        count = min(count, MAX_LOGPROBS)

        def ask(endpoint: Endpoint) -> NextTokens:
            served = _known(endpoint)
            room = len(ids) if served.max_model_len is None else served.max_model_len - 1
            asked = [position for position in positions if position + 2 <= room]
            prompt = ids[: max(asked, default=0) + 2]
            content = self._client.complete(endpoint.base, logprobs_body(served.name, prompt, count), row.row_id)
            self._reader.forget(params_of(content))
            return next_tokens_of(content, asked, count)

        try:
            return self._persistently(ask, len(ids))
        except (BadStates, EndpointFault) as fault:
            raise VerifierError(f"the vLLM server does not tell its next-token probabilities ({fault})") from fault

    def status(self) -> dict[str, int]:
        """Servers and those alive, rows and tokens received, rows that were kept from before, further tries, rows given up."""
        with self._lock:
            counts = dict(self._counts)
        return {"endpoints": len(self._endpoints.all), "endpoints_alive": self._endpoints.alive, **counts}

    def close(self) -> None:
        self._endpoints.close()
        self._client.close()
        self._workers.close()
        self._reader.close()

    # -- one row -------------------------------------------------------------------------------------------------------------

    def _row(self, row: Row) -> HiddenStates | None:
        kept = self._from_kept(row)
        if kept is not None:
            self._count(kept=1)
            return kept
        if self._settings.on_missing != "generate":
            self._missing(row)
            return None
        try:
            states = self._persistently(partial(self._generate, row), len(row))
        except (BadStates, EndpointFault) as fault:
            self._give_up(row, str(fault))
            return None
        with self._lock:
            self._failed_in_a_row = 0
        self._count(rows=1, tokens=len(row))
        return states

    def _from_kept(self, row: Row) -> HiddenStates | None:
        try:
            received = self._kept.read(row.row_id, self._check.most_bytes(1 << 20))
            return None if received is None else self._check.kept(received, row)
        except (StatesFileError, BadStates) as error:
            remedy = "they are generated again" if self._settings.on_missing == "generate" else "they count as missing"
            warnings.warn(f"the kept states of row {row.row_id} are of no use ({error}); {remedy}", stacklevel=2)
            return None

    def _missing(self, row: Row) -> None:
        path = self._kept.path(row.row_id)
        if self._settings.on_missing == "raise":
            raise DataError(f"row {row.row_id} has no hidden states in {path}; pass --on-missing generate, or make them first")
        if self._settings.on_missing == "warn":
            warnings.warn(f"row {row.row_id} has no hidden states in {path}; it is left out", stacklevel=2)

    def _give_up(self, row: Row, reason: str) -> None:
        self._count(failures=1)
        with self._lock:
            self._failed_in_a_row += 1
            failed = self._failed_in_a_row
        if failed >= self._settings.max_consecutive_failures:
            raise VerifierError(
                f"{failed} rows in a row got no hidden states from vLLM, the last one because of this: {reason}; see the "
                "server's log, and run the same command again"
            )
        warnings.warn(f"row {row.row_id} got no hidden states from vLLM and is left out: {reason}", stacklevel=2)

    def _persistently(self, work: Callable[[Endpoint], T], tokens: int) -> T:
        """Do some work at whichever server can, with the tries that the settings allow.

        :raises EndpointFault: of the last try.
        :raises BadStates: of the last try.
        """
        # A server that fails while another lives costs no try.
        faults_left = self._settings.max_retries + len(self._endpoints.all) - 1
        bad_left = self._settings.validation_retries
        avoid: Endpoint | None = None
        while True:
            used: Endpoint | None = None
            try:
                with self._endpoints.one(tokens, avoid) as used:
                    result = work(used)
                self._endpoints.succeeded(used)
                return result
            except EndpointFault:
                faults_left -= 1
                if faults_left < 0:
                    raise
            except BadStates as fault:
                assert used is not None
                self._endpoints.answered_badly(used, str(fault))
                bad_left -= 1
                if bad_left < 0:
                    raise
            avoid = used
            self._count(retries=1)

    def _generate(self, row: Row, endpoint: Endpoint, *, keep: bool = True) -> HiddenStates:
        """One try of one row at one server."""
        served = _known(endpoint)
        if served.max_model_len is not None and len(row) + 1 > served.max_model_len:
            raise DataError(
                f"row {row.row_id} has {len(row)} tokens and the vLLM server at {endpoint.base} takes "
                f"{served.max_model_len - 1}; start it with --max-model-len {len(row) + 1} or more, or lower --total-seq-len"
            )
        until = time.monotonic() + self._settings.request_timeout
        ids = row.input_ids.tolist()
        content = self._client.complete(endpoint.base, states_body(served.name, ids), row.row_id)
        params = params_of(content)
        try:
            check_prompt(content, ids)
            left = max(1.0, until - time.monotonic())
            received = self._reader.read(params, left, self._check.most_bytes(len(row)))
            states = self._check(received, row)
            if keep and self._settings.on_generate == "cache":
                self._keep(row, received)
            return states
        finally:
            self._reader.forget(params)

    def _keep(self, row: Row, received: Received) -> None:
        try:
            self._kept.write(row.row_id, received)
        except DataError as error:
            warnings.warn(f"states are used, but not kept: {error}", stacklevel=2)

    # -- the servers ---------------------------------------------------------------------------------------------------------

    def _served(self, base: str) -> Served:
        """What the server at ``base`` serves; see :class:`Endpoints`.

        :raises VerifierError: when it serves several models, none of which is the verifier.
        """
        models, name = self._client.models(base), self._verifier.name
        fitting = [served for served in models if _same_model(served.root, name) or _same_model(served.name, name)]
        if not fitting and len(models) > 1:
            raise VerifierError(
                f"the vLLM server at {base} serves {', '.join(served.name for served in models)} and not {name}; correct "
                "--vllm-endpoint"
            )
        if not fitting and base not in self._warned_of:
            self._warned_of.add(base)
            warnings.warn(
                f"the vLLM server at {base} serves {models[0].root}, and --verifier-name-or-path is {name}; they must be the "
                "same model",
                stacklevel=2,
            )
        return (fitting or models)[0]

    def _find_dtype(self) -> str:
        """In which dtype states come: asks a server, or looks at what is kept where nothing is to be generated."""
        if self._settings.on_missing == "generate":
            probe = _row_of(np.arange(_PROBE_TOKENS))
            try:
                self._persistently(partial(self._generate, probe, keep=False), len(probe))
            except (BadStates, EndpointFault) as fault:
                raise VerifierError(f"the vLLM server gives no hidden states ({fault}); see its log") from fault
        else:
            received = self._kept.any()
            if received is None:
                raise DataError(
                    f"there are no hidden states in {self._kept.folder}; pass --on-missing generate, or correct "
                    "--hidden-states-path"
                )
            try:
                self._check.kept(received, _row_of(received.tensors[TOKEN_IDS].numpy()))
            except BadStates as error:
                raise DataError(f"the hidden states in {self._kept.folder} do not fit ({error})") from error
        assert self._check.dtype is not None
        return self._check.dtype

    def _count(self, **counts: int) -> None:
        with self._lock:
            for name, count in counts.items():
                self._counts[name] += count


def _row_of(ids: np.ndarray) -> Row:
    """A row of no data set."""
    return Row(-1, ids.astype(np.int64), np.zeros(len(ids), dtype=bool))


def _known(endpoint: Endpoint) -> Served:
    assert endpoint.served is not None  # said when it was asked whether it lives
    return endpoint.served


def _same_model(served: str, wanted: str) -> bool:
    """Whether two names, hub ids or folders, can be those of one model."""
    if served == wanted or os.path.realpath(served) == os.path.realpath(wanted):
        return True
    return bool(wanted) and os.path.basename(served.rstrip("/")) == os.path.basename(wanted.rstrip("/"))
