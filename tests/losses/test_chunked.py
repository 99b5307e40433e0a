"""The chunked loss is the reference's, in values, gradients and metrics, however small its chunks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from speculators.losses import BlockTargets, LossConfig, block_loss, chunked, loss_denominators
from speculators.models.heads import ConfidenceHead, DraftHeads, MarkovHead
from tests.losses.test_block_loss import A, D, H, N, Teacher, V, verifier_to_draft

RANK = 3


def heads(head_type: Any = "vanilla") -> DraftHeads:
    torch.manual_seed(1)
    lm_head = nn.Linear(H, D, bias=False).double()
    lm_head.weight.requires_grad_(False)
    markov = MarkovHead(head_type, H, RANK, V, D).double() if head_type else None
    confidence = ConfidenceHead(H, RANK if head_type else 0, detach=False).double()
    return DraftHeads(lm_head, markov, confidence, confidence_with_markov=bool(head_type))


def targets(shared: bool) -> BlockTargets:
    """Targets of A blocks; ``shared`` states are stored once and indexed."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, V, (A, N), generator=generator)
    states = torch.randn(A + N, H, dtype=torch.float64, generator=generator)
    index = torch.arange(A)[:, None] + torch.arange(N)
    return BlockTargets(
        previous_ids=torch.randint(0, V, (A, N), generator=generator),
        label_ids=labels,
        label_draft_ids=verifier_to_draft(labels),
        states=states if shared else states[index],
        counts=torch.arange(N) < torch.tensor([4, 2, 1, 0, 3])[:, None],
        state_index=index if shared else None,
    )


def run(impl: Any, head_type: Any, given: BlockTargets, config: LossConfig) -> tuple[Tensor, dict[str, Any], dict[str, Tensor]]:
    draft = heads(head_type)
    hidden = torch.randn(A, N, H, dtype=torch.float64, generator=torch.Generator().manual_seed(2)).requires_grad_()
    denominators = loss_denominators(given.counts, given.label_draft_ids, config)
    output = block_loss(hidden, draft, Teacher(), given, config, denominators, impl=impl)
    (2 * output.loss).backward()  # not 1, so that the outer gradient must be passed on
    assert hidden.grad is not None
    gradients = {"hidden": hidden.grad}
    for label, module in (("markov", draft.markov), ("confidence", draft.confidence)):
        for name, parameter in module.named_parameters() if module is not None else ():
            assert parameter.grad is not None
            gradients[f"{label}.{name}"] = parameter.grad
    return output.loss.detach(), output.sums, gradients


@pytest.mark.parametrize("head_type", [None, "vanilla", "gated", "rnn"])
@pytest.mark.parametrize("blocks_per_chunk", [1, 2, 100])
@pytest.mark.parametrize(
    "config",
    [
        LossConfig(),
        LossConfig(loss_fn={"kl_div": 1.0}, normalization="count"),
        LossConfig(loss_fn={"ce": 0.5, "l1": 0.5}, ce_label="data", target_support="full"),
        LossConfig(loss_fn={"ce": 1.0}, per_position_weight="dpace"),
    ],
    ids=["paper", "kl", "data-full", "dpace"],
)
def test_equals_the_reference(monkeypatch, head_type, blocks_per_chunk, config):
    monkeypatch.setattr(chunked, "CPU_ELEMENTS", blocks_per_chunk * N * D)
    for shared in (False, True):
        torch.manual_seed(0)
        expected = run("reference", head_type, targets(shared), config)
        torch.manual_seed(0)
        found = run("chunked", head_type, targets(shared), config)
        torch.testing.assert_close(found[0], expected[0])
        assert found[2].keys() == expected[2].keys()
        for name, gradient in expected[2].items():
            torch.testing.assert_close(found[2][name], gradient, msg=name)
        assert found[1].keys() == expected[1].keys()
        for name, pair in expected[1].items():
            torch.testing.assert_close(torch.stack(found[1][name]), torch.stack(pair), msg=name)


def test_no_chunk_holds_more_logits_than_asked_for(monkeypatch):
    monkeypatch.setattr(chunked, "CPU_ELEMENTS", 2 * N * D)
    seen = []

    class Watched(Teacher):
        def draft_logits(self, states: Tensor) -> Tensor:
            seen.append(states.shape[0] * D)
            return super().draft_logits(states)

    given, config = targets(shared=True), LossConfig()
    hidden = torch.randn(A, N, H, dtype=torch.float64, requires_grad=True)
    denominators = loss_denominators(given.counts, None, config)
    block_loss(hidden, heads(), Watched(), given, config, denominators, impl="chunked").loss.backward()
    assert len(seen) == 3
    assert max(seen) <= 2 * N * D


def test_without_gradients():
    given, config, teacher = targets(shared=True), LossConfig(), Teacher()
    hidden = torch.randn(A, N, H, dtype=torch.float64)
    denominators = loss_denominators(given.counts, None, config)
    with torch.no_grad():
        plain, lean = (
            block_loss(hidden, heads(), teacher, given, config, denominators, impl=impl) for impl in ("reference", "chunked")
        )
    torch.testing.assert_close(lean.loss, plain.loss)
    assert not lean.loss.requires_grad


def test_no_block_is_a_zero_loss_with_a_graph():
    given, config = targets(shared=True).blocks(slice(0, 0)), LossConfig()
    hidden = torch.zeros(0, N, H, dtype=torch.float64, requires_grad=True)
    output = block_loss(
        hidden, heads(), Teacher(), given, config, loss_denominators(given.counts, None, config), impl="chunked"
    )
    output.loss.backward()
    assert output.loss.item() == 0.0
