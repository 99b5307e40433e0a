"""Configs of published drafts, to train more of their kind or to check figures against."""

from __future__ import annotations

from transformers import Qwen3Config

from speculators.config import VerifierConfig
from speculators.models.dspark import DSparkSpeculatorConfig

__all__ = ["kimi_k2_6"]


def kimi_k2_6(verifier: str = "moonshotai/Kimi-K2.6") -> DSparkSpeculatorConfig:
    """The shape of Novita's ``kimi-k2.6-dspark`` (their ``kimi-k2.7-code-dspark`` has the same): 1,745,747,969 trained weights.

    From its model card: three layers, 56 heads over 8 key heads of 128, rank 256, 32,000 of 163,840 ids, mask token 163608,
    states after the final norm. Its layer ids 1, 29, 57 count layers from 0, so they are 2, 30, 58 here. A block of 8 slots
    served with 7 tokens is the fill-in layout.

    :param verifier: folder or hub id to record.
    """
    layers = 3
    decoder = Qwen3Config(
        vocab_size=163840,
        hidden_size=7168,
        intermediate_size=18432,
        num_hidden_layers=layers,
        num_attention_heads=56,
        num_key_value_heads=8,
        head_dim=128,
        hidden_act="silu",
        max_position_embeddings=262144,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 50000.0},
        tie_word_embeddings=False,
        use_sliding_window=False,
        layer_types=["full_attention"] * layers,
    )
    return DSparkSpeculatorConfig.build(
        decoder,
        VerifierConfig(name_or_path=verifier, architectures=[]),
        num_verifier_layers=61,
        draft_vocab_size=32000,
        block_size=8,
        sample_from_anchor=False,
        aux_hidden_state_layer_ids=[2, 30, 58],
        mask_token_id=163608,
        markov_rank=256,
        markov_head_type="vanilla",
        enable_confidence_head=True,
        confidence_head_with_markov=True,
        final_state="post_norm",
    )
