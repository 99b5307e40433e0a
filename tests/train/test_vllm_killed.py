"""Trainings whose vLLM servers are killed: they go on, or stop with one sentence and use every row as planned when resumed."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from speculators.errors import VerifierError
from speculators.train import train
from speculators.train.account import check_account
from speculators.train.results import StepInfo
from speculators.verifiers.loading import Verifier
from speculators.verifiers.source import HiddenStateSource
from speculators.verifiers.transformers_source import TransformersSource
from speculators.verifiers.vllm import VllmSettings, VllmSource
from tests.train.helpers import loaded_verifier, settings, tiny_rows
from tests.verifiers.fake_states_server import ServerProcess

pytestmark = pytest.mark.chaos

LAYERS = (2, 1)
ROWS = tiny_rows(24)
IDS = np.arange(len(ROWS))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("killed")


@pytest.fixture(scope="module")
def verifier(folder: Path) -> Verifier:
    return loaded_verifier(folder)


@pytest.fixture(scope="module")
def servers(folder: Path, verifier: Verifier) -> Iterator[tuple[ServerProcess, ServerProcess]]:
    with (
        ServerProcess(folder / "verifier", folder / "first", (1, 2, 4), "--delay", "0.02") as first,
        ServerProcess(folder / "verifier", folder / "second", (1, 2, 4), "--delay", "0.02") as second,
    ):
        yield first, second


def run(
    folder: Path, verifier: Verifier, source: HiddenStateSource, name: str, on_step: Callable[[int], None] = lambda step: None
) -> list[float]:
    """The losses of the steps that were done, of a run folder of this name."""
    config = settings(
        folder,
        save_path=str(folder / name),
        final_state="pre_norm",
        target_layer_ids=list(LAYERS),
        epochs=3,
        checkpoint_freq=0.25,
    )
    losses: list[float] = []

    def note(info: StepInfo) -> None:
        losses.append(info.metrics["loss"])
        on_step(info.global_step)

    try:
        train(
            config,
            dataset=ROWS,
            train_ids=IDS,
            val_ids=IDS[:0],
            verifier=verifier,
            source=source,
            progress=False,
            on_step=note,
        )
    finally:
        source.close()
    return losses


def opened(folder: Path, verifier: Verifier, *servers: ServerProcess, max_retries: int, first_wait: float) -> VllmSource:
    given = VllmSettings(
        endpoint=",".join(server.address for server in servers),
        backend="file",
        folder=folder,
        on_missing="generate",
        on_generate="delete",
        request_timeout=20,
        max_retries=max_retries,
        validation_retries=2,
        max_consecutive_failures=5,
    )
    return VllmSource(given, LAYERS, verifier, first_wait=first_wait)


@pytest.fixture(scope="module")
def wanted(folder: Path, verifier: Verifier, servers: tuple[ServerProcess, ServerProcess]) -> list[float]:
    """Computed while the servers start."""
    return run(folder, verifier, TransformersSource(verifier, LAYERS, "pre_norm"), "wanted")


def same(found: list[float], wanted: list[float]) -> bool:
    return len(found) == len(wanted) and float(np.abs(np.subtract(found, wanted)).max()) < 1e-3


def test_a_server_that_is_started_again_is_rejoined(
    folder: Path, verifier: Verifier, servers: tuple[ServerProcess, ServerProcess], wanted: list[float]
) -> None:
    server = servers[0]

    def kill(step: int) -> None:
        if step == 3:
            server.kill()
            server.start()  # which takes it some seconds

    source = opened(folder, verifier, server, max_retries=8, first_wait=0.1)  # waits up to 51 s
    assert same(run(folder, verifier, source, "rejoined", kill), wanted)
    status = source.status()
    assert status["failures"] == 0
    assert status["retries"] > 0
    account = check_account(folder / "rejoined", IDS)
    assert account.exact, account.faults
    assert (account.epochs, account.left_out) == (3, 0)


def test_a_run_goes_on_with_the_server_that_is_left_and_resumes_when_there_was_none(
    folder: Path, verifier: Verifier, servers: tuple[ServerProcess, ServerProcess], wanted: list[float]
) -> None:
    first, second = servers
    survived: list[int] = []

    def kill(step: int) -> None:
        survived.append(step)
        if step == 2:
            first.kill()
        elif step == 6:
            second.kill()

    source = opened(folder, verifier, first, second, max_retries=1, first_wait=0.3)
    with pytest.raises(VerifierError) as stopped:
        run(folder, verifier, source, "resumed", kill)
    assert re.fullmatch(
        r"no vLLM server answers \(.*\); start one with `speculators launch-vllm .*run the same command again",
        str(stopped.value),
    )
    assert max(survived) >= 6
    second.start()
    source = opened(folder, verifier, first, second, max_retries=8, first_wait=0.1)
    losses = run(folder, verifier, source, "resumed")
    assert len(losses) < len(wanted)  # it was not begun anew
    assert same(losses, wanted[-len(losses) :])
    account = check_account(folder / "resumed", IDS)
    assert account.exact, account.faults
    assert (account.epochs, account.left_out) == (3, 0)
