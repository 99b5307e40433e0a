"""The connector between a scheduler and a worker, with the few names of vLLM that it imports put in their places."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

BLOCK, COUNT, HIDDEN = 4, 3, 8
PACKAGES = ("vllm", "vllm.distributed", "vllm.distributed.kv_transfer", "vllm.distributed.kv_transfer.kv_connector")
BASE = "vllm.distributed.kv_transfer.kv_connector.v1.base"


class KVConnectorMetadata:
    pass


class KVConnectorBase:
    def __init__(self, vllm_config, role, kv_cache_config=None):
        self._bound = None

    def bind(self, metadata):
        self._bound = metadata

    def has_connector_metadata(self):
        return self._bound is not None

    def _get_connector_metadata(self):
        return self._bound


@pytest.fixture
def module(monkeypatch):
    import logging

    for name in (*PACKAGES, f"{PACKAGES[-1]}.v1", BASE, "vllm.distributed.parallel_state", "vllm.logger"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["vllm"].__version__ = "0.32.0"
    base = sys.modules[BASE]
    base.KVConnectorBase_V1, base.KVConnectorMetadata = KVConnectorBase, KVConnectorMetadata
    base.KVConnectorRole, base.SupportsHMA = SimpleNamespace, type("SupportsHMA", (), {})
    sys.modules["vllm.distributed.parallel_state"].get_tensor_model_parallel_rank = lambda: 0
    sys.modules["vllm.logger"].init_logger = logging.getLogger
    monkeypatch.delitem(sys.modules, "speculators_vllm_connector.connector", raising=False)
    loaded = importlib.import_module("speculators_vllm_connector.connector")
    yield loaded
    sys.modules.pop("speculators_vllm_connector.connector", None)


def config(root: Path, method="extract_hidden_states", **extra):
    hf_config = SimpleNamespace(eagle_aux_hidden_state_layer_ids=[4, 1, 2])
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(
            kv_connector_extra_config={"shared_storage_path": str(root), "retention_seconds": 0, **extra}, engine_id="e"
        ),
        speculative_config=SimpleNamespace(method=method, draft_model_config=SimpleNamespace(hf_config=hf_config)),
        model_config=SimpleNamespace(
            model="org/model",
            dtype=torch.float32,
            get_total_num_hidden_layers=lambda: 4,
            get_hidden_size=lambda: HIDDEN,
        ),
        cache_config=SimpleNamespace(block_size=BLOCK),
    )


class Server:
    """A scheduler and a worker of one server, in step."""

    def __init__(self, module, root: Path, **extra) -> None:
        self.scheduler = module.HiddenStatesConnector(config(root, **extra), None)
        self.worker = module.HiddenStatesConnector(config(root, **extra), None)
        self.cache = torch.randn(10, COUNT, BLOCK, HIDDEN)
        self.worker.register_kv_caches({"layers.0": torch.zeros(1), "cache_only_layers.4": self.cache})

    def step(self, new=(), finished=()) -> set[str]:
        output = SimpleNamespace(
            scheduled_new_reqs=[SimpleNamespace(req_id=name) for name in new], total_num_scheduled_tokens=len(new)
        )
        self.worker.bind(self.scheduler.build_connector_meta(output))
        self.worker.wait_for_save()
        done, received = self.worker.get_finished(set(finished))
        assert received is None
        return done or set()

    def finish(self, name, prompt, blocks, status="FINISHED_LENGTH_CAPPED", output=(), **params):
        request = SimpleNamespace(
            request_id=name,
            status=SimpleNamespace(name=status),
            prompt_token_ids=prompt,
            all_token_ids=[*(prompt or []), *output],
            kv_transfer_params=params,
        )
        return self.scheduler.request_finished_all_groups(request, (blocks,))


@pytest.fixture
def server(module, tmp_path):
    made = Server(module, tmp_path)
    yield made
    made.worker.shutdown()
    made.scheduler.shutdown()
    assert {entry.name for entry in tmp_path.iterdir()} == {".hs-owners.lock"}


def test_a_request_from_its_first_step_to_its_file(server):
    assert server.step(new=["r"]) == set()
    delay, params = server.finish("r", [5, 6, 7, 8, 9], [3, 7], output=[1])
    assert delay
    path = params["hidden_states_path"]
    assert Path(f"{path}.lock").exists()
    assert server.step(finished=["r"]) == {"r"}
    server.worker._saver.close()
    got = load_file(path)
    assert got["token_ids"].tolist() == [5, 6, 7, 8, 9]
    expected = torch.cat([server.cache[3].transpose(0, 1), server.cache[7].transpose(0, 1)])[:5]
    assert torch.equal(got["hidden_states"], expected)


def test_a_preempted_request_that_comes_again_keeps_its_name(server):
    server.step(new=["r"])
    server.step(new=["r"])
    _, params = server.finish("r", [5], [3])
    server.step(finished=["r"])
    assert params["hidden_states_path"].endswith("r-0.safetensors")


def test_the_answers_tokens_come_too_if_asked_for_but_the_last(server):
    server.step(new=["r"])
    _, params = server.finish("r", [5, 6], [3], output=[7, 8], include_output_tokens=True)
    server.step(finished=["r"])
    server.worker._saver.close()
    assert load_file(params["hidden_states_path"])["token_ids"].tolist() == [5, 6, 7]


@pytest.mark.parametrize("status", ["FINISHED_ABORTED", "FINISHED_ERROR", "FINISHED_IGNORED"])
def test_a_request_that_is_aborted_leaves_nothing(server, status):
    server.step(new=["r"])
    assert server.finish("r", [5], [3], status=status) == (False, None)
    assert server.step(finished=["r"]) == set()
    assert {entry.name for entry in Path(server.worker._transport.folder).iterdir()} == {"owner"}


def test_a_request_that_never_ran_or_has_no_tokens_gets_none(server):
    assert server.finish("never", [5], [], status="FINISHED_ABORTED") == (False, None)
    server.step(new=["embeddings"])
    assert server.finish("embeddings", None, [3]) == (False, None)
    assert server.step(finished=["embeddings"]) == set()


def test_other_ranks_and_workers_without_the_layer_write_nothing(module, tmp_path, monkeypatch):
    elsewhere = module.HiddenStatesConnector(config(tmp_path), None)
    elsewhere.register_kv_caches({"layers.0": torch.zeros(1)})
    monkeypatch.setattr(module, "get_tensor_model_parallel_rank", lambda: 1)
    second = module.HiddenStatesConnector(config(tmp_path), None)
    second.register_kv_caches({"cache_only_layers.4": torch.zeros(10, COUNT, BLOCK, HIDDEN)})
    for worker in (elsewhere, second):
        worker.bind(module.StepMetadata(begun=["x"], saves=[1]))
        worker.wait_for_save()
        assert worker.get_finished({"r"}) == (None, None)
        worker.shutdown()
    assert list(tmp_path.iterdir()) == []
    assert second.get_finished_count() == 1


def test_a_lock_that_cannot_be_made_does_not_end_the_server(server, monkeypatch):
    monkeypatch.setattr(server.worker._transport, "expect", lambda ticket: (_ for _ in ()).throw(OSError(24, "too many files")))
    server.step(new=["r"])
    _, params = server.finish("r", [5], [3])
    assert server.step(finished=["r"]) == {"r"}
    server.worker._saver.close()
    assert Path(params["hidden_states_path"]).exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"method": "eagle3"}, "needs the speculative method extract_hidden_states"),
        ({"retention": 3}, "has retention, which this connector does not know"),
        ({"backend": "carrier pigeon"}, "one of file, fp8, mooncake"),
        ({"shared_storage_path": ""}, "needs shared_storage_path"),
        ({"num_writer_threads": 0}, "num_writer_threads at least 1"),
        ({"mooncake_master": "h:1"}, "mooncake_master is for the mooncake backend"),
    ],
)
def test_a_server_that_is_set_up_wrongly_does_not_start(module, tmp_path, changes, message):
    extra = {key: value for key, value in changes.items() if key != "method"}
    with pytest.raises(ValueError, match=message):
        module.HiddenStatesConnector(config(tmp_path, changes.get("method", "extract_hidden_states"), **extra), None)


def test_the_record_names_layers_in_the_order_of_the_model(module, tmp_path):
    record = module.HiddenStatesConnector(config(tmp_path), None)._record
    assert record.layer_ids == (1, 2, 4)
    assert record.header()["final_state"] == "pre_norm"
