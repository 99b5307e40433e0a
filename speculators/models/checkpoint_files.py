"""Weight files of a model folder or hub repository, drafts' and verifiers' alike: reading, writing and listing tensors.

Read are one ``model.safetensors``, shards named by ``model.safetensors.index.json``, and the pickled forms of both
(``pytorch_model.bin``), which torch opens with ``weights_only=True``, so that nothing in them is executed. Written is
safetensors only.
"""

from __future__ import annotations

import json
import os
import pickle
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePath
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers.utils import cached_file

from speculators.errors import ConfigError, SpeculatorsError
from speculators.files import give_ordinary_mode, read_json, write_text_atomically

__all__ = ["DEFAULT_SHARD_SIZE", "DTYPES", "TensorEntry", "WeightFiles", "has_weights", "locate", "write_weights"]

WEIGHTS_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"

#: In the order of preference, which is transformers'; the last two are Mistral's own, found where no other is.
_CANDIDATES = (
    WEIGHTS_NAME,
    INDEX_NAME,
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
    "consolidated.safetensors",
    "consolidated.safetensors.index.json",
)
_SHARD = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")

#: transformers' default for models: practically always one file, which serving engines read the quickest.
DEFAULT_SHARD_SIZE = "50GB"

#: Types by their name in a safetensors header.
DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a file, without its values."""

    name: str
    shape: tuple[int, ...]
    dtype: str  #: torch's name, ``bfloat16``; for types torch lacks, the file's
    nbytes: int

    @classmethod
    def of(cls, name: str, tensor: Tensor) -> TensorEntry:
        """The entry of a tensor, which may be on the meta device."""
        dtype = str(tensor.dtype).removeprefix("torch.")
        return cls(name, tuple(tensor.shape), dtype, tensor.numel() * tensor.element_size())


def locate(name_or_path: str | os.PathLike[str], filename: str, where: Mapping[str, Any] | None = None) -> Path | None:
    """A file of a folder or, through the cache, of a hub repository; None when it has none of that name.

    :param where: ``cache_dir``, ``revision``, ``token``, ``local_files_only``, as transformers takes them.
    """
    if os.path.isdir(name_or_path):
        path = Path(name_or_path) / filename
        return path if path.is_file() else None
    try:
        found = cached_file(str(name_or_path), filename, _raise_exceptions_for_missing_entries=False, **(where or {}))
    except (OSError, ValueError):
        return None
    return Path(found) if found else None


def has_weights(folder: str | os.PathLike[str]) -> bool:
    """Whether a folder holds weights that :class:`WeightFiles` would read."""
    return any((Path(folder) / filename).is_file() for filename in _CANDIDATES)


class WeightFiles:
    """The tensors of a model by name. Only what is asked for is read.

    :param name_or_path: folder or hub id.
    :param owner: whose weights they are, for messages: ``draft`` or ``verifier``.
    :param error: class of the errors raised.
    :param where: see :func:`locate`.
    """

    def __init__(
        self,
        name_or_path: str | os.PathLike[str],
        *,
        owner: str = "draft",
        error: type[SpeculatorsError] = ConfigError,
        where: Mapping[str, Any] | None = None,
    ) -> None:
        self.name_or_path = str(name_or_path)
        self._owner, self._error, self._where = owner, error, where
        self._pickled: dict[str, Mapping[str, Tensor]] = {}

    @cached_property
    def index(self) -> dict[str, str]:
        """Tensor name -> name of its file.

        :raises SpeculatorsError: of the class given; no weights there, or they are unreadable.
        """
        for filename in _CANDIDATES:
            path = locate(self.name_or_path, filename, self._where)
            if path is None:
                continue
            if not filename.endswith(".index.json"):
                return dict.fromkeys(self._names_in(filename), filename)
            try:
                weight_map = dict(read_json(path)["weight_map"])
            except (OSError, ValueError, KeyError, TypeError) as error:
                raise self._unreadable(path, error) from error
            for shard in weight_map.values():
                if not isinstance(shard, str) or PurePath(shard).is_absolute() or ".." in PurePath(shard).parts:
                    raise self._error(f"{path} names the file {shard!r} outside its folder; take the index of another copy")
            return weight_map
        raise self._error(
            f"no {self._owner} weights at {self.name_or_path!r}; give the folder with the {self._owner}'s {WEIGHTS_NAME}"
        )

    def read(self, names: Iterable[str] | None = None) -> dict[str, Tensor]:
        """Tensors by name, on the CPU in their own types; all of them when ``names`` is None.

        :raises SpeculatorsError: of the class given; a file is missing or torn, or lacks a tensor.
        """
        wanted = list(self.index) if names is None else list(names)
        by_file: dict[str, list[str]] = {}
        for name in wanted:
            by_file.setdefault(self.index[name], []).append(name)
        found: dict[str, Tensor] = {}
        for filename, inside in by_file.items():
            path = self._path(filename)
            if filename.endswith(".bin"):
                pickled = self._unpickled(filename)
                missing = [name for name in inside if name not in pickled]
                if missing:
                    raise self._unreadable(path, KeyError(missing[0]))
                # Cloned, because the mapped file would otherwise stay open.
                found |= {name: pickled[name].clone() for name in inside}
                continue
            try:
                with safe_open(path, framework="pt") as file:
                    found |= {name: file.get_tensor(name) for name in inside}
            except (OSError, SafetensorError) as error:
                raise self._unreadable(path, error) from error
        return {name: found[name] for name in wanted}

    def entries(self) -> list[TensorEntry]:
        """What the files hold, from their headers, in the order of their names."""
        result = []
        for filename in dict.fromkeys(self.index.values()):
            path = self._path(filename)
            if filename.endswith(".bin"):
                result += [TensorEntry.of(name, tensor) for name, tensor in self._unpickled(filename).items()]
            else:
                result += _header_entries(self._header(path))
        return sorted(result, key=lambda entry: entry.name)

    def _header(self, path: Path) -> dict[str, Any]:
        try:
            with open(path, "rb") as file:
                size = int.from_bytes(file.read(8), "little")
                if size > path.stat().st_size:
                    raise ValueError("its header is longer than the file")
                return json.loads(file.read(size))
        except RecursionError as error:
            raise self._unreadable(path, ValueError("its header is nested too deep")) from error
        except (OSError, ValueError) as error:
            raise self._unreadable(path, error) from error

    def _path(self, filename: str) -> Path:
        path = locate(self.name_or_path, filename, self._where)
        if path is None:
            raise self._error(f"the {self._owner} {self.name_or_path!r} lacks its weight file {filename}; fetch it again")
        return path

    def _names_in(self, filename: str) -> list[str]:
        path = self._path(filename)
        if filename.endswith(".bin"):
            return list(self._unpickled(filename))
        try:
            with safe_open(path, framework="pt") as file:
                return list(file.keys())
        except (OSError, SafetensorError) as error:
            raise self._unreadable(path, error) from error

    def _unpickled(self, filename: str) -> Mapping[str, Tensor]:
        """Tensors of a pickled file, mapped into memory where its format allows that."""
        if filename not in self._pickled:
            path = self._path(filename)
            try:
                # torch's format before 1.6 is no zip archive and cannot be mapped.
                values = torch.load(path, weights_only=True, mmap=_is_zip(path), map_location="cpu")
            except pickle.UnpicklingError as error:  # whose own words are torch's advice to run the file's code
                reason = ValueError("it is no pickle of tensors alone")
                raise self._unreadable(path, reason) from error
            except (OSError, EOFError, ValueError, RuntimeError) as error:
                raise self._unreadable(path, error) from error
            named = isinstance(values, Mapping) and all(isinstance(name, str) for name in values)
            if not named or not all(isinstance(value, Tensor) for value in values.values()):
                raise self._error(f"{path} holds more than tensors; save the {self._owner}'s weights as {WEIGHTS_NAME}")
            self._pickled[filename] = values
        return self._pickled[filename]

    def _unreadable(self, path: Path, error: Exception) -> SpeculatorsError:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        return self._error(f"cannot read the {self._owner}'s {path} ({reason}); the file is torn or foreign, fetch it again")


def _is_zip(path: Path) -> bool:
    with open(path, "rb") as file:
        return file.read(4) == b"PK\x03\x04"


def _header_entries(header: Mapping[str, Any]) -> list[TensorEntry]:
    entries = []
    for name, value in header.items():
        if name != "__metadata__":
            dtype = DTYPES.get(value["dtype"])
            start, end = value["data_offsets"]
            spelled = str(dtype).removeprefix("torch.") if dtype is not None else value["dtype"]
            entries.append(TensorEntry(name, tuple(value["shape"]), spelled, end - start))
    return entries


def write_weights(
    folder: str | os.PathLike[str], tensors: Mapping[str, Tensor], max_shard_size: int | str = DEFAULT_SHARD_SIZE
) -> None:
    """Write ``model.safetensors``, or numbered shards and their index where the tensors exceed ``max_shard_size``.

    Files appear by rename once all are written, and those of an earlier checkpoint that no longer belong go last.

    :param tensors: contiguous, on the CPU.
    :param max_shard_size: bytes, or text such as ``5GB``.
    :raises ConfigError: ``max_shard_size`` is no size.
    :raises OSError: a file cannot be written; those that were there stay.
    """
    folder = Path(folder)
    try:
        plan = split_torch_state_dict_into_shards(dict(tensors), max_shard_size=max_shard_size)
    except ValueError as error:
        raise ConfigError(f"max_shard_size {max_shard_size!r} is no size; give bytes or a text such as '5GB'") from error
    pending: dict[Path, Path] = {}
    try:
        for filename, names in plan.filename_to_tensors.items():
            temporary = folder / f".{filename}.tmp"
            pending[temporary] = folder / filename
            save_file({name: tensors[name] for name in names}, temporary, metadata={"format": "pt"})
            give_ordinary_mode(temporary)
        for temporary, final in pending.items():
            os.replace(temporary, final)
    except SafetensorError as error:
        raise OSError(f"could not write the weights into {folder}: {error}") from error
    finally:
        for temporary in pending:
            temporary.unlink(missing_ok=True)
    if plan.is_sharded:
        index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
        write_text_atomically(folder / INDEX_NAME, json.dumps(index, indent=2, sort_keys=True) + "\n")
    else:
        (folder / INDEX_NAME).unlink(missing_ok=True)
    for path in folder.iterdir():
        ours = path.name == WEIGHTS_NAME or _SHARD.fullmatch(path.name)
        if ours and path.name not in plan.filename_to_tensors:
            path.unlink()
