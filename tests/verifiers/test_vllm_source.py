"""States from (imitated) vLLM servers: the right ones, whatever the server does, or one sentence."""

from __future__ import annotations

import json
import os
import threading
import time
import warnings
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from speculators.data.rows import Row
from speculators.errors import ConfigError, DataError, SpeculatorsError, VerifierError
from speculators.verifiers import TransformersSource, load_verifier
from speculators.verifiers.loading import Verifier
from speculators.verifiers.source import HiddenStates
from speculators.verifiers.vllm import VllmSettings, VllmSource
from speculators.verifiers.vllm.files import FileReader
from speculators.verifiers.vllm.readers import BadStates
from speculators.verifiers.vllm.source import REQUESTS_PER_SERVER
from tests.tiny import random_rows, tiny_verifier
from tests.verifiers.fake_states_server import OF_ANSWERS, OF_STATES, FakeStatesServer, write_states

LAYERS = (3, 0, 2)  # as a draft may read them
CAPTURED = (0, 2, 3, 4)  # as a server hands them over; the verifier has four layers
ROWS = random_rows(6)


@pytest.fixture(scope="module")
def verifier(tmp_path_factory: pytest.TempPathFactory) -> Verifier:
    return load_verifier(tiny_verifier(tmp_path_factory.mktemp("verifier")))


@pytest.fixture(scope="module")
def truth(verifier: Verifier) -> list[HiddenStates]:
    return TransformersSource(verifier, LAYERS, "pre_norm").fetch(ROWS)


def settings(folder: Path, *servers: FakeStatesServer, **changes: Any) -> VllmSettings:
    given: dict[str, Any] = {
        "endpoint": ",".join(server.address for server in servers),
        "backend": "file",
        "folder": folder,
        "on_missing": "generate",
        "on_generate": "delete",
        "request_timeout": 5.0,
        "max_retries": 3,
        "validation_retries": 2,
        "max_consecutive_failures": 3,
    }
    return VllmSettings(**{**given, **changes})


def opened(verifier: Verifier, folder: Path, *servers: FakeStatesServer, **changes: Any) -> VllmSource:
    return VllmSource(settings(folder, *servers, **changes), LAYERS, verifier, first_wait=0.01)


def assert_same(found: list[HiddenStates], truth: list[HiddenStates], tolerance: float = 1e-4) -> None:
    assert [states.row_id for states in found] == [states.row_id for states in truth]
    for mine, theirs in zip(found, truth):
        assert torch.equal(mine.token_ids, theirs.token_ids)
        torch.testing.assert_close(mine.features, theirs.features, atol=tolerance, rtol=tolerance)
        torch.testing.assert_close(mine.final, theirs.final, atol=tolerance, rtol=tolerance)


def left_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


@pytest.fixture
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@pytest.mark.parametrize("locks", [True, False])
@pytest.mark.usefixtures("quiet")
def test_states_are_the_verifiers_and_nothing_is_left(verifier, truth, tmp_path, locks):
    record = {"layer_ids": json.dumps(CAPTURED), "verifier_hash": verifier.hash, "dtype": "float32"}
    with FakeStatesServer(verifier, tmp_path, CAPTURED, locks=locks, record=record, write_delay=0.05) as server:
        source = opened(verifier, tmp_path, server)
        assert_same(source.fetch(ROWS), truth)
        assert source.fetch([]) == []
        source.close()
    found = source.description
    assert (found.layer_ids, found.final_state, found.dtype, found.precision) == (LAYERS, "pre_norm", "float32", None)
    assert found.verifier_hash == verifier.hash
    assert left_in(tmp_path) == []
    assert sorted(server.prompts[1:]) == sorted(row.input_ids.tolist() for row in ROWS)
    status = source.status()
    assert status["tokens"] == sum(map(len, ROWS))
    assert (status["endpoints"], status["endpoints_alive"], status["retries"], status["failures"]) == (1, 1, 0, 0)


def test_the_last_layer_may_be_a_feature_too(verifier, tmp_path):
    with FakeStatesServer(verifier, tmp_path, (1, 4)) as server:
        source = VllmSource(settings(tmp_path, server), (4, 1), verifier)
        (found,) = source.fetch(ROWS[:1])
        source.close()
    assert torch.equal(found.features[:, 0], found.final)
    assert_same([found], TransformersSource(verifier, (4, 1), "pre_norm").fetch(ROWS[:1]))


def test_eight_bits(verifier, truth, tmp_path):
    with FakeStatesServer(verifier, tmp_path, CAPTURED, fp8=True, record={"dtype": "float32"}) as server:
        source = opened(verifier, tmp_path, server, backend="fp8")
        found = source.fetch(ROWS)
        source.close()
        assert (source.description.dtype, source.description.precision) == ("float32", "fp8")
        for mine, theirs in zip(found, truth):
            scale = torch.cat([theirs.features, theirs.final[:, None]], dim=1).abs().amax((1, 2), keepdim=True) / 448
            bound = torch.maximum(theirs.features.abs() / 15, scale / 500)
            assert bool(((mine.features - theirs.features).abs() <= bound).all())
            assert not torch.equal(mine.features, theirs.features)
        with pytest.raises(VerifierError, match="--hidden-states-backend fp8"):
            opened(verifier, tmp_path, server)


@pytest.mark.parametrize("fault", [500, 503, 429, *OF_ANSWERS, *OF_STATES])
def test_a_fault_is_tried_again(verifier, truth, tmp_path, fault):
    with FakeStatesServer(verifier, tmp_path, CAPTURED) as server:
        seconds = 0.5 if fault in ("hang", "drip") else 5.0
        source = opened(verifier, tmp_path, server, request_timeout=seconds)
        server.faults.extend([fault, fault])
        started = time.monotonic()
        assert_same(source.fetch(ROWS[:1]), truth[:1])
        assert time.monotonic() - started < 9  # a drip would go on for ten seconds, twice
        assert source.status()["retries"] == 2
        assert source.status()["failures"] == 0
        source.close()
    if fault not in ("garbage", "drip", "no params"):  # where the client cannot know of the file, the server removes it
        assert left_in(tmp_path) == []


@pytest.mark.parametrize("fault", [500, "nan", "other prompt", "few"])
def test_rows_that_always_fail_are_left_out_and_end_the_run_when_they_are_all_that_come(verifier, truth, tmp_path, fault):
    with FakeStatesServer(verifier, tmp_path, CAPTURED) as server:
        source = opened(verifier, tmp_path, server)
        server.faults.extend([fault] * 4)  # one row's tries
        with pytest.warns(UserWarning, match=r"row 0 got no hidden states from vLLM and is left out: "):
            first = source.fetch(ROWS[:1])
        server.faults.clear()
        assert first == []
        assert_same(source.fetch(ROWS[1:]), truth[1:])
        server.always = fault
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert source.fetch(ROWS[:1]) == source.fetch(ROWS[1:2]) == []
            with pytest.raises(VerifierError, match=r"^3 rows in a row got no hidden states from vLLM"):
                source.fetch(ROWS[2:3])
        assert source.status()["failures"] == 4
        source.close()


def test_a_server_that_lives_and_works_no_more_ends_the_run(verifier, tmp_path):
    with FakeStatesServer(verifier, tmp_path, CAPTURED) as server:
        source = opened(verifier, tmp_path, server, request_timeout=0.3, max_retries=2)
        server.always = "hang"  # and it does not say what it serves any more, either
        with pytest.raises(
            VerifierError, match=r"no vLLM server answers \(.*no answer in 0\.3 s\); start one with `speculators "
        ):
            source.fetch(ROWS[:2])
        source.close()


def test_no_server_at_all(verifier, tmp_path):
    started = time.monotonic()
    with pytest.raises(
        VerifierError, match=r"no vLLM server answers \(http://127.0.0.1:9/v1: .*--target-layer-ids 3 0 2 --hid"
    ):
        VllmSource(settings(tmp_path, endpoint="127.0.0.1:9"), LAYERS, verifier, first_wait=0.05)
    assert 0.6 < time.monotonic() - started < 3  # 0.05 * (2 + 4 + 8)
    with pytest.raises(ConfigError, match="--vllm-endpoint is empty"):
        VllmSource(settings(tmp_path, endpoint=" ,"), LAYERS, verifier)
    with pytest.raises(ConfigError, match="--vllm-endpoint has a name or password"):
        VllmSource(settings(tmp_path, endpoint="http://me:secret@host"), LAYERS, verifier)


@pytest.mark.parametrize(
    ("layers", "record", "message"),
    [
        ((0, 2, 4), None, r"hands over 3 states of size 32 a token, where the layers \[0, 2, 3, 4\] of .* are 4"),
        ((0, 1, 2, 4), {"layer_ids": "[0, 1, 2, 4]"}, r"captures the layers \[0, 1, 2, 4\], but \[0, 2, 3, 4\] are needed"),
    ],
)
def test_a_server_of_other_layers_is_refused_with_the_right_command(verifier, tmp_path, layers, record, message):
    command = (
        rf"start it with `speculators launch-vllm {verifier.name} --target-layer-ids 3 0 2 --hidden-states-path {tmp_path}`"
    )
    with (
        FakeStatesServer(verifier, tmp_path, layers, record=record) as server,
        pytest.raises(VerifierError, match=f"{message}.*{command}"),
    ):
        opened(verifier, tmp_path, server)


def test_another_verifier_is_warned_of(verifier, tmp_path):
    record = {"verifier_hash": "0" * 16, "model": "other/model"}
    with (
        FakeStatesServer(verifier, tmp_path, CAPTURED, root="other/model", record=record) as server,
        pytest.warns(UserWarning, match="serves other/model, and --verifier-name-or-path is"),
        pytest.warns(UserWarning, match="runs other/model, whose config or weight files are not those of"),
    ):
        opened(verifier, tmp_path, server).close()


def test_a_server_of_other_models_and_one_that_wants_a_key(verifier, tmp_path, monkeypatch):
    with FakeStatesServer(verifier, tmp_path, CAPTURED, root="other/model", models=["one", "two"]) as server:
        with pytest.raises(VerifierError, match=r"serves one, two and not .*; correct --vllm-endpoint"):
            opened(verifier, tmp_path, server)
        server.models.append(verifier.name)
        opened(verifier, tmp_path, server).close()
    with FakeStatesServer(verifier, tmp_path, CAPTURED, key="open sesame") as server:
        with pytest.raises(VerifierError, match="wants a key; set VLLM_API_KEY to it"):
            opened(verifier, tmp_path, server)
        monkeypatch.setenv("VLLM_API_KEY", "open sesame")
        opened(verifier, tmp_path, server).close()


@pytest.mark.parametrize("kind", ["path", "dots", "link", "folder"])
def test_a_path_outside_the_folder_is_refused_and_left_alone(verifier, tmp_path, kind):
    folder, outside = tmp_path / "shared", tmp_path / "secret.safetensors"
    (folder / "states").mkdir(parents=True)
    ids = list(range(4))
    write_states(outside, torch.zeros(4, 4, 32), ids)
    before = outside.read_bytes()
    named = {"path": outside, "dots": folder / ".." / "secret.safetensors", "link": folder / "link.safetensors"}.get(
        kind, folder / "elsewhere" / "secret.safetensors"
    )
    (folder / "link.safetensors").symlink_to(outside)
    (folder / "elsewhere").symlink_to(tmp_path)
    with (
        FakeStatesServer(verifier, folder, CAPTURED, names=named) as server,
        pytest.raises(VerifierError, match=r"lies outside the shared folder .* it is refused"),
    ):
        opened(verifier, folder, server)
    assert outside.read_bytes() == before


def test_a_named_file_that_is_no_file_or_never_comes(verifier, tmp_path):
    fifo = tmp_path / "pipe.safetensors"
    os.mkfifo(fifo)
    os.mkfifo(f"{fifo}.lock")
    reader = FileReader(tmp_path, appearing=0.1)
    for named, problem in [(str(fifo), "no ordinary file"), (str(tmp_path / "never"), "did not appear"), (5, "names no file")]:
        started = time.monotonic()
        with pytest.raises(BadStates, match=problem):
            reader.read({"hidden_states_path": named}, 0.2, 1 << 20)
        assert time.monotonic() - started < 2
    kept = tmp_path / "hs_5.safetensors"
    kept.touch()
    reader.forget({"hidden_states_path": str(kept)})  # named so by a server, it is still the client's own
    assert kept.exists()
    big = tmp_path / "big.safetensors"
    write_states(big, torch.zeros(100, 4, 32), range(100))
    with pytest.raises(BadStates, match="more than it can need"):
        reader.read({"hidden_states_path": str(big)}, 0.2, 1000)


def test_rows_that_the_server_has_no_room_for(verifier, tmp_path):
    with FakeStatesServer(verifier, tmp_path, CAPTURED, max_model_len=20) as server:
        source = opened(verifier, tmp_path, server)
        row = Row(7, np.arange(20), np.ones(20, bool))
        with pytest.raises(
            DataError, match=r"row 7 has 20 tokens and the vLLM server .* takes 19; start it with --max-model-len 21"
        ):
            source.fetch([row])
        server.always = 400
        with pytest.raises(DataError, match=r"refuses row 0 \(status 400: not today\)"):
            source.fetch([Row(0, np.arange(5), np.ones(5, bool))])
        source.close()


def test_kept_states_are_used_and_bad_ones_made_again(verifier, truth, tmp_path):
    with FakeStatesServer(verifier, tmp_path, CAPTURED) as server:
        source = opened(verifier, tmp_path, server, on_generate="cache")
        assert_same(source.fetch(ROWS), truth)
        assert left_in(tmp_path) == [f"hs_{row.row_id}.safetensors" for row in ROWS]  # the probe is not kept
        asked = len(server.prompts)
        assert_same(source.fetch(ROWS), truth)
        cut = Row(0, ROWS[0].input_ids[:9], ROWS[0].loss_mask[:9])
        assert_same(source.fetch([cut]), [truth[0].first(9)])
        assert len(server.prompts) == asked
        assert source.status()["kept"] == len(ROWS) + 1
        kept = tmp_path / "hs_1.safetensors"
        kept.write_bytes(kept.read_bytes()[:-8])
        write_states(tmp_path / "hs_2.safetensors", torch.full((len(ROWS[2]), 4, 32), torch.nan), ROWS[2].input_ids)
        write_states(tmp_path / "hs_3.safetensors", torch.zeros(len(ROWS[3]), 4, 32), ROWS[3].input_ids + 1)
        write_states(tmp_path / "hs_4.safetensors", torch.zeros(len(ROWS[4]), 3, 32), ROWS[4].input_ids)
        with pytest.warns(UserWarning, match="are of no use .* they are generated again"):
            assert_same(source.fetch(ROWS), truth)
        assert len(server.prompts) == asked + 4
        assert_same(source.fetch(ROWS), truth)
        assert len(server.prompts) == asked + 4
        source.close()


@pytest.mark.parametrize("on_missing", ["skip", "warn", "raise"])
def test_rows_without_kept_states_where_nothing_is_to_be_generated(verifier, truth, tmp_path, on_missing):
    for states in truth[:2]:
        stacked = torch.cat([states.features[:, [1, 2, 0]], states.final[:, None]], dim=1)
        write_states(tmp_path / f"hs_{states.row_id}.safetensors", stacked, states.token_ids.tolist())
    # No server is there, and none is needed.
    source = VllmSource(settings(tmp_path, endpoint="127.0.0.1:9", on_missing=on_missing), LAYERS, verifier)
    assert source.description.dtype == "float32"
    assert_same(source.fetch(ROWS[:2]), truth[:2])
    if on_missing == "raise":
        with pytest.raises(DataError, match=r"row 2 has no hidden states in .*hs_2.safetensors; pass --on-missing generate"):
            source.fetch(ROWS[:3])
    elif on_missing == "warn":
        with pytest.warns(UserWarning, match="row 2 has no hidden states .* left out"):
            assert_same(source.fetch(ROWS[:3]), truth[:2])
    else:
        assert_same(source.fetch(ROWS), truth[:2])
    source.close()
    with pytest.raises(DataError, match="there are no hidden states in"):
        VllmSource(settings(tmp_path / "other", endpoint="127.0.0.1:9", on_missing=on_missing), LAYERS, verifier)


def test_next_tokens_are_the_verifiers_own(verifier, tmp_path):
    row = ROWS[0]
    with FakeStatesServer(verifier, tmp_path, CAPTURED) as server:
        source = opened(verifier, tmp_path, server)
        positions = [0, 3, len(row) - 1]
        found = source.next_tokens(row, positions, 5)
        source.close()
        with torch.no_grad():
            truth = verifier.logits(torch.tensor(row.input_ids)[None])[0].log_softmax(-1)[positions].topk(5)
        assert found.positions.tolist() == positions
        assert found.ids.tolist() == truth.indices.tolist()
        torch.testing.assert_close(found.logprobs, truth.values)
        server.max_model_len = len(row) + 1  # no room for a token behind the last one
        source = opened(verifier, tmp_path, server)
        assert source.next_tokens(row, positions, 30).positions.tolist() == positions[:-1]
        server.always = 500
        with pytest.raises(VerifierError, match="does not tell its next-token probabilities"):
            source.next_tokens(row, positions, 5)
        source.close()
    assert left_in(tmp_path) == []


def test_many_threads(verifier, truth, tmp_path):
    with FakeStatesServer(verifier, tmp_path, CAPTURED, delay=0.02) as server:
        source = opened(verifier, tmp_path, server)
        found: dict[int, list[HiddenStates]] = {}

        def fetch(number: int) -> None:
            found[number] = source.fetch(ROWS)

        threads = [threading.Thread(target=fetch, args=(number,)) for number in range(source.concurrency)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        source.close()
        assert server.busiest > len(ROWS)
    for number in range(source.concurrency):
        assert_same(found[number], truth)


def test_threads_keep_no_states_and_end_with_the_source(verifier, tmp_path):
    before = set(threading.enumerate())
    with FakeStatesServer(verifier, tmp_path, CAPTURED) as server:
        source = opened(verifier, tmp_path, server)
        mine = [thread for thread in set(threading.enumerate()) - before if thread.name.startswith("vllm-states")]
        given = [weakref.ref(states.final) for states in source.fetch(ROWS)]
        time.sleep(0.05)
        assert [state() for state in given] == [None] * len(ROWS)
        source.close()
        assert [thread.is_alive() for thread in mine] == [False] * REQUESTS_PER_SERVER


def test_closing_frees_who_waits(verifier, tmp_path):
    with FakeStatesServer(verifier, tmp_path, CAPTURED) as server:
        source = VllmSource(settings(tmp_path, server, max_retries=10), LAYERS, verifier, first_wait=30.0)
        server.always = 500
        said: list[SpeculatorsError] = []

        def fetch() -> None:
            try:
                source.fetch(ROWS)
            except SpeculatorsError as error:
                said.append(error)

        thread = threading.Thread(target=fetch)
        thread.start()
        time.sleep(0.3)
        source.close()
        thread.join(5)
        assert not thread.is_alive()
        assert "closed" in str(said[0])
