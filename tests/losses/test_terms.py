"""Elementwise terms at known values and against loops, and upstream's functions by name."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from speculators import losses
from speculators.errors import ConfigError
from speculators.losses.terms import MIN_ACCEPTANCE, TERMS, Distributions, full_precision
from speculators.losses.weights import decay_weights, dpace_weights

VOCAB = 5


def make(p: list[float], q: list[float], outside: float | None = None) -> Distributions:
    """Distributions of one position; zeros become a tiny probability, so that logs stay finite."""
    log_p = torch.tensor(p, dtype=torch.float64).clamp(min=1e-300).log()
    log_q = torch.tensor(q, dtype=torch.float64).clamp(min=1e-300).log()
    mass = None if outside is None else torch.tensor(outside, dtype=torch.float64)
    return Distributions(log_q=log_q, log_p=log_p, labels=log_p.argmax(), outside=mass)


def test_disjoint_distributions() -> None:
    d = make([0.5, 0.5, 0, 0], [0, 0, 0.25, 0.75])
    assert d.acceptance.item() == pytest.approx(0.0)
    assert TERMS["l1"](d).item() == pytest.approx(2.0)
    assert TERMS["tv"](d).item() == pytest.approx(1.0)
    assert TERMS["nla"](d).item() == pytest.approx(-math.log(MIN_ACCEPTANCE))
    assert TERMS["jsd"](d).item() == pytest.approx(math.log(2))


@pytest.mark.parametrize("name", [name for name in TERMS if name != "ce"])
def test_equal_distributions_lose_nothing(name: str) -> None:
    p = [0.1, 0.2, 0.3, 0.4]
    assert TERMS[name](make(p, p)).item() == pytest.approx(0.0, abs=1e-12)


def test_cross_entropy_of_the_argmax() -> None:
    assert TERMS["ce"](make([0.1, 0.7, 0.2], [0.2, 0.3, 0.5])).item() == pytest.approx(-math.log(0.3))


def test_full_support_against_a_loop_over_the_whole_vocabulary() -> None:
    """p = (.4, .1, .1) on the draft ids and .4 outside, where q is 0."""
    p, q = [0.4, 0.1, 0.1, 0.4], [0.2, 0.5, 0.3, 0.0]
    d = make(p[:3], q[:3], outside=0.4)
    alpha = sum(map(min, p, q))
    assert d.acceptance.item() == pytest.approx(alpha)
    assert TERMS["tv"](d).item() == pytest.approx(1 - alpha)
    l1 = sum(abs(a - b) for a, b in zip(p, q, strict=True))
    assert TERMS["l1"](d).item() == pytest.approx(l1)
    assert l1 == pytest.approx(2 * (1 - alpha))
    assert TERMS["nla"](d).item() == pytest.approx(-math.log(alpha))
    m = [(a + b) / 2 for a, b in zip(p, q, strict=True)]
    jsd = sum(0.5 * a * math.log(a / c) + (0.5 * b * math.log(b / c) if b else 0) for a, b, c in zip(p, q, m, strict=True))
    assert TERMS["jsd"](d).item() == pytest.approx(jsd)
    assert TERMS["rkl"](d).item() == pytest.approx(sum(b * math.log(b / a) for a, b in zip(p, q, strict=True) if b))
    # KL over all ids would be infinite: renormalised p.
    renormalised = [a / 0.6 for a in p[:3]]
    kl = sum(a * math.log(a / b) for a, b in zip(renormalised, q, strict=False))
    assert TERMS["kl_div"](d).item() == pytest.approx(kl)
    share = math.exp(-3 * alpha)
    assert TERMS["lk_hybrid"](d).item() == pytest.approx(share * kl + (1 - share) * (1 - alpha))


def loop_value(name: str, p: list[float], q: list[float]) -> float:
    pairs = list(zip(p, q, strict=True))
    kl = sum(a * math.log(a / b) for a, b in pairs)
    alpha = sum(min(a, b) for a, b in pairs)
    share = math.exp(-3 * alpha)
    values = {
        "ce": -math.log(q[p.index(max(p))]),
        "tv": 1 - alpha,
        "l1": sum(abs(a - b) for a, b in pairs),
        "kl_div": kl,
        "rkl": sum(b * math.log(b / a) for a, b in pairs),
        "jsd": sum(0.5 * a * math.log(2 * a / (a + b)) + 0.5 * b * math.log(2 * b / (a + b)) for a, b in pairs),
        "nla": -math.log(alpha),
        "lk_hybrid": share * kl + (1 - share) * (1 - alpha),
    }
    return values[name]


UPSTREAM_NAMES = {
    "ce": losses.ce_loss,
    "tv": losses.tv_loss,
    "kl_div": losses.kl_div_loss,
    "rkl": losses.reverse_kl_div_loss,
    "jsd": losses.js_div_loss,
    "nla": losses.neg_log_acceptance_loss,
    "lk_hybrid": losses.lk_hybrid_loss,
}


@pytest.mark.parametrize("name", list(TERMS))
def test_terms_against_loops_in_float64(name: str) -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(1, 6, VOCAB, dtype=torch.float64, generator=generator, requires_grad=True)
    targets = torch.randn(1, 6, VOCAB, dtype=torch.float64, generator=generator, requires_grad=True)
    p, q = targets.softmax(-1)[0].tolist(), logits.softmax(-1)[0].tolist()
    expected = [loop_value(name, a, b) for a, b in zip(p, q, strict=True)]
    d = Distributions(logits.log_softmax(-1), targets.detach().log_softmax(-1), targets.argmax(-1))
    torch.testing.assert_close(TERMS[name](d)[0].detach(), torch.tensor(expected, dtype=torch.float64))
    if name in UPSTREAM_NAMES:
        value = UPSTREAM_NAMES[name](logits, targets)
        torch.testing.assert_close(value[0].detach(), torch.tensor(expected, dtype=torch.float64))
        value.sum().backward()
        assert targets.grad is None
        assert logits.grad is not None


def test_softmax_precision() -> None:
    assert full_precision(torch.zeros(1, dtype=torch.bfloat16)).dtype == torch.float32
    assert full_precision(torch.zeros(1, dtype=torch.float64)).dtype == torch.float64


def test_decay_weights() -> None:
    weights = decay_weights(8, 4.0)
    assert weights.sum().item() == pytest.approx(3.9090, abs=5e-5)
    assert weights.mean().item() == pytest.approx(0.4886, abs=5e-5)
    slots = torch.arange(8)
    torch.testing.assert_close(
        losses.dflash_loss_decay(slots, 4.0, sample_from_anchor=True).double(), weights, rtol=1e-6, atol=0
    )
    fill_in = losses.dflash_loss_decay(slots, 4.0, sample_from_anchor=False)
    assert fill_in[0] == 0
    torch.testing.assert_close(fill_in[1:].double(), weights[:7], rtol=1e-6, atol=0)
    assert losses.exp_loss_decay(torch.tensor([0, 1, 2]), 0.5).tolist() == [1.0, 0.5, 0.25]


def test_dpace_weights_against_a_loop() -> None:
    alpha = 0.3
    ce = torch.tensor([[0.1, 1.0, 2.0, 0.5], [0.2, 0.3, 0.4, 0.5]], dtype=torch.float64, requires_grad=True)
    counts = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]]).bool()
    weights = dpace_weights(ce, counts, alpha)
    assert not weights.requires_grad
    for block in range(2):
        reached, product = [], 1.0
        for depth in range(4):
            if counts[block, depth]:
                product *= (1 - alpha) * math.exp(-ce[block, depth].item()) + alpha
            reached.append(product if counts[block, depth] else 0.0)
        for depth in range(4):
            expected = sum(reached[depth:]) if counts[block, depth] else 0.0
            assert weights[block, depth].item() == pytest.approx(expected)
    flat = losses.dpace_loss_decay(torch.arange(8) % 4, counts.reshape(1, 8), 4, alpha, ce.detach().reshape(1, 8))
    torch.testing.assert_close(flat.reshape(2, 4), weights)


def test_upstream_reduction_keeps_weights_out_of_the_denominator() -> None:
    generator = torch.Generator().manual_seed(0)
    logits, targets = torch.randn(2, 1, 8, VOCAB, dtype=torch.float64, generator=generator)
    mask = torch.tensor([[1, 1, 1, 0, 1, 1, 1, 1]])
    slots = torch.arange(8)[None] % 4

    def decay(pos_idx: Tensor, **_: object) -> Tensor:
        return losses.dflash_loss_decay(pos_idx, 4.0, sample_from_anchor=True)

    elementwise = losses.tv_loss(logits, targets)[0].tolist()
    expected = sum(m * math.exp(-(i % 4) / 4) * e for i, (m, e) in enumerate(zip(mask[0].tolist(), elementwise, strict=True)))
    expected /= 7 + 1e-5
    assert losses.loss_function(logits, targets, mask, slots, losses.tv_loss, decay).item() == pytest.approx(expected)
    loss, logged = losses.compound_loss(logits, targets, mask, slots, {"ce": 0.1, "tv": 0.9}, decay)
    assert set(logged) == {"ce_loss", "tv_loss"}
    assert logged["tv_loss"].item() == pytest.approx(expected)
    assert loss.item() == pytest.approx(0.1 * logged["ce_loss"].item() + 0.9 * expected)
    assert losses.compound_loss(logits, targets, mask, slots, {"tv": 1.0})[1] == {}
    nothing = losses.loss_function(logits, targets, torch.zeros_like(mask), slots, losses.tv_loss, decay)
    assert nothing.item() == 0.0


@pytest.mark.parametrize(
    ("spec", "expected"),
    [("ce", {"ce": 1.0}), ('{"ce": 0.1, "tv": 0.9}', {"ce": 0.1, "tv": 0.9}), ({"kl_div": 2}, {"kl_div": 2.0})],
)
def test_loss_specs(spec: object, expected: dict[str, float]) -> None:
    assert losses.resolve_loss_config(spec) == expected  # type: ignore[arg-type]
    assert losses.LossConfig(loss_fn=spec).loss_fn == expected  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("cross", "neither one of"),
        ("[1]", "must map terms"),
        ("{}", "must map terms"),
        ({"mse": 1.0}, "unknown loss term 'mse'"),
        ({"ce": "1"}, "coefficient"),
        ({"ce": -1.0}, "coefficient"),
        ({"ce": float("nan")}, "coefficient"),
        ({"ce": True}, "coefficient"),
    ],
)
def test_wrong_loss_specs_are_refused(spec: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        losses.resolve_loss_config(spec)  # type: ignore[arg-type]


def test_dpace_is_refused_with_other_terms() -> None:
    losses.LossConfig(loss_fn={"ce": 1.0}, per_position_weight="dpace")
    with pytest.raises(ValueError, match="dpace is defined for the loss ce alone"):
        losses.LossConfig(per_position_weight="dpace")
