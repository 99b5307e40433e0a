"""Values that depend on the family or on other settings, worked out after flags, file and defaults were merged."""

from __future__ import annotations

import dataclasses
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import yaml

from speculators.errors import ConfigError

if TYPE_CHECKING:
    from speculators.train.config.model import TrainConfig

__all__ = ["BUILT_FAMILIES", "Derived", "check_consistency", "check_runnable", "derive", "describe_derived"]

#: Families this version can train.
BUILT_FAMILIES = ("dspark", "dflash", "eagle3", "peagle", "mtp")
#: Values of ``--logger``.
TRACKERS = ("trackio", "wandb", "tensorboard", "mlflow")

_BLOCK_FAMILIES = ("dflash", "dspark", "dflash2", "xpress")
_PRUNING = ("draft_vocab_size", "token_freq_path", "d2t_path", "t2d_path")
_SHAPING = ("num_layers", "draft_arch", "draft_hidden_act", "sliding_window", "full_attention_indices")


@dataclass(frozen=True, slots=True)
class Derived:
    """The effective value of every setting whose default is None; see the settings of the same names."""

    num_layers: int
    draft_arch: Literal["llama", "qwen3", "deepseek_v3"]
    draft_hidden_act: str | None
    sliding_window_non_causal: bool
    block_size: int
    sample_from_anchor: bool
    per_position_loss_weight: Literal["fixed-exp-decay", "dpace"]
    loss_fn: dict[str, float]
    muon_lr: float
    norm_before_fc: bool
    norm_output: bool


def derive(config: TrainConfig) -> Derived:
    """Work out the derived values of ``config``; defaults that depend on the family are written here only."""
    family, draft, dflash = config.speculator_type, config.draft, config.dflash
    return Derived(
        num_layers=draft.num_layers or (5 if family in _BLOCK_FAMILIES else 1),
        draft_arch=draft.draft_arch or ("llama" if family == "eagle3" else "qwen3"),
        draft_hidden_act=draft.draft_hidden_act or None,
        sliding_window_non_causal=_or(draft.sliding_window_non_causal, family == "dflash2"),
        block_size=dflash.block_size or (16 if family in ("dflash", "xpress") else 8),
        sample_from_anchor=_or(dflash.sample_from_anchor, family == "dspark"),
        per_position_loss_weight=dflash.per_position_loss_weight or ("dpace" if family == "dflash" else "fixed-exp-decay"),
        loss_fn=_loss_weights(config),
        muon_lr=config.optimizer.muon_lr or config.optimizer.lr,
        # fc_norm stands in the place of norm_before_fc, which is on unless something is said; engines do not have it beside
        # latent attention.
        norm_before_fc=_or(
            draft.norm_before_fc, family == "eagle3" and not draft.fc_norm and draft.draft_arch != "deepseek_v3"
        ),
        norm_output=_or(draft.norm_output, family == "eagle3"),
    )


def _or(value: bool | None, default: bool) -> bool:
    return default if value is None else value


def _loss_weights(config: TrainConfig) -> dict[str, float]:
    loss_fn = config.loss.loss_fn
    from speculators.losses import resolve_loss_config  # here, so that --help need not wait for torch

    if loss_fn is None:
        # Upstream's dspark default is kl_div; see docs/differences.md.
        family_default: dict[str, str | dict[str, float]] = {
            "dflash": "ce",
            "dspark": {"ce": 0.1, "tv": 0.9},
            "xpress": {"ce": 0.1, "tv": 0.9},
        }
        loss_fn = family_default.get(config.speculator_type, "kl_div")
    return resolve_loss_config(loss_fn)


def describe_derived(config: TrainConfig) -> str:
    """The derived values that were not given and have an effect, as YAML comments."""
    idle = _without_effect(config)
    values = {
        name: value for name, value in dataclasses.asdict(derive(config)).items() if not (config.given(name) or name in idle)
    }
    lines = [yaml.safe_dump({name: value}, default_flow_style=True, width=1000).strip()[1:-1] for name, value in values.items()]
    return "".join(f"# derived: {line}\n" for line in lines)


def _without_effect(config: TrainConfig) -> set[str]:
    """Names of derived values that nothing reads: another family's, or those of a shape that a config or a draft brings."""
    family, draft = config.speculator_type, config.draft
    of_blocks = {"sliding_window_non_causal", "block_size", "sample_from_anchor"}
    of_chains = {"norm_before_fc", "norm_output"}
    idle: set[str] = set()
    if family not in _BLOCK_FAMILIES:
        idle |= {*of_blocks, "per_position_loss_weight"}
    if family not in ("eagle3", "peagle"):
        idle |= of_chains
    if draft.from_pretrained:
        idle |= {*_SHAPING, *of_blocks, *of_chains}
    if draft.draft_config:
        idle |= {"num_layers", "draft_hidden_act"}
    if family == "mtp":
        idle |= set(_SHAPING)
    if config.optimizer.optimizer != "muon":
        idle.add("muon_lr")
    return idle


def check_consistency(config: TrainConfig) -> None:
    """Refuse settings that contradict each other, whatever the family.

    :raises ConfigError: with one sentence.
    """
    draft, trainer = config.draft, config.trainer
    if draft.from_pretrained:
        clashing = [name for name in ("draft_config", *_SHAPING) if config.given(name)]
        if clashing:
            flags = ", ".join("--" + name.replace("_", "-") for name in clashing)
            raise ConfigError(f"--from-pretrained brings the draft's shape with it; drop {flags}")
        if not draft.draft_mrope_full_head_hack:
            raise ConfigError("--from-pretrained brings the draft's rope with it; drop --no-draft-mrope-full-head-hack")
    if (draft.d2t_path is None) != (draft.t2d_path is None):
        raise ConfigError("--d2t-path and --t2d-path belong together; give both or neither")
    if trainer.checkpoint_freq > 1 and trainer.checkpoint_freq != int(trainer.checkpoint_freq):
        raise ConfigError(f"--checkpoint-freq above 1 counts whole epochs, not {trainer.checkpoint_freq}")
    _warn_of_no_effect(config)
    scheduler = config.scheduler
    if scheduler.scheduler_warmup_steps is not None and scheduler.scheduler_warmup_ratio is not None:
        warnings.warn("--scheduler-warmup-steps wins over --scheduler-warmup-ratio", UserWarning, stacklevel=4)
    derived = derive(config)
    if config.speculator_type in _BLOCK_FAMILIES:
        from speculators.layout import BlockLayout

        for flag, size in (("--block-size", derived.block_size), ("--short-block-size", config.data.short_block_size)):
            try:
                if size is not None:
                    BlockLayout(size, derived.sample_from_anchor)
            except ValueError as error:
                raise ConfigError(f"{flag}: {error}") from None
        if not draft.from_pretrained and derived.block_size > config.data.total_seq_len:
            raise ConfigError(
                f"--block-size {derived.block_size} is longer than a packed row of --total-seq-len "
                f"{config.data.total_seq_len}; lower the one or raise the other"
            )
        if derived.per_position_loss_weight == "dpace" and set(derived.loss_fn) != {"ce"}:
            if config.given("per_position_loss_weight"):
                raise ConfigError("--per-position-loss-weight dpace needs --loss-fn ce")
            raise ConfigError("--loss-fn other than ce with dflash needs --per-position-loss-weight fixed-exp-decay")
    if config.speculator_type == "dspark":
        dspark = config.dspark
        if dspark.markov_rank == 0 and dspark.enable_confidence_head and dspark.confidence_head_with_markov:
            raise ConfigError("--markov-rank 0 leaves no Markov embedding; add --no-confidence-head-with-markov")
    _check_chain(config)
    if config.speculator_type == "mtp":
        pruning = ["--" + name.replace("_", "-") for name in _PRUNING if config.given(name)]
        if pruning:
            raise ConfigError(f"MTP drafts the verifier's whole vocabulary; drop {', '.join(pruning)}")
    if draft.fc_norm and draft.norm_before_fc:
        raise ConfigError("--fc-norm and --norm-before-fc exclude each other; drop one")
    unknown = [name for name in tracker_names(config) if name not in TRACKERS]
    if unknown:
        raise ConfigError(f"--logger: {unknown[0]!r} is not one of {', '.join(TRACKERS)}")
    final_state, apply_norm = config.data.final_state, config.data.apply_verifier_norm
    if final_state is not None and apply_norm is not None and apply_norm != (final_state == "pre_norm"):
        flag = "--apply-verifier-norm" if apply_norm else "--no-apply-verifier-norm"
        raise ConfigError(
            f"--final-state {final_state} and {flag} disagree: the norm is applied to pre_norm states and not to post_norm ones"
        )


def _check_chain(config: TrainConfig) -> None:
    """Refuse steps that a recurrent chain cannot take, and weights that grow with them."""
    steps = {
        "eagle3": ("--ttt-steps", config.loss.ttt_steps),
        "mtp": ("--num-speculative-steps", config.mtp.num_speculative_steps),
    }
    decays = {
        "eagle3": ("--ttt-step-loss-decay", config.loss.ttt_step_loss_decay),
        "mtp": ("--step-weight-beta", config.mtp.step_weight_beta),
    }
    if config.speculator_type not in steps:
        return
    from speculators.layout import MAX_CHAIN

    flag, count = steps[config.speculator_type]
    if count > MAX_CHAIN:
        raise ConfigError(f"{flag} {count} is more than a chain can draft; use at most {MAX_CHAIN}")
    flag, decay = decays[config.speculator_type]
    if decay > 1:
        raise ConfigError(f"{flag} {decay:g} makes later steps weigh more than earlier ones; use a value of at most 1")


def _warn_of_no_effect(config: TrainConfig) -> None:
    """Say which given settings another one leaves without effect."""
    draft, data = config.draft, config.data
    idle = []
    if draft.from_pretrained and config.given("draft_init"):
        idle.append("--draft-init has no effect beside --from-pretrained weights")
    if draft.token_freq_path is not None and draft.d2t_path is not None:
        idle.append("--token-freq-path has no effect beside --d2t-path and --t2d-path")
    if config.given("short_block_share") and data.short_block_size is None:
        idle.append("--short-block-share has no effect without --short-block-size")
    for sentence in idle:
        warnings.warn(sentence, UserWarning, stacklevel=5)


def tracker_names(config: TrainConfig) -> list[str]:
    """Names in ``--logger``."""
    return [name.strip() for name in config.logging.logger.split(",") if name.strip()]


def check_runnable(config: TrainConfig) -> None:
    """Refuse by name what this version cannot train yet.

    :raises ConfigError: with one sentence.
    """
    if config.speculator_type not in BUILT_FAMILIES:
        built = " or ".join(BUILT_FAMILIES)
        raise ConfigError(f"--speculator-type {config.speculator_type} cannot be trained by this version yet; use {built}")
