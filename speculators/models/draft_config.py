"""From a verifier's config and training settings to the draft's config.

The draft has the verifier's hidden size and vocabulary, and by default its heads, head size, feed-forward size and rotary
embedding. Block drafts have Qwen3-style layers (per-head query and key norms), which serving engines expect; chains may also
have Llama-style ones, or DeepSeek's latent attention.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from transformers import DeepseekV3Config, LlamaConfig, PretrainedConfig, Qwen3Config

from speculators.errors import ConfigError
from speculators.models.verifier_weights import text_config

__all__ = ["build_draft_config", "check_layer_ids", "default_layer_ids"]

#: Rotary settings of a verifier that a text-only draft drops: image and video sections, which vLLM refuses in a draft, and a
#: part of each head left unrotated (but see ``mrope_full_head``).
_DROPPED_ROPE_KEYS = ("mrope_section", "mrope_interleaved", "partial_rotary_factor")


#: Decoder configs by the value of ``--draft-arch``.
DRAFT_ARCHITECTURES: dict[str, Any] = {
    "llama": LlamaConfig,
    "qwen3": Qwen3Config,
    "deepseek_v3": DeepseekV3Config,
}


def default_layer_ids(num_hidden_layers: int) -> list[int]:
    """Verifier layers captured by default: early, middle and late; ``[2, n // 2, n - 3]``, made distinct for tiny verifiers."""
    wanted = (2, num_hidden_layers // 2, num_hidden_layers - 3)
    return sorted({min(max(layer, 0), num_hidden_layers) for layer in wanted})


def check_layer_ids(layer_ids: Sequence[int], num_hidden_layers: int | None = None) -> None:
    """Refuse layer ids that repeat or do not exist; id k is the residual stream after k layers, 0 the embeddings.

    :raises ConfigError: with one sentence.
    """
    if not layer_ids:
        raise ConfigError("no verifier layer is captured; give at least one target layer id")
    if len(set(layer_ids)) != len(layer_ids):
        raise ConfigError(f"target layer ids {list(layer_ids)} must be distinct")
    highest = num_hidden_layers if num_hidden_layers is not None else max(*layer_ids, 0)
    if min(layer_ids) < 0 or max(layer_ids) > highest:
        most = "their number" if num_hidden_layers is None else highest
        raise ConfigError(f"target layer ids {list(layer_ids)} must lie within [0, {most}], the verifier's layers")


def build_draft_config(
    verifier_config: PretrainedConfig,
    *,
    num_layers: int = 5,
    draft_arch: str | None = None,
    draft_hidden_act: str | None = "silu",
    sliding_window: int | None = 2048,
    full_attention_indices: Sequence[int] = (),
    mrope_full_head: bool = True,
) -> PretrainedConfig:
    """Decoder config of a draft.

    :param verifier_config: the verifier's; of a composite one, the language model's part counts.
    :param num_layers: draft layers.
    :param draft_arch: a key of :data:`DRAFT_ARCHITECTURES`; None is ``qwen3``.
    :param draft_hidden_act: activation; None or empty takes the verifier's.
    :param sliding_window: tokens of context that a sliding layer sees; None or 0 makes every layer full.
    :param full_attention_indices: draft layers that see the whole context; the others slide.
    :param mrope_full_head: of a verifier with multimodal rope that rotates a part of each head, rotate whole heads; otherwise
        the same part. Nothing changes for other verifiers.
    :raises ConfigError: a setting does not fit.
    """
    arch = draft_arch or "qwen3"
    if arch not in DRAFT_ARCHITECTURES:
        raise ConfigError(f"draft_arch {arch!r} does not exist; choose one of {', '.join(DRAFT_ARCHITECTURES)}")
    if num_layers < 1:
        raise ConfigError(f"num_layers is {num_layers}, but a draft needs at least one layer")
    outside = [index for index in full_attention_indices if not 0 <= index < num_layers]
    if outside:
        raise ConfigError(f"full_attention_indices {outside} are not layers of a draft with layers 0 to {num_layers - 1}")
    if sliding_window is not None and sliding_window < 0:
        raise ConfigError(f"sliding_window is {sliding_window}; give a number of tokens, or 0 for full attention")

    text = _one_layer(text_config(verifier_config))
    latent = arch == "deepseek_v3"
    heads, kv_heads, head_dim = _latent_heads(text) if latent else _heads(text)
    full = set(range(num_layers)) if not sliding_window else set(full_attention_indices)
    slides = len(full) < num_layers
    shape = _latent_shape(text) if latent else {"num_key_value_heads": kv_heads, "head_dim": head_dim}
    if slides:
        shape |= {"use_sliding_window": True, "sliding_window": sliding_window}
    elif arch == "qwen3":
        shape |= {"use_sliding_window": False, "sliding_window": None}
    return DRAFT_ARCHITECTURES[arch](
        vocab_size=text.vocab_size,
        hidden_size=text.hidden_size,
        intermediate_size=_intermediate_size(text),
        num_hidden_layers=num_layers,
        num_attention_heads=heads,
        hidden_act=draft_hidden_act or _value(text, "hidden_act", "silu"),
        max_position_embeddings=_value(text, "max_position_embeddings", 32768),
        initializer_range=_value(text, "initializer_range", 0.02),
        rms_norm_eps=_value(text, "rms_norm_eps", 1e-6),
        attention_bias=False,
        attention_dropout=0.0,
        tie_word_embeddings=False,
        rope_parameters=_rope_parameters(text, head_dim, mrope_full_head),
        max_window_layers=0,
        layer_types=["full_attention" if layer in full else "sliding_attention" for layer in range(num_layers)],
        **shape,
    )


def _one_layer(text: PretrainedConfig) -> PretrainedConfig:
    """Config of one layer where layers differ in shape (Gemma 4): the first that slides, whose rope the draft takes too."""
    if not getattr(text, "is_heterogeneous", False):
        return text
    types = list(text.layer_types or [])
    return text.per_layer_config[types.index("sliding_attention") if "sliding_attention" in types else 0]


def _value(config: PretrainedConfig, name: str, default: Any) -> Any:
    value = getattr(config, name, None)
    return default if value is None else value


def _heads(text: PretrainedConfig) -> tuple[int, int, int]:
    """Query heads, key heads and head size."""
    if getattr(text, "kv_lora_rank", None):
        # Latent attention has no grouped heads to copy; heads of 128 and 8 key heads are what the published drafts use.
        heads = max(text.hidden_size // 128, 1)
        return heads, 8 if heads % 8 == 0 else heads, min(128, text.hidden_size)
    heads = text.num_attention_heads
    return heads, _value(text, "num_key_value_heads", heads), _value(text, "head_dim", text.hidden_size // heads)


def _latent_heads(text: PretrainedConfig) -> tuple[int, int, int]:
    """Heads and rotated head size of a draft with latent attention; the verifier must have it too.

    :raises ConfigError: it has not.
    """
    if not getattr(text, "kv_lora_rank", None):
        raise ConfigError(
            f"draft_arch deepseek_v3 takes its latent attention from the verifier, but {text.model_type} has none; "
            "use llama or qwen3"
        )
    return text.num_attention_heads, text.num_attention_heads, text.qk_rope_head_dim


def _latent_shape(text: PretrainedConfig) -> dict[str, Any]:
    names = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "rope_interleave")
    values = {name: getattr(text, name) for name in names if hasattr(text, name)}
    # The draft's MLP is dense.
    return values | {"num_key_value_heads": text.num_attention_heads, "first_k_dense_replace": 1_000_000, "num_mtp_layers": 0}


def _intermediate_size(text: PretrainedConfig) -> int:
    size = _value(text, "intermediate_size", 4 * text.hidden_size)
    # Some configs list one size per layer.
    return int(size[0] if isinstance(size, (list, tuple)) else size)


def _rope_parameters(text: PretrainedConfig, head_dim: int, mrope_full_head: bool) -> dict[str, Any]:
    parameters = copy.deepcopy(getattr(text, "rope_parameters", None) or {})
    # One set per layer type: the draft takes the sliding layers' (upstream's choice), else the full layers'.
    for layer_type in ("sliding_attention", "full_attention"):
        if isinstance(parameters.get(layer_type), dict):
            parameters = parameters[layer_type]
            break
    part = _rotated_part(parameters, head_dim) if not mrope_full_head else 1.0
    parameters = {key: value for key, value in parameters.items() if key not in _DROPPED_ROPE_KEYS}
    if parameters.get("rope_type", "default") in ("default", "mrope", "proportional"):
        parameters = {"rope_type": "default", "rope_theta": parameters.get("rope_theta", _value(text, "rope_theta", 10000.0))}
    return parameters if part == 1.0 else parameters | {"partial_rotary_factor": part}


def _rotated_part(parameters: dict[str, Any], head_dim: int) -> float:
    """Share of each head that multimodal rope rotates; 1 without multimodal rope.

    The sections that divide this part among time, height and width are of no use to the draft: of a text token the three
    positions are the same, and rotation by three equal positions is ordinary rope.
    """
    if not parameters.get("mrope_section"):
        return 1.0
    part = float(parameters.get("partial_rotary_factor") or 1.0)
    rotated = int(head_dim * part)
    if not 2 <= rotated <= head_dim or rotated % 2:
        raise ConfigError(
            f"the verifier's multimodal rope rotates {part:g} of each head, {rotated} entries of the draft's {head_dim}, "
            "which are no pairs; leave out --no-draft-mrope-full-head-hack"
        )
    return part
