"""``--hidden-states``: every source trains the same draft; one that is not what it says is refused before the first step."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from speculators.errors import ConfigError, DataError, VerifierError
from speculators.models.verifier_weights import VerifierHead
from speculators.pipelines.offline_states import FillSettings, fill_store
from speculators.train import run, train
from speculators.verifiers.loading import Verifier, load_verifier
from speculators.verifiers.self_check import check_source
from speculators.verifiers.store import StoreSource
from speculators.verifiers.transformers_source import TransformersSource
from speculators.verifiers.vllm import VllmSettings, VllmSource
from tests.tiny import random_rows, tiny_verifier
from tests.train.helpers import loaded_verifier, settings, tiny_rows
from tests.verifiers.fake_states_server import FakeStatesServer

BUDGET = 128
ROWS = tiny_rows()
LAYERS = (1, 2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sources")


@pytest.fixture(scope="module")
def verifier(folder: Path) -> Verifier:
    return loaded_verifier(folder)


@pytest.fixture(scope="module")
def stores(folder: Path, verifier: Verifier) -> dict[str, Path]:
    """A store of each of the two last states."""
    found = {}
    for final in ("post_norm", "pre_norm"):
        found[final] = folder / final
        source = TransformersSource(verifier, LAYERS, final, BUDGET)
        fill_store(found[final], ROWS, source, FillSettings(seq_length=64, token_budget=BUDGET), shown=False)
    return found


@pytest.fixture(scope="module")
def server(folder: Path, verifier: Verifier) -> Iterator[FakeStatesServer]:
    shared = folder / "shared"
    shared.mkdir()
    with FakeStatesServer(verifier, shared, (*LAYERS, verifier.num_layers)) as running:
        yield running


@pytest.fixture
def losses(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Losses of a training as the command line starts it: nothing is handed in but the rows."""

    def do(name: str, **changes: Any) -> list[float]:
        if changes.get("hidden_states") in ("store", "vllm"):
            monkeypatch.setattr(run, "load_verifier", lambda *_, **__: pytest.fail("the verifier's weights were loaded"))
        seen: list[float] = []
        config = settings(folder, save_path=str(tmp_path / name), capture_batch_tokens=BUDGET, max_steps=6, **changes)
        train(config, dataset=ROWS, progress=False, on_step=lambda info: seen.append(info.metrics["loss"]))
        return seen

    return do


def test_a_store_and_the_verifier_give_the_same_bits(losses: Any, stores: dict[str, Path], tmp_path: Path) -> None:
    wanted = losses("live")
    assert len(wanted) == 6
    given = {"hidden_states": "store", "hidden_states_path": str(stores["post_norm"]), "store_source": "none"}
    assert losses("stored", **given) == wanted
    last = max((path for path in (tmp_path / "stored").iterdir() if path.name.isdigit()), key=lambda path: int(path.name))
    record = json.loads((last / "hidden_states.json").read_text())
    assert record["layer_ids"] == list(LAYERS)
    assert record["final_state"] == "post_norm"


def test_servers_give_the_same_losses(losses: Any, server: FakeStatesServer, folder: Path) -> None:
    given = {"vllm_endpoint": server.address, "hidden_states_path": str(folder / "shared")}
    wanted = losses("live", final_state="pre_norm")
    for name, cache in (("cached", 4.0), ("streamed", 0.0)):
        assert losses(name, hidden_states="vllm", states_cache_gib=cache, **given) == pytest.approx(wanted, abs=1e-4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"final_state": "pre_norm"}, "contradicts the hidden-states source, whose last states are post_norm"),
        ({"target_layer_ids": [2, 1]}, r"captures layers \[1, 2\], but the draft reads \[2, 1\]"),
        ({"hidden_states_path": "nowhere"}, "nowhere"),
    ],
)
def test_a_store_that_does_not_fit_is_refused(losses: Any, stores: dict[str, Path], changes: Any, message: str) -> None:
    given = {"hidden_states": "store", "hidden_states_path": str(stores["post_norm"]), "store_source": "none"}
    with pytest.raises((ConfigError, DataError), match=message):
        losses("refused", **{**given, **changes})


def test_a_store_of_another_verifier_is_refused(folder: Path, tmp_path: Path, stores: dict[str, Path]) -> None:
    other = tiny_verifier(tmp_path, seed=9, hidden=48)
    given = {"hidden_states": "store", "hidden_states_path": str(stores["post_norm"]), "store_source": "none"}
    config = settings(folder, save_path=str(tmp_path / "run"), verifier_name_or_path=str(other), **given)
    with pytest.raises(ConfigError, match="the hidden states are of another verifier"):
        train(config, dataset=ROWS, progress=False)


def relabelled(store: Path, target: Path, final_state: str) -> Path:
    """The store, whose record says something else about its last states."""
    target.mkdir()
    for entry in store.iterdir():
        (target / entry.name).symlink_to(entry)
    record = json.loads((store / "hidden_states.json").read_text())
    (target / "hidden_states.json").unlink()
    text = json.dumps(record).replace(record["states"]["final_state"], final_state)
    (target / "hidden_states.json").write_text(text)
    return target


@pytest.mark.parametrize(("taken", "said"), [("post_norm", "pre_norm"), ("pre_norm", "post_norm")])
def test_a_store_that_lies_about_its_norm_is_caught_without_a_verifier(
    verifier: Verifier, stores: dict[str, Path], tmp_path: Path, taken: str, said: str
) -> None:
    head = VerifierHead.from_folder(verifier.name)
    honest = StoreSource(stores[taken], ROWS, None, "raise")
    assert check_source(honest, head, None, list(ROWS)).max_difference < 1e-5
    honest.close()
    source = StoreSource(relabelled(stores[taken], tmp_path / "lying", said), ROWS, None, "raise")
    with pytest.raises(VerifierError, match=f"set --final-state {taken}"):
        check_source(source, head, None, list(ROWS))
    source.close()


def test_a_server_of_another_verifier_is_caught(
    verifier: Verifier, server: FakeStatesServer, folder: Path, tmp_path: Path
) -> None:
    """It serves states and predictions that go together, but not through the head that the draft is trained against."""
    given = VllmSettings(server.address, "file", folder / "shared", "generate", "delete", 5.0, 3, 2, 3)
    source = VllmSource(given, LAYERS, verifier, first_wait=0.01)
    rows = random_rows(2)
    assert check_source(source, VerifierHead.from_folder(verifier.name), None, rows, 64).max_difference < 1e-4
    other = load_verifier(tiny_verifier(tmp_path, seed=9))
    with pytest.raises(VerifierError, match="they come from another verifier"):
        check_source(source, VerifierHead.from_folder(other.name), None, rows, 64)
    # Predictions of shifted positions, too.
    told = source.next_tokens

    def shifted(row: Any, positions: Any, count: int) -> Any:
        found = told(row, positions, count)
        return type(found)(found.positions, found.ids.roll(1, 0), found.logprobs.roll(1, 0))

    source.next_tokens = shifted  # type: ignore[method-assign]
    with pytest.raises(VerifierError, match="do not rebuild the verifier's next-token probabilities"):
        check_source(source, VerifierHead.from_folder(verifier.name), None, rows, 64)
    source.close()


def test_rows_without_states_are_checked_by_the_next_one(verifier: Verifier) -> None:
    class Lacking(TransformersSource):
        def fetch(self, rows: Any) -> Any:
            return super().fetch([row for row in rows if row.row_id > 1])

    head = VerifierHead.from_folder(verifier.name)
    assert check_source(Lacking(verifier, LAYERS), head, verifier, random_rows(4)).row_id == 2
    with pytest.raises(VerifierError, match="has no states for any of 2 rows"):
        check_source(Lacking(verifier, LAYERS), head, verifier, random_rows(2))
