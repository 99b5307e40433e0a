"""States as files in a folder that servers and client share; and those kept there for the next time.

The protocol is that of vLLM's own connector and of ours: the answer names ``<path>``, the server holds an exclusive lock on
``<path>.lock`` until the file is written, and the client removes both. A connector without locks writes by renaming, so that a
file which is there is whole. Nothing outside the folder is touched, whatever a server names.
"""

from __future__ import annotations

import fcntl
import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from speculators.errors import VerifierError
from speculators.files import atomic_write
from speculators.verifiers.state_dtypes import SCALES, STATES
from speculators.verifiers.states_files import Expected, StatesFile, StatesFileError
from speculators.verifiers.vllm.readers import TOKEN_IDS, BadStates, Received

__all__ = ["FileReader", "KeptStates"]

#: Seconds that a file without a lock may take to appear.
APPEARING_SECONDS = 10.0

_POLL_SECONDS = (0.002, 0.05)  # first and longest
_REASON_BYTES = 300
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC

_PLAIN = {
    STATES: Expected((torch.float32, torch.bfloat16, torch.float16), (None, None, None)),
    TOKEN_IDS: Expected((torch.int64, torch.int32), (None,)),
}
_FP8 = {
    STATES: Expected((torch.float8_e4m3fn,), (None, None, None)),
    SCALES: Expected((torch.float32,), (None, 1, 1)),
    TOKEN_IDS: Expected((torch.int64, torch.int32), (None,)),
}


class FileReader:
    """See :class:`speculators.verifiers.vllm.readers.StatesReader`.

    :param folder: the shared folder.
    :param fp8: states come in eight bits, with scales.
    """

    def __init__(self, folder: Path, *, fp8: bool = False, appearing: float = APPEARING_SECONDS) -> None:
        self._folder = folder
        self._fp8 = fp8
        self._appearing = appearing
        self._complained = False

    def read(self, params: Mapping[str, Any], timeout: float, most_bytes: int) -> Received:
        path = self._path(params)
        with self._parent(path) as parent:
            self._wait(parent, path, time.monotonic() + timeout)
        try:
            return read_states(path, self._folder, most_bytes, fp8=self._fp8)
        except StatesFileError as error:
            raise BadStates(str(error)) from error

    def forget(self, params: Mapping[str, Any]) -> None:
        with suppress(BadStates, VerifierError, OSError):
            path = self._path(params)
            if KeptStates.owns(path):
                return
            with self._parent(path) as parent:
                for name in (path.name, f"{path.name}.lock"):
                    try:
                        os.unlink(name, dir_fd=parent)
                    except FileNotFoundError:
                        pass
                    except OSError as error:
                        self._complain(path, error)

    def close(self) -> None:
        """Nothing is held."""

    def _path(self, params: Mapping[str, Any]) -> Path:
        """Where the server says that the states are.

        :raises VerifierError: when that is outside the shared folder.
        """
        named = params.get("hidden_states_path")
        if not isinstance(named, str) or not named or "\0" in named:
            raise BadStates("its answer names no file of hidden states; is it started with a hidden-states connector?")
        path = Path(os.path.abspath(named))
        try:
            inside = path.parent.resolve().is_relative_to(self._folder.resolve())
            leaves = path.is_symlink() and not path.resolve().is_relative_to(self._folder.resolve())
        except (OSError, RuntimeError) as error:
            raise BadStates(f"it names {named!r}, which cannot be looked at ({error})") from error
        if not inside or leaves:
            raise VerifierError(
                f"a vLLM server wants {named!r} to be read, which lies outside the shared folder {self._folder}; it is "
                "refused: give the folder that the server writes to as --hidden-states-path"
            )
        return path

    @contextmanager
    def _parent(self, path: Path) -> Iterator[int]:
        """A descriptor of the file's folder, opened without following a link, also one that is put there now."""
        try:
            base = self._folder.resolve(strict=True)
            folder = os.open(base, _FOLDER)
            for part in path.parent.resolve(strict=True).relative_to(base).parts:
                try:
                    below = os.open(part, _FOLDER, dir_fd=folder)
                finally:
                    os.close(folder)
                folder = below
        except (OSError, ValueError, RuntimeError) as error:
            raise BadStates(
                f"the folder of {path} cannot be opened ({getattr(error, 'strerror', None) or error}); is {self._folder} "
                "shared with the server?"
            ) from error
        try:
            yield folder
        finally:
            os.close(folder)

    def _wait(self, parent: int, path: Path, until: float) -> None:
        """Until the file is there.

        :raises BadStates: when it will not be, or is not in time.
        """
        try:
            lock = os.open(f"{path.name}.lock", _FILE, dir_fd=parent)
        except FileNotFoundError:
            until = min(until, time.monotonic() + self._appearing)
            if not _poll(lambda: _is_there(path.name, parent), until):
                raise BadStates(f"{path} did not appear; is {self._folder} shared with the server?") from None
            return
        except OSError as error:
            raise BadStates(f"the lock of {path} cannot be opened ({error.strerror or error})") from error
        try:
            if not _poll(lambda: _locked(lock), until):
                raise BadStates(f"the server was still writing {path} at the end of --request-timeout")
            if not _is_there(path.name, parent):
                words = os.read(lock, _REASON_BYTES).decode(errors="replace").split()
                raise BadStates(f"the server wrote no states: {' '.join(words) or 'its log says why'}")
        except OSError as error:
            raise BadStates(f"the lock of {path} cannot be used ({error.strerror or error})") from error
        finally:
            os.close(lock)

    def _complain(self, path: Path, error: OSError) -> None:
        if not self._complained:
            self._complained = True
            warnings.warn(
                f"{path} cannot be removed ({error.strerror or error}); the shared folder will fill up unless the server "
                "removes what was read",
                stacklevel=4,
            )


class KeptStates:
    """Generated states kept for the next time, as upstream keeps them: ``hs_<row id>.safetensors`` in the shared folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, row_id: int) -> Path:
        return self.folder / f"hs_{row_id}.safetensors"

    @staticmethod
    def owns(path: Path) -> bool:
        """Whether a file is named as kept states are."""
        return path.suffix == ".safetensors" and path.stem.startswith("hs_") and path.stem[3:].isdecimal()

    def read(self, row_id: int, most_bytes: int) -> Received | None:
        """What is kept for a row; None when nothing is.

        :raises StatesFileError: when what is there cannot be read.
        """
        path = self.path(row_id)
        return read_states(path, self.folder, most_bytes) if os.path.lexists(path) else None

    def any(self) -> Received | None:
        """What is kept for some row; None when nothing is, or nothing readable."""
        for path in self.folder.glob("hs_*.safetensors"):
            with suppress(StatesFileError):
                return read_states(path, self.folder, 1 << 62)
        return None

    def write(self, row_id: int, received: Received) -> None:
        """:raises DataError: when they cannot be written."""
        from safetensors.torch import save_file

        tensors = {name: tensor.contiguous() for name, tensor in received.tensors.items()}
        atomic_write(self.path(row_id), lambda path: save_file(tensors, path, metadata=dict(received.record)))


def read_states(path: Path, folder: Path, most_bytes: int, *, fp8: bool | None = None) -> Received:
    """Tensors and record of a states file.

    :param fp8: whether it must, or must not, hold states in eight bits; None: as it says.
    :raises StatesFileError: for a file that is not such, or lies outside ``folder``.
    """
    # Copied, not mapped: a server that cuts the file afterwards would kill this process.
    with StatesFile(path.absolute(), root=folder.absolute(), mapped=False) as file:
        if file.size > most_bytes:
            raise StatesFileError(f"the tensor file {path} is refused: it has {file.size} bytes, more than it can need")
        stored = file.places.get(STATES)
        eight_bits = stored is not None and stored.dtype == torch.float8_e4m3fn
        if fp8 is not None and stored is not None and eight_bits != fp8:
            backend = "fp8" if eight_bits else "file"
            raise StatesFileError(f"{path} holds states of the backend {backend}; pass --hidden-states-backend {backend}")
        expected = _FP8 if eight_bits else _PLAIN
        for name, wanted in expected.items():
            file.check(name, wanted)
        return Received({name: file.tensor(name) for name in expected}, dict(file.metadata))


def _poll(done: Callable[[], bool], until: float) -> bool:
    pause, longest = _POLL_SECONDS
    while not done():
        if time.monotonic() >= until:
            return False
        time.sleep(pause)
        pause = min(longest, pause * 1.5)
    return True


def _locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_there(name: str, folder: int) -> bool:
    try:
        os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True
