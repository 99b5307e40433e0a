"""A verifier that fits the foreign drafts."""

from __future__ import annotations

import pytest

from tests.convert.foreign import HIDDEN, VERIFIER_LAYERS, VOCAB
from tests.tiny import tiny_verifier


@pytest.fixture(scope="session")
def verifier(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("verifier")
    return str(tiny_verifier(folder, vocab=VOCAB, hidden=HIDDEN, layers=VERIFIER_LAYERS))
