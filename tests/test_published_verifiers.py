"""A DSpark draft for tiny verifiers of the kinds in ``examples/``: trained, then decoded losslessly.

Kimi's have latent attention and experts; Gemma 4's layers have heads of two sizes, sliding windows and a soft cap.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText

from speculators.data import DataManifest, Row, RowDataset
from speculators.data.rows import AnswerRecord
from speculators.decoding import Decoder
from speculators.models import SpeculatorModel
from speculators.sampling import SamplingParams
from speculators.train import train
from speculators.verifiers.cache import PreallocatedCache, new_cache
from speculators.verifiers.generation import generate_answers
from speculators.verifiers.loading import load_verifier
from speculators.verifiers.session import TransformersSession
from tests.tiny import random_rows, tiny_tokenizer
from tests.train.helpers import settings

#: DeepSeek-V3 with Kimi's proportions: one dense layer, then experts; keys of 12, values of 8; YaRN past 8 positions.
TEXT: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.827,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 50000.0,
    "rope_scaling": {
        "type": "yarn",
        "factor": 64.0,
        "original_max_position_embeddings": 8,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
    "tie_word_embeddings": False,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "pos_emb_height": 4,
    "pos_emb_width": 4,
}
GEMMA: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "global_head_dim": 16,
    "num_global_key_value_heads": 1,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention", "full_attention"],
    "sliding_window": 6,
    "attention_k_eq_v": True,
    "final_logit_softcapping": 5.0,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "eos_token_id": 2,
}
ANSWER = 30


def published_verifier(kind: str, folder: Path) -> Path:
    """``deepseek_v3``, the same inside ``kimi_k25``, a model with images, under the names of Kimi's own files, or Gemma 4."""
    torch.manual_seed(1)
    if kind == "gemma4_unified":
        text = {"model_type": "gemma4_unified_text", **GEMMA}
        vision = {"patch_size": 2, "mm_embed_dim": 16, "mm_posemb_size": 8}
        model: Any = AutoModelForCausalLM.from_config(
            CONFIG_MAPPING[kind](text_config=text, vision_config=vision, audio_config={"audio_embed_dim": 16})
        )
    elif kind == "deepseek_v3":
        model: Any = AutoModelForCausalLM.from_config(
            CONFIG_MAPPING[kind](**{k: v for k, v in TEXT.items() if k != "model_type"})
        )
    else:
        config = CONFIG_MAPPING[kind](
            text_config=dict(TEXT), vision_config=dict(VISION), projection_hidden_size=16, tie_word_embeddings=False
        )
        model = AutoModelForImageTextToText.from_config(config)
    model.eval().save_pretrained(folder / "verifier")
    tiny_tokenizer().save_pretrained(folder / "verifier")
    return folder / "verifier"


@torch.no_grad()
def greedy(model: Any, prompt: list[int], count: int) -> list[int]:
    """Greedy decoding that runs the whole text again for every token."""
    text = list(prompt)
    for _ in range(count):
        text.append(int(model(input_ids=torch.tensor([text]), use_cache=False).logits[0, -1].argmax()))
        if text[-1] == TEXT["eos_token_id"]:
            break
    return text[len(prompt) :]


@pytest.mark.parametrize(
    ("kind", "layout"), [("deepseek_v3", "anchor-first"), ("kimi_k25", "fill-in"), ("gemma4_unified", "anchor-first")]
)
def test_a_draft_trains_and_decodes(kind: str, layout: str, tmp_path: Path) -> None:
    path = published_verifier(kind, tmp_path)
    verifier = load_verifier(path)
    prompts = [row.input_ids[:8].tolist() for row in random_rows(4, seed=3)]
    answers = dict(generate_answers(verifier, prompts, ANSWER, SamplingParams(temperature=0.0)))
    rows = [
        Row(index, np.array([*prompt, *answers[index]]), np.arange(len(prompt) + len(answers[index])) >= len(prompt))
        for index, prompt in enumerate(prompts)
    ]
    manifest = DataManifest(answers=AnswerRecord(on_policy=True, temperature=0.0, max_new_tokens=ANSWER))
    config = settings(
        tmp_path,
        block_size=8,
        sample_from_anchor=layout == "anchor-first",
        target_layer_ids=[2, 3],
        draft_vocab_size=60,
        sliding_window=0,
        final_state="post_norm",
        train_data_ratio=1.0,
        checkpoint_dtype="float32",
        total_seq_len=256,
        max_anchors=128,
        epochs=50,
    )
    losses: list[float] = []
    result = train(
        config,
        dataset=RowDataset.from_rows(rows, manifest),
        verifier=verifier,
        progress=False,
        on_step=lambda info: losses.append(info.metrics["loss"]),
    )
    assert losses[-1] < 0.85 * losses[0]

    precise = load_verifier(path, dtype=torch.float64)
    draft: Any = SpeculatorModel.from_pretrained(result.checkpoint, dtype=torch.float64)
    decoder = Decoder(lambda: TransformersSession(precise, draft.target_layer_ids), draft.drafter(), 7)
    decoded = [decoder.decode(prompt, ANSWER, precise.eos_ids) for prompt in prompts]
    expected = [greedy(precise.model, prompt, ANSWER) for prompt in prompts]
    assert [answer.tokens for answer in decoded] == expected
    rounds = sum(len(answer.rounds) for answer in decoded)
    assert sum(map(len, expected)) / rounds > 1.3


def test_expanded_latent_keys_fit_the_cache_in_place(tmp_path: Path) -> None:
    """Keys and values of different sizes, rolled back like any other; transformers keeps no latents."""
    verifier = load_verifier(published_verifier("deepseek_v3", tmp_path), dtype=torch.float64)
    assert isinstance(new_cache(verifier.config), PreallocatedCache)
    ids = torch.randint(5, 64, (30,), generator=torch.Generator().manual_seed(0))
    session = TransformersSession(verifier, (2,))
    session.prefill([ids[:12]])
    session.verify([torch.tensor([7, 8, 9, 10])])
    session.rollback([12])
    output = session.verify([ids[12:20]])[0]
    with torch.no_grad():
        whole = verifier.model(input_ids=ids[None, :20], use_cache=False).logits[0]
    torch.testing.assert_close(output.logits, whole[12:], rtol=1e-9, atol=1e-9)
