"""z-lab's DFlash: a flat Qwen3 config with a ``dflash_config``, to and fro; vLLM serves the same form.

Blocks are fill-in. ``target_layer_ids`` are outputs of decoder layers. A key is looked up in ``dflash_config``, then outside
it. Embedding and head are the verifier's and not in the file. Sources: z-lab's ``model.py``, vLLM 0.32's ``qwen3_dflash.py``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from speculators.convert.adapter import (
    Adapter,
    Conversion,
    capture_ids,
    check_fit,
    check_layer_count,
    foreign_ids,
    refuse_final_layer,
)
from speculators.convert.decoders import decoder_config, flat_decoder, non_causal_sliding
from speculators.convert.notes import ConversionNotes, FlatConfig
from speculators.convert.options import ConversionOptions
from speculators.convert.source import ForeignCheckpoint
from speculators.convert.verifier import VerifierFacts
from speculators.convert.vllm_dspark import sliding_keys
from speculators.errors import ConfigError
from speculators.models.dflash import DFlashSpeculatorConfig

__all__ = ["ZLabDFlash", "write_zlab_dflash"]

ARCHITECTURE = "DFlashDraftModel"
_LAGUNA = "DFlashLagunaForCausalLM"

#: Laguna's network has these besides DFlash's: a gate on the attention output and a norm per captured layer.
_LAGUNA_ONLY = (".g_proj.", "aux_hidden_norms.")

_DROP_HINT = (
    "leave it out with --algorithm-kwargs '{\"drop_unsupported\": true}' if you will train the draft further, which upstream's "
    "converter always does"
)


class ZLabDFlash(Adapter):
    name = "zlab-dflash"
    title = "z-lab DFlash (dflash_config)"
    algorithms = ("dflash",)
    options = frozenset({"mask_token_id", "aux_hidden_state_layer_ids", "drop_unsupported"})

    def recognises(self, source: ForeignCheckpoint) -> bool:
        return "dflash_config" in source.config or any("DFlash" in name for name in source.architectures)

    def read(
        self, source: ForeignCheckpoint, verifier: VerifierFacts, algorithm: str | None, options: ConversionOptions
    ) -> Conversion:
        notes = ConversionNotes()
        flat = FlatConfig(source.config, "z-lab DFlash", notes)
        nested = flat.nested("dflash_config")
        _refuse_other_networks(source, flat, nested)
        check_layer_count(flat, verifier)
        check_layer_count(nested, verifier)
        decoder = decoder_config(flat, "qwen3")
        tensors = _split_fused(source.tensors(), decoder)
        _refuse_laguna(source, tensors, options, notes)
        ids = options.aux_hidden_state_layer_ids
        if ids is None:
            ids = _layer_ids(flat, nested, decoder.num_hidden_layers, verifier, tensors, options)
        mask_token_id = options.mask_token_id
        if mask_token_id is None:
            mask_token_id = _lookup(flat, nested, "mask_token_id")
        if mask_token_id is None:
            raise ConfigError(
                "the z-lab DFlash config has no 'mask_token_id' (its first reader took it as an argument); give the id that "
                "the draft was trained with by --algorithm-kwargs '{\"mask_token_id\": ...}'"
            )
        block_size = _lookup(flat, nested, "block_size")
        if block_size is None:
            block_size = notes.assume("block_size", 16, "z-lab's default")
        config = DFlashSpeculatorConfig.build(
            decoder,
            verifier.record,
            aux_hidden_state_layer_ids=ids,
            mask_token_id=mask_token_id,
            block_size=block_size,
            sample_from_anchor=notes.assume("sample_from_anchor", False, "z-lab's blocks are fill-in, always"),
            draft_vocab_size=_lookup(flat, nested, "draft_vocab_size") or decoder.vocab_size,
            sliding_window_non_causal=non_causal_sliding(flat, layer_types=decoder.layer_types),
            sliding_window_reference="slot",
        )
        check_fit(config, ids, verifier)
        nested.skip("causal")
        for part in (flat, nested):
            part.remark_unread()
        return Conversion(config, tensors, notes)


def _lookup(flat: FlatConfig, nested: FlatConfig, key: str) -> Any:
    inner, outer = nested.optional(key), flat.optional(key)
    return outer if inner is None else inner


def _refuse_other_networks(source: ForeignCheckpoint, flat: FlatConfig, nested: FlatConfig) -> None:
    if any("DFlash2" in name for name in source.architectures) or nested.has("selector_rank"):
        raise ConfigError("this is a DFlash2 draft, which this library does not have yet; it cannot be converted")
    for part in (flat, nested):
        part.refuse_other("projector_type", ("dflash",), "another kind of block draft")
        part.refuse_other("attention_mode", ("gqa", "mha"), "another attention")
        part.refuse_other("input_embedding_scale", (1, 1.0), "scaled embeddings")
        part.refuse_other("output_multiplier", (1, 1.0), "scaled logits")
        part.refuse_other("final_logit_softcapping", (0, 0.0), "capped logits")


def _layer_ids(
    flat: FlatConfig,
    nested: FlatConfig,
    num_draft_layers: int,
    verifier: VerifierFacts,
    tensors: dict[str, Tensor],
    options: ConversionOptions,
) -> list[int]:
    """Captured layers, without the verifier's last one, whose state z-lab takes after the final norm and engines before."""
    foreign = _lookup(flat, nested, "target_layer_ids")
    if foreign is None:
        spread = default_target_layers(verifier.num_hidden_layers, num_draft_layers)
        foreign = flat.notes.assume("target_layer_ids", spread, "the spread of z-lab's first reader")
    ids = capture_ids(foreign)
    kept = [index for index, layer in enumerate(ids) if layer != verifier.num_hidden_layers]
    if len(kept) == len(ids):
        return ids
    if not options.drop_unsupported:
        refuse_final_layer(ids, verifier, _DROP_HINT)
    width = verifier.hidden_size
    blocks = tensors["fc.weight"].split(width, dim=1)
    tensors["fc.weight"] = torch.cat([blocks[index] for index in kept], dim=1).contiguous()
    flat.notes.remark("the last verifier layer and its columns of fc were left out; the draft must be trained further")
    return [ids[index] for index in kept]


def default_target_layers(num_target_layers: int, num_draft_layers: int) -> list[int]:
    """Evenly from layer 1 to the third from last, as outputs of decoder layers; the middle one for a single draft layer."""
    if num_draft_layers == 1:
        return [num_target_layers // 2]
    step = (num_target_layers - 4) / (num_draft_layers - 1)
    return [round(1 + index * step) for index in range(num_draft_layers)]


def _split_fused(tensors: dict[str, Tensor], decoder: Any) -> dict[str, Tensor]:
    """Laguna's ``qkv_proj`` as separate projections: queries, keys, values, in this order of rows."""
    sizes = [decoder.num_attention_heads * decoder.head_dim] + [decoder.num_key_value_heads * decoder.head_dim] * 2
    result = {}
    for name, tensor in tensors.items():
        if ".qkv_proj." not in name:
            result[name] = tensor
            continue
        if tensor.shape[0] != sum(sizes):
            raise ConfigError(
                f"{name} has {tensor.shape[0]} rows, but the config's heads ask for {sum(sizes)}; the file is of another draft"
            )
        for part, rows in zip(("q_proj", "k_proj", "v_proj"), tensor.split(sizes, dim=0), strict=True):
            result[name.replace("qkv_proj", part)] = rows.contiguous()
    return result


def _refuse_laguna(
    source: ForeignCheckpoint, tensors: dict[str, Tensor], options: ConversionOptions, notes: ConversionNotes
) -> None:
    """Laguna's extra tensors have no counterpart; without them the network is another one."""
    extra = sorted(name for name in tensors if any(mark in name for mark in _LAGUNA_ONLY))
    if not extra and _LAGUNA not in source.architectures:
        return
    if not options.drop_unsupported:
        found = f"{extra[0]} and {len(extra) - 1} more tensors" if extra else "context that each layer norms again"
        raise ConfigError(f"this is a Laguna draft with {found}, which DFlash does not have; {_DROP_HINT}")
    for name in extra:
        del tensors[name]
    notes.remark(f"Laguna's network was cut to DFlash's ({len(extra)} tensors left out); the draft must be trained further")


def write_zlab_dflash(conversion: Conversion) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Config and tensors of the native form, which vLLM serves as method ``dflash``; tensor names are the same.

    :raises ConfigError: the layout is anchor-first, which the form cannot say.
    """
    config: DFlashSpeculatorConfig = conversion.config
    if config.sample_from_anchor:
        raise ConfigError(
            "vLLM drafts DFlash blocks fill-in only, and this draft is anchor-first; train it with sample_from_anchor false"
        )
    sliding = sliding_keys(conversion)
    nested = sliding.pop("dflash_config", {}) | {
        "target_layer_ids": foreign_ids(config.aux_hidden_state_layer_ids),
        "mask_token_id": config.mask_token_id,
    }
    flat = flat_decoder(config.transformer_layer_config) | {
        "architectures": [ARCHITECTURE],
        "block_size": config.block_size,
        "draft_vocab_size": config.draft_vocab_size,
        "dflash_config": nested,
    }
    return flat | sliding, dict(conversion.tensors)
