from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from speculators.errors import ConfigError
from speculators.vllm_server.command import (
    ServerSettings,
    build_command,
    captured_layer_ids,
    connector_folder,
    draft_layer_ids,
    server_environment,
)
from speculators.vllm_server.versions import VllmInstallation

GPU = VllmInstallation(Path("/vllm/bin/python"), "0.23.1rc1.dev786+g34b560b72", False, True, False, False, Path("/vllm"))
CPU = VllmInstallation(Path("/vllm/bin/python"), "0.32.0", True, False, False, True, Path("/vllm"))
SETTINGS = ServerSettings("the/model", (2, 15, 27, 30), hidden_states_path=Path("/states"))


def test_the_command_of_a_gpu_server():
    assert build_command(GPU, SETTINGS, port=8001) == [
        "/vllm/bin/python",
        "-m",
        "vllm.entrypoints.cli.main",
        "serve",
        "the/model",
        "--host",
        "127.0.0.1",
        "--port",
        "8001",
        "--speculative-config",
        '{"method":"extract_hidden_states","num_speculative_tokens":1,'
        '"draft_model_config":{"hf_config":{"eagle_aux_hidden_state_layer_ids":[2,15,27,30]}}}',
        "--kv-transfer-config",
        '{"kv_connector":"HiddenStatesConnector","kv_connector_module_path":"speculators_vllm_connector.connector",'
        '"kv_role":"kv_producer","kv_connector_extra_config":{"shared_storage_path":"/states","backend":"file"}}',
    ]


def test_a_cpu_build_without_the_name_vllm_starts_by_its_module():
    command = build_command(CPU, replace(SETTINGS, vllm_args=("--dtype", "float32")), port=8000)
    assert command[1:5] == ["-m", "vllm.entrypoints.openai.api_server", "--model", "the/model"]
    assert command[-4:] == ["--shutdown-timeout", "20", "--dtype", "float32"]


def test_what_a_version_needs_is_added_unless_the_user_gives_it():
    kimi = replace(SETTINGS, model_type="kimi_k25")
    assert "fuse_allreduce_rms" in " ".join(build_command(GPU, kimi, port=1))
    assert "fuse_allreduce_rms" not in " ".join(build_command(GPU, SETTINGS, port=1))
    assert "fuse_allreduce_rms" not in " ".join(build_command(CPU, kimi, port=1))
    for own in (("--compilation-config", "{}"), ("--compilation_config={}",)):
        given = build_command(GPU, replace(kimi, vllm_args=own), port=1)
        assert "fuse_allreduce_rms" not in " ".join(given)
        assert given[-len(own) :] == list(own)
    assert build_command(CPU, replace(SETTINGS, vllm_args=("--shutdown-timeout", "5")), port=1)[-2:] == [
        "--shutdown-timeout",
        "5",
    ]


def transfer(settings):
    command = build_command(GPU, settings, port=1)
    return json.loads(command[command.index("--kv-transfer-config") + 1])


def test_backends_and_connectors():
    fp8 = transfer(replace(SETTINGS, backend="fp8", connector_settings={"retention_seconds": 60.0}))
    assert fp8["kv_connector_extra_config"] == {"shared_storage_path": "/states", "backend": "fp8", "retention_seconds": 60.0}
    stock = transfer(replace(SETTINGS, own_connector=False))
    assert stock == {
        "kv_connector": "ExampleHiddenStatesConnector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"shared_storage_path": "/states"},
    }
    mooncake = replace(SETTINGS, backend="mooncake", hidden_states_path=None, connector_settings={"mooncake_master": "h:1"})
    assert transfer(mooncake)["kv_connector_extra_config"] == {"backend": "mooncake", "mooncake_master": "h:1"}
    assert "--trust-remote-code" in build_command(GPU, replace(SETTINGS, trust_remote_code=True), port=1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vllm_args": ("--port", "9")}, "--port behind -- would contradict"),
        ({"vllm_args": ("--kv_transfer_config={}",)}, "--kv-transfer-config behind -- .* --hidden-states-backend before"),
        ({"hidden_states_path": None}, "the backend file needs a folder"),
        ({"own_connector": False, "backend": "fp8"}, "vLLM's own connector knows the backend file alone"),
        ({"layer_ids": ()}, "no layers to capture"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        build_command(GPU, replace(SETTINGS, **changes), port=1)


def test_layer_ids():
    assert captured_layer_ids([27, 2, 15], 30) == (2, 15, 27, 30)
    assert captured_layer_ids([2, 30], 30) == (2, 30)
    assert captured_layer_ids([2, 15], 30, include_last_layer=False) == (2, 15)
    for wrong in ([31], [2, 2], [-1]):
        with pytest.raises(ConfigError, match="target layer ids"):
            captured_layer_ids(wrong, 30)


def test_ids_of_native_checkpoints_count_from_one_less():
    assert draft_layer_ids({"aux_hidden_state_layer_ids": [2, 15, 27]}) == [2, 15, 27]
    assert draft_layer_ids({"target_layer_ids": [1, 14, 26]}) == [2, 15, 27]
    assert draft_layer_ids({"dflash_config": {"target_layer_ids": [1, 14, 26]}}) == [2, 15, 27]
    for wrong in ({}, {"target_layer_ids": "1"}, {"target_layer_ids": [1.5]}):
        with pytest.raises(ConfigError, match="names no layers"):
            draft_layer_ids(wrong)


def test_the_server_sees_the_connector_and_nothing_of_our_interpreter(tmp_path):
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libiomp5.so").touch()
    base = {"PYTHONPATH": "/ours", "VIRTUAL_ENV": "/ours", "HF_HOME": "/hub"}
    variables = server_environment(replace(CPU, prefix=tmp_path), SETTINGS, base)
    assert variables == {
        "PYTHONPATH": str(connector_folder()),
        "HF_HOME": "/hub",
        "LD_PRELOAD": str(tmp_path / "lib" / "libiomp5.so"),
        "PYTHONSAFEPATH": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    installed = server_environment(replace(GPU, has_connector=True), SETTINGS, base)
    assert "PYTHONPATH" not in installed
    assert "PYTHONPATH" not in server_environment(GPU, replace(SETTINGS, own_connector=False), base)
    assert (connector_folder() / "speculators_vllm_connector" / "__init__.py").is_file()
