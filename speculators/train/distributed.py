"""Processes of one job: what the main one does for all, and the trackers it feeds."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs, broadcast_object_list

from speculators.errors import ConfigError, LostProcessError, SpeculatorsError
from speculators.train.config.derived import tracker_names
from speculators.train.config.model import TrainConfig

__all__ = ["StopSignals", "main_first", "make_accelerator", "noticing_lost_processes"]

Result = TypeVar("Result")


def make_accelerator(config: TrainConfig) -> Accelerator:
    """Device, processes and trackers of a training. Mixed precision and accumulation are the trainer's own.

    :raises ConfigError: when a tracker's package is not installed.
    """
    names = tracker_names(config)
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise ConfigError(f"--logger {name}: the package {name} is not installed; install it or leave it out")
    return Accelerator(
        # Without an accelerator torchrun's processes would not find each other otherwise.
        cpu=not torch.accelerator.is_available(),
        mixed_precision="no",
        log_with=names or None,
        project_dir=expand_placeholders(config.logging.log_dir) if names else None,
        kwargs_handlers=[DistributedDataParallelKwargs(gradient_as_bucket_view=True)],
    )


def expand_placeholders(text: str) -> str:
    """Fill in {time}, {utc_time}, {rank} and {local_rank}."""
    values = {
        "{time}": time.strftime("%Y-%m-%dT%H-%M-%S"),
        "{utc_time}": time.strftime("%Y-%m-%dT%H-%M-%SZ", time.gmtime()),
        "{rank}": os.environ.get("RANK", "0"),
        "{local_rank}": os.environ.get("LOCAL_RANK", "0"),
    }
    for name, value in values.items():
        text = text.replace(name, value)
    return text


def main_first(accelerator: Accelerator, work: Callable[[], Result]) -> Result:
    """Do ``work`` on the main process and give its result, or its :class:`SpeculatorsError`, to all."""
    if accelerator.num_processes == 1:
        return work()
    answer: list[Any] = [None, None]
    unexpected: BaseException | None = None
    if accelerator.is_main_process:
        try:
            answer[0] = work()
        except SpeculatorsError as error:
            answer[1] = error
        except BaseException as error:  # the others must not wait for ever
            answer[1], unexpected = SpeculatorsError("the main process failed"), error
    broadcast_object_list(answer)
    if unexpected is not None:
        raise unexpected
    if answer[1] is not None:
        raise answer[1]
    result: Result = answer[0]
    return result


#: What gloo says when the process at the other end is gone or silent; NCCL has an exception class for it.
_GONE = ("Connection reset", "Connection closed", "Broken pipe", "Timed out waiting")


@contextmanager
def noticing_lost_processes() -> Iterator[None]:
    """Turn the failure of an exchange with a process that is gone into a sentence.

    :raises LostProcessError: in its place; every other error passes.
    """
    try:
        yield
    except RuntimeError as error:
        gone = "gloo" in str(error) and any(words in str(error) for words in _GONE)
        if not gone and not isinstance(error, torch.distributed.DistError):
            raise
        _keep_process_group()
        raise LostProcessError(
            "another process of this training is gone (its own output may say why); run the same command again, which goes "
            "on from the last checkpoint"
        ) from error


def _keep_process_group() -> None:
    """Let the process group live until the process ends, whoever lets go of it.

    gloo's destructor waits for its threads while it holds the interpreter; a thread that still has to give back the tensors
    of a failed exchange waits for the interpreter, and both wait for ever.
    """
    group = torch.distributed.group.WORLD
    if group is not None:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
        time.sleep(0.1)  # gives those threads the interpreter


class StopSignals:
    """Turns SIGINT and SIGTERM into a request to stop at the next step; a second signal acts at once."""

    def __init__(self) -> None:
        self.received: int | None = None

    @contextmanager
    def installed(self) -> Iterator[StopSignals]:
        """Listen while the context lasts; outside the main thread, where Python allows no handlers, do nothing."""
        import threading

        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        previous = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

        def receive(number: int, frame: Any) -> None:
            if self.received is not None:
                signal.signal(number, previous[signal.Signals(number)])
                signal.raise_signal(number)
            self.received = number

        for number in previous:
            signal.signal(number, receive)
        try:
            yield self
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
