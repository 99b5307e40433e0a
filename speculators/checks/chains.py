"""Chain drafts (EAGLE-3, P-EAGLE): their norms, names and masks, and what vLLM makes of them."""

from __future__ import annotations

from collections.abc import Iterator

from speculators.checks.facts import CheckpointFacts
from speculators.checks.findings import Finding, Kind
from speculators.convert.vllm_mla import absent_in_vllm

__all__ = ["KINDS", "check_chains"]

MIDLAYER = Kind(
    "midlayer-names",
    "error",
    "The decoder layer is called `midlayer`, as in EAGLE repositories.",
    "vLLM reads it as layers.0; upstream and this library do not.",
    "Convert the draft with `speculators convert`.",
)
NORMS_BOTH = Kind(
    "norms-before-fc-both",
    "error",
    "`norm_before_fc` and `fc_norm` are both true.",
    "They exclude each other: one norm over all states, or one per layer.",
    "Switch off the one whose weights are not in the file (input_norm, or fc_norm.j).",
)
MASK_HIDDEN = Kind(
    "mask-hidden-missing",
    "error",
    "A P-EAGLE draft without `mask_hidden`.",
    "vLLM and this library refuse it: later slots have no state to read.",
    "Take the tensor of the training, [1, 1, layers * hidden size].",
)
NORMS_IGNORED = Kind(
    "peagle-norms-ignored",
    "warning",
    "A P-EAGLE draft with `fc_norm` or `norm_output`.",
    "vLLM does not hand these keys on for P-EAGLE, and so runs another network.",
    "Serve with this library's decoder, or train without them.",
)
LATENT = Kind(
    "mla-needs-native-config",
    "note",
    "A draft with latent attention (MLA).",
    "vLLM's speculators loader knows llama and qwen3 decoders only; it serves MLA drafts from its native flat config.",
    "Write that form with `speculators convert --to vllm-native` before serving.",
)
LATENT_BEYOND = Kind(
    "mla-without-native-form",
    "warning",
    "A draft with latent attention (MLA) and something that vLLM's native form of such drafts has not.",
    "vLLM reads MLA drafts in that form only, and `speculators convert --to vllm-native` refuses this one.",
    "Train again without it, for example with `--no-norm-before-fc`; or serve with this library's decoder.",
)
LAYERS_OPEN = Kind(
    "layer-ids-left-open",
    "warning",
    "`eagle_aux_hidden_state_layer_ids` is absent or null.",
    "Readers take [2, n // 2, n - 3] of the verifier's n layers, right only if the draft was trained on these.",
    "Write the ids of the training.",
)
THREE_LAYERS = Kind(
    "vllm-reads-three-layers",
    "warning",
    "A draft with a Llama-style decoder that does not capture three layers.",
    "vLLM makes `fc` for three whatever the list says, and refuses the weights.",
    "Capture three layers, or train with `--draft-arch qwen3`, where it follows the list.",
)
OUTPUT_BIAS = Kind(
    "vllm-drops-output-bias",
    "warning",
    "A draft with a Qwen3-style decoder and `attention_bias`.",
    "vLLM has no bias in the output projection there, and so runs another network.",
    "Train without attention biases for vLLM.",
)
KINDS = (MIDLAYER, NORMS_BOTH, MASK_HIDDEN, NORMS_IGNORED, LATENT, LATENT_BEYOND, LAYERS_OPEN, THREE_LAYERS, OUTPUT_BIAS)


def check_chains(facts: CheckpointFacts) -> Iterator[Finding]:
    """Faults of EAGLE-3 and P-EAGLE drafts; nothing for other families."""
    if not facts.reads_like_eagle:
        return
    tensors = facts.raw.tensors
    midlayer = sorted(name for name in tensors if name.startswith("midlayer."))
    if midlayer:
        yield MIDLAYER.found(f"{len(midlayer)} tensors such as {midlayer[0]}")
    if facts.value("norm_before_fc") and facts.value("fc_norm"):
        yield NORMS_BOTH.found("norm_before_fc and fc_norm are true")
    if facts.decoder.get("model_type") == "deepseek_v3":
        beyond = absent_in_vllm(facts.decoder, bool(facts.value("norm_before_fc")))
        kind, why = (LATENT_BEYOND, f" and has {', '.join(beyond)}") if beyond else (LATENT, "")
        yield kind.found(f"the decoder's model_type is deepseek_v3{why}")
    layers = facts.config.get(facts.layer_id_key)
    if facts.decoder.get("model_type") == "llama" and isinstance(layers, list) and len(layers) != 3:
        yield THREE_LAYERS.found(f"{len(layers)} captured layers, and the decoder's model_type is llama")
    if facts.decoder.get("model_type") == "qwen3" and facts.decoder.get("attention_bias"):
        yield OUTPUT_BIAS.found("attention_bias is true, and the decoder's model_type is qwen3")
    if facts.config.get(facts.layer_id_key) is None and "target_layer_ids" not in facts.config:
        yield LAYERS_OPEN.found(f"{facts.layer_id_key} is {'null' if facts.layer_id_key in facts.config else 'absent'}")
    if facts.family != "peagle":
        return
    if "mask_hidden" not in tensors and facts.raw.complete:
        yield MASK_HIDDEN.found("the file holds no mask_hidden")
    ignored = [key for key in ("fc_norm", "norm_output") if facts.value(key)]
    if ignored:
        yield NORMS_IGNORED.found(f"{' and '.join(ignored)} {'are' if len(ignored) > 1 else 'is'} true")
