"""Trainings for verifiers and rows of other kinds: LayerNorm, rows beyond the context, answers of the verifier's own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from speculators.data import DataManifest, Row, RowDataset
from speculators.data.rows import AnswerRecord
from speculators.decoding.prediction import predict_acceptance
from speculators.errors import DataError
from speculators.models import SpeculatorModel
from speculators.models.verifier_weights import VerifierHead
from speculators.sampling import SamplingParams
from speculators.train import train
from speculators.train.planning import add_noise
from speculators.verifiers.generation import generate_answers
from speculators.verifiers.transformers_source import TransformersSource
from tests.tiny import random_rows, tiny_tokenizer
from tests.train.helpers import loaded_verifier, settings, tiny_rows


def test_a_verifier_with_a_layer_norm_is_trained_on_post_norm_states(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=128, n_embd=32, n_layer=3, n_head=4))
    model.save_pretrained(tmp_path / "verifier")
    tiny_tokenizer().save_pretrained(tmp_path / "verifier")
    result = train(settings(tmp_path, epochs=1), dataset=tiny_rows(), progress=False)
    assert result.global_step == 4
    assert result.validation["loss"] > 0


def test_rows_beyond_the_context_are_trained_once_cut(tmp_path: Path) -> None:
    """The advice of the refusal, a lower --total-seq-len, works with the default, caching source too."""
    verifier = loaded_verifier(tmp_path)
    rng = np.random.default_rng(0)
    long = [Row(index, rng.integers(5, 60, size=600), np.arange(600) >= 20) for index in range(8)]
    rows = RowDataset.from_rows(long)
    with pytest.raises(DataError, match="600 tokens and the verifier's context only 512; lower --total-seq-len"):
        train(settings(tmp_path, total_seq_len=640), dataset=rows, verifier=verifier, progress=False)
    result = train(settings(tmp_path, total_seq_len=256, epochs=1), dataset=rows, verifier=verifier, progress=False)
    assert result.global_step == 7


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_last_validation_predicts_the_decoder_from_own_answers(tmp_path: Path, temperature: float) -> None:
    verifier = loaded_verifier(tmp_path)
    sampling = SamplingParams(temperature=temperature)
    prompts = [row.input_ids[:10].tolist() for row in random_rows(8, seed=3)]
    answered = dict(generate_answers(verifier, prompts, 24, sampling))
    rows = [
        Row(index, np.array([*prompt, *answered[index]]), np.arange(len(prompt) + len(answered[index])) >= len(prompt))
        for index, prompt in enumerate(prompts)
    ]
    answers = AnswerRecord(on_policy=True, temperature=temperature, max_new_tokens=24)
    dataset = RowDataset.from_rows(rows, DataManifest(answers=answers))
    config = settings(tmp_path, train_data_ratio=0.5, checkpoint_dtype="float32", epochs=2)
    result = train(config, dataset=dataset, verifier=verifier, progress=False)
    model: Any = SpeculatorModel.from_pretrained(result.checkpoint)
    teacher = VerifierHead.from_folder(str(tmp_path / "verifier"), model.t2d)
    expected = predict_acceptance(
        model,
        teacher,
        [dataset.row(index) for index in range(4, 8)],
        TransformersSource(verifier, (1, 2)),
        answers=answers,
        num_draft_tokens=model.layout.max_draft_tokens,
        sampling=sampling,
        eos_ids=verifier.eos_ids,
    ).predicted_acceptance_length
    assert result.validation["predicted_acceptance_length"] == pytest.approx(expected, rel=1e-4)


def test_rows_of_unknown_answers_predict_nothing(tmp_path: Path) -> None:
    verifier = loaded_verifier(tmp_path)
    result = train(settings(tmp_path, epochs=1), dataset=tiny_rows(), verifier=verifier, progress=False)
    assert "predicted_acceptance_length" not in result.validation


def test_noise_is_a_function_of_seed_epoch_and_row(tmp_path: Path) -> None:
    from speculators.data import attach_states, build_batch
    from tests.train.helpers import RowByRowSource

    rows, source = tiny_rows(), RowByRowSource(loaded_verifier(tmp_path))

    def noisy(packed: tuple[int, ...], seed: int = 0, epoch: int = 0) -> Any:
        batch = attach_states(build_batch(rows, packed, 256, 4, "row", 0, 0, 4), source.fetch([rows[row] for row in packed]))
        return replace(batch, features=add_noise(batch, 0.1, seed, epoch).features - batch.features)

    alone, packed = noisy((3,)), noisy((5, 3))
    torch.testing.assert_close(packed.features[packed.document_ids == 1], alone.features, rtol=0, atol=1e-6)
    assert 0.05 < float(alone.features.abs().max()) <= 0.1 + 1e-6
    for other in (noisy((3,), seed=1), noisy((3,), epoch=1)):
        assert float((other.features - alone.features).abs().max()) > 0.01
