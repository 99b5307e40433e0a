"""Decoder, block drafter and replay on a tiny transformers verifier in float64, with a draft fitted to its answers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from speculators.batch import PackedBatch
from speculators.config import VerifierConfig
from speculators.data.rows import AnswerRecord, Row
from speculators.decoding import (
    AcceptancePrediction,
    AcceptanceStatistics,
    Decoder,
    compare_greedy,
    predict_acceptance,
    replay_row,
)
from speculators.errors import ConfigError, DataError
from speculators.layout import anchor_candidates
from speculators.losses import LossConfig, batch_denominators
from speculators.models.base import SpeculatorModel
from speculators.models.dflash import DFlashSpeculatorConfig
from speculators.models.draft_config import build_draft_config
from speculators.models.dspark import DSparkSpeculatorConfig
from speculators.models.verifier_weights import VerifierHead
from speculators.sampling import SamplingParams
from speculators.verifiers.loading import Verifier, load_verifier
from speculators.verifiers.session import TransformersSession
from tests.decoding.tables import Output
from tests.tiny import tiny_verifier

LAYERS = (1, 2, 4)
VOCAB, KEPT, ANSWER = 64, 40, 36
PROMPTS = [[7, 12, 30, 9], [41, 5, 5, 22, 17, 60], [33]]


class RecomputingSession:
    """A verifier session without a cache: every pass runs the whole text again."""

    def __init__(self, model: Any, layer_ids: tuple[int, ...] = LAYERS) -> None:
        self.model, self.layer_ids, self.texts = model, layer_ids, []

    @property
    def lengths(self) -> list[int]:
        return [len(text) for text in self.texts]

    def prefill(self, prompts: list[Tensor]) -> list[Output]:
        self.texts = [[] for _ in prompts]
        return [Output(output.logits[-1:], output.features) for output in self.verify(prompts)]

    def verify(self, tokens: list[Tensor]) -> list[Output]:
        outputs = []
        for text, part in zip(self.texts, tokens, strict=True):
            before = len(text)
            text.extend(part.tolist())
            logits, features, _ = states_of(self.model, text, self.layer_ids)
            outputs.append(Output(logits[before:], features[before:]))
        return outputs

    def rollback(self, lengths: list[int]) -> None:
        for text, length in zip(self.texts, lengths, strict=True):
            del text[length:]


@torch.no_grad()
def states_of(model: Any, text: list[int], layer_ids: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """Logits ``[T, V]``, features ``[T, M, H]`` and the state that goes into the head ``[T, H]``."""
    # transformers' last entry is behind the final norm; layer id 4 of 4 layers is the stream before it.
    last: list[Tensor] = []
    handle = model.model.norm.register_forward_pre_hook(lambda module, args: last.append(args[0]))
    outputs = model(torch.tensor([text]), output_hidden_states=True, use_cache=False)
    hidden = outputs.hidden_states
    handle.remove()
    stream = [*hidden[:-1], last[0]]
    return outputs.logits[0], torch.stack([stream[k][0] for k in layer_ids], dim=1), hidden[-1][0]


@dataclass
class Setting:
    verifier: Any
    head: VerifierHead
    draft: Any
    answers: list[list[int]]


FAMILIES = ["dspark", "dspark, fill-in, rnn, sliding", "dflash", "dflash, anchor-first, gated"]


@pytest.fixture(scope="module")
def verifier(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tiny_verifier(tmp_path_factory.mktemp("decoding"), vocab=VOCAB, dtype=torch.float64, seed=1)
    return folder, AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()


@pytest.fixture(scope="module", params=FAMILIES)
def setting(request: pytest.FixtureRequest, verifier: tuple[Path, Any]) -> Setting:
    return fitted(request.param, verifier)


def fitted(family: str, verifier: tuple[Path, Any], steps: int = 40) -> Setting:
    """A draft trained on the verifier's greedy answers for some steps: right often, not always."""
    folder, model = verifier
    plain = Decoder(lambda: RecomputingSession(model))
    answers = [plain.decode(prompt, ANSWER).tokens for prompt in PROMPTS]
    decoder = build_draft_config(
        model.config, num_layers=1, sliding_window=6 if "sliding" in family else None, full_attention_indices=()
    )
    common: dict[str, Any] = {
        "aux_hidden_state_layer_ids": list(LAYERS),
        "mask_token_id": 3,
        "block_size": 5,
        "draft_vocab_size": KEPT,
    }
    where = VerifierConfig.from_pretrained(str(folder))
    config: Any
    if family.startswith("dspark"):
        values = {
            "markov_rank": 8,
            "markov_head_type": "rnn" if "rnn" in family else "vanilla",
            "sample_from_anchor": "fill-in" not in family,
            "sliding_window_reference": "slot" if "sliding" in family else "anchor",
        }
        config = DSparkSpeculatorConfig.build(decoder, where, **common, **values)
    else:
        config = DFlashSpeculatorConfig.build(decoder, where, **common, sample_from_anchor="anchor-first" in family)
    kept = torch.zeros(VOCAB, dtype=torch.bool)
    used = torch.tensor(answers).flatten().unique()[: KEPT - 2]  # a few of the answers' tokens may stay outside
    kept[used] = True
    kept[(~kept).nonzero().flatten()[: KEPT - int(kept.sum())]] = True
    d2t = kept.nonzero().flatten() - torch.arange(KEPT)
    torch.manual_seed(0)
    draft: Any = SpeculatorModel.from_verifier(config, t2d=kept, d2t=d2t, verifier=folder, dtype=torch.float64)
    head = VerifierHead.from_folder(folder, kept, torch.float64)
    optimizer = torch.optim.AdamW([p for p in draft.parameters() if p.requires_grad], lr=1e-2)
    loss_config = LossConfig()
    batches = [batch_of(model, prompt, answer) for prompt, answer in zip(PROMPTS, answers)]
    for step in range(steps):
        batch = batches[step % len(batches)]
        denominators = batch_denominators(batch, draft.layout.max_draft_tokens, draft.verifier_to_draft, loss_config)
        optimizer.zero_grad()
        draft(batch, teacher=head, loss_config=loss_config, denominators=denominators, metrics=False).loss.backward()
        optimizer.step()
    return Setting(model, head, draft.eval(), answers)


def batch_of(model: Any, prompt: list[int], answer: list[int]) -> PackedBatch:
    text = [*prompt, *answer]
    _, features, final = states_of(model, text, LAYERS)
    mask = torch.arange(len(text)) >= len(prompt)
    documents = torch.zeros(len(text), dtype=torch.long)
    anchors = anchor_candidates(mask, documents).nonzero().flatten()
    return PackedBatch(
        torch.tensor(text), mask, documents, torch.arange(len(text)), (0,), anchors, features=features, final_states=final
    )


@pytest.mark.parametrize("n", [1, 3, 4])
def test_every_greedy_round_equals_its_replay(setting: Setting, n: int) -> None:
    statistics, prediction, drafter = AcceptanceStatistics(), AcceptancePrediction(), setting.draft.drafter()
    decoder = Decoder(lambda: RecomputingSession(setting.verifier), drafter, n)
    for prompt, answer in zip(PROMPTS, setting.answers):
        end = answer[ANSWER // 2]  # a token of the answer, so that it ends by itself in one of the two runs
        for eos in ((), (end,)):
            expected = answer[: answer.index(end) + 1] if eos else answer
            decoded = decoder.decode(prompt, ANSWER, eos)
            assert decoded.tokens == expected
            comparison = compare_greedy(decoder, prompt, expected, decoded.tokens, ANSWER, eos_ids=eos)
            assert comparison.identical_to_baseline
            assert comparison.near_ties == []
            batch = batch_of(setting.verifier, prompt, expected)
            row = replay_row(
                setting.draft,
                setting.head,
                input_ids=batch.input_ids,
                loss_mask=batch.loss_mask,
                features=batch.features,
                final_states=batch.final_states,
                num_draft_tokens=n,
                sampling=SamplingParams(),
                eos_ids=eos,
                max_new_tokens=ANSWER,
            )
            assert row.surprises == 0
            complete = [one for one in decoded.rounds if one.complete]
            assert [(one.anchor, one.accepted, one.emitted, one.ended) for one in complete] == [
                (one.anchor, one.accepted, one.emitted, one.ended) for one in row.greedy_rounds() if one.complete
            ]
            statistics.add(complete, len(decoded.tokens))
            prediction.add(row)
    assert prediction.predicted_acceptance_length == pytest.approx(statistics.acceptance_length, abs=1e-12)
    assert prediction.predicted_acceptance_by_position == pytest.approx(statistics.acceptance_by_position, abs=1e-12)
    assert 0 < statistics.accepted < statistics.drafted  # neither a draft that is never right nor one that always is
    assert prediction.tau_uniform != prediction.predicted_acceptance_length


class ListedSource:
    """A hidden-state source over :func:`states_of`, with states from before or behind the final norm."""

    def __init__(self, model: Any, final_state: str) -> None:
        self.model, self.description = model, SimpleNamespace(final_state=final_state)

    def fetch(self, rows: list[Row]) -> list[SimpleNamespace]:
        result = []
        for row in rows:
            stream = states_of(self.model, row.input_ids.tolist(), (*LAYERS, 4))[1]
            final = states_of(self.model, row.input_ids.tolist(), LAYERS)[2]
            before_norm = stream[:, -1]
            chosen = final if self.description.final_state == "post_norm" else before_norm
            result.append(SimpleNamespace(row_id=row.row_id, features=stream[:, :-1], final=chosen))
        return result


@pytest.mark.parametrize("final_state", ["post_norm", "pre_norm"])
def test_a_data_set_s_rows_predict_the_decoder_s_statistics(setting: Setting, final_state: str) -> None:
    rows = [
        Row(index, np.array([*prompt, *answer]), np.arange(len(prompt) + ANSWER) >= len(prompt))
        for index, (prompt, answer) in enumerate(zip(PROMPTS, setting.answers))
    ]
    predict = partial(
        predict_acceptance,
        setting.draft,
        setting.head,
        rows,
        ListedSource(setting.verifier, final_state),
        num_draft_tokens=4,
        sampling=SamplingParams(),
    )
    prediction = predict(answers=AnswerRecord(on_policy=True, max_new_tokens=ANSWER))
    decoder = Decoder(lambda: RecomputingSession(setting.verifier), setting.draft.drafter(), 4)
    statistics = AcceptanceStatistics()
    for prompt in PROMPTS:
        decoded = decoder.decode(prompt, ANSWER)
        statistics.add([one for one in decoded.rounds if one.complete], len(decoded.tokens))
    assert prediction.rounds == statistics.rounds
    assert prediction.predicted_acceptance_length == pytest.approx(statistics.acceptance_length, abs=1e-12)
    with pytest.raises(DataError, match="own answers"):
        predict(answers=AnswerRecord(on_policy=False))


def test_sampled_prediction_agrees_with_sampled_decoding(verifier: tuple[Path, Any]) -> None:
    """Rows sampled by plain decoding predict the mean rounds of drafting, within four standard errors."""
    setting, n, length, count = fitted("dspark", verifier, steps=24), 3, 12, 40
    sampling, prompt = SamplingParams(temperature=0.8, top_k=20), PROMPTS[0]
    plain = Decoder(lambda: RecomputingSession(setting.verifier), None, 0, sampling, seed=1)
    drafted = Decoder(lambda: RecomputingSession(setting.verifier), setting.draft.drafter(), n, sampling, seed=2)
    predicted, measured = [], []
    for index in range(count):
        batch = batch_of(setting.verifier, prompt, plain.decode(prompt, length, index=index).tokens)
        row = replay_row(
            setting.draft,
            setting.head,
            input_ids=batch.input_ids,
            loss_mask=batch.loss_mask,
            features=batch.features,
            final_states=batch.final_states,
            num_draft_tokens=n,
            sampling=sampling,
            max_new_tokens=length,
        )
        assert row.surprises == 0
        prediction = AcceptancePrediction()
        prediction.add(row)
        predicted.append(prediction.rounds)
        measured.append(float(sum(one.complete for one in drafted.decode(prompt, length, index=index).rounds)))
    left, right = torch.tensor(predicted), torch.tensor(measured)
    error = ((left.var() + right.var()) / count).sqrt()
    assert abs(left.mean() - right.mean()) < 4 * error
    assert left.var() < right.var()  # averaged over the draft's and the acceptance's draws


def test_more_tokens_than_the_layout_has_are_refused(setting: Setting) -> None:
    most = setting.draft.layout.max_draft_tokens
    with pytest.raises(ConfigError, match=f"use at most {most}"):
        Decoder(lambda: RecomputingSession(setting.verifier), setting.draft.drafter(), most + 1)


def test_the_markov_head_and_the_full_block_can_be_chosen(verifier: tuple[Path, Any]) -> None:
    """Both change what is drafted, neither changes the output."""
    setting = fitted("dspark", verifier)
    rounds = []
    for options, full in (({}, False), ({"markov": False}, False), ({}, True)):
        decoder = Decoder(lambda: RecomputingSession(setting.verifier), setting.draft.drafter(**options), 2, full_block=full)
        decoded = decoder.decode(PROMPTS[1], ANSWER)
        assert decoded.tokens == setting.answers[1]
        assert all(one.confidence is not None and len(one.confidence) == 2 for one in decoded.rounds)
        rounds.append([one.confidence for one in decoded.rounds])
    assert rounds[0] != rounds[2]


@pytest.fixture(scope="module")
def loaded(verifier: tuple[Path, Any]) -> Verifier:
    return load_verifier(verifier[0], dtype=torch.float64, device="cpu")


@pytest.mark.parametrize("n", [0, 2, 4])
def test_the_cached_session_decodes_as_the_recomputing_one(setting: Setting, loaded: Verifier, n: int) -> None:
    """Same tokens and same rounds: caches of verifier and draft, and their rollback, change nothing."""
    drafter = setting.draft.drafter()
    cached = Decoder(lambda: TransformersSession(loaded, LAYERS), drafter, n, context_length=loaded.context_length)
    recomputed = Decoder(lambda: RecomputingSession(setting.verifier), drafter, n)
    for prompt, answer in zip(PROMPTS, setting.answers):
        one, other = cached.decode(prompt, ANSWER), recomputed.decode(prompt, ANSWER)
        assert one.tokens == other.tokens == answer
        assert [(r.anchor, r.accepted, r.kept) for r in one.rounds] == [(r.anchor, r.accepted, r.kept) for r in other.rounds]
    together = cached.decode_together(PROMPTS, ANSWER)
    assert [one.tokens for one in together] == setting.answers


def test_drafting_reaches_the_end_of_the_verifier_s_context(verifier: tuple[Path, Any]) -> None:
    """With a context of 32 both ways of decoding fill it, and a longer prompt is refused."""
    setting = fitted("dspark", verifier)
    small = load_verifier(verifier[0], dtype=torch.float64, device="cpu")
    small.context_length = 32
    for n in (0, 4):
        session = partial(TransformersSession, small, LAYERS)
        decoder = Decoder(session, setting.draft.drafter(), n, context_length=small.context_length)
        decoded = decoder.decode(PROMPTS[0], 100)
        assert decoded.tokens == setting.answers[0][: 32 - len(PROMPTS[0])]
        assert decoded.finish == "context"
        with pytest.raises(DataError, match="context"):
            decoder.decode([1] * 32, 5)
