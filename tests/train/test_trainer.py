"""The training loop on a tiny verifier, in memory."""

import json
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from speculators.data import RowDataset
from speculators.data.rows import Row
from speculators.errors import ConfigError, DataError, SpeculatorsError, VerifierError
from speculators.models import SpeculatorModel
from speculators.models.checkpoint_files import WeightFiles
from speculators.train import StepInfo, TrainResult, train
from speculators.train.checkpoints import CheckpointStore
from tests.train.helpers import RowByRowSource, loaded_verifier, settings, tiny_rows


class Killed(BaseException):
    """Ends a training as a kill would: nothing of the library catches it."""


def killed() -> None:
    raise Killed


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trainer")


@pytest.fixture(scope="module")
def verifier(folder: Path) -> Any:
    return loaded_verifier(folder)


@pytest.fixture
def run(folder: Path, verifier: Any, tmp_path: Path):
    """Train with changed settings; run folders are new for every test."""

    def do(name: str = "run", rows: Any = None, on_step: Any = None, source: Any = None, **changes: Any) -> TrainResult:
        config = settings(folder, save_path=str(tmp_path / name), **changes)
        return train(config, dataset=rows or tiny_rows(), verifier=verifier, source=source, progress=False, on_step=on_step)

    return do


def records(path: Path, kind: str = "train") -> list[dict[str, Any]]:
    return [record for record in map(json.loads, (path / "metrics.jsonl").read_text().splitlines()) if kind in record]


def losses(path: Path) -> list[float]:
    return [record["train"]["loss"] for record in records(path)]


def test_a_training_learns_validates_and_leaves_a_draft(run, tmp_path: Path) -> None:
    result = run(epochs=12, lr=3e-2)
    assert (result.reason, result.global_step, result.total_steps) == ("finished", 48, 48)
    history = losses(tmp_path / "run")
    assert np.mean(history[-4:]) < np.mean(history[:4]) - 0.2
    assert result.checkpoint == tmp_path / "run" / "11"
    assert result.best is not None
    assert len(records(tmp_path / "run", "val")) == 12
    names = {"loss", "ce_loss", "tv_loss", "confidence_loss", "tau_uniform", "anchor_coverage", "grad_norm"}
    assert names <= set(result.metrics)
    assert {"verifier_mass_in_draft_vocabulary", "true_tau_uniform", "greedy_tau_uniform"} <= set(result.validation)
    assert 0 < result.metrics["anchor_coverage"] <= 1
    written = {entry.name for entry in result.checkpoint.iterdir()}
    assert {"config.json", "model.safetensors", "training_state.json", "val_metrics.json", "train_command.txt"} <= written
    model = SpeculatorModel.from_pretrained(result.checkpoint)
    assert model.config.speculators_model_type == "dspark"
    assert {"run.yaml", "train_command.txt", "metrics.jsonl", "checkpoint_best", "epoch0_end"} <= {
        entry.name for entry in (tmp_path / "run").iterdir()
    }


@pytest.mark.parametrize(("optimizer", "killed_at"), [("muon", 1), ("muon", 5), ("adamw", 8), ("muon", 11)])
def test_a_killed_run_goes_on_bit_for_bit(run, tmp_path: Path, optimizer: str, killed_at: int) -> None:
    changes = {"epochs": 3, "optimizer": optimizer, "checkpoint_steps": 3, "noise_std": 0.02}
    run("whole", **changes)

    def kill(info: StepInfo) -> None:
        if info.global_step == killed_at:
            raise Killed

    with pytest.raises(Killed):
        run("cut", on_step=kill, **changes)
    torch.manual_seed(99)
    resumed = run("cut", **changes)
    assert resumed.global_step == 12
    assert (resumed.resumed_from is None) == (killed_at < 4)
    for kind in ("train", "val"):
        whole, cut = records(tmp_path / "whole", kind), records(tmp_path / "cut", kind)
        assert [record[kind] for record in cut] == [record[kind] for record in whole]
        assert [record["global_step"] for record in cut] == [record["global_step"] for record in whole]
    weights = [
        SpeculatorModel.from_pretrained(run_folder / "checkpoint_best").state_dict()
        for run_folder in (tmp_path / "whole", tmp_path / "cut")
    ]
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())


def test_a_finished_run_is_not_run_again(run, tmp_path: Path) -> None:
    first = run(epochs=1)
    again = run(epochs=1)
    assert (again.global_step, again.checkpoint) == (4, first.checkpoint)
    assert again.validation == first.validation
    assert again.metrics == first.metrics
    assert len(losses(tmp_path / "run")) == 4


def test_a_torn_checkpoint_is_passed_over(run, tmp_path: Path) -> None:
    run("whole")
    run("cut", on_step=None, epochs=2)
    (tmp_path / "cut" / "1" / "training_state.safetensors").write_bytes(b"torn")
    resumed = run("cut")
    assert resumed.resumed_from == tmp_path / "cut" / "0"
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")
    assert resumed.checkpoint == tmp_path / "cut" / "2"


def test_another_configuration_or_other_rows_are_refused(run) -> None:
    run(epochs=1)
    with pytest.raises(ConfigError, match=r"optimizer\.lr: 0\.01 there, 0\.02 here"):
        run(epochs=1, lr=2e-2)
    with pytest.raises(ConfigError, match="rows: "):
        run(epochs=1, rows=tiny_rows(11))
    with pytest.raises(ConfigError, match="packed rows per step: 1 there, 2 here"):
        run(epochs=1, gradient_accumulation_steps=2)


def test_starting_anew_keeps_the_earlier_run_aside(run, tmp_path: Path) -> None:
    run(epochs=1)
    again = run(epochs=1, lr=2e-2, no_resume_from_checkpoint=True)
    assert again.resumed_from is None
    (aside,) = (tmp_path / "run").glob("previous-*")
    assert CheckpointStore(aside).latest().state["global_step"] == 4


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_the_run_goes_on(run, tmp_path: Path, number: signal.Signals) -> None:
    run("whole")

    def send(info: StepInfo) -> None:
        if info.global_step == 2:
            signal.raise_signal(number)

    handler = signal.getsignal(number)
    stopped = run("cut", on_step=send)
    assert signal.getsignal(number) == handler
    assert (stopped.reason, stopped.signal) == ("interrupted", number)
    assert stopped.checkpoint == tmp_path / "cut" / "0"
    assert run("cut").resumed_from == stopped.checkpoint
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")


def test_accumulation_halves_the_steps_and_adds_up_the_rows(run, tmp_path: Path) -> None:
    """Two packed rows a step: at a rate of 0 its loss is that of both rows' predictions, not a mean of two means."""
    single = run("single", optimizer="adamw", epochs=1, lr=1e-12, weight_decay=0.0, ce_label="data")
    result = run(
        "double", optimizer="adamw", epochs=1, lr=1e-12, weight_decay=0.0, ce_label="data", gradient_accumulation_steps=2
    )
    assert (single.global_step, result.global_step, result.total_steps) == (4, 2, 2)
    one, two = records(tmp_path / "single"), records(tmp_path / "double")
    for step, record in enumerate(two):
        parts = [one[2 * step]["train"], one[2 * step + 1]["train"]]
        low, high = sorted(part["tv_loss"] for part in parts)
        assert low < record["train"]["tv_loss"] < high
        # The rows count by their predictions, which differ in number.
        assert record["train"]["tv_loss"] != pytest.approx((low + high) / 2, abs=1e-7)


def test_max_steps_end_the_run_and_save_once(run, tmp_path: Path) -> None:
    result = run(max_steps=6, epochs=9)
    assert (result.global_step, result.total_steps) == (6, 6)
    assert [checkpoint.state["global_step"] for checkpoint in CheckpointStore(tmp_path / "run").complete()] == [4, 6]
    assert (tmp_path / "run" / "epoch1_step2").exists()
    assert len(records(tmp_path / "run", "val")) == 2


@pytest.mark.parametrize(("frequency", "steps"), [(0.5, [2, 4, 6, 8]), (2, [8, 12]), (1, [4, 8, 12])])
def test_checkpoint_frequency(run, tmp_path: Path, frequency: float, steps: list[int]) -> None:
    run(epochs=2 if frequency < 1 else 3, checkpoint_freq=frequency)
    assert [checkpoint.state["global_step"] for checkpoint in CheckpointStore(tmp_path / "run").complete()] == steps


def test_save_best_keeps_best_newest_and_everything_foreign(run, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "notes.txt").write_text("mine")
    result = run(epochs=6, save_best=True, lr=5e-2)
    kept = {checkpoint.path for checkpoint in CheckpointStore(tmp_path / "run").complete()}
    assert kept == {result.checkpoint, result.best}
    best = json.loads((result.best / "val_metrics.json").read_text())["loss"]
    assert best == min(record["val"]["loss"] for record in records(tmp_path / "run", "val"))
    assert (tmp_path / "run" / "notes.txt").read_text() == "mine"
    assert (tmp_path / "run" / "run.yaml").exists()


def test_validation_can_be_rare_or_left_out(run, tmp_path: Path) -> None:
    run("rare", epochs=3, val_freq=2)
    assert [record["global_step"] for record in records(tmp_path / "rare", "val")] == [8, 12]
    result = run("none", epochs=1, train_data_ratio=1.0)
    assert (result.validation, result.best) == ({}, None)
    assert result.checkpoint is not None


def test_a_time_limit_becomes_a_step_budget_that_is_kept(run, tmp_path: Path) -> None:
    first = run("run", epochs=10_000, time_limit_minutes=2 / 60, checkpoint_freq=1000, val_freq=1000)
    assert first.reason in ("finished", "time limit")
    assert first.seconds < 4
    budget = json.loads((tmp_path / "run" / "run_state.json").read_text())["step_budget"]
    assert first.total_steps == budget
    # The timed steps left no trace: the first losses are those of a run with that many steps.
    run("plain", epochs=10_000, max_steps=budget, checkpoint_freq=1000, val_freq=1000, on_step=None)
    assert losses(tmp_path / "run")[:5] == losses(tmp_path / "plain")[:5]


def test_what_the_limit_cuts_is_saved_and_not_begun_again(run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("speculators.train.trainer.step_budget", lambda trainer, minutes: 100_000)
    changes = {"epochs": 100_000, "time_limit_minutes": 1 / 60, "checkpoint_freq": 1000, "val_freq": 1000}
    first = run(**changes)
    assert first.reason == "time limit"
    assert CheckpointStore(tmp_path / "run").latest().state["global_step"] == first.global_step
    again = run(**changes)
    assert (again.reason, again.global_step, again.checkpoint) == ("time limit", first.global_step, first.checkpoint)


def test_rare_logs_are_the_same_after_a_kill(run, tmp_path: Path) -> None:
    changes = {"epochs": 3, "log_freq": 5, "checkpoint_freq": 2}
    run("whole", **changes)
    with pytest.raises(Killed):
        run("cut", on_step=lambda info: killed() if info.global_step == 10 else None, **changes)
    assert run("cut", **changes).resumed_from is not None
    assert [record["train"] for record in records(tmp_path / "cut")] == [
        record["train"] for record in records(tmp_path / "whole")
    ]
    assert [record["global_step"] for record in records(tmp_path / "cut")] == [5, 10, 12]


def test_rows_without_supervision_train_nothing_and_break_nothing(run, tmp_path: Path) -> None:
    """Whole packed rows of them; only one row of all is supervised."""
    rows = [Row(index, np.arange(20) % 60, np.full(20, index == 0)) for index in range(12)]
    result = run(rows=RowDataset.from_rows(rows), epochs=1)
    assert result.reason == "finished"
    assert {"loss" in record["train"] for record in records(tmp_path / "run")} == {True, False}
    weights = SpeculatorModel.from_pretrained(result.checkpoint).state_dict()
    assert all(torch.isfinite(value.float()).all() for value in weights.values())


def test_dry_run_saves_a_first_draft_and_trains_nothing(run, tmp_path: Path) -> None:
    result = run(dry_run=True)
    assert result.global_step == 0
    assert SpeculatorModel.from_pretrained(tmp_path / "run").config.block_size == 4
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.mark.parametrize("dry_run", [True, False])
def test_checkpoints_can_carry_the_verifiers_parts(dry_run: bool, run) -> None:
    result = run(epochs=1, dry_run=dry_run, checkpoint_embeddings=True, draft_vocab_size=24)
    found = WeightFiles(result.checkpoint).read(["embed_tokens.weight", "lm_head.weight"])
    model: Any = SpeculatorModel.from_pretrained(result.checkpoint, verifier="nowhere")
    assert torch.equal(found["embed_tokens.weight"].float(), model.embed_tokens.weight)
    assert found["lm_head.weight"].shape[0] == 24


def test_going_on_from_a_draft(run, tmp_path: Path) -> None:
    first = run("first", epochs=1, draft_vocab_size=24)
    shape = ("num_layers", "block_size", "markov_rank", "target_layer_ids", "mask_token_id")
    source = SpeculatorModel.from_pretrained(first.checkpoint).state_dict()
    again = run("again", dry_run=True, from_pretrained=str(first.checkpoint), **unset(*shape))
    after = SpeculatorModel.from_pretrained(again.checkpoint).state_dict()
    assert all(torch.equal(value, after[name]) for name, value in source.items())
    trained = run("more", epochs=1, from_pretrained=str(first.checkpoint), **unset(*shape))
    assert trained.global_step == 4
    with pytest.raises(ConfigError, match=r"--block-size 8 contradicts the draft in .*, which has 4; drop it"):
        run("bad", from_pretrained=str(first.checkpoint), **{**unset(*shape), "block_size": 8})
    with pytest.raises(ConfigError, match="is a dspark draft; train it with --speculator-type dspark"):
        run("bad", from_pretrained=str(first.checkpoint), speculator_type="dflash", **unset(*shape))
    config_only = tmp_path / "shape"
    config_only.mkdir()
    (config_only / "config.json").write_text((first.checkpoint / "config.json").read_text())
    fresh = SpeculatorModel.from_pretrained(
        run("fresh", dry_run=True, from_pretrained=str(config_only), **unset(*shape)).checkpoint
    )
    assert fresh.config.draft_vocab_size == 24
    assert not torch.equal(fresh.state_dict()["fc.weight"], source["fc.weight"])


def unset(*names: str) -> dict[str, Any]:
    """Changes that :func:`settings` drops."""
    return dict.fromkeys(names, ...)


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"draft_vocab_size": 65}, ConfigError, "larger than the verifier's vocabulary of 64"),
        ({"mask_token_id": 64}, ConfigError, "outside the verifier's vocabulary of 64"),
        ({"token_freq_path": "x.pt"}, ConfigError, "add --draft-vocab-size"),
        ({"token_freq_path": "/nowhere.pt", "draft_vocab_size": 8}, DataError, "no token frequency file"),
        ({"d2t_path": "/nowhere.npy", "t2d_path": "/no.npy"}, DataError, "no vocabulary table"),
        ({"target_layer_ids": [1, 1]}, ConfigError, "distinct"),
        ({"target_layer_ids": [1, 5]}, ConfigError, "within"),
        ({"full_attention_indices": [3]}, ConfigError, "full_attention_indices"),
        ({"draft_config": "/nowhere"}, ConfigError, "--draft-config /nowhere"),
        ({"from_pretrained": "/nowhere", "num_layers": ...}, ConfigError, "/nowhere"),
        ({"logger": "wandb"}, ConfigError, "wandb is not installed"),
        ({"mixed_precision": "bf16"}, ConfigError, "no bfloat16"),
    ],
)
def test_what_does_not_fit_is_refused(run, monkeypatch, changes: dict, error: type[SpeculatorsError], words: str) -> None:
    monkeypatch.setattr("speculators.train.precision.has_native_bf16", lambda device: False)
    with pytest.raises(error, match=words) as refused:
        run(**changes)
    assert "\n" not in str(refused.value)


def test_a_source_must_be_what_was_asked_for(run, verifier) -> None:
    source = RowByRowSource(verifier)
    for change, words in (
        ({"final_state": "pre_norm"}, "--final-state pre_norm contradicts the hidden-states source"),
        ({"apply_verifier_norm": True}, "--apply-verifier-norm contradicts"),
        ({"target_layer_ids": [2, 1]}, r"captures layers \[1, 2\], but the draft reads \[2, 1\]"),
    ):
        with pytest.raises(ConfigError, match=words):
            run(source=source, **change)


@pytest.mark.parametrize(
    "changes", [{"final_state": "pre_norm"}, {"num_workers": 0}, {"states_cache_gib": 0}, {"source": True}]
)
def test_however_the_states_come_the_training_is_the_same(run, verifier, tmp_path: Path, changes: dict) -> None:
    run("plain", epochs=1)
    if "source" in changes:
        changes = {"source": RowByRowSource(verifier)}
    run("other", epochs=1, **changes)
    assert losses(tmp_path / "other") == pytest.approx(losses(tmp_path / "plain"), abs=1e-4)


def test_gradient_checkpointing_recomputes_and_changes_no_loss(run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from speculators.models import backbone

    recomputed = []
    original = backbone.checkpoint
    monkeypatch.setattr(backbone, "checkpoint", lambda *args, **kwargs: recomputed.append(1) or original(*args, **kwargs))
    run("plain", epochs=1)
    assert not recomputed
    run("recomputing", epochs=1, gradient_checkpointing=True)
    assert recomputed
    assert losses(tmp_path / "recomputing") == pytest.approx(losses(tmp_path / "plain"), abs=1e-6)


def test_states_that_are_not_the_verifiers_stop_the_training(run, verifier) -> None:
    class Shifted(RowByRowSource):
        def _row(self, row: Row) -> Any:
            states = super()._row(row)
            states.final = states.final.roll(1, dims=-1)
            return states

    with pytest.raises(VerifierError, match="do not rebuild the verifier's next-token probabilities"):
        run(source=Shifted(verifier))


def test_rows_of_another_vocabulary_are_refused(run) -> None:
    rows = RowDataset.from_rows([Row(index, np.full(20, 64), np.ones(20, bool)) for index in range(8)])
    with pytest.raises(DataError, match="64"):
        run(rows=rows)


def test_trackers_get_the_metrics(run, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    run(logger="tensorboard", log_dir=str(tmp_path / "logs-{rank}"), run_name="tiny", epochs=1)
    assert list((tmp_path / "logs-0").rglob("events.out.tfevents*"))


def test_dflash_trains_with_its_own_defaults(run) -> None:
    result = run(speculator_type="dflash", block_size=..., markov_rank=..., epochs=1)
    model = SpeculatorModel.from_pretrained(result.checkpoint)
    assert (model.config.block_size, model.config.sample_from_anchor) == (16, False)
    assert "confidence_loss" not in result.metrics


def test_bfloat16_is_left_alone_where_the_hardware_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    from speculators.train.precision import choose_precision

    cpu = torch.device("cpu")
    monkeypatch.setattr("speculators.train.precision.has_native_bf16", lambda device: False)
    found = choose_precision("auto", "bfloat16", cpu)
    assert (found.autocast, found.states) == (None, torch.float32)
    assert "no bfloat16 instructions" in found.note
    monkeypatch.setattr("speculators.train.precision.has_native_bf16", lambda device: True)
    assert choose_precision("auto", "bfloat16", cpu).autocast is torch.bfloat16
    assert choose_precision("auto", "float32", cpu).autocast is None
    assert choose_precision("bf16", "float32", cpu).autocast is torch.bfloat16
    assert choose_precision("no", "bfloat16", cpu).autocast is None
