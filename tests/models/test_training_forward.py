"""One packed row through the model: losses, gradients, and learning on a repeated row."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from speculators.batch import PackedBatch
from speculators.losses import LossConfig, batch_denominators, chunked
from speculators.models import SpeculatorModel
from speculators.models.verifier_weights import VerifierHead
from tests.models.small import HIDDEN, LAYER_IDS, VOCAB, draft_config, packed_row, verifier_config

FAMILIES: list[tuple[str, dict[str, Any]]] = [
    ("dflash", {}),
    ("dspark", {"markov_head_type": "rnn"}),
    ("dspark", {"sample_from_anchor": False, "decoder": {"sliding_window": 4}}),
]


def model_of(family: str, **values: Any) -> Any:
    torch.manual_seed(0)
    config = draft_config(family, **values)
    return SpeculatorModel.registered_model_class_from_config(config)(config).double()


def teacher(norm: bool = False) -> VerifierHead:
    generator = torch.Generator().manual_seed(5)
    weight = torch.randn(VOCAB, HIDDEN, generator=generator, dtype=torch.float64)
    norm_weight = torch.rand(HIDDEN, generator=generator, dtype=torch.float64) + 0.5 if norm else None
    return VerifierHead(weight, verifier_config(), norm_weight=norm_weight)


def loss_of(model: Any, row: PackedBatch, head: VerifierHead, **options: Any) -> Any:
    config = LossConfig()
    denominators = batch_denominators(row, model.layout.max_draft_tokens, model.verifier_to_draft, config)
    return model(row, teacher=head, loss_config=config, denominators=denominators, **options)


@pytest.mark.parametrize(("family", "values"), FAMILIES)
def test_every_trained_weight_gets_a_gradient(family: str, values: dict[str, Any]) -> None:
    model = model_of(family, **values).train()
    loss_of(model, packed_row([20, 15], [3, 8, 22, 25]), teacher()).loss.backward()
    for name, parameter in model.named_parameters():
        assert (parameter.grad is not None and bool(parameter.grad.any())) is parameter.requires_grad, name


@pytest.mark.parametrize(("family", "values"), FAMILIES)
def test_a_row_without_anchors_gives_zero_loss_and_zero_gradients(family: str, values: dict[str, Any]) -> None:
    """All ranks run the same collective calls, so every weight needs a gradient there too."""
    model = model_of(family, **values).train()
    row = PackedBatch.empty(len(LAYER_IDS), HIDDEN)
    row.features, row.final_states = row.features.double(), row.final_states.double()  # type: ignore[union-attr]
    output = loss_of(model, row, teacher())
    assert output.loss.item() == 0.0
    output.loss.backward()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None, name
            assert not parameter.grad.any(), name


def test_pre_norm_states_are_normed_once() -> None:
    row = packed_row([20], [3, 8])
    head = teacher(norm=True)
    pre = loss_of(model_of("dspark", final_state="pre_norm"), row, head)
    row.final_states = head.normalize(row.final_states)  # type: ignore[arg-type]
    post = loss_of(model_of("dspark", final_state="post_norm"), row, head)
    torch.testing.assert_close(pre.loss, post.loss, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("family", "values"), FAMILIES)
def test_loss_is_the_same_with_either_attention(family: str, values: dict[str, Any]) -> None:
    model, row = model_of(family, **values), packed_row([20, 15], [3, 8, 22, 25])
    losses = [loss_of(model, row, teacher(), attn_impl=impl).loss for impl in ("reference", "document")]
    torch.testing.assert_close(losses[0], losses[1], rtol=0, atol=1e-12)


@pytest.mark.parametrize("sample_from_anchor", [True, False])
def test_a_repeated_row_is_learnt_and_drafted(sample_from_anchor: bool) -> None:
    """The verifier's states say its next token; after some steps the draft proposes just these tokens."""
    model = model_of("dspark", sample_from_anchor=sample_from_anchor).train()
    head = teacher()
    row = packed_row([24], list(range(2, 18)))
    # States whose argmax is the next token: the row is a greedy answer of this verifier.
    following = torch.cat([row.input_ids[1:], row.input_ids[:1]])
    row.final_states = 3.0 * head.weight[following]
    assert torch.equal(head.full_logits(row.final_states).argmax(dim=-1), following)
    optimizer = torch.optim.AdamW([value for value in model.parameters() if value.requires_grad], lr=1e-2)
    for _ in range(60):
        optimizer.zero_grad()
        loss_of(model, row, head, metrics=False).loss.backward()
        optimizer.step()
    accepted = greedy_matches(model, row, following)
    assert accepted > 0.9 * model.layout.max_draft_tokens


def greedy_matches(model: Any, row: PackedBatch, following: Tensor) -> float:
    """Mean leading run of drafted tokens that the verifier would have produced, over the anchors."""
    from speculators.sampling import SamplingParams

    runs = []
    n = model.layout.max_draft_tokens
    for anchor in row.anchors.tolist():
        drafter = model.drafter()
        drafter.start(1)
        drafter.extend([row.input_ids[:anchor]], [row.features[:anchor]])  # type: ignore[index]
        (draft,) = drafter.propose([int(row.input_ids[anchor])], n, SamplingParams())
        runs.append(int((draft.tokens == following[anchor : anchor + n]).long().cumprod(0).sum()))
    return sum(runs) / len(runs)


@pytest.mark.parametrize("impl", ["reference", "chunked"])
@pytest.mark.parametrize(("family", "values"), FAMILIES)
def test_autocast_runs_and_stays_close(monkeypatch, family: str, values: dict[str, Any], impl: str) -> None:
    """Weights in float32, matmuls in bfloat16, the loss in float32: how a GPU trains."""
    model, row = model_of(family, **values).float(), packed_row([20, 15], [3, 8, 22, 25])
    row, head = row.to("cpu", dtype=torch.float32), teacher().float()
    exact = loss_of(model, row, head).loss
    monkeypatch.setattr(chunked, "CPU_ELEMENTS", 1)  # a chunk per block
    with warnings.catch_warnings(), torch.autocast("cpu", dtype=torch.bfloat16):
        warnings.simplefilter("error")
        output = loss_of(model, row, head, impl=impl)
    assert output.loss.dtype == torch.float32
    torch.testing.assert_close(output.loss, exact, rtol=0.05, atol=0.05)
    output.loss.backward()
    assert all(value.grad is not None for value in model.parameters() if value.requires_grad)
