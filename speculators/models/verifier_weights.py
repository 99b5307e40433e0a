"""The verifier's frozen parts that a draft borrows: token embedding, output head and final norm, read from its files.

Only the tensors asked for are read. Shape letters: V verifier and D draft vocabulary, H hidden size.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PretrainedConfig

from speculators.errors import VerifierError
from speculators.models.checkpoint_files import WeightFiles

__all__ = [
    "VerifierHead",
    "VerifierPart",
    "has_rms_norm",
    "norm_adds_one",
    "read_layer_weights",
    "read_verifier_config",
    "read_verifier_weights",
    "text_config",
]

VerifierPart = Literal["embed_tokens", "lm_head", "norm"]

#: Names under which models keep each part: the usual one first, which also counts as a suffix, then those of other code bases.
_NAMES: dict[VerifierPart, tuple[str, ...]] = {
    "embed_tokens": (
        "model.embed_tokens.weight",
        "embed_tokens.weight",
        "tok_embeddings.weight",
        "llm.embed.weight",
        "backbone.embeddings.weight",
        "word_embeddings.weight",
        "wte.weight",
        "embed_in.weight",
        "embeddings.weight",
        "embed.weight",
    ),
    "lm_head": (
        "lm_head.weight",
        "output.weight",
        "llm.unembed.weight",
        "embed_out.weight",
        "output_layer.weight",
        "head.weight",
    ),
    "norm": (
        "model.norm.weight",
        "norm.weight",
        "llm.norm.weight",
        "backbone.norm_f.weight",
        "norm_f.weight",
        "ln_f.weight",
        "final_layernorm.weight",
        "final_layer_norm.weight",
        "final_norm.weight",
        "embedding_norm.weight",
    ),
}

#: Parts of composite models that have embeddings, heads and norms of their own.
_FOREIGN = ("layers.", "vision", "visual", "image", "audio", "speech", "projector", "mtp", "encoder.", "talker", "2wav")

#: Model types whose RMSNorm multiplies by 1 + weight; all others multiply by weight. Facts about model types here and below are
#: read off transformers' modelling code, and a test compares them with every model type of the installed release.
_NORM_ADDS_ONE = frozenset(
    {
        "gemma",
        "gemma2",
        "gemma3",
        "gemma3_text",
        "minimax_m3_vl",
        "minimax_m3_vl_text",
        "qwen3_5",
        "qwen3_5_moe",
        "qwen3_5_moe_text",
        "qwen3_5_text",
        "qwen3_next",
        "qwen4_exp",
        "qwen4_exp_text",
        "recurrent_gemma",
        "step3p7",
        "step3p7_text",
        "t5gemma",
        "t5gemma2",
        "vaultgemma",
    }
)

#: Final norms that are no RMSNorm of one state, in model types that name an RMSNorm's epsilon.
_NO_RMS_NORM = frozenset({"dory", "modernbert-decoder", "nemotron", "olmo", "phimoe", "qwen4_exp", "qwen4_exp_text"})

#: RMSNorms without a weight.
_NORM_WITHOUT_WEIGHT = frozenset({"nanochat"})

#: What logits are multiplied by, as a config's attribute and its power.
_LOGIT_SCALES = (
    ("logit_scale", 1),
    ("lm_head_multiplier", 1),
    ("output_multiplier", 1),
    ("logits_scaling", -1),
    ("logits_mup_width_multiplier", -1),
)
#: The exceptions: these multiply by what the others divide by,
_SCALING_MULTIPLIES = frozenset({"hyperclovax"})
#: and these composite models leave out the scale or the soft cap that their text model has on its own.
_WITHOUT_SCALE = frozenset({"aya_vision", "cohere2_vision"})
_WITHOUT_SOFTCAP = frozenset({"gemma3", "shieldgemma2"})


def text_config(config: PretrainedConfig) -> PretrainedConfig:
    """The language model's part of a config; the config itself if it is not composite."""
    return config.get_text_config(decoder=True)


def norm_adds_one(config: PretrainedConfig) -> bool:
    """Whether the verifier's RMSNorm computes ``x * (1 + weight)`` instead of ``x * weight``."""
    return config.model_type in _NORM_ADDS_ONE or text_config(config).model_type in _NORM_ADDS_ONE


def read_verifier_config(name_or_path: str | os.PathLike[str], trust_remote_code: bool = False) -> PretrainedConfig:
    """The verifier's config.

    :raises VerifierError: it cannot be read.
    """
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(name_or_path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise VerifierError(
            f"no readable model config at {str(name_or_path)!r}; give the verifier's folder or hub id"
        ) from error


def read_verifier_weights(name_or_path: str | os.PathLike[str], parts: Iterable[VerifierPart]) -> dict[VerifierPart, Tensor]:
    """Tensors of a verifier, on the CPU and in their own dtype: ``embed_tokens`` [V, H], ``lm_head`` [V, H], ``norm`` [H].

    A verifier without an output head of its own has tied embeddings, which then serve as ``lm_head``.

    :param name_or_path: folder or hub id; a hub id is looked up as transformers does.
    :raises VerifierError: no weights there, or a part is missing, quantised or unreadable.
    """
    files = _files(name_or_path)
    names = {part: _name_of(part, files.index, name_or_path) for part in parts}
    tensors = files.read(dict.fromkeys(names.values()))
    for name, tensor in tensors.items():
        scales = [other for other in files.index if other.startswith(name + "_scale")]
        if not tensor.is_floating_point() or tensor.element_size() < 2 or scales:
            how = str(tensor.dtype).removeprefix("torch.") + (f" with {scales[0]}" if scales else "")
            raise VerifierError(f"the verifier's {name} is quantised ({how}); point to an unquantised copy of the verifier")
    return {part: tensors[name] for part, name in names.items()}


def read_layer_weights(name_or_path: str | os.PathLike[str], layer: int) -> dict[str, Tensor]:
    """Floating-point tensors of one decoder layer of a verifier, by their name inside the layer (``self_attn.q_proj.weight``).

    :param layer: 0-based decoder layer.
    :raises VerifierError: no weights there, or one is unreadable.
    """
    files = _files(name_or_path)
    mark = f"layers.{layer}."
    # The language model's layers are those under the shortest prefix; vision towers and MTP layers have longer ones.
    prefixes = {
        name[: name.index(mark) + len(mark)]
        for name in files.index
        if mark in name and not any(m in name for m in _FOREIGN[1:])
    }
    if not prefixes:
        return {}
    prefix = min(prefixes, key=lambda text: (len(text), text))
    tensors = files.read(name for name in files.index if name.startswith(prefix))
    return {
        name.removeprefix(prefix): tensor
        for name, tensor in tensors.items()
        if tensor.is_floating_point() and tensor.element_size() >= 2
    }


def _files(name_or_path: str | os.PathLike[str]) -> WeightFiles:
    return WeightFiles(name_or_path, owner="verifier", error=VerifierError)


def _name_of(part: VerifierPart, index: Mapping[str, str], source: str | os.PathLike[str]) -> str:
    name = _find(index, part)
    if name is None:
        # A quantised head keeps its rows under another name; taking it for a tied one would be silently wrong.
        stems = [known.removesuffix("weight") for known in _NAMES[part]]
        packed = sorted(other for other in index if _is_own(other) and _ends_in_stem(other, stems))
        if packed:
            raise VerifierError(
                f"the verifier's {part} is quantised ({packed[0]}); point to an unquantised copy of the verifier"
            )
        if part == "lm_head":
            name = _find(index, "embed_tokens")
    if name is None:
        raise VerifierError(f"the verifier {str(source)!r} has no tensor that looks like its {part}, so it cannot be used")
    return name


def _find(index: Mapping[str, str], part: VerifierPart) -> str | None:
    for known in _NAMES[part]:
        if known in index:
            return known
    own = [name for name in index if _is_own(name)]
    for known in _NAMES[part]:
        matches = [name for name in own if name.endswith("." + known)]
        if matches:
            return min(matches, key=lambda name: (len(name), name))
    return None


def _is_own(name: str) -> bool:
    """Whether a tensor is the language model's and outside its layers."""
    return not any(mark in name for mark in _FOREIGN)


def _ends_in_stem(name: str, stems: Iterable[str]) -> bool:
    """Whether a tensor belongs to one of these modules: ``lm_head.weight_packed`` to ``lm_head.``; biases do not count."""
    owner, _, leaf = name.rpartition(".")
    return leaf != "bias" and any(f"{owner}.".endswith("." + stem) or f"{owner}." == stem for stem in stems)


class VerifierHead(nn.Module):
    """The verifier's output head, frozen: states to logits of the draft vocabulary or of the whole one.

    Logit scales and soft caps of the verifier's own head are applied (Cohere, Granite, Gemma, ...). Nothing of it is in
    ``state_dict``.

    :param weight: output rows ``[V, H]``.
    :param t2d: bool ``[V]``, the draft vocabulary; None keeps all.
    :param norm_weight: final RMSNorm's weight ``[H]``; None if :meth:`normalize` will not be needed.
    """

    weight: Tensor
    draft_weight: Tensor
    norm_weight: Tensor | None

    def __init__(
        self, weight: Tensor, config: PretrainedConfig, t2d: Tensor | None = None, norm_weight: Tensor | None = None
    ) -> None:
        super().__init__()
        text = text_config(config)
        self.register_buffer("weight", weight, persistent=False)
        self.register_buffer("draft_weight", weight if t2d is None else weight[t2d.to(weight.device)], persistent=False)
        self.register_buffer("norm_weight", norm_weight, persistent=False)
        self.adds_one = norm_adds_one(config)
        self.eps = _first(text, ("rms_norm_eps", "layer_norm_epsilon", "norm_eps", "layer_norm_eps"), 1e-6)
        self.scale = _logit_scale(config)
        capped = config.model_type not in _WITHOUT_SOFTCAP
        self.softcap: float | None = _first(text, ("final_logit_softcapping", "logits_soft_cap"), None) if capped else None

    @classmethod
    def from_folder(
        cls,
        name_or_path: str | os.PathLike[str],
        t2d: Tensor | None = None,
        dtype: torch.dtype = torch.float32,
        *,
        with_norm: bool = True,
        config: PretrainedConfig | None = None,
    ) -> VerifierHead:
        """Read the head from a verifier.

        :param t2d: bool ``[V]``.
        :param with_norm: also read the final norm, for :meth:`normalize`.
        :param config: the verifier's config, if already at hand.
        :raises VerifierError: files are missing or do not fit, or the final norm is no RMSNorm.
        """
        config = read_verifier_config(name_or_path) if config is None else config
        if with_norm and not has_rms_norm(config):
            raise VerifierError(
                f"the verifier's final norm ({text_config(config).model_type}) is a LayerNorm, which is not rebuilt here; "
                "capture its states after the norm (post_norm)"
            )
        has_weight = text_config(config).model_type not in _NORM_WITHOUT_WEIGHT
        parts: list[VerifierPart] = ["lm_head", "norm"] if with_norm and has_weight else ["lm_head"]
        tensors = read_verifier_weights(name_or_path, parts)
        weight = tensors["lm_head"].to(dtype)
        if t2d is not None and t2d.shape[0] != weight.shape[0]:
            raise VerifierError(
                f"the vocabulary mapping covers {t2d.shape[0]} ids, but the verifier's head has {weight.shape[0]} rows; "
                "build the mapping for this verifier"
            )
        norm = tensors.get("norm", torch.ones(weight.shape[1])).to(dtype) if with_norm else None
        return cls(weight, config, t2d, norm)

    @property
    def can_normalize(self) -> bool:
        """Whether :meth:`normalize` can be called."""
        return self.norm_weight is not None

    def normalize(self, states: Tensor) -> Tensor:
        """Final norm of *pre-norm* states ``[..., H]``, statistics in fp32 (fp64 for fp64).

        :raises VerifierError: the head was made without the norm's weight.
        """
        if self.norm_weight is None:
            raise VerifierError("pre-norm states need the verifier's final norm, but this head was read without it")
        precise = states if states.dtype == torch.float64 else states.float()
        normed = precise * torch.rsqrt(precise.square().mean(dim=-1, keepdim=True) + self.eps)
        gain = self.norm_weight.to(precise.dtype)
        return (normed * (1.0 + gain if self.adds_one else gain)).to(states.dtype)

    def draft_logits(self, states: Tensor) -> Tensor:
        """Logits of the draft vocabulary ``[..., D]`` of post-norm states ``[..., H]``."""
        return self._logits(states, self.draft_weight)

    def full_logits(self, states: Tensor) -> Tensor:
        """Logits of all ids ``[..., V]`` of post-norm states ``[..., H]``."""
        return self._logits(states, self.weight)

    def _logits(self, states: Tensor, rows: Tensor) -> Tensor:
        logits = F.linear(states.to(rows.dtype), rows)
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        return logits


def has_rms_norm(config: PretrainedConfig) -> bool:
    """Whether the model's final norm is an RMSNorm, which :meth:`VerifierHead.normalize` can rebuild.

    LayerNorm models name their epsilon differently, with few exceptions; state-space models' RMSNorms share their name.
    """
    text = text_config(config)
    named = any(getattr(text, name, None) is not None for name in ("rms_norm_eps", "norm_eps"))
    return (named and text.model_type not in _NO_RMS_NORM) or "mamba" in text.model_type or text.model_type == "nemotron_h"


def _logit_scale(config: PretrainedConfig) -> float:
    """Factor between ``lm_head(state)`` and the model's logits, before a soft cap."""
    text, scale = text_config(config), 1.0
    if config.model_type in _WITHOUT_SCALE:
        return scale
    for name, power in _LOGIT_SCALES:
        value = _first(text, (name,), 1.0)
        scale *= value if power == 1 or text.model_type in _SCALING_MULTIPLIES else 1.0 / value
    if getattr(text, "dim_model_base", None) and not hasattr(text, "logits_scaling"):  # MiniCPM's own code
        scale *= text.dim_model_base / text.hidden_size
    return scale


def _first(config: PretrainedConfig, names: tuple[str, ...], default: Any) -> Any:
    for name in names:
        value = getattr(config, name, None)
        if value is not None:
            return value
    return default
