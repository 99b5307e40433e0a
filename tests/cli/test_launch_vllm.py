"""``launch-vllm`` with a stand-in for vLLM's interpreter, in this process, down to the last process gone."""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import threading
import time

import pytest

from speculators.cli.app import run
from speculators.vllm_server.launching import free_port
from tests.vllm_server.processes import all_gone, fake_interpreter, fake_pids


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A verifier's folder as far as its config: 12 layers."""
    from transformers import LlamaConfig

    folder = tmp_path_factory.mktemp("model")
    LlamaConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=12, num_attention_heads=1).save_pretrained(folder)
    return str(folder)


@pytest.fixture
def python(tmp_path, monkeypatch):
    monkeypatch.setenv("FAKE_VLLM_PIDS", str(tmp_path / "pids"))
    monkeypatch.setenv("FAKE_VLLM", "healthy")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.chdir(tmp_path)
    return str(fake_interpreter(tmp_path))


def layer_ids(line: str) -> list[int]:
    words = shlex.split(line)
    speculative = json.loads(words[words.index("--speculative-config") + 1])
    return list(speculative["draft_model_config"]["hf_config"]["eagle_aux_hidden_state_layer_ids"])


def test_a_dry_run_prints_a_command_for_each_replica(model, python, tmp_path, capsys):
    arguments = ["launch-vllm", model, "--python", python, "--dry-run", "--replicas", "2", "--target-layer-ids", "9", "2"]
    assert run([*arguments, "--", "--dtype", "float32"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert layer_ids(first) == [2, 9, 12]
    assert first.startswith("env OMP_NUM_THREADS=")
    assert "--port 8000" in first
    assert "--port 8001" in second
    assert first.endswith("--dtype float32")
    assert not (tmp_path / "vllm-logs").exists()
    assert fake_pids(tmp_path / "pids") == []


def test_layers_by_default_of_a_draft_and_without_the_last(model, python, tmp_path, capsys):
    command = ["launch-vllm", model, "--python", python, "--dry-run"]
    assert run(command) == 0
    assert layer_ids(capsys.readouterr().out) == [2, 6, 9, 12]
    (tmp_path / "config.json").write_text('{"target_layer_ids": [1, 4, 7]}')
    assert run([*command, "--draft", str(tmp_path), "--no-include-last-layer"]) == 0
    assert layer_ids(capsys.readouterr().out) == [2, 5, 8]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--target-layer-ids", "13"], "must lie within [0, 12]"),
        (["--target-layer-ids", "x"], "takes whole numbers"),
        (["--draft", "nowhere"], "nowhere has no readable config.json"),
        (["--draft", ".", "--target-layer-ids", "2"], "--target-layer-ids and --draft both name layers"),
        (["--hidden-states-backend", "fax"], "--hidden-states-backend is fax"),
        (["--connector", "mine"], "--connector is mine"),
        (["--connector", "stock", "--hidden-states-backend", "fp8"], "vLLM's own connector knows the backend file alone"),
        (["--mooncake-master", "h:1"], "--mooncake-master is for --hidden-states-backend mooncake"),
        (["--replicas", "9", "--port", "65530"], "need ports above 65535"),
        (["--", "--port", "1"], "give --port before the --"),
    ],
)
def test_wrong_arguments_are_one_sentence(model, python, capsys, arguments, message):
    assert run(["launch-vllm", model, "--python", python, "--dry-run", *arguments]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert message in said
    assert len(said.splitlines()) == 1


def test_a_model_or_a_vllm_that_is_not_there_is_one_sentence(model, python, tmp_path, capsys):
    assert run(["launch-vllm", str(tmp_path / "none"), "--python", python]) == 1
    assert "no readable model config" in capsys.readouterr().err
    assert run(["launch-vllm", model]) == 2
    assert "vLLM is not installed for" in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_servers_run_until_a_signal_and_nothing_is_left(model, python, tmp_path, capsys, number):
    port = free_port()
    states = tmp_path / "states"
    timer = threading.Thread(target=signal_when_ready, args=(port, number))
    timer.start()
    arguments = ["launch-vllm", model, "--python", python, "--port", str(port), "--hidden-states-path", str(states)]
    assert run(arguments) == 128 + number
    timer.join()
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("1 vLLM server hands over hidden states of layers 2, 6, 9, 12; logs are in vllm-logs")
    assert f"--vllm-endpoint http://127.0.0.1:{port}/v1 --hidden-states-backend file --hidden-states-path {states}" in said[2]
    assert said[2].endswith("--target-layer-ids 2 6 9 ...")
    pids = fake_pids(tmp_path / "pids")
    assert len(pids) == 2
    assert all_gone(pids, 0.5)
    assert (tmp_path / "vllm-logs" / f"vllm-{port}.log").read_text().startswith("(EngineCore pid=7) INFO loading")


def signal_when_ready(port: int, number: int) -> None:
    for _ in range(200):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                break
        time.sleep(0.05)
    time.sleep(0.5)
    os.kill(os.getpid(), number)


def test_a_server_that_cannot_start_is_one_sentence_and_takes_the_others_along(model, python, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("FAKE_VLLM", "dies")
    port = free_port()
    assert run(["launch-vllm", model, "--python", python, "--port", str(port), "--replicas", "2"]) == 1
    said = capsys.readouterr()
    assert "ended: ValueError: no room for the cache; see its log vllm-logs" in said.err
    assert "train with" not in said.out
    assert all_gone(fake_pids(tmp_path / "pids"), 0.5)


def test_a_taken_port_is_one_sentence(model, python, tmp_path, capsys):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        assert run(["launch-vllm", model, "--python", python, "--port", str(port)]) == 2
    assert f"port {port} on 127.0.0.1 cannot be used" in capsys.readouterr().err
    assert fake_pids(tmp_path / "pids") == []
