"""From what a server hands over to the states that were asked for, or a refusal."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from speculators.data.rows import Row
from speculators.errors import DataError, VerifierError
from speculators.verifiers.source import HiddenStates
from speculators.verifiers.state_dtypes import STATES, decode
from speculators.verifiers.vllm.readers import TOKEN_IDS, BadStates, Received
from speculators.verifiers.vllm.settings import ServedVerifier

__all__ = ["StatesCheck"]

#: In which 8-bit states are decoded whose producer does not say how the verifier computed them.
_DECODED = "bfloat16"


class StatesCheck:
    """Checks states and brings their layers into the order asked for; a server hands over ascending ids, the last layer too.

    :param layer_ids: in the order that the draft reads.
    :param hint: the command that starts a server whose states fit.
    """

    def __init__(self, layer_ids: Sequence[int], verifier: ServedVerifier, hint: str) -> None:
        self.captured = tuple(sorted({*layer_ids, verifier.num_layers}))
        self._places = torch.tensor([self.captured.index(layer_id) for layer_id in layer_ids])
        self._verifier = verifier
        self._hint = hint
        self._warned = False
        self.dtype: str | None = None  #: torch dtype name of the states; that of the first ones that were checked
        self.precision: str | None = None  #: ``fp8`` when those came in eight bits

    def most_bytes(self, tokens: int) -> int:
        """What a row's states can take, with room for a server that captures more layers, so that it can be told so."""
        return 8 * tokens * (4 * len(self.captured) * self._verifier.hidden_size + 64) + (1 << 20)

    def __call__(self, received: Received, row: Row) -> HiddenStates:
        """
        :raises BadStates: when they are not those of the row; another try may give them.
        :raises VerifierError: when the server captures something else.
        """
        stored, ids = received.tensors[STATES], received.tensors[TOKEN_IDS]
        self._check_record(received.record)
        wanted = (len(self.captured), self._verifier.hidden_size)
        if tuple(stored.shape[1:]) != wanted:
            raise VerifierError(
                f"the vLLM server hands over {stored.shape[1]} states of size {stored.shape[2]} a token, where the layers "
                f"{list(self.captured)} of {self._verifier.name} are {wanted[0]} of size {wanted[1]}; start it with "
                f"`{self._hint}`"
            )
        if not np.array_equal(ids.numpy(), row.input_ids):
            raise BadStates(f"its states are of {len(ids)} other tokens than the {len(row)} asked for")
        if stored.shape[0] != len(row):
            raise BadStates(f"it gave {stored.shape[0]} states for {len(row)} tokens")
        dtype = self._dtype(stored.dtype, received.record)
        try:
            states = decode(received.tensors, getattr(torch, dtype))
        except DataError as error:
            raise BadStates(str(error)) from error
        if not bool(torch.isfinite(states).all()):
            raise BadStates("a state is not finite")
        return HiddenStates(row.row_id, ids.long(), states[:, self._places], states[:, -1].clone())

    def kept(self, received: Received, row: Row) -> HiddenStates:
        """As a call, of states that were kept; the row may be a prefix of the one they were captured for.

        :raises BadStates: when they are of no use.
        """
        length = len(row)
        if received.record.get("verifier_hash", self._verifier.hash) != self._verifier.hash:
            raise BadStates("they are another verifier's")
        cut = {name: tensor[:length] for name, tensor in received.tensors.items()}
        if len({len(tensor) for tensor in received.tensors.values()}) != 1:
            raise BadStates("they are not as many as their tokens")
        try:
            return self(Received(cut, received.record), row)
        except VerifierError as error:
            raise BadStates(str(error)) from error

    def _check_record(self, record: Mapping[str, str]) -> None:
        layers = _layers(record)
        if layers is not None and layers != self.captured:
            raise VerifierError(
                f"the vLLM server captures the layers {list(layers)}, but {list(self.captured)} are needed; start it with "
                f"`{self._hint}`"
            )
        found = record.get("verifier_hash")
        if found not in (None, self._verifier.hash) and not self._warned:
            self._warned = True
            warnings.warn(
                f"the vLLM server runs {record.get('model', 'a verifier')}, whose config or weight files are not those of "
                f"{self._verifier.name}; train for the verifier that is served",
                stacklevel=4,
            )

    def _dtype(self, stored: torch.dtype, record: Mapping[str, str]) -> str:
        """
        :raises VerifierError: when it is not that of the states before.
        """
        found = str(stored).removeprefix("torch.")
        if stored == torch.float8_e4m3fn:
            said = record.get("dtype", _DECODED)
            found = said if said in ("float32", "bfloat16", "float16") else _DECODED
        if self.dtype is None:
            self.dtype, self.precision = found, "fp8" if stored == torch.float8_e4m3fn else None
        if found != self.dtype:
            raise VerifierError(
                f"a vLLM server computes hidden states in {found}, where others were {self.dtype}; start all with the same "
                "--dtype"
            )
        return found


def _layers(record: Mapping[str, str]) -> tuple[int, ...] | None:
    """Layer ids of a record; None when it does not name any.

    :raises BadStates: when what it names is not a list of ids.
    """
    if "layer_ids" not in record:
        return None
    try:
        ids: Any = json.loads(record["layer_ids"])
        return tuple(int(layer_id) for layer_id in ids)
    except (ValueError, TypeError, RecursionError) as error:
        raise BadStates(f"its record names the layers {record['layer_ids'][:80]!r}") from error
