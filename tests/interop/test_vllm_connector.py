"""Hidden states of a real vLLM server through the connector, against transformers; and ``launch-vllm`` from start to stop."""

from __future__ import annotations

import fcntl
import json
import os
import random
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from speculators.verifiers.loading import load_verifier
from speculators.verifiers.packaged import packaged_verifier
from speculators.vllm_server.command import ServerSettings, build_command, connector_folder
from speculators.vllm_server.launching import free_port
from speculators.vllm_server.versions import find_vllm
from tests.interop.environments import peer_python
from tests.interop.vllm_server import vllm_server
from tests.vllm_server.processes import all_gone

pytestmark = pytest.mark.interop

LAYERS = (2, 15, 27, 30)
#: Seconds; longer than any test waits before it fetches.
RETENTION = 5.0


@pytest.fixture(scope="module")
def smollm() -> Path:
    return Path(packaged_verifier())


@pytest.fixture(scope="module")
def modules(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the connector's distribution, installed as users install it, beside the environment instead of into it."""
    target, copy = tmp_path_factory.mktemp("site"), tmp_path_factory.mktemp("source")
    source = connector_folder().parent
    subprocess.run(
        ["cp", "-r", str(source / "src"), str(source / "pyproject.toml"), str(source / "README.md"), copy], check=True
    )
    install = [peer_python("vllm"), "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--target", target, copy]
    subprocess.run([str(part) for part in install], check=True, capture_output=True)
    return target


@pytest.fixture(scope="module")
def served(smollm: Path, modules: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("states")
    settings = ServerSettings(
        str(smollm), LAYERS, hidden_states_path=folder, connector_settings={"retention_seconds": RETENTION}
    )
    command = build_command(find_vllm(peer_python("vllm")), settings, port=1)
    arguments = command[command.index("--speculative-config") :]
    log = tmp_path_factory.mktemp("log") / "vllm.log"
    chunks = ("--max-model-len", "2048", "--max-num-seqs", "16", "--max-num-batched-tokens", "256", "--enable-chunked-prefill")
    with vllm_server(smollm, log, *arguments, *chunks, modules=modules) as address:
        yield {"address": address, "model": str(smollm), "folder": folder, "log": log}
    assert {entry.name for entry in folder.iterdir()} == {".hs-owners.lock"}


def ask(served: dict[str, Any], prompt: list[int], *, max_tokens: int = 1, headers: Any = None, **more: Any) -> dict[str, Any]:
    body = {"model": served["model"], "prompt": prompt, "max_tokens": max_tokens, "return_token_ids": True, "temperature": 0}
    answer = httpx.post(f"{served['address']}/v1/completions", json=body | more, timeout=300, headers=headers)
    answer.raise_for_status()
    return dict(answer.json())


def fetch(answer: dict[str, Any]) -> dict[str, torch.Tensor]:
    """As upstream's client: wait for the lock, read, remove both."""
    path = answer["kv_transfer_params"]["hidden_states_path"]
    with open(f"{path}.lock", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        states = load_file(path)
    os.unlink(path)
    os.unlink(f"{path}.lock")
    return states


@pytest.fixture(scope="module")
def reference(smollm: Path) -> Any:
    """States of transformers: residual streams after k layers, the last before the final norm."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(smollm, dtype=torch.float32).eval()
    last: list[torch.Tensor] = []
    model.model.norm.register_forward_pre_hook(lambda _, inputs: last.append(inputs[0]))

    def states(prompt: list[int]) -> torch.Tensor:
        with torch.no_grad():
            streams = model(torch.tensor([prompt]), output_hidden_states=True).hidden_states
        return torch.stack([*(streams[layer][0] for layer in LAYERS[:-1]), last.pop()[0]], dim=1)

    return states


def worst(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float(((got - expected).norm(dim=-1) / expected.norm(dim=-1)).max())


def test_concurrent_chunked_prompts_have_the_states_of_transformers(served, reference):
    draw = random.Random(0)
    prompts = [[draw.randrange(3, 49000) for _ in range(draw.randrange(3, 500))] for _ in range(8)]
    prompts += [[*prompts[0], 5, 6, 7], prompts[1] * 2]
    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = list(pool.map(lambda prompt: fetch(ask(served, prompt)), prompts))
    for prompt, states in zip(prompts, answers):
        assert states["token_ids"].tolist() == prompt
        assert worst(states["hidden_states"], reference(prompt)) < 2e-4


def test_a_file_says_what_its_states_are(served, smollm):
    answer = ask(served, [1, 2, 3])
    path = answer["kv_transfer_params"]["hidden_states_path"]
    with open(f"{path}.lock", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        with safe_open(path, "pt") as file:
            record = file.metadata()
    fetch(answer)
    assert json.loads(record["layer_ids"]) == list(LAYERS)
    assert (record["final_state"], record["dtype"], record["layer_id_convention"]) == ("pre_norm", "float32", "after_k_layers")
    assert record["verifier_hash"] == load_verifier(smollm).hash


def test_states_of_a_prefix_in_the_servers_cache_are_there(served, reference):
    prompt = [1, *range(1000, 1400)]
    first = fetch(ask(served, prompt))
    again = fetch(ask(served, prompt))
    longer = fetch(ask(served, [*prompt, 17, 33]))
    assert torch.equal(first["hidden_states"], again["hidden_states"])
    assert worst(longer["hidden_states"], reference([*prompt, 17, 33])) < 2e-4


def test_states_of_an_answer_come_with_it(served, reference):
    answer = ask(served, [1, 504, 260], max_tokens=6, ignore_eos=True, kv_transfer_params={"include_output_tokens": True})
    tokens = [1, 504, 260, *answer["choices"][0]["token_ids"]]
    states = fetch(answer)
    assert states["token_ids"].tolist() == tokens[:-1]
    assert worst(states["hidden_states"], reference(tokens[:-1])) < 2e-4


def own_folder(served: dict[str, Any]) -> Path:
    (folder,) = served["folder"].glob("hs-*")
    return Path(folder)


def test_what_is_aborted_or_never_fetched_does_not_stay(served):
    with suppress(httpx.TimeoutException):
        body = {"model": served["model"], "prompt": [1, 2, 3], "max_tokens": 1500, "ignore_eos": True}
        httpx.post(f"{served['address']}/v1/completions", json=body, timeout=1.5)
        pytest.fail("the answer came before it could be aborted")
    path = Path(ask(served, [1, 2, 3])["kv_transfer_params"]["hidden_states_path"])
    # The answer comes before the file: its writer holds the lock.
    wait_for_names(served, {"owner", path.name, f"{path.name}.lock"})
    wait_for_names(served, {"owner"})


def wait_for_names(served: dict[str, Any], wanted: set[str]) -> None:
    """Until the server's folder holds these entries and no others."""
    until = time.monotonic() + 15
    while (names := {entry.name for entry in own_folder(served).iterdir()}) != wanted:
        assert time.monotonic() < until, f"{sorted(names)} are there, not {sorted(wanted)}"
        time.sleep(0.05)


def test_a_client_cannot_choose_where_states_are_written(served, tmp_path):
    answer = ask(
        served, [1, 2], headers={"X-Request-Id": f"../../..{tmp_path}/x"}, kv_transfer_params={"hidden_states_path": "/x"}
    )
    path = Path(answer["kv_transfer_params"]["hidden_states_path"])
    assert path.parent == own_folder(served)
    fetch(answer)
    assert not any(tmp_path.iterdir())


def test_the_plugin_is_found_and_has_nothing_to_do(modules):
    """By its entry point; and what it would patch is there, and patched on request."""
    script = (
        "import os\n"
        "from importlib.metadata import entry_points\n"
        "hook = entry_points(group='vllm.general_plugins')['speculators_fast_build'].load()\n"
        "from vllm.v1.attention.backends.flash_attn import FlashAttentionMetadataBuilder as builder\n"
        "patched = lambda: hasattr(builder.build, 'builds_drafts_fast')\n"
        "hook(); first = patched()\n"
        "os.environ['SPECULATORS_VLLM_FAST_BUILD'] = '1'; hook()\n"
        "print(first, patched())\n"
    )
    variables = {key: value for key, value in os.environ.items() if key != "SPECULATORS_VLLM_FAST_BUILD"}
    done = subprocess.run(
        [str(peer_python("vllm")), "-c", script],
        env=variables | {"PYTHONPATH": str(modules)},
        cwd=modules,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split()[-2:] == ["False", "True"]


def test_the_librarys_wheel_carries_the_connectors_modules(tmp_path):
    """Built and looked into, where only the wheel is."""
    repository = Path(__file__).parents[2]
    for name in ("speculators", "integrations", "pyproject.toml", "setup.py", "README.md", "MANIFEST.in", "LICENSE"):
        subprocess.run(["cp", "-r", str(repository / name), str(tmp_path)], check=True)
    build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", tmp_path / "out", tmp_path]
    subprocess.run([str(part) for part in build], check=True, capture_output=True)
    (wheel,) = (tmp_path / "out").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    carried = tmp_path / "site" / "speculators" / "vllm_server" / "modules" / "speculators_vllm_connector"
    source = connector_folder() / "speculators_vllm_connector"
    assert {file.name for file in carried.iterdir()} == {file.name for file in source.glob("*.py")}
    assert not (tmp_path / "site" / "integrations").exists()
    script = "from speculators.vllm_server.command import connector_folder; print(connector_folder())"
    variables = os.environ | {"PYTHONPATH": str(tmp_path / "site")}
    done = subprocess.run([sys.executable, "-c", script], env=variables, cwd="/", capture_output=True, text=True, check=True)
    assert Path(done.stdout.strip()) == carried.parent


def test_launch_vllm_from_start_to_stop(smollm, reference, tmp_path):
    port = free_port()
    command = [sys.executable, "-m", "speculators", "launch-vllm", str(smollm), "--python", str(peer_python("vllm"))]
    command += ["--port", str(port), "--hidden-states-backend", "fp8", "--hidden-states-path", str(tmp_path / "states")]
    command += ["--target-layer-ids", "2", "15", "27", "--", "--dtype", "float32", "--enforce-eager", "--max-model-len", "512"]
    variables = os.environ | {
        "PYTHONPATH": str(Path(__file__).parents[2]),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "OMP_NUM_THREADS": "2",
    }
    launcher = subprocess.Popen(command, env=variables, cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    try:
        assert launcher.stdout is not None
        lines = [launcher.stdout.readline() for _ in range(3)]
        assert f"--vllm-endpoint http://127.0.0.1:{port}/v1 --hidden-states-backend fp8" in lines[2]
        served = {"address": f"http://127.0.0.1:{port}", "model": str(smollm)}
        prompt = [1, *range(500, 560)]
        states = fetch(ask(served, prompt))
        decoded = states["hidden_states"].float() * states["hidden_states_scales"]
        assert states["hidden_states"].dtype == torch.float8_e4m3fn
        assert worst(decoded, reference(prompt)) < 2**-4
        processes = descendants(launcher.pid)
        assert len(processes) >= 3  # keeper, server, engine
        launcher.send_signal(signal.SIGTERM)
        assert launcher.wait(60) == 128 + signal.SIGTERM
    finally:
        launcher.kill()
        launcher.wait()
    assert all_gone(processes, 2)
    assert {entry.name for entry in (tmp_path / "states").iterdir()} == {".hs-owners.lock"}


def descendants(pid: int) -> list[int]:
    children = [int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()]
    return children + [below for child in children for below in descendants(child)]
