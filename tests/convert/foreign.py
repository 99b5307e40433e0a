"""Writers of foreign checkpoints with known random tensors, made from the facts about each format and from no code of ours."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

VOCAB, HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD_DIM = 64, 32, 48, 4, 2, 8
VERIFIER_LAYERS = 6
#: Outputs of decoder layers, as foreign configs count.
FOREIGN_IDS = [0, 2, 3]
#: The same in ours.
IDS = [1, 3, 4]
MASK = VOCAB - 1
KEPT = 40


def write(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor], *, shards: int = 1, pickled: bool = False) -> Path:
    """A checkpoint folder: one weight file, ``shards`` of them with an index, or one pickled file."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    if pickled:
        torch.save(tensors, folder / "pytorch_model.bin")
    elif shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    else:
        weight_map = {}
        names = sorted(tensors)
        for shard in range(shards):
            filename = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
            part = {name: tensors[name] for name in names[shard::shards]}
            save_file(part, folder / filename, metadata={"format": "pt"})
            weight_map.update(dict.fromkeys(part, filename))
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def read(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Config and tensors of a folder with one weight file."""
    return json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")


def equal(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    """Same names, dtypes, shapes and bits."""
    return set(first) == set(second) and all(
        first[name].dtype == second[name].dtype and torch.equal(first[name], second[name]) for name in first
    )


class Random:
    """Random bfloat16 tensors from one seed; norms near 1, weights large enough that a wrong reading shows."""

    def __init__(self, seed: int = 0) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def weight(self, *shape: int) -> Tensor:
        return (torch.randn(*shape, generator=self.generator) * 0.3).bfloat16()

    def norm(self, *shape: int) -> Tensor:
        return (torch.rand(*shape, generator=self.generator) + 0.5).bfloat16()

    def kept(self) -> Tensor:
        """A mask of the verifier's ids with ``KEPT`` true ones."""
        mask = torch.zeros(VOCAB, dtype=torch.bool)
        mask[torch.randperm(VOCAB, generator=self.generator)[:KEPT]] = True
        return mask


def vocabulary_tables(mask: Tensor) -> dict[str, Tensor]:
    """``d2t`` as offsets and ``t2d``."""
    kept = mask.nonzero().flatten()
    return {"d2t": kept - torch.arange(len(kept)), "t2d": mask}


def qwen3_layer(random: Random, prefix: str, *, width: int = HIDDEN, head_norms: bool = True) -> dict[str, Tensor]:
    """A decoder layer whose projections read ``width`` entries."""
    tensors = {
        "self_attn.q_proj": random.weight(HEADS * HEAD_DIM, width),
        "self_attn.k_proj": random.weight(KV_HEADS * HEAD_DIM, width),
        "self_attn.v_proj": random.weight(KV_HEADS * HEAD_DIM, width),
        "self_attn.o_proj": random.weight(HIDDEN, HEADS * HEAD_DIM),
        "mlp.gate_proj": random.weight(INTERMEDIATE, HIDDEN),
        "mlp.up_proj": random.weight(INTERMEDIATE, HIDDEN),
        "mlp.down_proj": random.weight(HIDDEN, INTERMEDIATE),
        "input_layernorm": random.norm(HIDDEN),
        "post_attention_layernorm": random.norm(HIDDEN),
    }
    if head_norms:
        tensors |= {"self_attn.q_norm": random.norm(HEAD_DIM), "self_attn.k_norm": random.norm(HEAD_DIM)}
    return {f"{prefix}.{name}.weight": tensor for name, tensor in tensors.items()}


def block_tensors(random: Random, *, layers: int = 2, features: int = len(FOREIGN_IDS)) -> dict[str, Tensor]:
    """The backbone that DFlash, DSpark and their foreign forms share, without embedding and head."""
    tensors = {
        "fc.weight": random.weight(HIDDEN, features * HIDDEN),
        "hidden_norm.weight": random.norm(HIDDEN),
        "norm.weight": random.norm(HIDDEN),
    }
    for layer in range(layers):
        tensors |= qwen3_layer(random, f"layers.{layer}")
    return tensors


def markov_tensors(random: Random, kind: str, rank: int, draft_vocab: int = VOCAB) -> dict[str, Tensor]:
    tensors = {
        "markov_head.markov_w1.weight": random.weight(VOCAB, rank),
        "markov_head.markov_w2.weight": random.weight(draft_vocab, rank),
    }
    if kind == "gated":
        tensors |= {
            "markov_head.gate_proj.weight": random.weight(rank, HIDDEN + rank),
            "markov_head.gate_proj.bias": random.norm(rank),
        }
    if kind == "rnn":
        tensors |= {
            "markov_head.joint_proj.weight": random.weight(3 * rank, 2 * rank + HIDDEN),
            "markov_head.joint_proj.bias": random.norm(3 * rank),
        }
    return tensors


def qwen3_keys(layers: int = 2) -> dict[str, Any]:
    """Decoder keys of a flat config, in the spelling of transformers 4."""
    return {
        "model_type": "qwen3",
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 50000.0,
        "rope_scaling": None,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }


def deepspec_checkpoint(
    folder: Path, *, rank: int = 6, kind: str = "vanilla", confidence: bool = True, with_markov: bool = True, seed: int = 0
) -> tuple[Path, dict[str, Tensor]]:
    """DeepSpec's Qwen3 block draft; rank 0 without confidence is its DFlash."""
    random = Random(seed)
    tensors = block_tensors(random) | {
        "embed_tokens.weight": random.weight(VOCAB, HIDDEN),
        "lm_head.weight": random.weight(VOCAB, HIDDEN),
    }
    config = qwen3_keys() | {
        "architectures": ["Qwen3DSparkModel"],
        "block_size": 5,
        "target_layer_ids": FOREIGN_IDS,
        "mask_token_id": MASK,
        "num_anchors": 512,
        "num_target_layers": VERIFIER_LAYERS,
        "layer_types": ["full_attention"] * 2,
        "markov_rank": rank,
        "enable_confidence_head": confidence,
    }
    if rank:
        config["markov_head_type"] = kind
        tensors |= markov_tensors(random, kind, rank)
    if confidence:
        config["confidence_head_with_markov"] = with_markov
        tensors["confidence_head.proj.weight"] = random.weight(1, HIDDEN + (rank if with_markov else 0))
        tensors["confidence_head.proj.bias"] = random.weight(1)
    return write(folder, config, tensors), tensors


def zlab_checkpoint(folder: Path, *, seed: int = 0, **changes: Any) -> tuple[Path, dict[str, Tensor]]:
    """z-lab's DFlash; ``changes`` to the config, None removing a key."""
    tensors = block_tensors(Random(seed))
    config = qwen3_keys() | {
        "architectures": ["DFlashDraftModel"],
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "block_size": 4,
        "dflash_config": {"mask_token_id": MASK, "target_layer_ids": FOREIGN_IDS},
        "num_target_layers": VERIFIER_LAYERS,
        "tie_word_embeddings": True,
    }
    config = {key: value for key, value in (config | changes).items() if value is not None}
    return write(folder, config, tensors), tensors


def vllm_dspark_checkpoint(
    folder: Path, *, reduced: bool = False, confidence: bool = True, seed: int = 0, **changes: Any
) -> tuple[Path, dict[str, Tensor]]:
    """vLLM's native DSpark with all keys; ``changes`` to the config, None removing a key."""
    random = Random(seed)
    rank, draft_vocab = 6, KEPT if reduced else VOCAB
    tensors = block_tensors(random) | markov_tensors(random, "vanilla", rank, draft_vocab)
    config = qwen3_keys() | {
        "architectures": ["Qwen3DSparkModel"],
        "block_size": 5,
        "target_layer_ids": FOREIGN_IDS,
        "mask_token_id": MASK,
        "markov_rank": rank,
        "markov_head_type": "vanilla",
        "enable_confidence_head": confidence,
        "confidence_head_with_markov": confidence,
        "sample_from_anchor": True,
        "draft_vocab_size": draft_vocab,
    }
    if reduced:
        tensors |= {"lm_head.weight": random.weight(KEPT, HIDDEN)} | vocabulary_tables(random.kept())
    if confidence:
        tensors["confidence_head.proj.weight"] = random.weight(1, HIDDEN + rank)
        tensors["confidence_head.proj.bias"] = random.weight(1)
    config = {key: value for key, value in (config | changes).items() if value is not None}
    return write(folder, config, tensors), tensors


def old_speculators_checkpoint(
    folder: Path, family: str = "dspark", *, reduced: bool = True, seed: int = 0, **changes: Any
) -> tuple[Path, dict[str, Tensor]]:
    """A tree of before 0.9.0: every frozen and training tensor in the file, few keys in the config, stray ones besides.

    ``changes`` to the config, None removing a key. Returns the tensors that the draft needs.
    """
    random = Random(seed)
    rank, draft_vocab = 6, KEPT if reduced else VOCAB
    tensors = block_tensors(random) | {
        "embed_tokens.weight": random.weight(VOCAB, HIDDEN),
        "lm_head.weight": random.weight(draft_vocab, HIDDEN),
    }
    if reduced:
        tensors |= vocabulary_tables(random.kept())
    if family == "dspark":
        tensors |= markov_tensors(random, "vanilla", rank, draft_vocab)
        tensors |= {
            "confidence_head.proj.weight": random.weight(1, HIDDEN + rank),
            "confidence_head.proj.bias": random.weight(1),
        }
    training = {"verifier_lm_head.weight": random.weight(draft_vocab, HIDDEN), "verifier_norm.weight": random.norm(HIDDEN)}
    config = {
        "architectures": [{"dspark": "DSparkSpeculator", "dflash": "DFlashSpeculator"}[family]],
        "auto_map": {"": f"config.{family}"},
        "speculators_model_type": family,
        "speculators_version": "0.5.0",
        "transformer_layer_config": qwen3_keys() | {"layer_types": ["full_attention"] * 2},
        "draft_vocab_size": draft_vocab,
        "block_size": 5,
        "aux_hidden_state_layer_ids": IDS,
        "mask_token_id": MASK,
        "torch_dtype": "bfloat16",
        "has_no_defaults_at_init": False,
        "speculators_config": {
            "algorithm": family,
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {"proposal_type": "greedy", "speculative_tokens": 4, "verifier_accept_k": 1, "accept_tolerance": 0.0}
            ],
            "verifier": {"name_or_path": "someone/elsewhere", "architectures": ["LlamaForCausalLM"]},
        },
    }
    config = {key: value for key, value in (config | changes).items() if value is not None}
    return write(folder, config, tensors | training), tensors


#: Sizes of the latent attention of a small DeepSeek-style draft.
LATENT = {"q_lora_rank": 12, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6}


def latent_layer(random: Random, prefix: str, *, width: int, q_lora_rank: int | None) -> dict[str, Tensor]:
    """A DeepSeek decoder layer with a dense MLP, without the norm of the state."""
    nope, rope, value, latent = (
        LATENT[f"{name}"] for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "kv_lora_rank")
    )
    tensors = qwen3_layer(random, prefix)
    tensors = {name: tensor for name, tensor in tensors.items() if "self_attn" not in name}
    attention = {
        "kv_a_proj_with_mqa": random.weight(latent + rope, width),
        "kv_a_layernorm": random.norm(latent),
        "kv_b_proj": random.weight(HEADS * (nope + value), latent),
        "o_proj": random.weight(HIDDEN, HEADS * value),
    }
    if q_lora_rank:
        attention |= {
            "q_a_proj": random.weight(q_lora_rank, width),
            "q_a_layernorm": random.norm(q_lora_rank),
            "q_b_proj": random.weight(HEADS * (nope + rope), q_lora_rank),
        }
    else:
        attention["q_proj"] = random.weight(HEADS * (nope + rope), width)
    return tensors | {f"{prefix}.self_attn.{name}.weight": tensor for name, tensor in attention.items()}


def eagle3_checkpoint(
    folder: Path, kind: str = "llama", *, layer: str = "midlayer", reduced: bool = True, seed: int = 0, **changes: Any
) -> tuple[Path, dict[str, Tensor]]:
    """An EAGLE-3 draft with a ``llama``, ``qwen3`` or ``deepseek_v3`` layer; ``changes`` to the config, None removing a key.

    Returns the tensors under the names that speculators checkpoints use.
    """
    random = Random(seed)
    config: dict[str, Any] = qwen3_keys(1) | {"model_type": kind, "draft_vocab_size": KEPT if reduced else VOCAB}
    config["architectures"] = [{"deepseek_v3": "Eagle3DeepseekV2ForCausalLM"}.get(kind, "LlamaForCausalLMEagle3")]
    if kind == "deepseek_v3":
        config |= LATENT | {"num_key_value_heads": HEADS, "n_routed_experts": 256, "first_k_dense_replace": 3}
        del config["head_dim"]
    config |= changes
    features = 3
    tensors = {"fc.weight": random.weight(HIDDEN, features * HIDDEN), "norm.weight": random.norm(HIDDEN)}
    if config.get("norm_before_fc"):
        tensors["input_norm.weight"] = random.norm(features * HIDDEN)
    if config.get("fc_norm"):
        tensors |= {f"fc_norm.{index}.weight": random.norm(HIDDEN) for index in range(features)}
    if kind == "deepseek_v3":
        tensors |= latent_layer(random, "layers.0", width=2 * HIDDEN, q_lora_rank=config.get("q_lora_rank"))
    else:
        tensors |= qwen3_layer(random, "layers.0", width=2 * HIDDEN, head_norms=kind == "qwen3")
    tensors["layers.0.hidden_norm.weight"] = random.norm(HIDDEN)
    if reduced:
        tensors |= {"lm_head.weight": random.weight(KEPT, HIDDEN)} | vocabulary_tables(random.kept())
    foreign = {name.replace("layers.0.", f"{layer}."): tensor for name, tensor in tensors.items()}
    config = {key: value for key, value in config.items() if value is not None}
    return write(folder, config, foreign), tensors


def deepspec_eagle3_checkpoint(folder: Path, *, seed: int = 0, **changes: Any) -> tuple[Path, dict[str, Tensor]]:
    """DeepSpec's EAGLE-3 over five captured layers, embedding and head in the file."""
    random = Random(seed)
    tensors = qwen3_layer(random, "layers.0", width=2 * HIDDEN) | {
        "layers.0.hidden_norm.weight": random.norm(HIDDEN),
        "fc.weight": random.weight(HIDDEN, 5 * HIDDEN),
        "norm.weight": random.norm(HIDDEN),
        "embed_tokens.weight": random.weight(VOCAB, HIDDEN),
        "lm_head.weight": random.weight(VOCAB, HIDDEN),
    }
    config = qwen3_keys(1) | {
        "architectures": ["Qwen3Eagle3Model"],
        "target_layer_ids": [0, 1, 2, 3, 4],
        "num_target_layers": VERIFIER_LAYERS,
        "ttt_length": 4,
        "step_loss_decay": 0.8,
        "draft_num_hidden_layers": 1,
    }
    config = {key: value for key, value in (config | changes).items() if value is not None}
    return write(folder, config, tensors), tensors
