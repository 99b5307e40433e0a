"""Hidden states of a real vLLM server: those of the process, its own next tokens, and the same training."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from speculators.data import AnswerRecord, DataManifest, Row, RowDataset
from speculators.data.prompts import find_prompt_files
from speculators.pipelines.offline_states import FillSettings, fill_store
from speculators.train import train
from speculators.train.config import TrainConfig
from speculators.verifiers.loading import Verifier, load_verifier
from speculators.verifiers.packaged import packaged_verifier
from speculators.verifiers.transformers_source import TransformersSource
from speculators.verifiers.vllm import VllmSettings, VllmSource
from speculators.vllm_server.command import ServerSettings, build_command, captured_layer_ids, server_environment
from speculators.vllm_server.launching import VllmServer, free_port
from speculators.vllm_server.versions import find_vllm
from tests.interop.environments import peer_python

pytestmark = pytest.mark.interop

LAYERS = (15, 2, 27)  # not as vLLM hands them over
STEPS = 20
#: For servers on CPUs: what the tests' other vLLM servers have.
VARIABLES = {"OMP_NUM_THREADS": "2", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}


@pytest.fixture(scope="module")
def verifier() -> Verifier:
    return load_verifier(packaged_verifier(), dtype=torch.float32)


@pytest.fixture(scope="module")
def dataset(verifier: Verifier) -> RowDataset:
    """Lines of prompts as text: 16 rows of 20 to 300 tokens, of one and of several blocks of vLLM's cache."""
    lines = [line for file in find_prompt_files() for line in file.read_text(encoding="utf-8").splitlines()]
    rows = []
    for index in range(16):
        text = " ".join(lines[place % len(lines)] for place in range(index * 20, index * 20 + 20))
        ids = np.array(verifier.tokenizer(text)["input_ids"][: 20 + 280 * index // 15])
        rows.append(Row(index, ids, np.arange(len(ids)) >= 4))
    return RowDataset.from_rows(rows, DataManifest(answers=AnswerRecord(on_policy=True)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("states")


@pytest.fixture(scope="module")
def server(verifier: Verifier, folder: Path) -> Iterator[VllmServer]:
    installation = find_vllm(peer_python("vllm"))
    settings = ServerSettings(
        model=verifier.name,
        layer_ids=captured_layer_ids(LAYERS, verifier.num_layers),
        hidden_states_path=folder,
        vllm_args=("--dtype", "float32", "--enforce-eager", "--max-model-len", "1024", "--max-num-seqs", "16"),
    )
    port = free_port()
    command = build_command(installation, settings, port=port)
    environment = server_environment(installation, settings, {**os.environ, **VARIABLES})
    with VllmServer(command, environment=environment, log=folder / "server.log", port=port, start_seconds=400) as running:
        yield running


@pytest.fixture
def source(server: VllmServer, verifier: Verifier, folder: Path) -> Iterator[VllmSource]:
    settings = VllmSettings(
        endpoint=server.endpoint,
        backend="file",
        folder=folder,
        on_missing="generate",
        on_generate="delete",
        request_timeout=120,
        max_retries=3,
        validation_retries=2,
        max_consecutive_failures=20,
    )
    opened = VllmSource(settings, LAYERS, verifier)
    yield opened
    opened.close()


def distance(mine: torch.Tensor, theirs: torch.Tensor) -> float:
    """Largest relative L2 distance of a token's state."""
    return float(((mine - theirs).norm(dim=-1) / theirs.norm(dim=-1)).max())


def test_states_and_next_tokens_are_those_of_the_process(
    source: VllmSource, verifier: Verifier, dataset: RowDataset, folder: Path
) -> None:
    rows = list(dataset)
    truth = TransformersSource(verifier, LAYERS, "pre_norm").fetch(rows)
    found = source.fetch(rows)
    assert [states.row_id for states in found] == [row.row_id for row in rows]
    features = max(distance(mine.features, theirs.features) for mine, theirs in zip(found, truth))
    final = max(distance(mine.final, theirs.final) for mine, theirs in zip(found, truth))
    print(f"{sum(map(len, rows))} tokens: features {features:.1e}, final {final:.1e}")
    assert max(features, final) < 1e-4
    assert source.description.dtype == "float32"
    row = rows[3]
    positions = [0, 5, len(row) - 1]
    told = source.next_tokens(row, positions, 8)
    with torch.no_grad():
        logits = verifier.logits(torch.tensor(row.input_ids)[None])[0, positions]
    own = logits.log_softmax(-1).gather(1, told.ids)
    assert told.positions.tolist() == positions
    torch.testing.assert_close(told.logprobs, own, atol=1e-3, rtol=0)
    assert told.ids[:, 0].tolist() == logits.argmax(-1).tolist()
    assert not list(folder.rglob("*.safetensors*"))  # neither states nor locks are left


def test_training_is_the_same_through_every_source(
    server: VllmServer, verifier: Verifier, dataset: RowDataset, folder: Path, tmp_path: Path
) -> None:
    ids = np.arange(len(dataset))
    shape: dict[str, Any] = {
        "verifier_name_or_path": verifier.name,
        "speculator_type": "dspark",
        "num_layers": 1,
        "block_size": 4,
        "markov_rank": 32,
        "draft_vocab_size": 512,
        "mask_token_id": 3,
        "target_layer_ids": list(LAYERS),
        "final_state": "pre_norm",
        "hidden_states_dtype": "float32",
        "total_seq_len": 320,
        "capture_batch_tokens": 512,
        "max_anchors": 64,
        "lr": 1e-3,
        "epochs": 20,
        "max_steps": STEPS,
        "checkpoint_freq": 1000,
    }

    def losses(source: str, **settings: Any) -> list[float]:
        config = TrainConfig.from_flat(shape | settings | {"hidden_states": source, "save_path": str(tmp_path / source)})
        seen: list[float] = []
        train(
            config,
            dataset=dataset,
            train_ids=ids,
            val_ids=ids[:0],
            progress=False,
            on_step=lambda info: seen.append(info.metrics["loss"]),
        )
        assert len(seen) == STEPS
        return seen

    wanted = losses("transformers")
    assert wanted[-1] < wanted[0]

    settings = FillSettings(token_budget=shape["capture_batch_tokens"], seq_length=shape["total_seq_len"])
    fill_store(tmp_path / "states", dataset, TransformersSource(verifier, LAYERS, "pre_norm", 512), settings, shown=False)
    assert losses("store", hidden_states_path=str(tmp_path / "states"), on_missing="raise") == wanted

    assert losses("ray", ray_rollout_workers=1) == wanted

    found = losses("vllm", vllm_endpoint=server.endpoint, hidden_states_path=str(folder), request_timeout=120)
    differences = [abs(mine - theirs) for mine, theirs in zip(found, wanted, strict=True)]
    apart = f"vllm's differ by {differences[0]:.1e} in step 1, {max(differences):.1e} in any"
    print(f"losses {wanted[0]:.4f} to {wanted[-1]:.4f}; {apart}")
    assert differences[0] < 1e-4
    assert max(differences) < 1e-3
