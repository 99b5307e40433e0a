"""Flags, files, defaults: precedence, provenance, warnings, refusals, and the way back from run.yaml."""

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from speculators.errors import ConfigError
from speculators.train.config import TrainConfig, check_runnable, derive

DSPARK = ["--verifier-name-or-path", "v", "--speculator-type", "dspark"]


def write(folder: Path, text: str) -> str:
    path = folder / "config.yaml"
    path.write_text(text)
    return str(path)


def refusal(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that a refused command line prints."""
    with pytest.raises(SystemExit) as stop:
        TrainConfig.resolve(arguments)
    assert stop.value.code == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    return printed.err


def test_flag_beats_file_beats_default(tmp_path: Path) -> None:
    path = write(
        tmp_path, "train:\n  speculator_type: dspark\n  optimizer: {lr: 1e-4, weight_decay: 0.5}\n  trainer: {epochs: 3}\n"
    )
    config = TrainConfig.resolve(["--verifier-name-or-path", "v", "--config", path, "--lr", "2e-4"])
    assert (config.optimizer.lr, config.optimizer.weight_decay, config.trainer.epochs) == (2e-4, 0.5, 3)
    assert config.speculator_type == "dspark"
    assert config.optimizer.optimizer == "muon"
    origin = config.provenance
    assert (origin["lr"], origin["weight_decay"], origin["optimizer"]) == ("flag", "yaml", "default")


def test_a_bare_file_and_sibling_stages_are_read(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        bare = TrainConfig.from_sources(config_path=write(tmp_path, "speculator_type: dspark\nprepare_data: {seed: 3}\n"))
        nested = TrainConfig.from_sources(config_path=write(tmp_path, "train: {speculator_type: dspark}\nlaunch_vllm: {}\n"))
        empty = TrainConfig.from_sources(config_path=write(tmp_path, ""))
    assert bare.speculator_type == nested.speculator_type == "dspark"
    assert empty == TrainConfig()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("trainer: {epoch: 3}", "'trainer' has no setting 'epoch'; ignored"),
        ("trainer: {lr: 3}", r"'trainer' has no setting 'lr' \(it belongs to 'optimizer'\); ignored"),
        ("surprise: 1", "unknown key 'surprise'; ignored"),
        ("speculator_type: dspark\npeagle: {num_depths: 4}", "does not use the 'peagle' algorithm group"),
        ("speculator_type: dspark\nloss: {ttt_steps: 4}", "does not use --ttt-steps"),
        ("speculator_type: dspark\ngeneration: {max_retries: 4}", "no effect with --hidden-states transformers"),
    ],
)
def test_what_is_not_used_warns(text: str, message: str, tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=message):
        config = TrainConfig.from_sources(config_path=write(tmp_path, text))
    assert config.trainer.epochs == 20


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "missing required value: set --verifier-name-or-path or provide it in --config"),
        ([*DSPARK, "--config", "/nowhere.yaml"], "--config '/nowhere.yaml' could not be read"),
        ([*DSPARK, "--epochs", "many"], "--epochs"),
        ([*DSPARK, "--epochs", "0"], "--epochs"),
        ([*DSPARK, "--learning-rate", "1"], "--learning-rate"),
        ([*DSPARK, "--loss-fn", "{ce"], "not valid JSON"),
        ([*DSPARK, "--optimizer", "sgd"], "'adamw' or 'muon'"),
        ([*DSPARK, "--hidden-states-dtype", "float16"], "--hidden-states-dtype"),
        ([*DSPARK, "--d2t-path", "x.npy"], "both or neither"),
        ([*DSPARK, "--checkpoint-freq", "1.5"], "whole epochs"),
        ([*DSPARK, "--from-pretrained", "d", "--num-layers", "5"], "drop --num-layers"),
        ([*DSPARK, "--from-pretrained", "d", "--draft-hidden-act", "silu"], "drop --draft-hidden-act"),
        ([*DSPARK, "--block-size", "1", "--no-sample-from-anchor"], "leaves no token to predict"),
        ([*DSPARK, "--per-position-loss-weight", "dpace"], "needs --loss-fn ce"),
        ([*DSPARK, "--markov-rank", "0"], "--no-confidence-head-with-markov"),
        ([*DSPARK, "--logger", "tensorboard,abacus"], "'abacus'"),
        ([*DSPARK, "--loss-fn", "hinge"], "hinge"),
        ([*DSPARK, "--final-state", "post_norm", "--apply-verifier-norm"], "disagree"),
        ([*DSPARK, "--lr", "inf"], "--lr: input should be a finite number"),
        ([*DSPARK, "--time-limit-minutes", "inf"], "--time-limit-minutes: input should be a finite number"),
        ([*DSPARK, "--seed", str(2**63)], "--seed: input should be less than"),
        ([*DSPARK, "--save-path", ""], "--save-path: string should have at least 1 character"),
        ([*DSPARK, "--block-size", "300", "--total-seq-len", "256"], "longer than a packed row of --total-seq-len 256"),
    ],
)
def test_bad_settings_are_refused_in_one_line(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert words in refusal(arguments, capsys)


def test_only_loss_weights_are_json() -> None:
    config = TrainConfig.resolve([*DSPARK, "--log-dir", "{time}", "--run-name", "{rank} of it", "--max-grad-norm", "inf"])
    assert (config.logging.log_dir, config.logging.run_name) == ("{time}", "{rank} of it")
    assert config.trainer.max_grad_norm == float("inf")


@pytest.mark.parametrize(
    ("text", "words"),
    [("a: [", "is not valid YAML"), ("- 1", "must contain a top-level mapping"), ("trainer: 3", "must be a mapping")],
)
def test_bad_files_are_refused_in_one_line(text: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert words in refusal([*DSPARK, "--config", write(tmp_path, text)], capsys)


def test_a_bad_value_in_a_file_names_the_file_and_key(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    message = refusal([*DSPARK, "--config", write(tmp_path, "trainer: {epochs: many}")], capsys)
    assert "config.yaml': trainer.epochs" in message


@pytest.mark.parametrize("family", ["dflash2", "xpress"])
def test_families_not_built_are_refused_by_name(family: str) -> None:
    config = TrainConfig.from_flat(speculator_type=family, verifier_name_or_path="v")
    with pytest.raises(ConfigError, match=f"--speculator-type {family}") as refused:
        check_runnable(config)
    assert refused.value.exit_code == 2


def test_settings_of_another_source_are_named() -> None:
    given = {"hidden_states": "store", "speculator_type": "dspark", "verifier_name_or_path": "v", "ray_max_restarts": 3}
    with pytest.warns(UserWarning, match="--ray-max-restarts has no effect with --hidden-states store"):
        TrainConfig.from_flat(given)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        TrainConfig.from_flat({**given, "hidden_states": "ray"})
        # A store whose gaps are filled by servers has the servers' settings.
        servers = {"store_source": "vllm", "vllm_endpoint": "http://localhost:1/v1"}
        del given["ray_max_restarts"]
        TrainConfig.from_flat({**given, **servers})


def test_a_draft_to_go_on_with_brings_its_rope() -> None:
    values = {"speculator_type": "dspark", "verifier_name_or_path": "v", "from_pretrained": "draft"}
    TrainConfig.from_flat(values, draft_mrope_full_head_hack=True)
    with pytest.raises(ConfigError, match="brings the draft's rope with it; drop --no-draft-mrope-full-head-hack"):
        TrainConfig.from_flat(values, draft_mrope_full_head_hack=False)


def test_bools_have_an_off_form_that_undoes_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, "train: {dry_run: true, trainer: {save_best: true, no_resume_from_checkpoint: true}}")
    config = TrainConfig.resolve([*DSPARK, "--config", path, "--no-dry-run", "--no-save-best", "--resume-from-checkpoint"])
    assert [config.dry_run, config.trainer.save_best, config.trainer.no_resume_from_checkpoint] == [False] * 3
    assert TrainConfig.resolve([*DSPARK, "--no-resume-from-checkpoint"]).trainer.no_resume_from_checkpoint


def test_dump_config_prints_what_reloads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [*DSPARK, "--loss-fn", '{"ce": 0.5, "tv": 0.5}', "--target-layer-ids", "1", "2", "--no-enable-confidence-head"]
    with pytest.raises(SystemExit) as stop:
        TrainConfig.resolve([*arguments, "--dump-config"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert yaml.safe_load(text)["train"]["draft"] == {"target_layer_ids": [1, 2]}
    assert "# derived: block_size: 8" in text
    assert TrainConfig.from_sources(config_path=write(tmp_path, text)) == TrainConfig.resolve(arguments)


@pytest.mark.parametrize(
    ("arguments", "derived"),
    [
        (
            ["--speculator-type", "eagle3", "--fc-norm"],
            {"num_layers": 1, "draft_arch": "llama", "norm_before_fc": False, "norm_output": True, "muon_lr": 0.001},
        ),
        (
            ["--speculator-type", "dspark", "--draft-config", "folder", "--optimizer", "adamw"],
            {"draft_arch": "qwen3", "block_size": 8, "sample_from_anchor": True, "sliding_window_non_causal": False},
        ),
        (
            ["--speculator-type", "eagle3", "--draft-arch", "deepseek_v3", "--muon-lr", "0.1"],
            {"num_layers": 1, "norm_before_fc": False, "norm_output": True},
        ),
        (["--speculator-type", "mtp", "--muon-lr", "0.1"], {}),
        (["--from-pretrained", "folder", "--optimizer", "adamw"], {}),
    ],
)
def test_dump_config_names_derived_values_that_are_read(
    arguments: list[str], derived: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        TrainConfig.resolve(["--verifier-name-or-path", "v", *arguments, "--dump-config"])
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("# derived: ")]
    found = {key: value for line in lines for key, value in yaml.safe_load(line.removeprefix("# derived: ")).items()}
    always = {"draft_hidden_act", "loss_fn", "per_position_loss_weight"}
    assert {key: value for key, value in found.items() if key not in always} == derived


def test_artifacts_reload_and_record_the_command(tmp_path: Path) -> None:
    config = TrainConfig.resolve([*DSPARK, "--lr", "1e-5", "--run-name", "a b"])
    config.save(tmp_path / "run")
    assert TrainConfig.from_sources(config_path=tmp_path / "run" / "run.yaml") == config
    command = (tmp_path / "run" / "train_command.txt").read_text()
    assert command.rstrip().endswith(
        "speculators train --verifier-name-or-path v --speculator-type dspark --lr 1e-5 --run-name 'a b'"
    )
    for line in ("# Timestamp: ", "# Git SHA: ", "# World size: 1", "# torch: "):
        assert line in command


@settings(deadline=None)
@given(
    lr=st.floats(1e-9, 1.0),
    window=st.integers(1, 9999),
    layers=st.lists(st.integers(0, 40), max_size=4),
    head=st.booleans(),
    loss=st.one_of(
        st.none(), st.just("ce"), st.dictionaries(st.sampled_from(["ce", "tv", "l1"]), st.floats(0.1, 2.0), min_size=1)
    ),
)
def test_every_config_comes_back_from_its_yaml_and_from_its_command(lr, window, layers, head, loss) -> None:
    config = TrainConfig.from_flat(
        speculator_type="dspark",
        verifier_name_or_path="v",
        lr=lr,
        sliding_window=window,
        full_attention_indices=layers,
        enable_confidence_head=head,
        loss_fn=loss,
    )
    from speculators.train.config.resolution import flags_of

    values = yaml.safe_load(config.dump_yaml())["train"]
    flat = {
        name: value
        for key, part in values.items()
        for name, value in (part.items() if isinstance(part, dict) else [(key, part)])
    }
    assert TrainConfig.from_flat(flat) == config
    assert TrainConfig.resolve(flags_of(config)) == config


def test_loss_weights_are_written_as_json_and_read_in_both_forms(tmp_path: Path) -> None:
    weights = {"ce": 0.5, "tv": 1.5}
    dumped = yaml.safe_load(TrainConfig.from_flat(speculator_type="dspark", loss_fn=weights).dump_yaml())["train"]
    assert json.loads(dumped["loss"]["loss_fn"]) == weights
    for text in (yaml.safe_dump(dumped), "speculator_type: dspark\nloss: {loss_fn: {ce: 0.5, tv: 1.5}}"):
        assert TrainConfig.from_sources(config_path=write(tmp_path, text)).loss.loss_fn == weights


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_flatten_names_every_setting() -> None:
    config = TrainConfig.from_flat(speculator_type="dspark", epochs=3)
    assert config.flatten()["epochs"] == 3
    assert TrainConfig.from_flat(config.flatten()) == config
    assert set(config.flatten()) == set(config.provenance)
    assert "mooncake_master" in config.backend_args
    with pytest.raises(ConfigError, match="unknown setting 'epoch'"):
        TrainConfig.from_flat(epoch=3)


def test_derived_values_follow_what_was_given() -> None:
    config = TrainConfig.from_flat(
        speculator_type="dflash", block_size=4, loss_fn="tv", per_position_loss_weight="fixed-exp-decay"
    )
    derived = derive(config)
    assert (derived.block_size, derived.sample_from_anchor, derived.loss_fn) == (4, False, {"tv": 1.0})
    assert derive(TrainConfig.from_flat(speculator_type="dspark", lr=3e-4)).muon_lr == 3e-4


def test_a_refusal_names_the_setting_and_not_its_group(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--lr: input should be greater than 0"):
        TrainConfig.from_flat(lr=0)
    with pytest.raises(ConfigError, match=r"optimizer\.lr: input should be greater than 0"):
        TrainConfig.from_sources(config_path=write(tmp_path, "optimizer: {lr: 0}"))


def test_loss_weights_are_the_same_setting_as_text_and_as_a_mapping(tmp_path: Path) -> None:
    mapping = TrainConfig.from_flat(speculator_type="dspark", verifier_name_or_path="v", loss_fn={"ce": 1, "tv": 0.5})
    text = TrainConfig.resolve([*DSPARK, "--loss-fn", '{"ce": 1, "tv": 0.5}'])
    assert mapping.loss.loss_fn == text.loss.loss_fn == {"ce": 1.0, "tv": 0.5}
    mapping.save(tmp_path)
    assert TrainConfig.from_sources(config_path=tmp_path / "run.yaml") == mapping
