"""What is known of a verifier without its weights is what is known of it with them."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from speculators.errors import VerifierError
from speculators.verifiers.facts import VerifierFacts, describe_verifier
from speculators.verifiers.loading import load_verifier
from tests.tiny import tiny_verifier


def test_facts_are_the_verifiers(tmp_path: Path) -> None:
    path = tiny_verifier(tmp_path)
    facts, verifier = describe_verifier(path), load_verifier(path)
    for field in fields(VerifierFacts):
        if field.name not in ("tokenizer", "config"):
            assert getattr(facts, field.name) == getattr(verifier, field.name), field.name
    assert facts.tokenizer is not None
    assert facts.tokenizer.get_vocab() == verifier.tokenizer.get_vocab()
    assert facts.config.to_dict() == verifier.config.to_dict()


def test_no_verifier(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "vit"}')
    with pytest.raises(VerifierError, match="not that of a language model"):
        describe_verifier(tmp_path)
    with pytest.raises(VerifierError):
        describe_verifier(tmp_path / "missing")
