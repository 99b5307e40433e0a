"""Upstream's half of the parity tests, run in its environment: one process for all cases, since importing takes seconds.

    python upstream_forward.py JOB.json

The job names the inputs and the cases; per case upstream loads the checkpoint of ours (``load``), or makes one of its own and
saves it (``make``), and runs it on the inputs. Tensors go to the job's ``outputs``; the last line printed is a JSON report.
"""

from __future__ import annotations

import json
import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from speculators.train.vocab_mapping import build_vocab_mappings_from_distribution
from torch import Tensor
from upstream_families import FORWARD

from speculators import SpeculatorModel, SpeculatorModelConfig
from speculators.losses import dflash_loss_decay, dpace_loss_decay, eager, exp_loss_decay, loss_function
from speculators.train.config import TrainConfig

#: Attention of the draft on a CPU; it takes the same masks as upstream's default, which needs a compiler.
ATTENTION = "sdpa"

#: Parts that upstream's models have in memory and leave out of their files.
VERIFIER_PARTS = ("embed_tokens.", "lm_head.", "verifier_lm_head.", "verifier_norm.")


def read_config(folder: str) -> Any:
    config = SpeculatorModelConfig.from_pretrained(folder)
    config.transformer_layer_config._attn_implementation = ATTENTION
    return config


def make(case: dict[str, Any], mapping: tuple[Tensor, Tensor]) -> None:
    """Save a checkpoint of upstream's own, of random weights."""
    config = SpeculatorModelConfig.from_dict(case["config"])
    config.transformer_layer_config._attn_implementation = ATTENTION
    model: Any = SpeculatorModel.registered_model_class_from_config(config)(config)
    d2t, t2d = mapping
    if hasattr(model, "load_vocab_mappings"):
        model.load_vocab_mappings(t2d, d2t)
    model.load_verifier_weights()
    torch.manual_seed(case["seed"])
    trained_embeddings = getattr(config, "embed_requires_grad", False)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.startswith(VERIFIER_PARTS) and not (trained_embeddings and name.startswith("embed_tokens.")):
                continue
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(std=0.4 if "markov" in name else 0.2)
    model.to(getattr(torch, case["dtype"])).save_pretrained(case["folder"])


def load_and_run(case: dict[str, Any], inputs: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Outputs of a checkpoint, and what upstream made of its files."""
    folder = case["folder"]
    with complaints() as complained:
        as_read = SpeculatorModelConfig.from_pretrained(folder).to_dict()
        model: Any = SpeculatorModel.from_pretrained(folder, config=read_config(folder), dtype=torch.float32).eval()
    state = model.state_dict()
    with safe_open(Path(folder) / "model.safetensors", framework="pt") as file:
        stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
    report = {
        "config": json.loads(json.dumps(as_read, default=lambda value: str(value).removeprefix("torch."))),
        "complaints": complained,
        "unknown": sorted(set(stored) - set(state)),
        "absent": sorted(name for name in set(state) - set(stored) if not name.startswith(VERIFIER_PARTS)),
        "changed": sorted(
            name for name in set(stored) & set(state) if not torch.equal(stored[name].to(state[name].dtype), state[name])
        ),
        "not_finite": sorted(name for name, value in state.items() if not value.float().isfinite().all()),
    }
    with torch.no_grad():
        outputs = FORWARD[case["config"]["speculators_model_type"]](model, inputs)
    return outputs, report


@contextmanager
def complaints() -> Iterator[list[str]]:
    """Yields the list of what Python's warnings and the libraries' loggers say, at warning level or above."""
    messages: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda entry: messages.append(entry.getMessage())  # type: ignore[method-assign]
    loggers = [logging.getLogger(name) for name in ("transformers", "speculators")]
    for logger in loggers:
        logger.addHandler(handler)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield messages
        messages.extend(str(warning.message) for warning in caught)
    finally:
        for logger in loggers:
            logger.removeHandler(handler)


def run_settings(path: str) -> dict[str, Any]:
    """The training settings of a run.yaml as upstream reads them, what it complains about, and its own dump of them."""
    with complaints() as complained:
        config = TrainConfig.from_sources(cli={}, config_path=path, argv=[])
    return {"settings": config.flatten(), "complaints": complained, "dump": config.dump_yaml()}


def losses(inputs: dict[str, Tensor], block_size: int) -> dict[str, Tensor]:
    """Upstream's elementwise losses, decays and the reduced loss."""
    logits, targets, mask = inputs["loss_logits"], inputs["loss_targets"], inputs["loss_mask"]
    slots = (torch.arange(logits.shape[1]) % block_size)[None].float()
    results = {name: getattr(eager, name)(logits, targets) for name in dir(eager) if name.endswith("_loss")}
    for anchor_first in (True, False):
        results[f"dflash_loss_decay-{anchor_first}"] = dflash_loss_decay(slots, gamma=4.0, sample_from_anchor=anchor_first)
    results["exp_loss_decay"] = exp_loss_decay(slots, gamma=0.8)
    results["dpace_loss_decay"] = dpace_loss_decay(slots, mask, block_size, 0.5, results["ce_loss"])
    for name in [name for name in results if name.endswith("_loss")]:
        results[f"{name}-reduced"] = loss_function(
            logits,
            targets,
            mask,
            slots,
            loss_fn=getattr(eager, name),
            decay_fn=lambda pos_idx, **_: dflash_loss_decay(pos_idx, gamma=4.0),
        )
    return results


def main(job: dict[str, Any]) -> dict[str, Any]:
    torch.set_num_threads(1)
    inputs = load_file(job["inputs"])
    counts = {int(token): count for token, count in job["token_counts"].items()}
    outputs: dict[str, Tensor] = {}
    report: dict[str, Any] = {"peer": f"speculators {version('speculators')}", "cases": {}, "vocabulary": {}}
    report["run"] = run_settings(job["run"])
    for size in job["draft_vocab_sizes"]:
        d2t, t2d = build_vocab_mappings_from_distribution(counts, size, job["vocab_size"])
        outputs[f"vocabulary-{size}/d2t"], outputs[f"vocabulary-{size}/t2d"] = d2t, t2d
        files = {name: torch.from_numpy(np.load(Path(job["vocabulary"]) / f"{name}-{size}.npy")) for name in ("d2t", "t2d")}
        report["vocabulary"][size] = torch.equal(files["d2t"], d2t) and torch.equal(files["t2d"], t2d)
    for name, value in losses(inputs, job["block_size"]).items():
        outputs[f"losses/{name}"] = value
    for case in job["cases"]:
        if case["action"] == "make":
            size = case["config"].get("draft_vocab_size", job["vocab_size"])
            make(case, build_vocab_mappings_from_distribution(counts, size, job["vocab_size"]))
        tensors, report["cases"][case["name"]] = load_and_run(case, inputs)
        outputs |= {f"{case['name']}/{name}": value for name, value in tensors.items()}
    save_file({name: value.contiguous() for name, value in outputs.items()}, job["outputs"])
    return report


if __name__ == "__main__":
    print(json.dumps(main(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))))
