"""The settings of ``speculators train`` that every draft family shares, by group, with upstream's names.

Defaults are those of upstream 0.9.0 except where ``docs/differences.md`` says otherwise; a test compares the two. A
default of None means "derived": from the family (:mod:`speculators.train.config.derived`), the data or the source.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import field_validator

from speculators.train.config.fields import Group, mapping_of_text, setting

__all__ = [
    "DataSettings",
    "DraftSettings",
    "GenerationSettings",
    "LoggingSettings",
    "LossSettings",
    "OptimizerSettings",
    "SchedulerSettings",
    "TrainerSettings",
    "VerifierSettings",
]

_EAGLE = ("eagle3", "peagle")
_BLOCKS = ("dflash", "dspark", "dflash2", "xpress")
#: Families whose shape and captured layers are a choice; those of mtp are the verifier's.
_SHAPED = _BLOCKS + _EAGLE


class VerifierSettings(Group):
    """The frozen model whose tokens are drafted."""

    # Compared by what it holds, not by its name, as --data-path is: a run folder may be copied or moved together with them.
    verifier_name_or_path: str = setting("", "Folder of the verifier (required).", cosmetic=True)
    trust_remote_code: bool = setting(False, "Allow the verifier's folder to bring its own model code.", cosmetic=True)


class DraftSettings(Group):
    """The draft model: where it starts from and its shape."""

    from_pretrained: str = setting(
        "", "Go on from this draft checkpoint; a folder with only a config.json starts anew in its shape."
    )
    draft_config: str | dict[str, Any] = setting(
        "",
        "Decoder config that shapes the draft: a folder, a JSON file, or JSON itself; hidden_size must be the verifier's.",
        families=_SHAPED,
    )
    draft_init: Literal["random", "verifier"] = setting(
        "random",
        "First values of a new draft: noise, or the verifier's last layers where shapes fit; for mtp the verifier's own MTP "
        "layer [used for mtp where there is one].",
        families=(*_BLOCKS, "mtp"),
        own=True,
    )
    num_layers: int | None = setting(
        None, "Draft layers [5 for dflash, dspark, dflash2, xpress; else 1].", families=_SHAPED, shaping=True, ge=1
    )
    draft_arch: Literal["llama", "qwen3", "deepseek_v3"] | None = setting(
        None,
        "Decoder architecture of the draft [llama for eagle3, else qwen3]; deepseek_v3 is latent attention, for chains.",
        families=_SHAPED,
        shaping=True,
    )
    draft_hidden_act: str | None = setting(
        "silu", "Activation of the draft's MLPs; empty: the verifier's.", families=_SHAPED, shaping=True
    )
    sliding_window: int = setting(
        2048,
        "Window of the sliding-attention layers, in tokens; 0 for full attention everywhere.",
        families=_SHAPED,
        shaping=True,
        ge=0,
    )
    full_attention_indices: list[int] = setting(
        [], "Draft layers with full instead of sliding attention.", families=_SHAPED, shaping=True
    )
    sliding_window_non_causal: bool | None = setting(
        None, "Slots of a sliding layer also see later slots of their block [on for dflash2 only].", families=_BLOCKS
    )
    sliding_window_reference: Literal["anchor", "slot"] = setting(
        "anchor",
        "Where the window is measured from: the anchor (upstream) or each slot (serving engines) [slot for chains].",
        families=_SHAPED,
        own=True,
    )
    draft_mrope_full_head_hack: bool = setting(
        True,
        "Rotate whole heads where the verifier's multimodal rope rotates a part of each; off: the same part.",
        families=_SHAPED,
    )
    target_layer_ids: list[int] | None = setting(
        None,
        "Verifier layers to capture: id k is the residual stream after k layers [2, n//2, n-3 of n layers].",
        families=_SHAPED,
    )
    token_freq_path: str | None = setting(
        None, "Token counts for the draft vocabulary [DATA_PATH/token_freq.pt, else counted]."
    )
    draft_vocab_size: int | None = setting(None, "Size of a pruned draft vocabulary; whole vocabulary when not given.", ge=1)
    d2t_path: str | None = setting(None, "Draft-to-verifier offsets (.npy); needs --t2d-path.")
    t2d_path: str | None = setting(None, "Mask of the verifier ids kept (.npy); needs --d2t-path.")
    mask_token_id: int | None = setting(
        None, "Verifier id of the mask token [tokenizer's mask token, else the first id past the tokenizer].", ge=0
    )
    norm_before_residual: bool = setting(True, "The first layer's residual is the normed state.", families=_EAGLE)
    embed_requires_grad: bool = setting(False, "Train the embeddings too.", families=_EAGLE)
    norm_before_fc: bool | None = setting(None, "RMSNorm before the input projection [on for eagle3].", families=_EAGLE)
    norm_output: bool | None = setting(None, "Feed the normed output to the next step [on for eagle3].", families=_EAGLE)
    fc_norm: bool = setting(False, "One RMSNorm per captured layer before the input projection.", families=_EAGLE)
    draft_attn_impl: Literal["auto", "document", "reference", "simple_flex_attention", "sdpa", "eager"] = setting(
        "auto", "Attention of the draft; upstream's names choose the nearest one here."
    )

    @field_validator("draft_config")
    @classmethod
    def _from_text(cls, value: Any) -> Any:
        return mapping_of_text(value)


class DataSettings(Group):
    """Rows, packing, anchors and where the verifier's hidden states come from."""

    data_path: str = setting("./output", "Folder of prepared rows.", cosmetic=True)
    hidden_states: Literal["transformers", "vllm", "ray", "store"] = setting(
        "transformers",
        "Source of hidden states: the verifier in this process, live vLLM servers, actors on a Ray cluster, or a store.",
        own=True,
    )
    hidden_states_backend: Literal["file", "fp8", "mooncake"] = setting(
        "file", "How a vLLM server hands over hidden states.", sources=("vllm",)
    )
    final_state: Literal["pre_norm", "post_norm"] | None = setting(
        None, "Verifier's last state before or after its final norm [the source's own].", own=True
    )
    apply_verifier_norm: bool | None = setting(
        None, "Apply the verifier's final norm to the last state; must agree with the source [as the source needs].", own=True
    )
    total_seq_len: int = setting(8192, "Width of a packed row in tokens.", ge=2)
    train_data_ratio: float = setting(0.9, "Share of the rows, from the head, to train on; the tail validates.", gt=0.0, le=1.0)
    hidden_states_dtype: Literal["bfloat16", "float32"] = setting(
        "bfloat16", "Type of the hidden states and of autocast; float32 where the hardware has no bfloat16."
    )
    noise_std: float = setting(0.0, "Half-width of uniform noise on the captured states while training.", own=True, ge=0.0)
    num_workers: int = setting(
        12, "Most requests for states under way at once, if their source takes so many; 0: none ahead.", ge=0, cosmetic=True
    )
    prefetch_factor: int = setting(4, "Packed rows whose states are made ahead of the draft.", ge=1, cosmetic=True)
    max_anchors: int = setting(
        512, "Anchors drawn per packed row or document; eagle3 and mtp train from every token unless given.", ge=1
    )
    max_anchors_per: Literal["row", "document"] = setting("row", "What --max-anchors counts for.", own=True)
    short_block_size: int | None = setting(
        None, "Slots of the short blocks; their rows have as many more anchors.", families=_BLOCKS, own=True, ge=1
    )
    short_block_share: float = setting(
        0.5, "Share of the packed rows to train on short blocks.", families=_BLOCKS, own=True, ge=0.0, le=1.0
    )
    states_cache_gib: float = setting(4.0, "Keep all hidden states in memory if they fit in this many GiB.", own=True, ge=0.0)
    replay: int = setting(1, "Optimiser steps of an epoch that use a captured row, each with fresh anchors.", own=True, ge=1)
    replay_window: int = setting(16, "Optimiser steps whose states are kept for --replay.", own=True, ge=1)
    in_flight_gib: float = setting(
        4.0, "Most GiB of states asked for and not yet used, per process.", own=True, cosmetic=True, gt=0.0
    )
    capture_batch_tokens: int = setting(4096, "Tokens per verifier batch while capturing.", own=True, ge=1)


class GenerationSettings(Group):
    """A live vLLM server that makes hidden states."""

    vllm_endpoint: str = setting(
        "http://localhost:8000/v1", "Addresses of the servers, separated by commas.", sources=("vllm",), cosmetic=True
    )
    on_missing: Literal["generate", "skip", "warn", "raise"] = setting(
        "generate", "What to do with a row without hidden states.", sources=("vllm", "store")
    )
    on_generate: Literal["cache", "delete"] = setting(
        "delete", "Keep or delete generated states.", sources=("vllm",), cosmetic=True
    )
    request_timeout: float = setting(120, "Seconds to wait for a request.", sources=("vllm", "ray"), cosmetic=True, gt=0)
    max_retries: int = setting(3, "Tries of a failed request.", sources=("vllm",), cosmetic=True, ge=0)
    generation_validation_retries: int = setting(
        2, "Whole repeats after states that do not check.", sources=("vllm",), cosmetic=True, ge=0
    )
    max_consecutive_generation_failures: int = setting(
        20, "Failures in a row before giving up.", sources=("vllm",), cosmetic=True, ge=1
    )


class LossSettings(Group):
    """The loss."""

    loss_implementation: Literal["auto", "chunked", "reference", "fused", "eager"] = setting(
        "auto", "How the loss is computed; upstream's names choose the nearest one here."
    )
    loss_fn: str | dict[str, float] | None = setting(
        None, 'Name or JSON of weights [ce for dflash, {"ce": 0.1, "tv": 0.9} for dspark and xpress, else kl_div].'
    )
    loss_normalization: Literal["weight", "count"] = setting(
        "weight", "Denominator: sum of weights, or of counted tokens (upstream).", own=True
    )
    ce_label: Literal["verifier", "data"] = setting(
        "verifier", "Label of the cross-entropy: the verifier's argmax or the row's token.", own=True
    )
    target_support: Literal["draft", "full"] = setting(
        "draft",
        "Verifier distribution over the draft vocabulary, renormalised, or over its whole one.",
        own=True,
    )
    ttt_steps: int = setting(3, "Steps of training-time test.", families=("eagle3",), ge=1)
    ttt_step_loss_decay: float = setting(1.0, "Weight of each further step.", families=("eagle3",), gt=0.0)

    @field_validator("loss_fn")
    @classmethod
    def _from_text(cls, value: Any) -> Any:
        return mapping_of_text(value)


class OptimizerSettings(Group):
    """Optimisers. Under muon, weights that are no matrices of the decoder are left to AdamW."""

    optimizer: Literal["adamw", "muon"] = setting("muon", "Optimiser of the 2-D weights.")
    lr: float = setting(1e-3, "Learning rate of AdamW.", gt=0.0)
    weight_decay: float = setting(0.01, "Weight decay of AdamW.", ge=0.0)
    muon_lr: float | None = setting(None, "Learning rate of Muon [--lr].", gt=0.0)
    muon_momentum: float = setting(0.95, "Momentum of Muon.", ge=0.0, lt=1.0)
    muon_weight_decay: float = setting(0.1, "Weight decay of Muon.", ge=0.0)
    muon_ns_steps: int = setting(5, "Newton-Schulz steps of Muon.", ge=1, lt=100)
    muon_adjust_lr_fn: Literal["original", "match_rms_adamw"] = setting("match_rms_adamw", "Muon's scaling by the shape.")


class SchedulerSettings(Group):
    """Learning rate over the steps."""

    scheduler_type: Literal["linear", "cosine", "none"] = setting("linear", "Shape of the decay.")
    scheduler_warmup_steps: int | None = setting(None, "Steps of linear warm-up; wins over the ratio.", ge=0)
    scheduler_warmup_ratio: float | None = setting(
        None, "Warm-up as a share of all steps [total // 100 steps].", ge=0.0, le=1.0
    )
    scheduler_total_steps: int | None = setting(None, "Steps of the schedule [the steps of the run].", ge=1)
    scheduler_num_cosine_cycles: float = setting(0.5, "Cycles of the cosine.", gt=0.0)


class TrainerSettings(Group):
    """The loop: length, checkpoints, precision."""

    epochs: int = setting(20, "Passes over the training rows.", ge=1)
    max_steps: int | None = setting(None, "Stop after this many optimiser steps.", ge=1)
    time_limit_minutes: float | None = setting(
        None, "Fit the run into this many minutes: the step budget is fixed from timed steps at the start.", own=True, gt=0.0
    )
    # Cosmetic: a run belongs to the product with the number of processes, which the run folder records.
    gradient_accumulation_steps: int = setting(1, "Packed rows per process and optimiser step.", own=True, ge=1, cosmetic=True)
    max_grad_norm: float = setting(
        1.0, "Clip gradients to this norm; inf for no clipping.", own=True, gt=0.0, allow_inf_nan=True
    )
    mixed_precision: Literal["auto", "no", "bf16"] = setting(
        "auto", "bf16 autocast: where the hardware has it, never, or always.", own=True
    )
    val_freq: int = setting(1, "Validate every so many epochs, and at the end.", own=True, ge=1, cosmetic=True)
    checkpoint_freq: float = setting(1.0, "Checkpoint every so many epochs; below 1 within an epoch.", gt=0.0, cosmetic=True)
    checkpoint_steps: int | None = setting(None, "Checkpoint also every so many steps.", own=True, ge=1, cosmetic=True)
    checkpoint_dtype: Literal["bfloat16", "float32"] = setting(
        "bfloat16", "Type of the draft's weights on disk; the training state is always float32.", own=True, cosmetic=True
    )
    checkpoint_embeddings: bool = setting(
        False,
        "Write the verifier's embeddings and head into checkpoints too; readers then need no verifier.",
        own=True,
        cosmetic=True,
    )
    save_best: bool = setting(False, "Keep only the best and the newest checkpoint of this run.", cosmetic=True)
    no_resume_from_checkpoint: bool = setting(False, "Start anew; an earlier run in the folder is moved aside.", cosmetic=True)
    log_freq: int = setting(1, "Log every so many steps.", ge=1, cosmetic=True)
    save_path: str = setting("./output/checkpoints", "Run folder.", cosmetic=True, min_length=1)
    fsdp_shard: bool = setting(False, "Shard the draft over the processes (FSDP2), instead of a copy on each.")
    gradient_checkpointing: bool = setting(False, "Recompute activations in the backward pass.")


class LoggingSettings(Group):
    """Trackers. metrics.jsonl in the run folder is always written."""

    logger: str = setting("", "Comma-separated: trackio, wandb, tensorboard, mlflow.", cosmetic=True)
    log_dir: str = setting(
        "./logs", "Folder of the trackers; may hold {time}, {utc_time}, {rank}, {local_rank}.", cosmetic=True
    )
    run_name: str | None = setting(None, "Name of the run, with the same placeholders.", cosmetic=True)
