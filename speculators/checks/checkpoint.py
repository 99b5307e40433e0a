"""A checkpoint folder read as it is: raw JSON and raw safetensors headers, so that a broken one can be looked at.

Nothing here refuses a checkpoint: what cannot be read is listed in :attr:`RawCheckpoint.findings`. Values are read a part at a
time, and only of files whose length is what their header says.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from speculators.checks.findings import Finding, Kind
from speculators.errors import ConfigError
from speculators.files import read_json
from speculators.models.checkpoint_files import DTYPES, WeightFiles

__all__ = ["KINDS", "RawCheckpoint", "TensorInfo", "read_checkpoint"]

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"

#: Elements looked at together when a whole tensor is.
PART = 1 << 24

#: The format's limit of a header's bytes; a larger number at the start of a file is no length.
MAX_HEADER = 100_000_000

CONFIG_MISSING = Kind(
    "config-missing",
    "error",
    "There is no config.json.",
    "No reader knows what the tensors are.",
    "Add the config.json that was saved with the weights.",
)
CONFIG_NOT_JSON = Kind(
    "config-not-json",
    "error",
    "config.json is not a JSON object.",
    "No reader can load the checkpoint.",
    "Repair the file, or save the checkpoint again; a transfer may have cut it or left an error page in its place.",
)
WEIGHTS_MISSING = Kind(
    "weights-missing",
    "error",
    "There are no weights.",
    "Nothing can be loaded.",
    "Copy model.safetensors (or its shards and model.safetensors.index.json) into the folder.",
)
WEIGHTS_PICKLED = Kind(
    "weights-pickled-only",
    "warning",
    "The weights are pickled PyTorch files only.",
    "This library opens them with weights_only; readers that do not let the file run any code, and many read safetensors only.",
    "Load the draft and save it again with `save_pretrained`, which writes safetensors.",
)
WEIGHTS_TRUNCATED = Kind(
    "weights-truncated",
    "error",
    "A safetensors file is shorter or longer than its header says.",
    "Loading fails, or the last tensors are garbage.",
    "Copy or download the file again and compare its size.",
)
WEIGHTS_UNREADABLE = Kind(
    "weights-unreadable",
    "error",
    "A safetensors file has no readable header.",
    "Loading fails.",
    "Copy the file again; a Git LFS pointer or an error page may lie in its place.",
)
SHARD_MISSING = Kind(
    "weights-shard-missing",
    "error",
    "The weight index names a file or a tensor that is not there.",
    "Loading fails, or the tensors stay random.",
    "Copy the missing shard, or write the checkpoint again as one file.",
)
KINDS = (
    CONFIG_MISSING,
    CONFIG_NOT_JSON,
    WEIGHTS_MISSING,
    WEIGHTS_PICKLED,
    WEIGHTS_TRUNCATED,
    WEIGHTS_UNREADABLE,
    SHARD_MISSING,
)

#: Faults after which tensors may exist that were not seen.
_INCOMPLETE = frozenset(kind.id for kind in (WEIGHTS_MISSING, WEIGHTS_UNREADABLE, SHARD_MISSING))


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """What a header says of one tensor."""

    file: Path
    dtype: torch.dtype | str  #: the name as written, if torch has no such type
    shape: tuple[int, ...]

    @property
    def floating(self) -> bool:
        return self.dtype.is_floating_point if isinstance(self.dtype, torch.dtype) else self.dtype.startswith("F")


@dataclass(slots=True)
class RawCheckpoint:
    """A checkpoint folder."""

    folder: Path
    config: dict[str, Any] | None = None
    tensors: dict[str, TensorInfo] = field(default_factory=dict)
    pickled: WeightFiles | None = None  #: reads the tensors where there is no safetensors file
    whole: set[Path] = field(default_factory=set)  #: files whose values can be read
    findings: list[Finding] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        """Whether all of the weights' headers were read, so that a tensor not seen is not there."""
        return bool(self.tensors) and not {finding.id for finding in self.findings} & _INCOMPLETE

    def readable(self, name: str) -> bool:
        """Whether the tensor is there with values that can be read."""
        info = self.tensors.get(name)
        return info is not None and info.file in self.whole and isinstance(info.dtype, torch.dtype)

    def read(self, name: str, rows: slice = slice(None)) -> Tensor:
        """A tensor, or some of its rows."""
        if self.pickled is not None:
            tensor = self.pickled.read([name])[name]
            return tensor[rows] if tensor.dim() else tensor
        with safe_open(self.tensors[name].file, framework="pt") as file:
            return file.get_slice(name)[rows] if self.tensors[name].shape else file.get_tensor(name)

    def parts(self, name: str) -> Iterator[Tensor]:
        """A tensor a few rows at a time."""
        shape = self.tensors[name].shape
        if not shape or 0 in shape:
            yield self.read(name)
            return
        step = max(1, PART // max(1, math.prod(shape[1:])))
        for start in range(0, shape[0], step):
            yield self.read(name, slice(start, start + step))


def read_checkpoint(folder: Path) -> RawCheckpoint:
    """Read what can be read.

    :raises ConfigError: there is no such folder, or it may not be read.
    """
    try:
        names = {path.name for path in folder.iterdir()}
    except NotADirectoryError:
        raise ConfigError(f"{folder} is a file; give the folder that holds config.json and model.safetensors") from None
    except OSError as error:
        raise ConfigError(f"cannot read the checkpoint folder {folder} ({error.strerror}); check the path") from error
    checkpoint = RawCheckpoint(folder)
    if CONFIG in names:
        _read_config(checkpoint)
    else:
        checkpoint.findings.append(CONFIG_MISSING.found(f"{folder} has no {CONFIG}"))
    _read_weights(checkpoint, names)
    return checkpoint


def _read_config(checkpoint: RawCheckpoint) -> None:
    try:
        values = read_json(checkpoint.folder / CONFIG)
    except (OSError, ValueError) as error:
        checkpoint.findings.append(CONFIG_NOT_JSON.found(f"{CONFIG} cannot be read: {error}"))
        return
    if isinstance(values, dict):
        checkpoint.config = values
    else:
        checkpoint.findings.append(CONFIG_NOT_JSON.found(f"{CONFIG} holds a {type(values).__name__}, not an object"))


def _read_weights(checkpoint: RawCheckpoint, names: set[str]) -> None:
    if WEIGHTS in names:
        _read_file(checkpoint, checkpoint.folder / WEIGHTS)
    elif INDEX in names:
        _read_shards(checkpoint)
    else:
        loose = sorted(name for name in names if name.endswith(".safetensors"))
        pickled = sorted(name for name in names if name.endswith((".bin", ".pt", ".pth")))
        if not loose and pickled:
            _read_pickled(checkpoint, pickled)
            return
        others = f"; there are only {', '.join(loose)}" if loose else ""
        checkpoint.findings.append(WEIGHTS_MISSING.found(f"{checkpoint.folder} has neither {WEIGHTS} nor {INDEX}{others}"))
        for name in loose:
            _read_file(checkpoint, checkpoint.folder / name)


def _read_pickled(checkpoint: RawCheckpoint, names: list[str]) -> None:
    checkpoint.findings.append(WEIGHTS_PICKLED.found(f"the only weights are {', '.join(names)}"))
    files = WeightFiles(checkpoint.folder)
    try:
        entries = files.entries()
    except ConfigError as error:
        checkpoint.findings.append(WEIGHTS_UNREADABLE.found(str(error)))
        return
    checkpoint.pickled, checkpoint.whole = files, {checkpoint.folder}
    for entry in entries:
        checkpoint.tensors[entry.name] = TensorInfo(checkpoint.folder, getattr(torch, entry.dtype, entry.dtype), entry.shape)


def _read_shards(checkpoint: RawCheckpoint) -> None:
    try:
        index = read_json(checkpoint.folder / INDEX)
        placed = {str(name): str(file) for name, file in index["weight_map"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        checkpoint.findings.append(WEIGHTS_UNREADABLE.found(f"{INDEX} has no readable weight_map ({error})"))
        return
    for file in sorted(set(placed.values())):
        if (checkpoint.folder / file).is_file():
            _read_file(checkpoint, checkpoint.folder / file)
        else:
            checkpoint.findings.append(SHARD_MISSING.found(f"{INDEX} names {file}, which is not in the folder"))
    broken = {finding.id for finding in checkpoint.findings}
    lost = sorted(set(placed) - set(checkpoint.tensors))
    if lost and not broken & {SHARD_MISSING.id, WEIGHTS_UNREADABLE.id}:
        checkpoint.findings.append(SHARD_MISSING.found(f"{INDEX} lists {', '.join(lost)}, which no shard holds"))


def _read_file(checkpoint: RawCheckpoint, path: Path) -> None:
    """Add the tensors of one file."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            if size < 8:
                checkpoint.findings.append(WEIGHTS_TRUNCATED.found(f"{path.name} has {size} bytes"))
                return
            (length,) = struct.unpack("<Q", file.read(8))
            if MAX_HEADER > length > size - 8:
                text = f"{path.name} has {size:,} bytes, its header alone should have {length:,}"
                checkpoint.findings.append(WEIGHTS_TRUNCATED.found(text))
                return
            header = json.loads(file.read(min(length, MAX_HEADER)))
        header.pop("__metadata__", None)
        infos = {
            name: TensorInfo(path, DTYPES.get(entry["dtype"], entry["dtype"]), tuple(int(size) for size in entry["shape"]))
            for name, entry in header.items()
        }
        end = 8 + length + max((int(entry["data_offsets"][1]) for entry in header.values()), default=0)
        if size == end:
            with safe_open(path, framework="pt"):  # which refuses shapes and places that contradict one another
                checkpoint.whole.add(path)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, SafetensorError) as error:
        checkpoint.findings.append(WEIGHTS_UNREADABLE.found(f"{path.name} is no safetensors file: {error}"))
        return
    checkpoint.tensors.update(infos)
    if size != end:
        checkpoint.findings.append(WEIGHTS_TRUNCATED.found(f"{path.name} has {size:,} bytes, its header promises {end:,}"))
