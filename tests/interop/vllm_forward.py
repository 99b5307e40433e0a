"""Runs in vLLM's environment: vLLM's own draft models and proposers on given contexts, without an engine.

    python vllm_forward.py JOB_FOLDER

``job.json`` in the folder: ``cases``, each with ``name``, ``model`` and ``speculative_config`` as one gives them to vLLM (a
draft in the speculators format is the ``model``, without more). ``contexts.safetensors``: ``tokens.I`` [T + 1], a context and
its anchor, and per case ``CASE.I.features`` [T, M, H], the verifier's states.

vLLM reads the draft's config and weights itself; attention is its own CPU kernel over a paged cache that is allocated here. A
DFlash or Eagle3 draft is run by vLLM's proposer. DSpark has one only in the runner that needs Triton, so the few lines between
its model's methods are written here; the engine runs of ``test_vllm_serving.py`` check them. Writes ``results.safetensors``
(``CASE.I.hidden`` [n, H], ``.tokens`` [n], ``.confidence`` [n], ``.target_features`` [T, M, H]) and prints, as JSON, what vLLM
made of each config, or the error with which it refused it.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import vllm
import vllm.config.vllm
import vllm.v1.worker.cpu.shm  # as vLLM's CPU worker does: replaces what needs an accelerator
from safetensors.torch import load_file, save_file
from torch import Tensor
from vllm.config import VllmConfig, get_layers_from_vllm_config, set_current_vllm_config
from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
from vllm.engine.arg_utils import EngineArgs
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.model_loader import get_model
from vllm.platforms import current_platform
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec
from vllm.v1.spec_decode.dflash import DFlashProposer
from vllm.v1.spec_decode.eagle import EagleProposer
from vllm.v1.worker.gpu.spec_decode.dflash.utils import load_dflash_model
from vllm.v1.worker.gpu.spec_decode.dspark.utils import load_dspark_model
from vllm.v1.worker.gpu.spec_decode.eagle.eagle3_utils import get_eagle3_aux_layers_from_config
from vllm.v1.worker.gpu.spec_decode.utils import get_parallel_drafting_token_id

# The validation of a DSpark config asks for Triton, which only the runner needs that is never made here.
vllm.config.vllm.HAS_TRITON = True
# The kernels that vLLM's CPU worker puts in Triton's place.
current_platform.register_triton_kernel_overrides()

MAX_LENGTH = 512
CPU = torch.device("cpu")


class Paged:
    """A paged key-value cache of one request for every attention layer of a config, and vLLM's metadata for passes over it."""

    def __init__(self, config: VllmConfig) -> None:
        self.config = config
        self.layers = get_layers_from_vllm_config(config, AttentionLayerBase)
        self.block = config.cache_config.block_size
        # Blocks in reverse order, so that a mistake in paging shows.
        self.blocks = torch.arange(MAX_LENGTH // self.block - 1, -1, -1, dtype=torch.int32)
        self.specs, self.builders = {}, {}
        for name, layer in self.layers.items():
            backend = layer.get_attn_backend()
            self.specs[name] = spec = layer.get_kv_cache_spec(config)
            self.builders[name] = backend.get_builder_cls()(spec, [name], config, CPU)
            if backend.is_mla():
                layer.kv_cache = torch.zeros(len(self.blocks), self.block, spec.head_size)
            else:
                layer.kv_cache = torch.zeros(len(self.blocks), spec.num_kv_heads, self.block, 2 * spec.head_size)

    def slots(self, positions: Tensor) -> Tensor:
        return self.blocks[positions // self.block].long() * self.block + positions % self.block

    def common(self, start: int, count: int, causal: bool) -> CommonAttentionMetadata:
        """Metadata of a pass of ``count`` tokens from position ``start``."""
        starts = torch.tensor([0, count], dtype=torch.int32)
        return CommonAttentionMetadata(
            query_start_loc=starts,
            query_start_loc_cpu=starts,
            seq_lens=torch.tensor([start + count], dtype=torch.int32),
            seq_lens_cpu_upper_bound=torch.tensor([start + count], dtype=torch.int32),
            num_reqs=1,
            num_actual_tokens=count,
            max_query_len=count,
            max_seq_len=start + count,
            block_table_tensor=self.blocks[None],
            slot_mapping=self.slots(torch.arange(start, start + count)),
            causal=causal,
        )

    def forward(self, start: int, count: int, causal: dict[str, bool]) -> Any:
        """The forward context of a pass through the layers named in ``causal``."""
        metadata, slots = {}, {}
        for name, is_causal in causal.items():
            common = self.common(start, count, is_causal)
            metadata[name] = self.builders[name].build(0, common)
            slots[name] = common.slot_mapping
        return set_forward_context(metadata, self.config, num_tokens=count, slot_mapping=slots)


def norm_keys_by_layer(inner: Any) -> None:
    """Norm context keys with each layer's own weight, as the model's code says and its CUDA kernel does.

    The CPU kernel of 0.32.0 takes the first layer's weight for all layers, so a CPU engine drafts right with one layer only.
    """

    def normalize(keys: Tensor) -> Tensor:  # [L, T, g, c]
        weights = inner._k_norm_weights[:, None, None]
        return torch.nn.functional.rms_norm(keys, keys.shape[-1:], eps=inner._rms_norm_eps) * weights

    inner._normalize_context_k = normalize


def target_features(target: Any, paged: Paged, names: list[str], tokens: Tensor) -> Tensor:
    """vLLM's own states ``[T, M, H]`` of the verifier."""
    with paged.forward(0, len(tokens), dict.fromkeys(names, True)):
        _, captured = target(tokens.int(), torch.arange(len(tokens)))
    return torch.stack(captured, dim=1)


def draft_block(model: Any, paged: Paged, config: VllmConfig, features: Tensor, anchor: int) -> dict[str, Tensor]:
    """One block of DSpark, or of DFlash where vLLM has no proposer for the layers, after ``T`` context tokens."""
    hf = model.config
    n = config.speculative_config.num_speculative_tokens
    dspark = hasattr(model, "markov_embed")
    from_anchor = bool(getattr(hf, "sample_from_anchor", True)) if dspark else False
    length, slots = len(features), n if from_anchor else n + 1
    model.precompute_and_store_context_kv(
        model.combine_hidden_states(features.flatten(1)), torch.arange(length), paged.slots(torch.arange(length))
    )
    ids = torch.full((slots,), get_parallel_drafting_token_id(hf), dtype=torch.int32)
    ids[0] = anchor
    causal = dict(zip(model.get_draft_kv_cache_layer_names(), model.get_draft_attn_causal()))
    with paged.forward(length, slots, causal):
        hidden = model(input_ids=ids, positions=torch.arange(length, length + slots))[slots - n :]
    if not dspark:
        return {"hidden": hidden, "tokens": model.compute_logits(hidden).argmax(-1)}
    base, previous, tokens, embeds = model.compute_draft_logits(hidden), torch.tensor([anchor]), [], []
    for depth in range(n):
        embeds.append(model.markov_embed(previous))
        logits = base[depth : depth + 1] + model.markov_bias(embeds[-1])
        previous = model.map_draft_to_target(logits.argmax(-1))
        tokens.append(previous)
    drafted = {"hidden": hidden, "tokens": torch.cat(tokens)}
    if model.model.confidence_head is not None:
        drafted["confidence"] = model.compute_confidence(hidden, torch.cat(embeds))
    return drafted


def draft_by_proposer(proposer: Any, paged: Paged, features: Tensor, tokens: Tensor) -> dict[str, Tensor]:
    """What vLLM's proposer drafts after a prompt; the states are those from which it samples."""
    states: list[Tensor] = []
    greedy = proposer._greedy_sample

    def recorded(hidden: Tensor) -> Tensor:
        states.append(hidden.clone())
        return greedy(hidden)

    proposer._greedy_sample = recorded
    length = len(features)
    drafted = proposer.propose(
        proposer.speculative_config.num_speculative_tokens,
        target_token_ids=tokens[:-1].int(),
        target_positions=torch.arange(length),
        target_hidden_states=features.flatten(1),
        next_token_ids=tokens[-1:].int(),
        token_indices_to_sample=None,
        common_attn_metadata=paged.common(0, length, True),
        sampling_metadata=SimpleNamespace(all_greedy=True),
    )
    proposer._greedy_sample = greedy
    return {"hidden": torch.cat(states), "tokens": drafted[0].long()}


def load_proposer(config: VllmConfig, target: Any) -> Any:
    proposer = (DFlashProposer if config.speculative_config.method == "dflash" else EagleProposer)(config, CPU)
    proposer.load_model(target)
    return proposer


def attach(proposer: Any, paged: Paged) -> None:
    """Give a proposer the attention groups that a runner would give it."""
    names = sorted(proposer._draft_attn_layer_names)
    group = KVCacheGroupSpec(names, paged.specs[names[0]])
    proposer.initialize_attn_backend(KVCacheConfig(len(paged.blocks), [], [group]))


def run_case(case: dict[str, Any], contexts: dict[str, Tensor], results: dict[str, Tensor]) -> dict[str, Any]:
    name = case["name"]
    arguments = EngineArgs(
        model=case["model"],
        dtype="float32",
        enforce_eager=True,
        max_model_len=MAX_LENGTH,
        max_num_batched_tokens=MAX_LENGTH,
        max_num_seqs=2,
        block_size=case["block_size"],
        speculative_config=case["speculative_config"],
    )
    config = arguments.create_engine_config()
    speculative = config.speculative_config
    with set_current_vllm_config(config), torch.inference_mode():
        ensure_model_parallel_initialized(1, 1)
        target = get_model(vllm_config=config)
        target_names = list(get_layers_from_vllm_config(config, AttentionLayerBase))
        layer_ids = get_eagle3_aux_layers_from_config(speculative) or target.get_eagle3_default_aux_hidden_state_layers()
        target.set_aux_hidden_state_layers(layer_ids)
        types = getattr(speculative.draft_model_config.hf_config, "layer_types", None) or []
        mixed = len(set(types)) > 1 and speculative.method == "dflash"
        proposer = None
        if speculative.method == "dspark":
            model = load_dspark_model(target, config)
        elif mixed:
            model = load_dflash_model(target, config)
        else:
            proposer = load_proposer(config, target)
            model = proposer.model
        if hasattr(model.model, "_normalize_context_k") and not case["cpu_key_norm"]:
            norm_keys_by_layer(model.model)
        paged = Paged(config)
        if proposer is not None:
            attach(proposer, paged)
        for index in range(sum(key.startswith("tokens.") for key in contexts)):
            tokens, features = contexts[f"tokens.{index}"], contexts[f"{name}.{index}.features"]
            if proposer is None:
                drafted = draft_block(model, paged, config, features, int(tokens[-1]))
            else:
                drafted = draft_by_proposer(proposer, paged, features, tokens)
            drafted["target_features"] = target_features(target, paged, target_names, tokens[:-1])
            results.update({f"{name}.{index}.{key}": value.contiguous() for key, value in drafted.items()})
        draft_names = [layer for layer in paged.layers if layer not in target_names]
        return {
            "method": speculative.method,
            "model": type(model).__name__,
            "num_speculative_tokens": speculative.num_speculative_tokens,
            "layer_ids": list(layer_ids),
            "causal": model.get_draft_attn_causal() if hasattr(model, "get_draft_attn_causal") else None,
            "windows": [getattr(paged.layers[layer], "sliding_window", None) for layer in draft_names],
        }


def main(folder: Path) -> None:
    job = json.loads((folder / "job.json").read_text(encoding="utf-8"))
    contexts = load_file(folder / "contexts.safetensors")
    results: dict[str, Tensor] = {}
    # Before this process has threads, which a fork would not have.
    reports = {case["name"]: in_a_fork(case, contexts) for case in job["cases"] if case["crashes"]}
    gc.collect()
    gc.freeze()  # vLLM collects garbage after each model, which would go through all that was imported every time
    with distributed():
        for case in job["cases"]:
            if case["crashes"]:
                continue
            try:
                reports[case["name"]] = run_case(case, contexts, results)
            except Exception as error:
                traceback.print_exc()
                reports[case["name"]] = {"error": f"{type(error).__name__}: {error}"}
    save_file(results, folder / "results.safetensors")
    print(json.dumps({"version": vllm.__version__, "cases": reports}))


@contextmanager
def distributed() -> Iterator[None]:
    """A process group of one process."""
    with tempfile.TemporaryDirectory() as work:
        with set_current_vllm_config(VllmConfig()):
            init_distributed_environment(1, 0, f"file://{work}/store", 0, "gloo")
        yield


def in_a_fork(case: dict[str, Any], contexts: dict[str, Tensor]) -> dict[str, str]:
    """How a process ends that runs a case."""
    child = os.fork()
    if child == 0:
        with distributed():
            run_case(case, contexts, {})
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return {"error": f"the process ends with {signal.Signals(-code).name if code < 0 else f'exit code {code}'}"}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
