"""One conversation learned by heart is drafted almost whole: anchors, labels, loss and decoder agree on every position."""

from pathlib import Path

import numpy as np
import pytest

from speculators.data import AnswerRecord, DataManifest, Row, RowDataset
from speculators.decoding import Decoder
from speculators.models import SpeculatorModel
from speculators.train import train
from speculators.verifiers.loading import load_verifier
from speculators.verifiers.session import TransformersSession
from tests.tiny import tiny_verifier
from tests.train.helpers import settings

PROMPT = [7, 23, 41, 12, 33, 9, 58, 20]
ANSWER = 56


@pytest.mark.parametrize(
    ("layout", "sample_from_anchor", "n", "enough"), [("anchor-first", True, 8, 7.0), ("fill-in", False, 7, 6.0)]
)
def test_one_conversation_is_learned_by_heart(
    tmp_path: Path, layout: str, sample_from_anchor: bool, n: int, enough: float
) -> None:
    tiny_verifier(tmp_path, seed=3)
    verifier = load_verifier(tmp_path / "verifier")
    answer = Decoder(lambda: TransformersSession(verifier)).decode(PROMPT, ANSWER).tokens
    assert len(set(answer)) > 20, "the verifier's answer is too plain to test anything"
    ids = np.array([*PROMPT, *answer])
    rows = [Row(0, ids, np.arange(len(ids)) >= len(PROMPT))]
    config = settings(
        tmp_path,
        block_size=8,
        sample_from_anchor=sample_from_anchor,
        num_layers=2,
        markov_rank=16,
        target_layer_ids=[1, 2, 4],
        total_seq_len=128,
        max_anchors=64,
        epochs=250,
        lr=1e-2,
        checkpoint_freq=1000,
        checkpoint_dtype="float32",
        log_freq=50,
    )
    dataset = RowDataset.from_rows(rows, DataManifest(answers=AnswerRecord(on_policy=True)))
    result = train(
        config, dataset=dataset, train_ids=np.array([0]), val_ids=np.array([], int), verifier=verifier, progress=False
    )
    assert result.metrics["anchor_coverage"] == 1.0

    draft = SpeculatorModel.from_pretrained(result.checkpoint)
    assert draft.layout.name == layout
    drafter = draft.drafter()
    decoder = Decoder(lambda: TransformersSession(verifier, drafter.layer_ids), drafter, n)
    decoded = decoder.decode(PROMPT, ANSWER)
    assert decoded.tokens == answer
    full = [round_ for round_ in decoded.rounds if round_.complete]
    assert len(full) >= 5
    mean = sum(round_.accepted for round_ in full) / len(full)
    assert mean > enough
