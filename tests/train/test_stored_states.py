"""Training from a store gives the losses of training with the verifier at hand, bit for bit, whatever happens to the store."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from speculators.pipelines.offline_states import FillSettings, fill_store
from speculators.train import train
from speculators.verifiers.loading import Verifier
from speculators.verifiers.store import StoreSource
from speculators.verifiers.transformers_source import TransformersSource
from tests.train.helpers import loaded_verifier, settings, tiny_rows

BUDGET = 128
ROWS = tiny_rows()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("stored")


@pytest.fixture(scope="module")
def verifier(folder: Path) -> Verifier:
    return loaded_verifier(folder)


def fill(path: Path, verifier: Verifier, **changes: Any) -> None:
    source = TransformersSource(verifier, (1, 2), token_budget=BUDGET)
    fill_store(
        path, ROWS, source, FillSettings(seq_length=64, token_budget=BUDGET, shard_bytes=16 << 10, **changes), shown=False
    )


@pytest.fixture
def losses(folder: Path, verifier: Verifier, tmp_path: Path) -> Callable[..., list[float]]:
    """Trains, from ``store`` or from the verifier, and gives the losses of all steps."""

    def run(name: str, store: Path | None = None, **changes: Any) -> list[float]:
        config = settings(folder, save_path=str(tmp_path / name), capture_batch_tokens=BUDGET, **changes)
        source = None
        if store is not None:
            source = StoreSource(store, ROWS, lambda: TransformersSource(verifier, (1, 2), token_budget=BUDGET))
        seen: list[float] = []

        def note(info: Any) -> None:
            seen.append(info.metrics["loss"])

        try:
            train(config, dataset=ROWS, verifier=verifier, source=source, progress=False, on_step=note)
        finally:
            if source is not None:
                source.close()
        return seen

    return run


def test_the_losses_are_those_of_the_verifier_at_hand(losses: Any, verifier: Verifier, tmp_path: Path) -> None:
    wanted = losses("live")
    assert len(wanted) > 4
    fill(tmp_path / "store", verifier)
    assert losses("stored", tmp_path / "store") == wanted
    # A part of the states, the rest made when it is needed; then damage.
    fill(tmp_path / "part", verifier, world_size=2, rank=1)
    assert losses("part", tmp_path / "part") == wanted
    shard = sorted((tmp_path / "store" / "shards").iterdir())[1]
    file = bytearray(shard.read_bytes())
    file[-100] ^= 1
    shard.write_bytes(file)
    with pytest.warns(UserWarning, match=rf"{shard.name} is damaged: .* its states are made again"):
        assert losses("damaged", tmp_path / "store") == wanted
    file[-100] ^= 1
    assert shard.read_bytes() == file


#: A training from a store in a process of its own, which kills itself after step 4.
TRAINER = """
import os, signal, sys
from pathlib import Path
from speculators.train import train
from speculators.verifiers.store import StoreSource
from speculators.verifiers.transformers_source import TransformersSource
from tests.train.helpers import loaded_verifier, settings
from tests.train.test_stored_states import BUDGET, ROWS

folder, save, store = map(Path, sys.argv[1:])
verifier = loaded_verifier(folder)
source = StoreSource(store, ROWS, lambda: TransformersSource(verifier, (1, 2), token_budget=BUDGET))

def note(info):
    if info.global_step == 4:
        os.kill(os.getpid(), signal.SIGKILL)

config = settings(folder, save_path=str(save), capture_batch_tokens=BUDGET, checkpoint_freq=0.2)
train(config, dataset=ROWS, verifier=verifier, source=source, progress=False, on_step=note)
"""


@pytest.mark.chaos
def test_a_killed_training_goes_on_bit_for_bit(losses: Any, folder: Path, verifier: Verifier, tmp_path: Path) -> None:
    """Half of the states were stored, the other half is being made and stored when the process is killed."""
    wanted = losses("live", checkpoint_freq=0.2)
    fill(tmp_path / "store", verifier, world_size=2, rank=1)
    killed = subprocess.run(
        [sys.executable, "-c", TRAINER, str(folder), str(tmp_path / "run"), str(tmp_path / "store")],
        stderr=subprocess.DEVNULL,
        check=False,
    )
    assert killed.returncode == -signal.SIGKILL
    found = losses("run", tmp_path / "store", checkpoint_freq=0.2)
    assert 0 < len(found) < len(wanted)
    assert found == wanted[-len(found) :]


def test_other_dtypes_train_as_well(losses: Any, verifier: Verifier, tmp_path: Path) -> None:
    wanted = losses("live")
    for dtype, tolerance in (("bfloat16", 0.02), ("fp8", 0.1)):
        fill(tmp_path / dtype, verifier, dtype=dtype)
        found = losses(f"from-{dtype}", tmp_path / dtype)
        assert found != wanted
        assert found == pytest.approx(wanted, rel=tolerance)
