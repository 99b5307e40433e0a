"""Deliberately broken checkpoints: what is done to a good one, and the one finding that must come of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.checks.drafts import HIDDEN, KEPT, VOCAB, change_config, change_tensors

Change = Callable[[Path], Any]


@dataclass(frozen=True)
class Broken:
    """One fault."""

    name: str
    expected: str  #: id of the finding
    change: Change = lambda folder: None
    family: str = "dspark"
    build: dict[str, Any] = field(default_factory=dict)  #: values that the checkpoint is made with
    verifier: str = "verifier"  #: folder of the verifier that the checkpoint names
    also: tuple[str, ...] = ()  #: findings of a second fault


def put(*path: Any, value: Any) -> Change:
    """Set a key of the config."""

    def change(values: dict[str, Any]) -> None:
        place: Any = values
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = value

    return lambda folder: change_config(folder, change)


def drop(*path: Any) -> Change:
    """Remove a key of the config."""

    def change(values: dict[str, Any]) -> None:
        place: Any = values
        for key in path[:-1]:
            place = place[key]
        del place[path[-1]]

    return lambda folder: change_config(folder, change)


def both(*changes: Change) -> Change:
    def change(folder: Path) -> None:
        for one in changes:
            one(folder)

    return change


def tensor(name: str, new: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    """Replace a tensor by a function of it."""
    return lambda folder: change_tensors(folder, lambda tensors: tensors.update({name: new(tensors[name].clone())}))


def renamed(old: str, new: str) -> Change:
    """Give tensors another prefix."""

    def change(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.startswith(old)]:
            tensors[new + name.removeprefix(old)] = tensors.pop(name)

    return lambda folder: change_tensors(folder, change)


def without(*names: str) -> Change:
    return lambda folder: change_tensors(folder, lambda tensors: [tensors.pop(name) for name in names])


def added(name: str, *shape: int) -> Change:
    value = torch.ones(*shape, dtype=torch.bfloat16)
    return lambda folder: change_tensors(folder, lambda tensors: tensors.update({name: value}))


def cast(dtype: torch.dtype) -> Change:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors.update({name: value.to(dtype) for name, value in tensors.items() if value.is_floating_point()})

    return lambda folder: change_tensors(folder, change)


def at(index: Any, value: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    def new(old: torch.Tensor) -> torch.Tensor:
        old[index] = value
        return old

    return new


def write(name: str, content: bytes) -> Change:
    return lambda folder: (folder / name).write_bytes(content)


def remove(name: str) -> Change:
    return lambda folder: (folder / name).unlink()


def cut(folder: Path) -> None:
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:-1000])


def cut_in_the_header(folder: Path) -> None:
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:100])


def pickle_weights(folder: Path) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def shard(folder: Path, *, lose_file: bool) -> None:
    """Two shards and their index; then the second is lost, or a tensor of it."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    files = {name: f"model-0000{1 + (name > 'm')}-of-00002.safetensors" for name in names}
    for file in set(files.values()):
        kept = {name: tensors[name] for name in names if files[name] == file and (lose_file or name != "norm.weight")}
        if not (lose_file and file.startswith("model-00002")):
            save_file(kept, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))


def swap_offsets(d2t: torch.Tensor) -> torch.Tensor:
    """Offsets under which draft ids 3 and 4 have each other's verifier ids."""
    d2t[3], d2t[4] = d2t[4] + 1, d2t[3] - 1
    return d2t


def absolute(d2t: torch.Tensor) -> torch.Tensor:
    return d2t + torch.arange(KEPT)


def move_one(t2d: torch.Tensor) -> torch.Tensor:
    """The same number of ids, one of them another."""
    t2d[int(t2d.nonzero()[0])] = False
    t2d[int((~t2d).nonzero()[-1])] = True
    return t2d


EAGLE_LAYERS, Q_PROJ = "eagle_aux_hidden_state_layer_ids", "layers.0.self_attn.q_proj.weight"
DECODER = "transformer_layer_config"
VERIFIER, PROPOSAL = ("speculators_config", "verifier"), ("speculators_config", "proposal_methods", 0)
LATENT = {"made_for": "latent", "decoder": {"draft_arch": "deepseek_v3"}}
SLIDING = {"decoder": {"sliding_window": 32}}
MIXED = {"decoder": {"sliding_window": 32, "full_attention_indices": [0]}, "sliding_window_non_causal": True}

BROKEN = [
    # files
    Broken("no config", "config-missing", remove("config.json")),
    Broken("config cut off", "config-not-json", write("config.json", b'{"speculators_model_type": "dsp')),
    Broken("config is a list", "config-not-json", write("config.json", b"[1, 2]")),
    Broken("config is binary", "config-not-json", write("config.json", b"\xff\xfe\x00")),
    Broken("no weights", "weights-missing", remove("model.safetensors")),
    Broken("pickled weights only", "weights-pickled-only", pickle_weights),
    Broken("weights cut off", "weights-truncated", cut),
    Broken("weights cut off in the header", "weights-truncated", cut_in_the_header),
    Broken("weights empty", "weights-truncated", write("model.safetensors", b"")),
    Broken(
        "a pointer in place of weights",
        "weights-unreadable",
        write("model.safetensors", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"),
    ),
    Broken("a shard is missing", "weights-shard-missing", lambda folder: shard(folder, lose_file=True)),
    Broken("a tensor of a shard is missing", "weights-shard-missing", lambda folder: shard(folder, lose_file=False)),
    # config
    Broken("no type", "type-missing", drop("speculators_model_type")),
    Broken("unknown type", "type-unknown", put("speculators_model_type", value="dspark9")),
    Broken("no mask token", "required-key-missing", drop("mask_token_id")),
    Broken("no layer ids", "required-key-missing", drop("aux_hidden_state_layer_ids")),
    Broken("no proposal", "required-key-missing", put("speculators_config", "proposal_methods", value=[])),
    Broken("no verifier", "required-key-missing", put(*VERIFIER, "name_or_path", value=None)),
    Broken("no decoder", "required-key-missing", drop(DECODER)),
    Broken("no layout flag", "layout-flag-missing", drop("sample_from_anchor")),
    Broken("no confidence flag", "key-missing-engines-differ", drop("enable_confidence_head")),
    Broken("no rope", "key-missing-engines-differ", drop(DECODER, "rope_parameters")),
    Broken("no causality flag", "key-missing-engines-differ", drop("sliding_window_non_causal"), "dflash"),
    Broken("no block size", "key-missing", drop("block_size")),
    Broken("no layout flag in DFlash", "key-missing", drop("sample_from_anchor"), "dflash"),
    Broken("impossible tolerance", "config-invalid", put(*PROPOSAL, "accept_tolerance", value=-1.0)),
    Broken("unknown final state", "config-invalid", put("final_state", value="mid_norm")),
    Broken("too many tokens", "layout-contradicts-tokens", put(*PROPOSAL, "speculative_tokens", value=9)),
    Broken("flag flipped", "layout-contradicts-tokens", put("sample_from_anchor", value=False)),
    Broken("tokens of the other layout", "layout-suspicious-tokens", put(*PROPOSAL, "speculative_tokens", value=7)),
    Broken("a block of one slot", "block-size-too-small", put("block_size", value=1), "dflash"),
    Broken("another algorithm", "algorithm-contradicts-type", put("speculators_config", "algorithm", value="eagle3")),
    Broken("tied", "tied-embeddings", put("tie_word_embeddings", value=True)),
    Broken("tied decoder", "tied-embeddings", put(DECODER, "tie_word_embeddings", value=True)),
    Broken("auto_map", "stray-config-code", put("auto_map", value={"": "config.DSparkSpeculatorConfig"})),
    Broken("config.py", "stray-config-code", write("config.py", b"import os\n")),
    Broken("a llama decoder", "decoder-type-unsupported", put(DECODER, "model_type", value="llama")),
    Broken("uneven heads", "heads-contradict", put(DECODER, "num_key_value_heads", value=3)),
    # captured layers
    Broken(
        "native key",
        "layer-ids-native-key",
        both(drop("aux_hidden_state_layer_ids"), put("target_layer_ids", value=[1, 3, 4])),
    ),
    Broken("native key not shifted", "layer-ids-native-contradict", put("target_layer_ids", value=[2, 4, 5])),
    Broken("layer ids as text", "layer-ids-malformed", put("aux_hidden_state_layer_ids", value="2,4,5")),
    Broken("negative layer id", "layer-ids-negative", put("aux_hidden_state_layer_ids", value=[-1, 4, 5])),
    Broken("layer id twice", "layer-ids-duplicate", put("aux_hidden_state_layer_ids", value=[2, 4, 4])),
    Broken("layer ids unordered", "layer-ids-unordered", put("aux_hidden_state_layer_ids", value=[5, 2, 4])),
    Broken("layer id too high", "layer-ids-out-of-range", put("aux_hidden_state_layer_ids", value=[2, 4, 9])),
    Broken("final layer", "layer-ids-final-layer", put("aux_hidden_state_layer_ids", value=[2, 4, 8])),
    Broken("embeddings captured", "layer-ids-embeddings", put("aux_hidden_state_layer_ids", value=[0, 4, 5])),
    Broken("layer ids one low", "layer-ids-off-by-one", put("aux_hidden_state_layer_ids", value=[1, 3, 4])),
    Broken("last layer appended", "feature-width-mismatch", put("aux_hidden_state_layer_ids", value=[2, 4, 5, 7])),
    # vocabulary
    Broken("mask token too high", "mask-token-out-of-range", put("mask_token_id", value=VOCAB)),
    Broken("mask token negative", "mask-token-out-of-range", put("mask_token_id", value=-1)),
    Broken("mask token is eos", "mask-token-is-special", put("mask_token_id", value=2)),
    Broken("empty mask row", "mask-embedding-zero", tensor("embed_tokens.weight", at(3, 0.0))),
    Broken("draft vocabulary too large", "draft-vocabulary-above-verifier", put("draft_vocab_size", value=VOCAB + 1)),
    Broken("wrong draft vocabulary", "draft-vocabulary-size-wrong", put("draft_vocab_size", value=KEPT - 1)),
    Broken("no d2t", "d2t-missing", without("d2t")),
    Broken("no t2d", "t2d-missing", without("t2d")),
    Broken("short d2t", "d2t-length", tensor("d2t", lambda old: old[:-1])),
    Broken("d2t in int32", "d2t-dtype", tensor("d2t", lambda old: old.int())),
    Broken("d2t of ids", "d2t-absolute-ids", tensor("d2t", absolute)),
    Broken("d2t of ids, no t2d", "d2t-absolute-ids", both(tensor("d2t", absolute), without("t2d")), also=("t2d-missing",)),
    Broken("d2t past the end", "d2t-out-of-range", tensor("d2t", at(-1, 1000))),
    Broken("d2t negative", "d2t-out-of-range", tensor("d2t", at(0, -5))),
    Broken("d2t unordered", "d2t-not-ascending", tensor("d2t", swap_offsets)),
    Broken("short t2d", "t2d-length", tensor("t2d", lambda old: old[:-1])),
    Broken("t2d keeps one more", "t2d-count", tensor("t2d", lambda old: at(int((~old).nonzero()[0]), True)(old))),
    Broken("t2d of another mapping", "t2d-contradicts-d2t", tensor("t2d", move_one)),
    Broken(
        "tables of a whole vocabulary",
        "vocabulary-tables-unneeded",
        tensor("lm_head.weight", lambda old: old),
        build={"reduced": False, "tables": True},
    ),
    Broken("no lm_head", "lm-head-missing", without("lm_head.weight")),
    Broken("short lm_head", "lm-head-rows", tensor("lm_head.weight", lambda old: old[:-1])),
    Broken("W1 in draft ids", "markov-w1-rows", tensor("markov_head.markov_w1.weight", lambda old: old[:KEPT])),
    Broken(
        "W2 in verifier ids", "markov-w2-rows", tensor("markov_head.markov_w2.weight", lambda old: old.repeat(2, 1)[:VOCAB])
    ),
    Broken("confidence without Markov", "confidence-width", put("confidence_head_with_markov", value=False)),
    # EAGLE-3 and P-EAGLE
    Broken("no residual norm", "key-missing-engines-differ", drop("norm_before_residual"), "eagle3"),
    Broken("an EAGLE repository's names", "midlayer-names", renamed("layers.0.", "midlayer."), "eagle3"),
    Broken("both norms", "norms-before-fc-both", put("fc_norm", value=True), "eagle3"),
    Broken("a trained embedding lost", "tensor-missing", without("embed_tokens.weight"), "peagle"),
    Broken("no mask state", "mask-hidden-missing", without("mask_hidden"), "peagle"),
    Broken("no mask token in P-EAGLE", "required-key-missing", drop("mask_token_id"), "peagle"),
    Broken("a norm that vLLM ignores", "peagle-norms-ignored", put("norm_output", value=True), "peagle"),
    Broken("latent attention", "mla-needs-native-config", family="eagle3", build=LATENT | {"norm_before_fc": False}),
    Broken("latent attention and a norm that vLLM lacks", "mla-without-native-form", family="eagle3", build=LATENT),
    Broken(
        "two layers of a Llama decoder",
        "vllm-reads-three-layers",
        family="eagle3",
        build={"decoder": {"draft_arch": "llama"}, EAGLE_LAYERS: [2, 4]},
    ),
    Broken("biases", "vllm-drops-output-bias", family="eagle3", build={"change_decoder": {"attention_bias": True}}),
    Broken("layers left open", "layer-ids-left-open", put(EAGLE_LAYERS, value=None), "eagle3"),
    Broken("four layers of three", "feature-width-mismatch", put(EAGLE_LAYERS, value=[2, 4, 5, 7]), "eagle3"),
    Broken(
        "a narrow first layer",
        "tensor-shape",
        tensor(Q_PROJ, lambda old: old[:, :HIDDEN]),
        "eagle3",
    ),
    # MTP
    Broken("no state named", "mtp-state-before-norm", drop("hidden_state_input"), "mtp"),
    Broken("state before the norm", "mtp-state-before-norm", put("hidden_state_input", value="pre_norm"), "mtp"),
    Broken("a verifier of other depth", "mtp-verifier-layers", put(DECODER, "num_hidden_layers", value=7), "mtp"),
    Broken("no MTP norm", "tensor-missing", without("mtp_layers.0.token_layernorm.weight"), "mtp"),
    # tensors
    Broken("no final norm", "tensor-missing", without("norm.weight")),
    Broken("a foreign tensor", "tensor-unexpected", added("midlayer.self_attn.q_proj.weight", 2, 2)),
    Broken("the trainer's copies", "tensor-superfluous", added("verifier_norm.weight", HIDDEN)),
    Broken("a narrow MLP", "tensor-shape", tensor("layers.1.mlp.up_proj.weight", lambda old: old[:-1])),
    Broken("float32", "weights-not-bfloat16", both(cast(torch.float32), put("dtype", value="float32"))),
    Broken("float16", "weights-not-bfloat16", both(cast(torch.float16), put("dtype", value="float16"))),
    Broken("mixed types", "weights-mixed-dtype", tensor("fc.weight", lambda old: old.float())),
    Broken("dtype key", "dtype-key-contradicts", put("dtype", value="float32")),
    Broken("NaN", "tensor-not-finite", tensor("layers.0.mlp.up_proj.weight", at((3, 4), float("nan")))),
    Broken("an unread embedding", "tensor-not-finite", tensor("embed_tokens.weight", lambda old: old * float("nan"))),
    Broken("infinity", "tensor-not-finite", tensor("norm.weight", at(0, float("inf")))),
    Broken("an empty matrix", "tensor-all-zero", tensor("fc.weight", torch.zeros_like)),
    # serving
    Broken("another activation", "vllm-needs-silu", build={"decoder": {"draft_hidden_act": "gelu"}}),
    Broken("DFlash as upstream writes it", "dflash-causal-in-vllm", put("sliding_window_non_causal", value=False), "dflash"),
    Broken("mixed layers", "mixed-attention-needs-v2", family="dflash", build={**MIXED, "sliding_window_reference": "slot"}),
    Broken(
        "window from the anchor",
        "window-measured-from-anchor",
        family="dspark",
        build={**MIXED, "sliding_window_non_causal": False},
    ),
    Broken(
        "non-causal window",
        "dspark-non-causal-window",
        build={**MIXED, "sliding_window_reference": "slot"},
    ),
    Broken(
        "no window size",
        "window-size-missing",
        put(DECODER, "sliding_window", value=None),
        build={**MIXED, "sliding_window_non_causal": False, "sliding_window_reference": "slot"},
    ),
    Broken(
        "window switched off",
        "window-flag-contradicts",
        put(DECODER, "use_sliding_window", value=False),
        build={**MIXED, "sliding_window_non_causal": False, "sliding_window_reference": "slot"},
    ),
    Broken("a layer type too few", "layer-types-length", put(DECODER, "layer_types", value=["full_attention"])),
    Broken("gated Markov head", "markov-type-unsupported", build={"markov_head_type": "gated"}),
    Broken("rnn Markov head", "markov-type-unsupported", build={"markov_head_type": "rnn"}),
    Broken("no Markov head", "markov-rank-zero", build={"markov_rank": 0, "confidence_head_with_markov": False}),
    # against the verifier
    Broken("verifier moved", "verifier-not-found", put(*VERIFIER, "name_or_path", value="/nowhere/model")),
    Broken("a wider verifier", "hidden-size-mismatch", verifier="wide"),
    Broken("a verifier of more tokens", "vocab-size-mismatch", verifier="wordy"),
    Broken(
        "another architecture",
        "verifier-architecture-differs",
        put(*VERIFIER, "architectures", value=["MistralForCausalLM"]),
    ),
    Broken("another theta", "rope-theta-mismatch", put(DECODER, "rope_parameters", "rope_theta", value=50000.0)),
    Broken(
        "another scaling",
        "rope-scaling-mismatch",
        put(DECODER, "rope_parameters", value={"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}),
    ),
    Broken("another head size", "head-dim-differs", build={"change_decoder": {"head_dim": 16}}),
    Broken("another epsilon", "norm-eps-mismatch", put(DECODER, "rms_norm_eps", value=1e-5)),
    Broken("fewer positions", "positions-below-verifier", put(DECODER, "max_position_embeddings", value=128)),
    Broken(
        "windows only",
        "window-shorter-than-context",
        family="dflash",
        build={**SLIDING, "sliding_window_reference": "slot"},
    ),
    Broken("a trained embedding", "embedding-differs", tensor("embed_tokens.weight", lambda old: old * 1.5)),
    Broken("lm_head in another order", "lm-head-differs", tensor("lm_head.weight", lambda old: old.flip(0))),
]
