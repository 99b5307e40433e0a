"""What vLLM does with the checkpoint that the trainer did not mean."""

from __future__ import annotations

from collections.abc import Iterator

from speculators.checks.facts import CheckpointFacts
from speculators.checks.findings import Finding, Kind

__all__ = ["KINDS", "check_serving"]

DFLASH_CAUSAL = Kind(
    "dflash-causal-in-vllm",
    "error",
    "A DFlash draft with full-attention layers and `sliding_window_non_causal` false.",
    "vLLM applies the key to every layer and runs the full ones causally inside the block, which were trained bidirectionally "
    "(measured: hidden states off by a tenth).",
    "Set `sliding_window_non_causal` to true if no layer slides; with sliding layers trained causally, vLLM cannot serve the "
    "draft as trained: train with `--sliding-window-non-causal` or with one kind of layer.",
)
DSPARK_NON_CAUSAL = Kind(
    "dspark-non-causal-window",
    "warning",
    "A DSpark draft with sliding layers and `sliding_window_non_causal` true.",
    "vLLM does not read the key for DSpark; its sliding layers are causal inside the block, which costs acceptance.",
    "Train with causal sliding layers, or with full attention, for vLLM.",
)
MIXED_LAYERS = Kind(
    "mixed-attention-needs-v2",
    "note",
    "A DFlash draft with both sliding and full layers.",
    "Only vLLM's V2 model runner serves it; it needs Triton.",
    "Set VLLM_USE_V2_MODEL_RUNNER=1 where it is not the default.",
)
DSPARK_RUNNER = Kind(
    "dspark-needs-v2",
    "note",
    "A DSpark draft.",
    "Only vLLM's V2 model runner serves it; it needs Triton.",
    "Set VLLM_USE_V2_MODEL_RUNNER=1 where it is not the default.",
)
WINDOW_REFERENCE = Kind(
    "window-measured-from-anchor",
    "note",
    "The sliding window was measured from the block's anchor in training.",
    "Engines measure it from each slot, so that the last slots see up to K - 1 tokens of context less than in training.",
    "Nothing at windows much longer than a block; else train with `--sliding-window-reference slot`.",
)
WINDOW_MISSING = Kind(
    "window-size-missing",
    "error",
    "A sliding layer, and no `sliding_window`.",
    "Engines assume a window of their own or see everything.",
    "Write the window of the training.",
)
WINDOW_OFF = Kind(
    "window-flag-contradicts",
    "warning",
    "`layer_types` has sliding layers and `use_sliding_window` is false.",
    "Readers that go by the flag drop the window, and those that go by the layer types keep it.",
    "Set `use_sliding_window` to true, or make the layers full.",
)
LAYER_TYPES = Kind(
    "layer-types-length",
    "error",
    "`layer_types` does not have one entry per draft layer.",
    "Loading fails, or layers get another attention than in training.",
    "Write one type per layer.",
)
MARKOV_TYPE = Kind(
    "markov-type-unsupported",
    "warning",
    "A Markov head that vLLM does not implement.",
    "vLLM has the vanilla head only and no parameter for the others' tensors: it refuses them.",
    "Serve with this library's decoder, or train with `--markov-head-type vanilla`.",
)
MARKOV_OFF = Kind(
    "markov-rank-zero",
    "warning",
    "A DSpark draft without a Markov head.",
    "Tokens of a block are drafted independently; vLLM's CPU build ends with a floating-point exception.",
    "Serve it as DFlash, or train with `--markov-rank 256`.",
)
CONFIDENCE_IGNORED = Kind(
    "confidence-head-ignored",
    "note",
    "The draft has a confidence head.",
    "vLLM ignores it unless `enable_adaptive_verification` is set, which needs full CUDA graphs.",
    "Set it in the speculative config to let the verified length follow the confidence.",
)
ACTIVATION = Kind(
    "vllm-needs-silu",
    "warning",
    "A draft whose MLPs have another activation than silu.",
    "vLLM's draft models have silu only and refuse the config.",
    "Train with `--draft-hidden-act silu` for vLLM.",
)
KINDS = (
    ACTIVATION,
    DFLASH_CAUSAL,
    DSPARK_NON_CAUSAL,
    MIXED_LAYERS,
    DSPARK_RUNNER,
    WINDOW_REFERENCE,
    WINDOW_MISSING,
    WINDOW_OFF,
    LAYER_TYPES,
    MARKOV_TYPE,
    MARKOV_OFF,
    CONFIDENCE_IGNORED,
)


def check_serving(facts: CheckpointFacts) -> Iterator[Finding]:
    """What engines would do differently."""
    if facts.family in (None, "mtp") or not facts.decoder:  # an MTP layer's attention is full, whatever the verifier's are
        return
    yield from _windows(facts)
    if facts.decoder.get("hidden_act", "silu") != "silu":
        yield ACTIVATION.found(f"hidden_act is {facts.decoder['hidden_act']}")
    if facts.family == "dflash":
        yield from _dflash(facts)
    if facts.family == "dspark":
        yield from _dspark(facts)


def _windows(facts: CheckpointFacts) -> Iterator[Finding]:
    decoder, types = facts.decoder, facts.layer_types
    if facts.num_layers is not None and len(types) != facts.num_layers:
        yield LAYER_TYPES.found(f"{len(types)} layer_types for {facts.num_layers} layers")
    if "sliding_attention" not in types:
        return
    sliding = types.count("sliding_attention")
    if not decoder.get("sliding_window"):
        yield WINDOW_MISSING.found(
            f"{sliding} of {len(types)} layers slide, and sliding_window is {decoder.get('sliding_window')}"
        )
        return
    if decoder.get("use_sliding_window") is False:
        yield WINDOW_OFF.found(f"{sliding} of {len(types)} layers slide, and use_sliding_window is false")
    if facts.drafts_blocks and facts.value("sliding_window_reference") == "anchor":
        yield WINDOW_REFERENCE.found(f"windows of {decoder['sliding_window']} tokens, blocks of {facts.block_size} slots")


def _dflash(facts: CheckpointFacts) -> Iterator[Finding]:
    kinds = set(facts.layer_types)
    if facts.config.get("sliding_window_non_causal") is False and "full_attention" in kinds:
        full = facts.layer_types.count("full_attention")
        yield DFLASH_CAUSAL.found(f"sliding_window_non_causal is false and {full} of {len(facts.layer_types)} layers are full")
    if len(kinds) > 1:
        yield MIXED_LAYERS.found(f"layer_types are {', '.join(facts.layer_types)}")


def _dspark(facts: CheckpointFacts) -> Iterator[Finding]:
    yield DSPARK_RUNNER.found("speculators_model_type is dspark")
    if facts.config.get("sliding_window_non_causal") is True and "sliding_attention" in facts.layer_types:
        yield DSPARK_NON_CAUSAL.found("sliding_window_non_causal is true, and vLLM's DSpark does not read it")
    if facts.value("markov_rank") == 0:
        yield MARKOV_OFF.found("markov_rank is 0")
    elif facts.value("markov_head_type") != "vanilla":
        yield MARKOV_TYPE.found(f"markov_head_type is {facts.value('markov_head_type')}")
    if facts.value("enable_confidence_head"):
        yield CONFIDENCE_IGNORED.found("enable_confidence_head is true")
