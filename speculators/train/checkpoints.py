"""Numbered checkpoints of a run folder: they appear whole by one rename, and a torn one is never taken for one.

``<run folder>/<number>/`` holds the draft as anybody may load it (``config.json``, ``model.safetensors``) and the training
state: ``training_state.safetensors`` (float32 weights, optimiser states, random-number generators) and
``training_state.json`` (position, and the size of every file). Only safetensors and JSON are written or read.
"""

from __future__ import annotations

import json
import logging
import os
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from speculators.errors import SpeculatorsError
from speculators.files import NO_ROOM, give_ordinary_mode

__all__ = ["Checkpoint", "CheckpointStore", "disk_is_full", "get_rng_state", "set_rng_state"]

STATE_JSON = "training_state.json"
STATE_TENSORS = "training_state.safetensors"
BEST = "checkpoint_best"
_FORMAT = 1

logger = logging.getLogger("speculators.train")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete checkpoint on disk."""

    path: Path
    number: int
    state: dict[str, Any]

    def tensors(self) -> dict[str, Tensor]:
        """The tensors of the training state, on the CPU."""
        return load_file(self.path / STATE_TENSORS)


class CheckpointStore:
    """The numbered checkpoints of one run folder; its user holds the folder's lock."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def complete(self) -> list[Checkpoint]:
        """Complete checkpoints by rising number."""
        if not self.folder.is_dir():
            return []
        numbers = sorted(int(entry.name) for entry in self.folder.iterdir() if entry.name.isdigit() and entry.is_dir())
        found = [self._read(number) for number in numbers]
        return [checkpoint for checkpoint in found if checkpoint is not None]

    def latest(self) -> Checkpoint | None:
        """The complete checkpoint of the highest number."""
        found = self.complete()
        return found[-1] if found else None

    def to_resume(self) -> Checkpoint | None:
        """:meth:`latest`, with a note about a newer folder that is passed over."""
        found = self.latest()
        newest = self.next_number() - 1
        if newest >= 0 and (found is None or newest > found.number):
            then = f"going on from {found.path}" if found is not None else "starting anew"
            logger.warning("%s is no complete checkpoint and is passed over; %s", self.folder / str(newest), then)
        return found

    def best(self) -> Path | None:
        """Where :data:`BEST` points, if there is one."""
        link = self.folder / BEST
        return self.folder / os.readlink(link) if link.exists() else None

    def next_number(self) -> int:
        """One above every numbered folder, torn ones included."""
        taken = [int(entry.name) for entry in self.folder.iterdir() if entry.name.isdigit()] if self.folder.is_dir() else []
        return max(taken, default=-1) + 1

    def save(
        self,
        write_model: Callable[[Path], None],
        tensors: dict[str, Tensor],
        state: dict[str, Any],
        *,
        label: str,
        extra: dict[str, str] | None = None,
    ) -> Checkpoint:
        """Write the next checkpoint.

        :param write_model: writes the draft into the folder it is given.
        :param label: name of a link to the checkpoint, such as ``epoch0_end``.
        :param extra: further text files, name -> content.
        :raises SpeculatorsError: when the disk is full; every earlier checkpoint is as it was.
        """
        number = self.next_number()
        target = self.folder / str(number)
        temporary = self.folder / f".{number}.{os.getpid()}.tmp"
        try:
            temporary.mkdir(parents=True)
            write_model(temporary)
            save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, temporary / STATE_TENSORS)
            for name, text in (extra or {}).items():
                (temporary / name).write_text(text, encoding="utf-8")
            files = {entry.name: entry.stat().st_size for entry in sorted(temporary.iterdir())}
            record = {"format": _FORMAT, **state, "files": files}
            (temporary / STATE_JSON).write_text(json.dumps(record, indent=1), encoding="utf-8")
            for entry in temporary.iterdir():
                give_ordinary_mode(entry)
                _fsync(entry)
            _fsync(temporary)
            os.rename(temporary, target)
            _fsync(self.folder)
        except BaseException as error:
            shutil.rmtree(temporary, ignore_errors=True)
            if disk_is_full(error):
                raise SpeculatorsError(self._full_disk_sentence(number)) from error
            raise
        self._link(label, target.name)
        return Checkpoint(target, number, record)

    def mark_best(self, checkpoint: Checkpoint) -> None:
        """Point :data:`BEST` at a checkpoint."""
        self._link(BEST, checkpoint.path.name)

    def restore_best(self, number: int | None) -> None:
        """Point :data:`BEST` at checkpoint ``number`` again, where a kill came between its saving and :meth:`mark_best`."""
        checkpoint = None if number is None else self._read(number)
        if checkpoint is not None and self.best() != checkpoint.path:
            self.mark_best(checkpoint)

    def prune(self, keep: set[int], mine: set[int]) -> None:
        """Remove the checkpoints in ``mine`` that are not in ``keep``, and the links that pointed at them."""
        for number in mine - keep:
            # Renamed first: a removal cut short must not leave what looks like a checkpoint.
            doomed = self.folder / f".{number}.{os.getpid()}.old"
            if (self.folder / str(number)).is_dir():
                os.rename(self.folder / str(number), doomed)
                shutil.rmtree(doomed, ignore_errors=True)
        for entry in self.folder.iterdir():
            if entry.is_symlink() and not entry.exists() and os.readlink(entry).isdigit():
                entry.unlink()

    def sweep(self) -> None:
        """Remove what an earlier process left half-written."""
        for entry in self.folder.iterdir():
            name = entry.name
            if name.startswith(".") and name.endswith((".tmp", ".old")) and name[1:].split(".")[0].isdigit() and entry.is_dir():
                shutil.rmtree(entry, ignore_errors=True)

    def _read(self, number: int) -> Checkpoint | None:
        path = self.folder / str(number)
        try:
            state = json.loads((path / STATE_JSON).read_text(encoding="utf-8"))
            if state["format"] != _FORMAT or STATE_TENSORS not in state["files"]:
                return None
            if any((path / name).stat().st_size != size for name, size in state["files"].items()):
                return None
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None
        return Checkpoint(path, number, state)

    def _link(self, name: str, target: str) -> None:
        temporary = self.folder / f".{name}.{os.getpid()}.tmp"
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(target)
        os.replace(temporary, self.folder / name)

    def _full_disk_sentence(self, number: int) -> str:
        latest = self.latest()
        resume = f"checkpoint {latest.path}" if latest is not None else "the start"
        return (
            f"the disk is full while saving checkpoint {number} to {self.folder}; free some space and run the same command "
            f"again, which goes on from {resume}"
        )


def disk_is_full(error: BaseException | None) -> bool:
    """Whether an error, or what it was raised from, is a full disk."""
    if error is None:
        return False
    if isinstance(error, OSError) and error.errno in NO_ROOM:
        return True
    # safetensors wraps the operating system's error in its own.
    wrapped = isinstance(error, SafetensorError) and any(os.strerror(number) in str(error) for number in NO_ROOM)
    return wrapped or disk_is_full(error.__cause__)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def get_rng_state() -> tuple[dict[str, Tensor], dict[str, Any]]:
    """State of torch's, numpy's and Python's global generators, as tensors and as JSON."""
    tensors = {"rng/torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        tensors["rng/cuda"] = torch.cuda.get_rng_state()
    numpy_state: Any = np.random.get_state(legacy=False)
    numpy_state["state"]["key"] = numpy_state["state"]["key"].tolist()
    version, internal, gauss = random.getstate()
    return tensors, {"numpy": numpy_state, "python": [version, list(internal), gauss]}


def set_rng_state(tensors: dict[str, Tensor], record: dict[str, Any]) -> None:
    """Put back what :func:`get_rng_state` gave."""
    torch.set_rng_state(tensors["rng/torch"])
    if "rng/cuda" in tensors and torch.cuda.is_available():
        torch.cuda.set_rng_state(tensors["rng/cuda"])
    numpy_state = record["numpy"]
    key = np.asarray(numpy_state["state"]["key"], dtype=np.uint32)
    np.random.set_state({**numpy_state, "state": {**numpy_state["state"], "key": key}})
    version, internal, gauss = record["python"]
    random.setstate((version, tuple(internal), gauss))
