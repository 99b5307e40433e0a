"""Trainings from a rollout whose actors, nodes or trainer are killed: real processes, and every row used as planned."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from speculators.train import StepInfo, train
from speculators.train.account import check_account
from speculators.verifiers.loading import Verifier
from speculators.verifiers.rollout import RaySource, RolloutSettings
from tests.train.helpers import loaded_verifier, settings, tiny_rows

pytestmark = pytest.mark.chaos
pytest.importorskip("ray")

ROOT = Path(__file__).parents[2]
CHANGES: dict[str, Any] = {"epochs": 4, "replay": 2, "replay_window": 2, "states_cache_gib": 0, "checkpoint_steps": 5}
USES = 4 * 2 * 12  # epochs, uses, rows


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("rollouts")


@pytest.fixture(scope="module")
def verifier(folder: Path) -> Verifier:
    return loaded_verifier(folder)


def run(folder: Path, name: str, on_step: Any = None, **given: Any) -> list[float]:
    seen: list[float] = []

    def note(info: StepInfo) -> None:
        seen.append(info.metrics["loss"])
        if on_step is not None:
            on_step(info.global_step)

    config = settings(folder, save_path=str(folder / name), train_data_ratio=1.0, **CHANGES)
    train(config, dataset=tiny_rows(), progress=False, on_step=note, **given)
    return seen


@pytest.fixture(scope="module")
def wanted(folder: Path, verifier: Verifier) -> list[float]:
    return run(folder, "wanted", verifier=verifier)


def exact(path: Path) -> bool:
    found = check_account(path, range(12), replay=2)
    assert found.exact, found.faults
    return (found.epochs, found.uses, found.left_out, found.reorder_window) == (4, USES, 0, 0)


@pytest.fixture
def cluster() -> Iterator[Any]:
    """A head for the trainer and two nodes for verifiers, each of real processes."""
    import ray
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    yield cluster
    ray.shutdown()
    cluster.shutdown()


def test_nodes_that_leave_and_join_do_not_stop_a_training(
    folder: Path, verifier: Verifier, wanted: list[float], cluster: Any
) -> None:
    nodes = [cluster.add_node(num_cpus=1, resources={"verifier": 1}) for _ in range(2)]
    cluster.wait_for_nodes()
    source = RaySource(
        verifier.name, (1, 2), address=cluster.address, settings=RolloutSettings(resources={"verifier": 1}, max_restarts=9)
    )
    assert source.status()["actors"] == 2

    def wait_for(count: int) -> None:
        """Go on training when so many actors are ready."""
        until = time.monotonic() + 60
        while source.status()["actors_alive"] < count:
            source.fetch(tiny_rows()[:1])
            assert time.monotonic() < until
            time.sleep(0.1)

    def on_step(step: int) -> None:
        if step == 4:
            wait_for(2)
            os.kill(source.processes()[0], signal.SIGKILL)
        if step == 12:
            wait_for(2)
            cluster.remove_node(nodes.pop(), allow_graceful=False)
        if step == 20:
            cluster.add_node(num_cpus=1, resources={"verifier": 1})
            wait_for(2)

    try:
        assert run(folder, "nodes", on_step, verifier=verifier, source=source) == wanted
        assert exact(folder / "nodes")
        assert source.status()["restarts"] >= 2
    finally:
        source.close()


#: A training of its own process, with the Ray that it starts.
TRAINER = """
import sys, time
from pathlib import Path
from tests.train.helpers import settings, tiny_rows
from tests.train.test_rollout_killed import CHANGES
from speculators.train import train

folder = Path(sys.argv[1])
given = {"hidden_states": "ray", "ray_rollout_workers": 1, "save_path": str(folder / "killed"), "train_data_ratio": 1.0}
config = settings(folder, **given, **CHANGES)
train(config, dataset=tiny_rows(), progress=False, on_step=lambda info: time.sleep(float(sys.argv[2])))
"""


def test_a_killed_trainer_leaves_no_verifier_behind_and_goes_on(folder: Path, wanted: list[float]) -> None:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT), "SPECULATORS_TEST_MARK": str(folder)}
    command = [sys.executable, "-c", TRAINER, str(folder)]
    trainer = subprocess.Popen([*command, "0.2"], cwd=ROOT, env=environment, start_new_session=True)
    account = folder / "killed" / "account.jsonl"
    try:
        until = time.monotonic() + 90
        while not (account.exists() and account.read_bytes().count(b"\n") > 12):
            assert time.monotonic() < until
            assert trainer.poll() is None
            time.sleep(0.05)
    finally:
        trainer.send_signal(signal.SIGKILL)
        trainer.wait()
    until = time.monotonic() + 30
    while marked(str(folder)):
        assert time.monotonic() < until, f"processes are left: {marked(str(folder))}"
        time.sleep(0.5)
    subprocess.run([*command, "0"], cwd=ROOT, env=environment, check=True)
    assert exact(folder / "killed")
    records = map(json.loads, (folder / "killed" / "metrics.jsonl").read_text().splitlines())
    assert [record["train"]["loss"] for record in records if "train" in record] == wanted


def marked(mark: str) -> list[str]:
    """Processes of the trainer's Ray that hold memory or work; its agents notice its end a minute later."""
    found = []
    for process in Path("/proc").iterdir():
        try:
            if process.name.isdigit() and f"SPECULATORS_TEST_MARK={mark}".encode() in (process / "environ").read_bytes():
                command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:80]
                found += [] if "Agent" in command else [command]
        except OSError:
            continue
    return found
