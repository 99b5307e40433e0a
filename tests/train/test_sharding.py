"""A sharded draft against a whole one, in two real processes: gradients, clipping, updates, checkpoints, silent processes.

Run by torchrun as a module, this file is one of the two processes.
"""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator

from speculators.batch import PackedBatch
from speculators.losses import LossConfig, batch_denominators
from speculators.models import SpeculatorModel
from speculators.models.verifier_weights import VerifierHead
from speculators.train.optimizers import Optimizers, build_optimizers
from speculators.train.sharding import average_gradients, clip_gradients, gathered, is_sharded, placed, release, spread, whole
from speculators.train.validation import validation_sums
from tests.models.small import HIDDEN, LAYER_IDS, VOCAB, draft_config, packed_row, verifier_config
from tests.models.test_chain import chain_model
from tests.train.helpers import settings

#: Two layers, and two heads with tables; a projection with a single row leaves one process without any part of it.
VALUES: dict[str, Any] = {"markov_head_type": "rnn"}
LOSS = LossConfig()


#: Families and whether their layers recompute their activations.
CASES = [("dspark", False), ("dspark", True), ("eagle3", False), ("eagle3", True), ("peagle", False)]


def draft(family: str = "dspark") -> Any:
    if family != "dspark":
        return chain_model(family, norm_before_fc=True).float().train()
    torch.manual_seed(0)
    config = draft_config("dspark", **VALUES)
    model: Any = SpeculatorModel.registered_model_class_from_config(config)(config)
    return model.train()


def teacher() -> VerifierHead:
    return VerifierHead(torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(5)), verifier_config())


def row(seed: int, anchors: list[int]) -> PackedBatch:
    found = packed_row([9, 12], anchors, seed=seed)
    assert found.features is not None
    generator = torch.Generator().manual_seed(seed)
    found.features, found.final_states = found.features.float(), torch.randn(21, HIDDEN, generator=generator)
    return found


#: Two micro-batches of each of two processes; the second process has no anchor in its second.
ROWS = [[row(1, [1, 4, 11]), row(2, [2, 15])], [row(3, [3, 12]), None]]


def rows_of(family: str) -> list[list[PackedBatch | None]]:
    """The processes' micro-batches; P-EAGLE drops depths, differently on each."""
    rows: list[list[PackedBatch | None]] = [list(process) for process in ROWS]
    if family == "peagle":
        for batch, depths in ((rows[0][0], [1, 3, 2]), (rows[0][1], [1, 1]), (rows[1][0], [4, 2])):
            assert batch is not None
            batch.depths = torch.tensor(depths)
    return rows


def denominators(model: Any, rows: list[list[PackedBatch | None]]) -> dict[str, float]:
    totals: dict[str, float] = {}
    for batch in (batch for process in rows for batch in process if batch is not None):
        for name, value in batch_denominators(batch, model.layout.max_draft_tokens, model.verifier_to_draft, LOSS).items():
            totals[name] = totals.get(name, 0.0) + value
    return totals


def backward(call: Any, batch: PackedBatch, over: dict[str, float], scale: float) -> None:
    (call(batch, teacher=teacher(), loss_config=LOSS, denominators=over).loss * scale).backward()


def trainable(model: Any) -> dict[str, torch.nn.Parameter]:
    return {name: value for name, value in model.named_parameters() if value.requires_grad}


def close(found: dict[str, Any], wanted: dict[str, Any], tolerance: float = 1e-6) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(
            found[name], value, rtol=tolerance, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}"
        )


def steps(model: Any, folder: Path, bf16: bool) -> Optimizers:
    return build_optimizers(model, settings(folder, lr=1e-2), bf16=bf16)


def main(folder: Path) -> None:
    """What each of the two processes does."""
    accelerator = Accelerator(cpu=True)
    assert accelerator.num_processes == 2
    for family, checkpointing in CASES:
        compare(folder, accelerator, family, checkpointing)
    # Together and with nothing left that belongs to the group, as the trainer ends.
    accelerator.free_memory()
    accelerator.wait_for_everyone()
    accelerator.end_training()


def compare(folder: Path, accelerator: Accelerator, family: str, checkpointing: bool) -> None:
    rank, batches = accelerator.process_index, rows_of(family)
    reference, sharded = draft(family), draft(family)
    sharded.gradient_checkpointing = checkpointing
    wrapped = spread(sharded, accelerator, shard=True)
    frozen = {"lm_head.weight"} if family == "peagle" else {"embed_tokens.weight", "lm_head.weight"}
    assert {name for name, value in sharded.named_parameters() if not is_sharded(value)} == frozen
    parts = sum(value.to_local().numel() for value in trainable(sharded).values())
    everything = sum(value.numel() for value in trainable(reference).values())
    assert parts < 0.6 * everything
    close(gathered(trainable(sharded), keep=True), {name: value.detach() for name, value in trainable(reference).items()}, 0.0)

    over = denominators(reference, batches)
    filler = PackedBatch.filler(reference.layout.block_size, len(LAYER_IDS), HIDDEN)
    ours, theirs = steps(sharded, folder, True), steps(reference, folder, True)
    for _ in range(3):
        for batch in (batch for process in batches for batch in process if batch is not None):
            backward(reference, batch, over, 1.0)
        for index, batch in enumerate(batches[rank]):
            with average_gradients(wrapped, accelerator, now=index == 1):
                backward(wrapped, batch or filler, over, 2.0 if batch is not None else 0.0)
        found = {name: whole(value.grad) for name, value in trainable(sharded).items()}
        close(found, {name: value.grad for name, value in trainable(reference).items()}, 2e-5)
        norms = [clip_gradients(list(trainable(model).values()), 0.1) for model in (sharded, reference)]
        assert norms[1] > 0.1
        close({"norm": norms[0]}, {"norm": norms[1]}, 1e-5)
        assert float(clip_gradients(list(trainable(sharded).values()), 1.0)) == pytest.approx(0.1, rel=1e-4)
        for optimizers in (ours, theirs):
            optimizers.step()
            optimizers.zero_grad()
        # Muon's bfloat16 rounds both sides' last bits up or down.
        weights = {name: value.detach() for name, value in trainable(reference).items()}
        close(gathered(trainable(sharded), keep=True), weights, 2e-3)
        # From equal weights again, so that one step is compared at a time.
        with torch.no_grad():
            for name, value in trainable(sharded).items():
                value.copy_(placed(weights[name], value))

    with torch.no_grad():
        sums = [
            model.eval().with_weights(lambda model=model: validation_sums(model, batches[0][0], teacher(), LOSS))
            for model in (sharded, reference)
        ]
    release(wrapped)
    close({name: pair[0] for name, pair in sums[0].items()}, {name: pair[0] for name, pair in sums[1].items()}, 1e-5)
    assert all(is_sharded(value) for value in trainable(sharded).values())

    state = gathered(ours.state_tensors(), keep=True)
    assert {name: value.shape for name, value in state.items()} == {
        name: value.shape for name, value in theirs.state_tensors().items()
    }
    again = steps(sharded, folder, True)
    again.load_state_tensors(state)
    close(gathered(again.state_tensors(), keep=True), state, 0.0)
    assert set(gathered(ours.state_tensors(), keep=False)) == {name for name, value in state.items() if value.ndim == 0}

    weights = gathered(trainable(sharded), keep=True)
    if accelerator.is_main_process:
        for name, model in (("sharded", sharded), ("whole", reference)):
            chosen = weights if model is sharded else None
            model.save_pretrained(folder / name, include_embeddings=True, state_dict=chosen)
        texts = [(folder / name / "config.json").read_text() for name in ("sharded", "whole")]
        assert texts[0] == texts[1]
        close(*(SpeculatorModel.from_pretrained(folder / name).state_dict() for name in ("sharded", "whole")), 0.0)
    accelerator.wait_for_everyone()


def test_a_sharded_draft_computes_what_a_whole_one_does(tmp_path: Path) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--rdzv-backend", "c10d"]
    done = subprocess.run(
        [*launcher, "--rdzv-endpoint", "localhost:0", "-m", __name__, str(tmp_path)],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "whole" / "model.safetensors").exists()


def test_one_process_trains_whole_and_says_so() -> None:
    model = draft()
    with pytest.warns(UserWarning, match="--fsdp-shard: one process has nothing to shard with"):
        wrapped = spread(model, Accelerator(cpu=True), shard=True)
    assert not any(is_sharded(value) for value in wrapped.parameters())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        spread(model, Accelerator(cpu=True), shard=False)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
