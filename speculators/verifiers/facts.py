"""What is known of a verifier without its weights, for whoever has its states from elsewhere."""

from __future__ import annotations

import os
from dataclasses import dataclass

from transformers import GenerationConfig, PretrainedConfig, PreTrainedTokenizerBase

from speculators.errors import VerifierError
from speculators.models.verifier_weights import read_verifier_config, text_config
from speculators.verifiers.loading import context_length_of, eos_ids_of, tokenizer_of, verifier_hash

__all__ = ["VerifierFacts", "describe_verifier"]


@dataclass(frozen=True, eq=False)
class VerifierFacts:
    """As the attributes of the same names of :class:`~speculators.verifiers.loading.Verifier`."""

    tokenizer: PreTrainedTokenizerBase | None
    config: PretrainedConfig
    name: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    eos_ids: tuple[int, ...]
    context_length: int | None
    hash: str


def describe_verifier(path: str | os.PathLike[str], trust_remote_code: bool = False) -> VerifierFacts:
    """Read a verifier's config and tokenizer.

    :param path: Hugging Face folder, or a hub id.
    :raises VerifierError: there is none, or its config does not say what is needed.
    """
    name = os.fspath(path)
    config = read_verifier_config(name, trust_remote_code)
    text = text_config(config)
    try:
        vocab_size, hidden_size, num_layers = int(text.vocab_size), int(text.hidden_size), int(text.num_hidden_layers)
    except (AttributeError, TypeError) as error:
        raise VerifierError(
            f"the config of {name} is not that of a language model ({error}); give a verifier's folder"
        ) from error
    return VerifierFacts(
        tokenizer=tokenizer_of(name, trust_remote_code),
        config=config,
        name=name,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_layers=num_layers,
        eos_ids=eos_ids_of(_generation_config(name), text),
        context_length=context_length_of(text),
        hash=verifier_hash(name, config),
    )


def _generation_config(name: str) -> GenerationConfig | None:
    try:
        return GenerationConfig.from_pretrained(name)
    except (OSError, ValueError):  # there need not be one
        return None
