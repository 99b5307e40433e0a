"""block_loss against explicit loops in float64: values, gradients, denominators, metrics, and the degenerate batches."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from speculators.batch import PackedBatch
from speculators.layout import PAD_DOCUMENT
from speculators.losses import (
    BlockTargets,
    LossConfig,
    batch_denominators,
    block_loss,
    gather_block_targets,
    loss_denominators,
)

A, N, H, V = 5, 4, 6, 9
#: The draft vocabulary's verifier ids.
KEPT = torch.tensor([0, 2, 3, 5, 8])
D = len(KEPT)


class Heads(nn.Module):
    """A base head, a Markov bias and a confidence head."""

    def __init__(self, confidence: bool = True) -> None:
        super().__init__()
        self.base = nn.Linear(H, D, bias=False, dtype=torch.float64)
        self.markov = nn.Embedding(V, D, dtype=torch.float64)
        self.confidence = nn.Linear(H, 1, dtype=torch.float64) if confidence else None

    def logits(self, hidden: Tensor, previous_ids: Tensor) -> Tensor:
        return self.base(hidden) + self.markov(previous_ids)

    def confidence_logits(self, hidden: Tensor, previous_ids: Tensor) -> Tensor | None:
        return None if self.confidence is None else self.confidence(hidden).squeeze(-1)


class Teacher(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(V, H, dtype=torch.float64))

    def full_logits(self, states: Tensor) -> Tensor:
        return states @ self.weight.T

    def draft_logits(self, states: Tensor) -> Tensor:
        return states @ self.weight[KEPT].T


def verifier_to_draft(ids: Tensor) -> Tensor:
    table = torch.full((V,), -1)
    table[KEPT] = torch.arange(D)
    return table[ids]


def setting(seed: int = 0, confidence: bool = True) -> tuple[Tensor, Heads, Teacher, BlockTargets]:
    torch.manual_seed(seed)
    hidden = torch.randn(A, N, H, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(0, V, (A, N))
    lengths = torch.tensor([4, 2, 1, 0, 3])
    targets = BlockTargets(
        previous_ids=torch.randint(0, V, (A, N)),
        label_ids=labels,
        label_draft_ids=verifier_to_draft(labels),
        states=torch.randn(A, N, H, dtype=torch.float64, requires_grad=True),
        counts=torch.arange(N) < lengths[:, None],
    )
    return hidden, Heads(confidence), Teacher(), targets


def by_loops(hidden: Tensor, heads: Heads, teacher: Teacher, t: BlockTargets, config: LossConfig) -> dict[str, Any]:
    """Loss and metrics as nested loops over blocks, depths and tokens."""
    logits = heads.logits(hidden, t.previous_ids).detach()
    confidence = heads.confidence_logits(hidden, t.previous_ids)
    num: dict[str, float] = dict.fromkeys((*config.loss_fn, "confidence"), 0.0)
    den = dict(num)
    metric = dict.fromkeys(("accept", "hits", "n", "tau", "run", "blocks", "abs", "pred", "bias"), 0.0)
    for a in range(A):
        tau = run = 1.0
        alphas = preds = streak = 1.0
        for d in range(N):
            if not t.counts[a, d]:
                break
            full = [math.exp(x) for x in teacher.full_logits(t.states[a, d]).tolist()]
            over = [full[v] for v in KEPT.tolist()]
            p = [x / (sum(over) if config.target_support == "draft" else sum(full)) for x in over]
            exps = [math.exp(x) for x in logits[a, d].tolist()]
            q = [x / sum(exps) for x in exps]
            alpha = sum(map(min, p, q))
            best = p.index(max(p))
            label = best if config.ce_label == "verifier" else int(t.label_draft_ids[a, d])
            weight = math.exp(-d / config.gamma)
            share = weight if config.normalization == "weight" else 1.0
            for name in config.loss_fn:
                if name == "ce" and label < 0:
                    continue
                value = -math.log(q[label]) if name == "ce" else 1 - alpha
                num[name] += weight * value
                den[name] += share
            den["confidence"] += share
            correct = q.index(max(q)) == best
            streak *= correct
            alphas *= alpha
            tau, run = tau + alphas, run + streak
            metric["accept"] += alpha
            metric["hits"] += correct
            metric["n"] += 1
            if confidence is not None:
                c = 1 / (1 + math.exp(-confidence[a, d].item()))
                num["confidence"] += weight * -(alpha * math.log(c) + (1 - alpha) * math.log(1 - c))
                preds *= c
                metric["abs"] += abs(c - alpha)
                metric["pred"] += c
                metric["bias"] += preds - alphas
        if t.counts[a, 0]:
            metric["tau"] += tau
            metric["run"] += run
            metric["blocks"] += 1
    return {"num": num, "den": den, "metric": metric}


CONFIGS = [
    LossConfig(),
    LossConfig(normalization="count"),
    LossConfig(ce_label="data"),
    LossConfig(ce_label="data", normalization="count", target_support="full"),
    LossConfig(target_support="full", gamma=7.0, confidence_alpha=0.5),
]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: f"{c.normalization}-{c.ce_label}-{c.target_support}")
def test_loss_and_metrics_against_loops(config: LossConfig) -> None:
    hidden, heads, teacher, targets = setting()
    expected = by_loops(hidden, heads, teacher, targets, config)
    denominators = loss_denominators(targets.counts, targets.label_draft_ids, config)
    assert denominators == pytest.approx(expected["den"])
    output = block_loss(hidden, heads, teacher, targets, config, denominators)
    coefficients = {**config.loss_fn, "confidence": config.confidence_alpha}
    loss = sum(c * expected["num"][name] / expected["den"][name] for name, c in coefficients.items())
    assert output.loss.item() == pytest.approx(loss)
    assert output.sums["loss"][0].item() / output.sums["loss"][1].item() == pytest.approx(loss)
    for name in coefficients:
        numerator, denominator = output.sums[name]
        assert numerator.item() == pytest.approx(expected["num"][name])
        assert denominator.item() == pytest.approx(expected["den"][name])
        assert not numerator.requires_grad
    metric = expected["metric"]
    pairs = {
        "accuracy": ("hits", "n"),
        "accept_rate": ("accept", "n"),
        "tau_uniform": ("tau", "blocks"),
        "greedy_run": ("run", "blocks"),
        "confidence_abs_error": ("abs", "n"),
        "confidence_pred_mean": ("pred", "n"),
        "confidence_cumprod_bias": ("bias", "n"),
    }
    for name, (numerator_key, denominator_key) in pairs.items():
        assert output.sums[name][0].item() == pytest.approx(metric[numerator_key]), name
        assert output.sums[name][1].item() == pytest.approx(metric[denominator_key]), name
    assert sum(output.sums[f"position_{d}_accuracy"][0].item() for d in range(1, N + 1)) == pytest.approx(metric["hits"])
    assert [output.sums[f"position_{d}_accuracy"][1].item() for d in range(1, N + 1)] == [4, 3, 2, 1]


def test_denominators_of_one_full_block() -> None:
    counts = torch.ones(1, 8, dtype=torch.bool)
    weighted = loss_denominators(counts, None, LossConfig())
    assert weighted == pytest.approx({"ce": 3.9090, "tv": 3.9090, "confidence": 3.9090}, abs=5e-5)
    assert loss_denominators(counts, None, LossConfig(normalization="count")) == {"ce": 8, "tv": 8, "confidence": 8}
    with pytest.raises(ValueError, match="label_draft_ids"):
        loss_denominators(counts, None, LossConfig(ce_label="data"))


def test_the_two_normalisations_differ_by_the_mean_weight() -> None:
    """0.489 for full blocks of 8 at gamma 4: what the scale of a logged loss depends on."""
    torch.manual_seed(0)
    labels = torch.randint(0, V, (3, 8))
    targets = BlockTargets(labels, labels, verifier_to_draft(labels), torch.randn(3, 8, H).double(), torch.ones(3, 8).bool())
    hidden, heads, teacher = torch.randn(3, 8, H).double(), Heads(), Teacher()
    losses = {}
    for normalization in ("weight", "count"):
        config = LossConfig(normalization=normalization)
        denominators = loss_denominators(targets.counts, targets.label_draft_ids, config)
        losses[normalization] = block_loss(hidden, heads, teacher, targets, config, denominators).loss.item()
    assert losses["count"] / losses["weight"] == pytest.approx(0.4886, abs=5e-5)


def test_l1_is_twice_tv() -> None:
    for support in ("draft", "full"):
        hidden, heads, teacher, targets = setting()
        config = LossConfig(loss_fn={"l1": 1.0, "tv": 1.0}, target_support=support)
        sums = block_loss(hidden, heads, teacher, targets, config, loss_denominators(targets.counts, None, config)).sums
        assert sums["l1"][0].item() == pytest.approx(2 * sums["tv"][0].item())


def test_a_data_label_outside_the_draft_vocabulary_adds_nothing_to_ce() -> None:
    hidden, heads, teacher, targets = setting()
    outside = (targets.label_draft_ids < 0) & targets.counts
    assert outside.any()
    config = LossConfig(ce_label="data")
    denominators = loss_denominators(targets.counts, targets.label_draft_ids, config)
    assert denominators["ce"] < denominators["tv"]
    output = block_loss(hidden, heads, teacher, targets, config, denominators)
    targets.label_draft_ids = targets.label_draft_ids.clone()
    targets.counts = targets.counts & ~outside
    alone = block_loss(hidden, heads, teacher, targets, LossConfig(ce_label="data", loss_fn="ce"), denominators)
    assert output.sums["ce"][0].item() == pytest.approx(alone.sums["ce"][0].item())


def test_gradients_reach_the_draft_only() -> None:
    hidden, heads, teacher, targets = setting()
    config = LossConfig(target_support="full")
    denominators = loss_denominators(targets.counts, None, config)
    block_loss(hidden, heads, teacher, targets, config, denominators).loss.backward()
    assert teacher.weight.grad is None
    assert targets.states.grad is None
    assert hidden.grad is not None
    # Predictions that do not count have no influence.
    assert (hidden.grad[~targets.counts] == 0).all()
    assert (hidden.grad[targets.counts].abs().sum(dim=-1) > 0).all()


def test_the_confidence_target_is_detached() -> None:
    hidden, heads, teacher, targets = setting()
    config = LossConfig(loss_fn={"ce": 0.0}, confidence_alpha=1.0)
    denominators = loss_denominators(targets.counts, None, config)
    block_loss(hidden, heads, teacher, targets, config, denominators).loss.backward()
    assert heads.base.weight.grad is not None
    assert (heads.base.weight.grad == 0).all()
    assert (heads.markov.weight.grad == 0).all()
    assert (heads.confidence.weight.grad != 0).any()


@pytest.mark.parametrize("support", ["draft", "full"])
@pytest.mark.parametrize("name", ["ce", "tv", "l1", "kl_div", "rkl", "jsd", "nla", "lk_hybrid"])
def test_gradcheck(name: str, support: str) -> None:
    hidden, heads, teacher, targets = setting()
    config = LossConfig(loss_fn=name, target_support=support)
    denominators = loss_denominators(targets.counts, None, config)

    def value(h: Tensor) -> Tensor:
        return block_loss(h, heads, teacher, targets, config, denominators, metrics=False).loss

    if name == "lk_hybrid":  # lambda is detached on purpose, so only the sign and the support can be checked
        value(hidden).backward()
        assert torch.isfinite(hidden.grad).all()
    else:
        heads.confidence = None
        assert torch.autograd.gradcheck(value, (hidden,))


def test_dpace() -> None:
    hidden, heads, teacher, targets = setting(confidence=False)
    config = LossConfig(loss_fn="ce", per_position_weight="dpace", dpace_alpha=0.5)
    denominators = loss_denominators(targets.counts, None, config)
    assert denominators["ce"] == targets.counts.sum()
    output = block_loss(hidden, heads, teacher, targets, config, denominators)
    log_q = heads.logits(hidden, targets.previous_ids).log_softmax(-1)
    label = teacher.draft_logits(targets.states).argmax(-1)
    total = 0.0
    for a in range(A):
        length = int(targets.counts[a].sum())
        ce = [-log_q[a, d, label[a, d]].item() for d in range(length)]
        reached = [math.prod(0.5 * math.exp(-x) + 0.5 for x in ce[: d + 1]) for d in range(length)]
        total += sum(ce[d] * sum(reached[d:]) for d in range(length))
    assert output.loss.item() == pytest.approx(total / denominators["ce"])
    output.loss.backward()
    assert torch.isfinite(hidden.grad).all()


@pytest.mark.parametrize("num_blocks", [0, 3])
@pytest.mark.parametrize("config", [*CONFIGS, LossConfig(loss_fn="ce", per_position_weight="dpace")], ids=str)
def test_nothing_supervised_is_a_zero_loss_with_a_graph(config: LossConfig, num_blocks: int) -> None:
    _, heads, teacher, targets = setting()
    hidden = torch.randn(num_blocks, N, H, dtype=torch.float64, requires_grad=True)
    empty = BlockTargets(
        targets.previous_ids[:num_blocks],
        targets.label_ids[:num_blocks],
        targets.label_draft_ids[:num_blocks],
        targets.states[:num_blocks],
        torch.zeros(num_blocks, N, dtype=torch.bool),
    )
    denominators = loss_denominators(empty.counts, empty.label_draft_ids, config)
    assert set(denominators.values()) == {0.0}
    # Alone, and as one micro-batch of a step that has supervised tokens elsewhere.
    for handed_in in (denominators, dict.fromkeys(denominators, 3.0)):
        output = block_loss(hidden, heads, teacher, empty, config, handed_in)
        assert output.loss.item() == 0.0
        output.loss.backward()
        for parameter in [hidden, *heads.parameters()]:
            assert parameter.grad is not None
            assert (parameter.grad == 0).all()
        assert all(numerator.item() == 0 and total.item() == 0 for numerator, total in output.sums.values())


def test_micro_batches_with_the_steps_denominators_add_up() -> None:
    hidden, heads, teacher, targets = setting()
    config = LossConfig()
    denominators = loss_denominators(targets.counts, None, config)
    whole = block_loss(hidden, heads, teacher, targets, config, denominators)
    parts, summed = [], {}
    for rows in (slice(0, 2), slice(2, 5)):
        names = ("previous_ids", "label_ids", "label_draft_ids", "states", "counts")
        part = BlockTargets(*(getattr(targets, name)[rows] for name in names))
        output = block_loss(hidden[rows], heads, teacher, part, config, denominators)
        parts.append(output.loss)
        for name, (numerator, denominator) in output.sums.items():
            old = summed.get(name, (0.0, 0.0))
            summed[name] = (old[0] + numerator.item(), old[1] + denominator.item())
    assert sum(parts).item() == pytest.approx(whole.loss.item())
    for name, (numerator, denominator) in whole.sums.items():
        assert summed[name] == pytest.approx((numerator.item(), denominator.item())), name


def packed() -> PackedBatch:
    """Documents of 7 and 6 tokens and one of padding; the last 5 and 4 tokens are supervised."""
    generator = torch.Generator().manual_seed(1)
    return PackedBatch(
        input_ids=torch.randint(0, V, (14,), generator=generator),
        loss_mask=torch.tensor([0, 0, 1, 1, 1, 1, 1, 0, 0, 1, 1, 1, 1, 0]).bool(),
        document_ids=torch.tensor([0] * 7 + [1] * 6 + [PAD_DOCUMENT]),
        position_ids=torch.tensor([*range(7), *range(6), 0]),
        row_ids=(4, 2),
        anchors=torch.tensor([2, 3, 5, 9, 11]),
        final_states=torch.randn(14, H, dtype=torch.float64, generator=generator),
    )


def test_gathered_targets_of_a_packed_row() -> None:
    batch = packed()
    targets = gather_block_targets(batch, N, verifier_to_draft)
    assert targets.counts.int().tolist() == [[1, 1, 1, 1], [1, 1, 1, 0], [1, 0, 0, 0], [1, 1, 1, 0], [1, 0, 0, 0]]
    assert targets.state_index is not None
    for row, anchor in enumerate(batch.anchors.tolist()):
        for depth in range(N):
            if targets.counts[row, depth]:
                assert targets.label_ids[row, depth] == batch.input_ids[anchor + 1 + depth]
                assert targets.previous_ids[row, depth] == batch.input_ids[anchor + depth]
                state = targets.states[targets.state_index[row, depth]]
                assert torch.equal(state, batch.final_states[anchor + depth])
    assert torch.equal(targets.label_draft_ids, verifier_to_draft(targets.label_ids))
    # Shared states are stored once: positions 2-5 and 9-11, and row 0 for everything that does not count.
    assert targets.states.shape[0] == 8
    config = LossConfig(ce_label="data")
    expected = loss_denominators(targets.counts, targets.label_draft_ids, config)
    assert batch_denominators(batch, N, verifier_to_draft, config) == expected


def test_shared_states_give_the_same_loss_as_copied_ones() -> None:
    targets = gather_block_targets(packed(), N, verifier_to_draft)
    copied = BlockTargets(
        targets.previous_ids, targets.label_ids, targets.label_draft_ids, targets.states[targets.state_index], targets.counts
    )
    torch.manual_seed(0)
    hidden, heads, teacher = torch.randn(5, N, H, dtype=torch.float64), Heads(), Teacher()
    config = LossConfig(target_support="full")
    denominators = loss_denominators(targets.counts, None, config)
    losses = [block_loss(hidden, heads, teacher, each, config, denominators).loss for each in (targets, copied)]
    torch.testing.assert_close(losses[0], losses[1])


def test_targets_need_states() -> None:
    batch = packed()
    states = batch.final_states
    batch.final_states = None
    with pytest.raises(ValueError, match="no final states"):
        gather_block_targets(batch, N, verifier_to_draft)
    assert gather_block_targets(batch, N, verifier_to_draft, states).states.shape == (8, H)


def test_the_empty_row_gives_no_loss() -> None:
    targets = gather_block_targets(PackedBatch.empty(3, H), N, verifier_to_draft)
    assert targets.counts.shape == (0, N)
    hidden = torch.zeros(0, N, H, dtype=torch.float64, requires_grad=True)
    targets.states = targets.states.double()
    config = LossConfig()
    output = block_loss(hidden, Heads(), Teacher(), targets, config, loss_denominators(targets.counts, None, config))
    assert output.loss.item() == 0.0


def test_unknown_implementation_is_refused() -> None:
    hidden, heads, teacher, targets = setting()
    with pytest.raises(ValueError, match="unknown block_loss implementation"):
        block_loss(hidden, heads, teacher, targets, LossConfig(), {}, impl="fused")  # type: ignore[arg-type]
