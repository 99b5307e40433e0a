"""The published Kimi-K2.6 draft, on the meta device: sizes as its model card and its file have them."""

from __future__ import annotations

import torch

from speculators.models.dspark import DSparkDraftModel
from speculators.models.presets import kimi_k2_6


def test_kimi_k2_6_has_the_published_size() -> None:
    with torch.device("meta"):
        model = DSparkDraftModel(kimi_k2_6())
    assert model.parameter_counts() == {"trainable": 1_745_747_969, "frozen": 1_403_781_120}
    tensors = model.state_dict()
    assert len(tensors) == 44
    size = sum(value.numel() * (2 if value.is_floating_point() else value.element_size()) for value in tensors.values())
    assert size == 6_299_478_018
    assert tensors["d2t"].shape == (32000,)
    assert tensors["t2d"].shape == (163840,)
    assert model.layout.max_draft_tokens == 7
    assert model.target_layer_ids == [2, 30, 58]
    layer = sum(parameter.numel() for parameter in model.layers[0].parameters()) * 2
    assert layer == 1_027_633_664
