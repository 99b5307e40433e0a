"""Hidden states as flat buffers for Ray's object store, which hands such arrays to readers without a copy."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from speculators.data.rows import Row
from speculators.errors import VerifierError
from speculators.verifiers.rollout.settings import TransferDtype
from speculators.verifiers.source import HiddenStates, StatesDescription
from speculators.verifiers.state_dtypes import SCALES, STATES, decode, encode, torch_dtype

__all__ = ["PackedStates", "pack", "unpack"]


@dataclass(frozen=True, slots=True)
class PackedStates:
    """States of some rows, end to end.

    :param states: bytes of ``[sum of T, M + 1, H]``, the final state last.
    :param scales: float32 ``[sum of T]`` with fp8, else None.
    """

    row_ids: tuple[int, ...]
    lengths: tuple[int, ...]
    token_ids: np.ndarray  #: int64 ``[sum of T]``
    states: np.ndarray  #: uint8
    scales: np.ndarray | None
    dtype: str

    @property
    def nbytes(self) -> int:
        return self.states.nbytes + self.token_ids.nbytes + (0 if self.scales is None else self.scales.nbytes)


def pack(answers: list[HiddenStates], transfer_dtype: TransferDtype) -> PackedStates:
    """:raises DataError: when a state is not finite, in a dtype that has to know."""
    whole = torch.cat([torch.cat([one.features, one.final[:, None]], dim=1) for one in answers])
    dtype = str(whole.dtype).removeprefix("torch.") if transfer_dtype == "native" else transfer_dtype
    tensors = {STATES: whole} if transfer_dtype == "native" else encode(whole, dtype)
    scales = tensors.get(SCALES)
    return PackedStates(
        tuple(one.row_id for one in answers),
        tuple(len(one.token_ids) for one in answers),
        torch.cat([one.token_ids for one in answers]).numpy(),
        tensors[STATES].contiguous().view(torch.uint8).flatten().numpy(),
        None if scales is None else scales.flatten().numpy(),
        dtype,
    )


def unpack(packed: PackedStates, rows: list[Row], description: StatesDescription) -> list[HiddenStates]:
    """The states of ``rows``, in their order; native ones are views of the packed bytes.

    :raises VerifierError: when they are not what was asked for.
    """
    tokens, width = sum(packed.lengths), len(description.layer_ids) + 1
    shape = (tokens, width, description.hidden_size)
    dtype = torch_dtype(packed.dtype) if packed.dtype == "fp8" else getattr(torch, packed.dtype)
    asked = tuple((row.row_id, len(row)) for row in rows)
    if tuple(zip(packed.row_ids, packed.lengths, strict=True)) != asked:
        raise VerifierError("an actor of the rollout answered for other rows than it was asked for")
    if not np.array_equal(packed.token_ids, np.concatenate([row.input_ids for row in rows])):
        raise VerifierError("an actor of the rollout ran other tokens than it was given")
    if packed.states.nbytes != tokens * width * description.hidden_size * dtype.itemsize:
        raise VerifierError("an actor of the rollout gave too few states, or states of another verifier")
    tensors = {STATES: _tensor(packed.states).view(dtype).view(shape)}
    if packed.scales is not None:
        tensors[SCALES] = _tensor(packed.scales).view(-1, 1, 1)
    whole = decode(tensors, getattr(torch, description.dtype))
    answers, start = [], 0
    for row in rows:
        own = whole[start : start + len(row)]
        answers.append(HiddenStates(row.row_id, torch.tensor(row.input_ids), own[:, :-1], own[:, -1]))
        start += len(row)
    return answers


def _tensor(array: np.ndarray) -> Tensor:
    """A tensor on the array's memory, which is read-only where it belongs to the object store; nobody writes to states."""
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return torch.from_numpy(array)
