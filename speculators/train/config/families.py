"""The settings of single draft families and of hidden-states backends, by group, with upstream's names."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import field_validator

from speculators.train.config.fields import Group, mapping_of_text, setting

__all__ = [
    "FAMILY_GROUPS",
    "BackendSettings",
    "DFlash2Settings",
    "DFlashSettings",
    "DSparkSettings",
    "MTPSettings",
    "PEagleSettings",
    "RaySettings",
    "XPressSettings",
]

#: Which families use which of the groups below.
FAMILY_GROUPS: dict[str, tuple[str, ...]] = {
    "dflash": ("dflash", "dspark", "dflash2", "xpress"),
    "dflash2": ("dflash2",),
    "dspark": ("dspark",),
    "xpress": ("xpress",),
    "peagle": ("peagle",),
    "mtp": ("mtp",),
}


class DFlashSettings(Group):
    """Block drafting, shared by dflash, dspark, dflash2 and xpress."""

    block_size: int | None = setting(None, "Slots of a block, the anchor's included [16 for dflash and xpress, else 8].", ge=1)
    sample_from_anchor: bool | None = setting(None, "The anchor's slot predicts a token too [on for dspark].")
    dflash_decay_gamma: float = setting(4.0, "Loss weight exp(-d / gamma) of predicted token d.", gt=0.0)
    per_position_loss_weight: Literal["fixed-exp-decay", "dpace"] | None = setting(
        None, "Weights within a block; dpace needs --loss-fn ce [dpace for dflash, else fixed-exp-decay]."
    )
    dpace_alpha: float = setting(0.5, "Smoothing of dpace.", gt=0.0, le=1.0)


class DFlash2Settings(Group):
    """DFlash2 only."""

    conv_kernel_size: int = setting(2, "Taps of the convolution.", ge=1)
    conv_group_size: int = setting(16, "Channels per group of the convolution.", ge=1)
    selector_rank: int = setting(256, "Rank of the candidate selector.", ge=1)
    selector_top_k: int = setting(16, "Candidates per slot.", ge=1)
    selector_loss_alpha: float = setting(1.0, "Weight of the selector's loss.", ge=0.0)


class DSparkSettings(Group):
    """DSpark only: Markov and confidence heads."""

    markov_rank: int = setting(256, "Rank of the Markov head; 0 for none.", ge=0)
    markov_head_type: Literal["vanilla", "gated", "rnn"] = setting("vanilla", "Form of the Markov head.")
    enable_confidence_head: bool = setting(True, "Train a confidence head.")
    confidence_head_with_markov: bool = setting(True, "The confidence head also reads the Markov embedding.")
    confidence_head_alpha: float = setting(1.0, "Weight of the confidence loss.", ge=0.0)
    confidence_detach: bool = setting(False, "Keep the confidence loss out of the decoder's gradient.", own=True)


class XPressSettings(Group):
    """XPress only."""

    xpress_rank: int = setting(256, "Rank of the refiner.", ge=1)
    xpress_mlp_ratio: int = setting(2, "Width of the refiner's MLP over its rank.", ge=1)
    num_jacobi_passes: int = setting(6, "Refinement passes at decoding.", ge=1)
    consistency_weight: float = setting(0.3, "Weight of the consistency loss.", ge=0.0)
    consistency_passes: int = setting(3, "Passes in the consistency loss.", ge=1)
    base_anchor_weight: float = setting(0.6, "Weight of the base logits' loss.", ge=0.0)
    ce_from_data: bool = setting(False, "Cross-entropy against the row's tokens.")
    base_anchor_full_weight: bool = setting(False, "No decay on the base logits' loss.")


class PEagleSettings(Group):
    """P-EAGLE only."""

    num_depths: int = setting(8, "Depths drafted in parallel.", ge=1)
    down_sample_ratio: float = setting(0.7, "Share of elements kept per depth.", gt=0.0, le=1.0)
    down_sample_ratio_min: float = setting(0.2, "Least share kept.", ge=0.0, le=1.0)


class MTPSettings(Group):
    """Multi-token prediction only."""

    num_speculative_steps: int = setting(3, "Recursive steps.", ge=1)
    step_weight_beta: float = setting(0.6, "Weight of step k is proportional to beta^k.", gt=0.0)


class BackendSettings(Group):
    """Where hidden states lie: those that a vLLM server leaves, and those of a store."""

    hidden_states_path: str | None = setting(
        None, "Folder of states [DATA_PATH/hidden_states].", sources=("vllm", "store"), cosmetic=True
    )
    store_source: Literal["transformers", "vllm", "none"] = setting(
        "transformers", "What makes states that a store lacks or holds damaged.", sources=("store",), own=True, cosmetic=True
    )
    mooncake_master: str = setting("127.0.0.1:50051", "Mooncake master.", sources=("vllm",))
    mooncake_metadata_server: str = setting("P2PHANDSHAKE", "Mooncake metadata server.", sources=("vllm",))
    mooncake_protocol: Literal["tcp", "rdma"] = setting("tcp", "Mooncake transport.", sources=("vllm",))
    mooncake_device: str = setting("", "Network device of rdma.", sources=("vllm",))
    mooncake_global_segment_gib: float = setting(4.0, "Shared segment in GiB.", sources=("vllm",), gt=0.0)
    mooncake_local_buffer_gib: float = setting(2.0, "Local buffer in GiB.", sources=("vllm",), gt=0.0)


class RaySettings(Group):
    """A rollout on a Ray cluster: actors that run the verifier, wherever there is room."""

    ray_address: str | None = setting(
        None,
        "Cluster to join: auto for this machine's, or host:port; starts Ray on this machine when not given.",
        sources=("ray",),
        own=True,
        cosmetic=True,
    )
    ray_rollout_workers: int | None = setting(
        None,
        "Actors [as many as the cluster has room for, and more when it grows].",
        sources=("ray",),
        own=True,
        cosmetic=True,
        ge=1,
    )
    ray_rollout_cpus: float = setting(1.0, "Processors of each actor.", sources=("ray",), own=True, cosmetic=True, ge=0.0)
    ray_rollout_gpus: float = setting(0.0, "GPUs of each actor.", sources=("ray",), own=True, cosmetic=True, ge=0.0)
    ray_rollout_resources: dict[str, float] = setting(
        {}, 'Further resources of each actor, as JSON: {"verifier": 1}.', sources=("ray",), own=True, cosmetic=True
    )
    ray_transfer_dtype: Literal["native", "bfloat16", "fp8"] = setting(
        "native", "Form of the states on their way; native keeps the bits.", sources=("ray",), own=True
    )
    ray_max_restarts: int = setting(
        20, "Actors that may be started in place of lost ones.", sources=("ray",), own=True, cosmetic=True, ge=0
    )

    @field_validator("ray_rollout_resources", mode="before")
    @classmethod
    def _from_text(cls, value: Any) -> Any:
        return mapping_of_text(value)
