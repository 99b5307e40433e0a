"""Chain families, from training to decoding: one conversation learned by heart, and the replay against the decoder."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from speculators.batch import PackedBatch
from speculators.data import AnswerRecord, DataManifest, DepthDrop, Row, RowDataset, build_batch, drop_depths
from speculators.decoding import Decoder
from speculators.decoding.prediction import predict_acceptance
from speculators.errors import ConfigError
from speculators.losses import gather_block_labels
from speculators.models import Eagle3DraftModel, MTPDraftModel, PEagleDraftModel, SpeculatorModel
from speculators.models.verifier_weights import VerifierHead
from speculators.sampling import SamplingParams
from speculators.train import train
from speculators.train.families import decay_length
from speculators.verifiers.loading import load_verifier
from speculators.verifiers.session import TransformersSession
from speculators.verifiers.transformers_source import TransformersSource
from tests.models.small import packed_row
from tests.models.test_chain import ANCHORS, LENGTHS, chain_model
from tests.tiny import random_rows, tiny_verifier
from tests.train.helpers import settings

PROMPT = [7, 23, 41, 12, 33, 9, 58, 20]
ANSWER = 40
CHAIN: dict[str, Any] = {
    "block_size": ...,
    "markov_rank": ...,
    "num_layers": 1,
    "target_layer_ids": [1, 2, 4],
    "total_seq_len": 128,
    "max_anchors": ...,
    "checkpoint_freq": 1000,
    "checkpoint_dtype": "float32",
    "log_freq": 50,
    "lr": 1e-2,
}
#: An MTP draft's shape is not a choice.
UNSHAPED: dict[str, Any] = {"num_layers": ..., "target_layer_ids": ..., "mask_token_id": ...}


@pytest.mark.parametrize(
    ("family", "changes", "n", "enough"),
    [
        ("eagle3", {"ttt_steps": 4, "mask_token_id": ..., "epochs": 300}, 4, 3.0),
        ("peagle", {"num_depths": 4, "epochs": 300, "max_anchors": 64, "down_sample_ratio": 0.9}, 4, 3.0),
        ("mtp", {"num_speculative_steps": 4, "epochs": 300, **UNSHAPED}, 4, 3.0),
    ],
)
def test_one_conversation_is_learned_by_heart(
    tmp_path: Path, family: str, changes: dict[str, Any], n: int, enough: float
) -> None:
    tiny_verifier(tmp_path, seed=3)
    verifier = load_verifier(tmp_path / "verifier")
    answer = Decoder(lambda: TransformersSession(verifier)).decode(PROMPT, ANSWER).tokens
    assert len(set(answer)) > 20, "the verifier's answer is too plain to test anything"
    ids = np.array([*PROMPT, *answer])
    rows = [Row(0, ids, np.arange(len(ids)) >= len(PROMPT))]
    config = settings(tmp_path, speculator_type=family, **(CHAIN | changes))
    manifest = DataManifest(answers=AnswerRecord(on_policy=True))
    dataset = RowDataset.from_rows(rows, manifest)
    nothing = np.array([], int)
    result = train(config, dataset=dataset, train_ids=np.array([0]), val_ids=nothing, verifier=verifier, progress=False)
    if family != "peagle":
        assert result.metrics["anchor_coverage"] == 1.0

    draft = SpeculatorModel.from_pretrained(result.checkpoint)
    assert type(draft) is {"eagle3": Eagle3DraftModel, "peagle": PEagleDraftModel, "mtp": MTPDraftModel}[family]
    drafter = draft.drafter()
    decoded = Decoder(lambda: TransformersSession(verifier, drafter.layer_ids), drafter, n).decode(PROMPT, ANSWER)
    assert decoded.tokens == answer
    full = [round_ for round_ in decoded.rounds if round_.complete]
    assert sum(round_.accepted for round_ in full) / len(full) > enough

    source = TransformersSource(verifier, tuple(drafter.layer_ids), final_state="post_norm", token_budget=512)
    replayed = predict_acceptance(
        draft,
        VerifierHead.from_folder(tmp_path / "verifier", draft.t2d),
        rows,
        source,
        answers=manifest.answers,
        num_draft_tokens=n,
        sampling=SamplingParams(temperature=0),
        eos_ids=verifier.eos_ids,
    )
    whole = [round_ for round_ in decoded.rounds if round_.complete]
    assert replayed.rounds == len(whole)
    assert replayed.emitted == sum(round_.emitted for round_ in whole)


def test_depths_are_dropped_as_a_prefix_that_depends_on_the_row_alone() -> None:
    rows = random_rows(30, min_length=30, max_length=40)

    def batch(ids: list[int], epoch: int = 0) -> PackedBatch:
        built = build_batch(rows, ids, 2000, 10_000, "document", 3, epoch, 8, first_anchor=1)
        return drop_depths(built, DepthDrop(0.7, 0.2), 3, epoch)

    whole = batch(list(range(30)))
    assert whole.depths is not None
    kept = [(whole.depths > depth).double().mean().item() for depth in range(8)]
    for depth, share in enumerate(kept):
        assert share == pytest.approx(max(0.7**depth, 0.2) if depth else 1.0, abs=0.07)
    alone = batch([17])
    ours = whole.document_ids[whole.anchors] == 17
    assert alone.depths is not None
    assert torch.equal(whole.depths[ours], alone.depths)
    assert not torch.equal(batch([17], epoch=1).depths, alone.depths)
    counts = gather_block_labels(whole, 8, lambda ids: ids)[2]
    assert (counts.sum(dim=1) <= whole.depths).all()


def test_dropped_slots_change_no_other_slot() -> None:
    model, row = chain_model("peagle"), packed_row(LENGTHS, ANCHORS)
    whole = model.draft_hidden(row)
    row.depths = torch.tensor([1, 4, 2, 3, 1, 2])
    dropped = model.draft_hidden(row)
    for anchor, depths in enumerate(row.depths.tolist()):
        torch.testing.assert_close(dropped[anchor, :depths], whole[anchor, :depths], rtol=0, atol=1e-12)
    assert dropped[0, 1:].abs().sum() == 0
    model.uniform_calls = True
    torch.testing.assert_close(model.draft_hidden(row), whole, rtol=0, atol=1e-12)


def test_steps_weigh_as_the_settings_say(tmp_path: Path) -> None:
    even = settings(tmp_path, speculator_type="eagle3", mask_token_id=..., block_size=..., markov_rank=...)
    assert decay_length(even) == math.inf
    falling = settings(
        tmp_path, speculator_type="eagle3", mask_token_id=..., block_size=..., markov_rank=..., ttt_step_loss_decay=0.8
    )
    assert math.exp(-2 / decay_length(falling)) == pytest.approx(0.8**2)
    mtp = settings(tmp_path, speculator_type="mtp", block_size=..., markov_rank=..., **UNSHAPED)
    assert math.exp(-2 / decay_length(mtp)) == pytest.approx(0.6**2)


@pytest.mark.parametrize(
    ("family", "changes", "sentence"),
    [
        ("eagle3", {"ttt_step_loss_decay": 1.5}, "--ttt-step-loss-decay 1.5 makes later steps weigh more"),
        ("mtp", {"step_weight_beta": 2.0}, "--step-weight-beta 2 makes later steps weigh more"),
        ("eagle3", {"ttt_steps": 65}, "--ttt-steps 65 is more than a chain can draft; use at most 64"),
        ("mtp", {"num_speculative_steps": 70}, "--num-speculative-steps 70 is more than a chain can draft"),
    ],
)
def test_chain_settings_are_refused_before_any_work(
    tmp_path: Path, family: str, changes: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        settings(tmp_path, speculator_type=family, block_size=..., markov_rank=..., **UNSHAPED, **changes)


def test_trained_embeddings_are_shipped_and_gone_on_with(tmp_path: Path) -> None:
    tiny_verifier(tmp_path)
    changes: dict[str, Any] = CHAIN | {"num_depths": 2, "epochs": 1, "max_anchors": 8, "speculator_type": "peagle"}
    rows = RowDataset.from_rows(random_rows(6, seed=5))
    ids = {"train_ids": np.arange(6), "val_ids": np.array([], int)}
    first = train(settings(tmp_path, **changes), dataset=rows, progress=False, **ids)
    assert first.checkpoint is not None
    draft: Any = SpeculatorModel.from_pretrained(first.checkpoint)
    verifier = load_verifier(tmp_path / "verifier").model.get_input_embeddings().weight
    assert draft.embed_tokens.weight.requires_grad
    assert not draft.lm_head.weight.requires_grad
    assert not torch.equal(draft.embed_tokens.weight, verifier)
    again = changes | {"from_pretrained": str(first.checkpoint), "num_layers": ..., "target_layer_ids": ..., "lr": 1e-12}
    second = train(
        settings(tmp_path, save_path=str(tmp_path / "second"), optimizer="adamw", weight_decay=0.0, **again),
        dataset=rows,
        progress=False,
        **ids,
    )
    went_on: Any = SpeculatorModel.from_pretrained(second.checkpoint)
    torch.testing.assert_close(went_on.embed_tokens.weight, draft.embed_tokens.weight, rtol=0, atol=1e-6)


def test_no_kept_depth_still_gives_every_weight_a_gradient() -> None:
    model, row = chain_model("peagle").train(), packed_row(LENGTHS, ANCHORS)
    row.depths = torch.ones(len(ANCHORS), dtype=torch.long)
    model.draft_hidden(row).square().sum().backward()
    assert [name for name, weight in model.named_parameters() if weight.requires_grad and weight.grad is None] == []
