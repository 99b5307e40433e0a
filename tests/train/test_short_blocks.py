"""Short blocks: which packed rows train them, that their slots are the whole block's, and that nothing else changes."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from speculators.data import attach_states
from speculators.errors import ConfigError
from speculators.layout import BlockLayout
from speculators.models import SpeculatorModel
from speculators.train import train
from speculators.train.planning import Recipe
from tests.train.helpers import RowByRowSource, loaded_verifier, settings, tiny_rows

WHOLE = BlockLayout(4, sample_from_anchor=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("short")


@pytest.fixture(scope="module")
def verifier(folder: Path) -> Any:
    return loaded_verifier(folder)


def recipe(folder: Path, layout: BlockLayout = WHOLE, **changes: Any) -> Recipe:
    return Recipe.from_config(settings(folder, **changes), tiny_rows(), layout)


def test_a_share_of_the_packed_rows_has_short_blocks_and_more_of_them(folder: Path) -> None:
    planned = recipe(folder, max_anchors=3, short_block_size=2, short_block_share=0.5)
    batches = [planned.batch((row,), epoch) for row in range(12) for epoch in range(20)]
    sizes = {(batch.num_depths, batch.anchors.numel()) for batch in batches}
    assert sizes == {(4, 3), (2, 6)}
    share = sum(batch.num_depths == 2 for batch in batches) / len(batches)
    assert 0.35 < share < 0.65  # 240 draws: 0.5 with a standard deviation of 0.032
    again = [planned.batch((row,), epoch).num_depths for row in range(12) for epoch in range(20)]
    assert again == [batch.num_depths for batch in batches]
    # Whole blocks are what they would be without short ones.
    plain = recipe(folder, max_anchors=3)
    for row in range(12):
        assert torch.equal(planned.whole_blocks((row,), 0).anchors, plain.batch((row,), 0).anchors)
        assert planned.whole_blocks((row,), 0).num_depths == 4


def test_the_fill_in_layout_predicts_one_token_less(folder: Path) -> None:
    layout = BlockLayout(4, sample_from_anchor=False)
    planned = recipe(folder, layout, max_anchors=3, short_block_size=2, short_block_share=1.0)
    batch = planned.batch((0,), 0)
    assert (batch.num_depths, batch.anchors.numel()) == (1, 6)


def test_slots_of_a_short_block_are_the_first_of_the_whole(folder: Path, verifier: Any, tmp_path: Path) -> None:
    """Layers that are causal within the block, as sliding ones are by default, do not see what was left out."""
    train(settings(folder, epochs=1, save_path=str(tmp_path)), dataset=tiny_rows(), verifier=verifier, progress=False)
    model: Any = SpeculatorModel.from_pretrained(tmp_path / "checkpoint_best", dtype=torch.float64)
    planned, rows = recipe(folder), tiny_rows()
    batch = attach_states(planned.batch((3,), 0), RowByRowSource(verifier).fetch([rows[3]]))
    batch = dataclasses.replace(batch, features=batch.features.double())
    torch.testing.assert_close(model.draft_hidden(batch, 2), model.draft_hidden(batch)[:, :2], rtol=1e-9, atol=1e-9)


def test_training_on_short_blocks_alone_never_reaches_the_last_slots(folder: Path, verifier: Any, tmp_path: Path) -> None:
    changes = {"short_block_size": 2, "short_block_share": 1.0, "epochs": 2}
    config = settings(folder, save_path=str(tmp_path), **changes)
    result = train(config, dataset=tiny_rows(), verifier=verifier, progress=False)
    records = list(map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines()))
    trained = [record["train"] for record in records if "train" in record]
    assert trained
    assert all("position_2_accuracy" in record and "position_3_accuracy" not in record for record in trained)
    # Validation measures whole blocks.
    assert "position_4_accuracy" in result.validation


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"short_block_size": 1, "sample_from_anchor": False}, "--short-block-size: block_size 1 leaves no token"),
        ({"short_block_size": 4}, "--short-block-size 4 is not below the draft's block size 4; lower it"),
    ],
)
def test_sizes_that_cannot_be_are_refused(
    folder: Path, verifier: Any, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    def attempt() -> None:
        train(settings(folder, save_path=str(tmp_path), **changes), dataset=tiny_rows(), verifier=verifier, progress=False)

    with pytest.raises(ConfigError, match=message):
        attempt()
