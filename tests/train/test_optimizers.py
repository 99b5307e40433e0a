"""Which weights go to Muon, what its float32 form computes, and states that come back bit for bit."""

from pathlib import Path

import pytest
import torch

from speculators.errors import SpeculatorsError
from speculators.train.config import TrainConfig
from speculators.train.muon import Float32Muon, orthogonalize
from speculators.train.optimizers import build_optimizers, split_parameters
from speculators.train.run import _draft, _split
from tests.train.helpers import loaded_verifier, settings, tiny_rows


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory):
    folder: Path = tmp_path_factory.mktemp("draft")
    config = settings(folder, draft_vocab_size=24, markov_head_type="rnn")
    verifier = loaded_verifier(folder)
    return _draft(config, _split(config, tiny_rows(), None, None), verifier, lambda: verifier)


def test_tables_and_single_rows_never_go_to_muon(draft) -> None:
    muon, adamw = split_parameters(draft)
    trainable = {name for name, value in draft.named_parameters() if value.requires_grad}
    assert set(muon) | set(adamw) == trainable
    assert not set(muon) & set(adamw)
    assert all(value.ndim == 2 and min(value.shape) > 1 for value in muon.values())
    assert "fc.weight" in muon
    assert "layers.0.self_attn.q_proj.weight" in muon
    assert "markov_head.joint_proj.weight" in muon
    for name in ("markov_head.markov_w1.weight", "markov_head.markov_w2.weight", "confidence_head.proj.weight", "norm.weight"):
        assert name in adamw
    assert "embed_tokens.weight" not in trainable
    assert "lm_head.weight" not in trainable


def test_orthogonalize_brings_singular_values_near_one() -> None:
    torch.manual_seed(0)
    for shape in ((8, 20), (20, 8), (16, 16)):
        result = orthogonalize(torch.randn(shape), (3.4445, -4.775, 2.0315), 8, 1e-7)
        values = torch.linalg.svdvals(result)
        assert values.min() > 0.5
        assert values.max() < 1.3


@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw"])
def test_float32_muon_is_torchs_up_to_bfloat16_rounding(adjust: str) -> None:
    torch.manual_seed(0)
    start, gradients = torch.randn(12, 30), torch.randn(3, 12, 30)
    updated = []
    for kind in (torch.optim.Muon, Float32Muon):
        weight = torch.nn.Parameter(start.clone())
        optimizer = kind([weight], lr=0.01, momentum=0.9, weight_decay=0.1, adjust_lr_fn=adjust)
        for gradient in gradients:
            weight.grad = gradient.clone()
            optimizer.step()
        updated.append(weight.detach())
    torch.testing.assert_close(updated[0], updated[1], rtol=0, atol=2e-3)
    assert not torch.equal(updated[0], start)


def test_states_come_back_bit_for_bit(draft) -> None:
    config = TrainConfig.from_flat(speculator_type="dspark")
    first = build_optimizers(draft, config, bf16=False)
    generator = torch.Generator().manual_seed(1)
    for parameter in draft.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.randn(parameter.shape, generator=generator)
    first.step()
    tensors = {name: value.clone() for name, value in first.state_tensors().items()}
    assert {name.split("/")[0] for name in tensors} == {"Muon", "AdamW"}
    weights = {name: value.detach().clone() for name, value in draft.named_parameters()}
    first.step()
    expected = {name: value.detach().clone() for name, value in draft.named_parameters()}

    with torch.no_grad():
        for name, value in draft.named_parameters():
            value.copy_(weights[name])
    second = build_optimizers(draft, config, bf16=False)
    second.load_state_tensors(tensors)
    second.step()
    assert all(torch.equal(value, expected[name]) for name, value in draft.named_parameters())
    second.zero_grad()

    with pytest.raises(SpeculatorsError, match="which this draft has not"):
        build_optimizers(draft, config, bf16=False).load_state_tensors({"AdamW/other.weight/exp_avg": torch.zeros(2)})


def test_learning_rates_scale_together(draft) -> None:
    optimizers = build_optimizers(draft, TrainConfig.from_flat(speculator_type="dspark", lr=1e-3, muon_lr=2e-2), bf16=False)
    assert optimizers.set_factor(0.5) == {"Muon": 1e-2, "AdamW": 5e-4}
    adamw = build_optimizers(draft, TrainConfig.from_flat(speculator_type="dspark", optimizer="adamw"), bf16=False)
    assert list(adamw.set_factor(1.0)) == ["AdamW"]
