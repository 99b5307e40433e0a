"""One run of upstream for all parity tests: what it is given, and what it gave back."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from speculators.data.vocabulary_files import save_mapping
from tests.interop import outputs as ours
from tests.interop.cases import HIDDEN, VERIFIER_LAYERS, VOCAB, Case, cases_of, families, written
from tests.interop.environments import peer_python, run_peer
from tests.interop.records import Direction
from tests.tiny import tiny_verifier

__all__ = ["BLOCK_SIZE", "CASES", "DIRECTIONS", "DRAFT_VOCAB_SIZES", "RUN_SETTINGS", "UpstreamRun"]

DIRECTIONS: tuple[Direction, ...] = ("ours -> peer", "peer -> ours")
CASES = [case for config in families().values() for case in cases_of(config)]

#: Of the losses' slots, and of the vocabularies that both build from one count of tokens.
BLOCK_SIZE, DRAFT_VOCAB_SIZES = 4, (40, 17, 60)

#: Settings, none at its default, that upstream and this library both know.
RUN_SETTINGS: dict[str, Any] = {
    "speculator_type": "dspark",
    "seed": 7,
    "verifier_name_or_path": "some/verifier",
    "trust_remote_code": True,
    "num_layers": 3,
    "draft_hidden_act": "gelu",
    "sliding_window": 512,
    "full_attention_indices": [0, 2],
    "sliding_window_non_causal": True,
    "draft_mrope_full_head_hack": False,
    "target_layer_ids": [1, 5],
    "draft_vocab_size": 4000,
    "mask_token_id": 11,
    "data_path": "some/rows",
    "total_seq_len": 1024,
    "train_data_ratio": 0.75,
    "hidden_states_dtype": "float32",
    "max_anchors": 99,
    "loss_fn": '{"ce": 0.5, "kl_div": 1.5}',
    "optimizer": "adamw",
    "lr": 0.0003,
    "weight_decay": 0.02,
    "muon_lr": 0.004,
    "muon_momentum": 0.9,
    "scheduler_type": "cosine",
    "scheduler_warmup_ratio": 0.1,
    "scheduler_num_cosine_cycles": 1.5,
    "epochs": 3,
    "max_steps": 500,
    "checkpoint_freq": 0.5,
    "save_path": "some/run",
    "gradient_checkpointing": True,
    "logger": "tensorboard",
    "block_size": 7,
    "sample_from_anchor": False,
    "dflash_decay_gamma": 5.0,
    "markov_rank": 64,
    "markov_head_type": "rnn",
    "enable_confidence_head": False,
    "confidence_head_alpha": 0.5,
}


def dumped_settings() -> str:
    """What ``speculators train ... --dump-config`` prints for :data:`RUN_SETTINGS`."""
    arguments = []
    for name, value in RUN_SETTINGS.items():
        flag = "--" + name.replace("_", "-")
        if isinstance(value, bool):
            arguments.append(flag if value else flag.replace("--", "--no-", 1))
        else:
            arguments += [flag, *map(str, value if isinstance(value, list) else [value])]
    command = [sys.executable, "-m", "speculators", "train", *arguments, "--dump-config"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


class UpstreamRun:
    """Checkpoints of both in ``folder``, and upstream's report and tensors."""

    def __init__(self, folder: Path) -> None:
        peer_python("upstream")
        self.verifier = tiny_verifier(folder, vocab=VOCAB, hidden=HIDDEN, layers=VERIFIER_LAYERS)
        self.folder, self.inputs = folder, ours.inputs()
        self._names = {id(case): f"{case.family}-{number}" for number, case in enumerate(CASES)}
        entries = []
        for number, case in enumerate(CASES):
            ours.save_ours(case, self.verifier, self.checkpoint(case, "ours -> peer"), seed=number)
            # Both draw alike: another seed gives other weights.
            entries += [self._entry(case, direction, len(CASES) + number) for direction in DIRECTIONS]
        for size in DRAFT_VOCAB_SIZES:
            save_mapping(folder, ours.vocabulary(size))
        (folder / "run.yaml").write_text(dumped_settings(), encoding="utf-8")
        save_file(self.inputs, folder / "inputs.safetensors")
        job = {
            "inputs": str(folder / "inputs.safetensors"),
            "outputs": str(folder / "outputs.safetensors"),
            "cases": entries,
            "token_counts": ours.token_counts(),
            "draft_vocab_sizes": DRAFT_VOCAB_SIZES,
            "vocabulary": str(folder),
            "vocab_size": VOCAB,
            "block_size": BLOCK_SIZE,
            "run": str(folder / "run.yaml"),
        }
        (folder / "job.json").write_text(json.dumps(job), encoding="utf-8")
        self.report = run_peer("upstream", "upstream_forward.py", folder / "job.json")
        self.peer: str = self.report["peer"]
        self._tensors = load_file(folder / "outputs.safetensors")

    def checkpoint(self, case: Case, direction: Direction) -> Path:
        return self.folder / direction.replace(" -> ", "-to-") / self._names[id(case)]

    def outputs(self, case: Case, direction: Direction) -> dict[str, Tensor]:
        """Upstream's tensors for one checkpoint."""
        return self.tensors(self._key(case, direction))

    def case_report(self, case: Case, direction: Direction) -> dict[str, Any]:
        """What upstream made of one checkpoint's files."""
        return self.report["cases"][self._key(case, direction)]

    def stored(self, case: Case, direction: Direction) -> dict[str, Tensor]:
        """The checkpoint's tensors as they lie in its file."""
        return load_file(self.checkpoint(case, direction) / "model.safetensors")

    def written_config(self, case: Case, direction: Direction) -> dict[str, Any]:
        return json.loads((self.checkpoint(case, direction) / "config.json").read_text(encoding="utf-8"))

    def tensors(self, prefix: str) -> dict[str, Tensor]:
        return {
            name.removeprefix(prefix + "/"): value for name, value in self._tensors.items() if name.startswith(prefix + "/")
        }

    def _key(self, case: Case, direction: Direction) -> str:
        return f"{direction}: {self._names[id(case)]}"

    def _entry(self, case: Case, direction: Direction, seed: int) -> dict[str, Any]:
        return {
            "name": self._key(case, direction),
            "folder": str(self.checkpoint(case, direction)),
            "action": "load" if direction == "ours -> peer" else "make",
            "config": written(case.family, case.options, str(self.verifier)),
            "dtype": case.dtype,
            "seed": seed,
        }
