"""A tiny tokenizer with a chat template and tiny random verifiers, written as ordinary Hugging Face folders."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

#: ChatML, with the template text (a newline) after the end-of-turn token that must not be supervised.
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>", "<|unk|>")
END_OF_TURN = "<|im_end|>"
ROLES = ("system", "user", "assistant")
ALPHABET = "\n abcdefghijklmnopqrstuvwxyz0123456789.,?!+='-"
#: Ids the tokenizer uses; a verifier's vocabulary must have at least as many.
MIN_VOCAB = len(SPECIAL_TOKENS) + len(ALPHABET) + len(ROLES)


def tiny_tokenizer(chat_template: str | None = CHATML) -> PreTrainedTokenizerFast:
    """One token per character of :data:`ALPHABET` (lower-cased), one per role name and special token; 0 is end of text."""
    vocab = {token: index for index, token in enumerate((*SPECIAL_TOKENS, *ALPHABET))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<|unk|>"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer.add_tokens([AddedToken(role, normalized=False) for role in ROLES])
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<|unk|>",
        eos_token=END_OF_TURN,
        pad_token="<|endoftext|>",
        mask_token="<|mask|>",
        clean_up_tokenization_spaces=False,
    )
    wrapped.chat_template = chat_template
    return wrapped


def tiny_verifier(
    folder: Path,
    *,
    vocab: int = 64,
    layers: int = 4,
    hidden: int = 32,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int | None = None,
    intermediate: int = 64,
    max_positions: int = 512,
    tie: bool = False,
    seed: int = 0,
    initializer_range: float = 0.3,
    dtype: torch.dtype = torch.float32,
    name: str = "verifier",
) -> Path:
    """Write a random Llama verifier with :func:`tiny_tokenizer` under ``folder / name`` and return that path.

    ``initializer_range`` 0.3 makes distributions far from uniform, so that argmaxes are not near-ties.
    """
    if vocab < MIN_VOCAB:
        raise ValueError(f"the tiny tokenizer needs a vocabulary of at least {MIN_VOCAB}")
    tokenizer = tiny_tokenizer()
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim or hidden // heads,
        max_position_embeddings=max_positions,
        tie_word_embeddings=tie,
        initializer_range=initializer_range,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config).to(dtype).eval()
        with torch.no_grad():
            # Norm weights other than 1, so that a norm forgotten or applied twice shows.
            for parameter_name, parameter in model.named_parameters():
                if parameter_name.endswith("norm.weight"):
                    parameter.uniform_(0.5, 1.5)
    path = Path(folder) / name
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def random_rows(count: int, *, vocab: int = 64, min_length: int = 12, max_length: int = 40, seed: int = 0) -> list:
    """``count`` random :class:`speculators.data.rows.Row`: a prompt that is not supervised, then a supervised answer."""
    from speculators.data.rows import Row

    rng = np.random.default_rng(seed)
    rows = []
    for row_id in range(count):
        length = int(rng.integers(min_length, max_length + 1))
        prompt = int(rng.integers(2, max(3, length // 2)))
        mask = np.arange(length) >= prompt
        rows.append(Row(row_id, rng.integers(0, vocab, size=length, dtype=np.int64), mask))
    return rows
