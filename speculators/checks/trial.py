"""A small trial of a draft: the verifier's own greedy answers, its states on them, and the replay under a reading.

Shape letters: T tokens of a row, M captured layers, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from speculators.checks.facts import CheckpointFacts
from speculators.checks.reading_kinds import ReadDraft, Reading
from speculators.data.prompts import Prompt, find_prompt_files, read_prompts
from speculators.data.rendering import on_policy_row, render_prompt
from speculators.data.rows import Row
from speculators.decoding.prediction import AcceptancePrediction
from speculators.decoding.replay import replay_row
from speculators.errors import DataError, VerifierError
from speculators.layout import BlockLayout, final_layer_id
from speculators.models.base import SpeculatorModel
from speculators.models.verifier_weights import VerifierHead, has_rms_norm
from speculators.sampling import SamplingParams
from speculators.verifiers.generation import generate_answers
from speculators.verifiers.loading import Verifier, load_verifier
from speculators.verifiers.transformers_source import TransformersSource

__all__ = ["Trial", "TrialSettings", "measure", "prepare_trial"]

GREEDY = SamplingParams()


@dataclass(frozen=True, slots=True)
class TrialSettings:
    """How much text: a few short answers show a wrong reading, which costs most of the acceptance."""

    prompts: int = 16
    max_new_tokens: int = 64
    device: str | None = None  #: the accelerator if there is one


@dataclass(slots=True)
class RowStates:
    """One answered prompt."""

    input_ids: Tensor  #: int64 ``[T]``
    loss_mask: Tensor  #: bool ``[T]``
    states: Tensor  #: ``[T, M', H]``, the states of :attr:`Trial.captured`
    final: Tensor  #: ``[T, H]``, post-norm


@dataclass(slots=True)
class Trial:
    """Everything that a reading is measured on."""

    draft: Any
    teacher: VerifierHead
    rows: list[RowStates]
    captured: list[int]  #: layer ids of the rows' states, ascending
    last_layer: int  #: id of the verifier's last state before its final norm
    num_draft_tokens: int
    max_new_tokens: int
    eos_ids: tuple[int, ...]
    tokens: int = 0  #: of the answers
    surprises: int = 0  #: of them, those that the rebuilt verifier would not have written

    @property
    def longest_row(self) -> int:
        return max(row.input_ids.shape[0] for row in self.rows)

    def features(self, row: RowStates, reading: Reading) -> Tensor:
        """``[T, M, H]`` as the reading takes them."""
        places = [self.captured.index(k + reading.layer_shift) for k in self.draft.target_layer_ids]
        features = row.states[:, places]
        if reading.normed:
            features = features.clone()
            features[:, list(reading.normed)] = self.teacher.normalize(features[:, list(reading.normed)])
        return features

    def targets(self, row: RowStates, reading: Reading) -> Tensor:
        """Final states ``[T, H]`` that go to the verifier's head."""
        if reading.targets == "unnormed":
            return row.states[:, self.captured.index(self.last_layer)]
        return self.teacher.normalize(row.final) if reading.targets == "normed twice" else row.final

    @torch.no_grad()
    def commonest_target(self, reading: Reading) -> float:
        """Share of the answers' positions at which the verifier, so read, would write its most frequent token."""
        tokens = [self.teacher.full_logits(self.targets(row, reading)[row.loss_mask]).argmax(dim=-1) for row in self.rows]
        counts = torch.cat(tokens).unique(return_counts=True)[1]
        return float(counts.max() / counts.sum())


def prepare_trial(
    facts: CheckpointFacts,
    verifier_name: str,
    data: Sequence[Path],
    settings: TrialSettings,
    progress: Callable[[str], None] = lambda _: None,
) -> Trial:
    """Load draft and verifier, let the verifier answer, and keep its states.

    :raises ConfigError: the checkpoint cannot be loaded.
    :raises DataError: the prompts cannot be used.
    :raises VerifierError: the verifier cannot be loaded, or does not fit the draft.
    """
    progress("loading the draft")
    draft: Any = SpeculatorModel.from_pretrained(facts.raw.folder, verifier=verifier_name)
    progress("loading the verifier")
    verifier = load_verifier(verifier_name, device=settings.device)
    draft = draft.to(device=verifier.device, dtype=verifier.dtype)
    ids = draft.target_layer_ids
    # MTP reads the last state after the final norm, or before it.
    last, highest = verifier.num_layers, final_layer_id(verifier.num_layers, after_norm=facts.family == "mtp")
    captured = sorted({k + shift for k in ids for shift in (-1, 0, 1) if 0 <= k + shift <= highest} | {last})
    source = TransformersSource(verifier, captured)
    prompts = _prompts(verifier, data, settings)
    progress(f"the verifier answers {len(prompts)} prompts")
    answers = dict(generate_answers(verifier, prompts, settings.max_new_tokens, GREEDY))
    rows = [on_policy_row(place, prompts[place], answers[place]) for place in sorted(answers)]
    teacher = VerifierHead.from_folder(
        verifier_name, dtype=verifier.dtype, with_norm=has_rms_norm(verifier.config), config=verifier.config
    ).to(verifier.device)
    states = [_row_states(row, fetched, verifier) for row, fetched in zip(rows, source.fetch(rows), strict=True)]
    layout = draft.layout
    both = isinstance(layout, BlockLayout) and layout.block_size > 1  # then a number that either layout can draft
    n = layout.block_size - 1 if both else layout.max_draft_tokens
    return Trial(draft, teacher, states, captured, last, n, settings.max_new_tokens, verifier.eos_ids)


def _row_states(row: Row, fetched: Any, verifier: Verifier) -> RowStates:
    device = verifier.device
    return RowStates(
        input_ids=torch.tensor(row.input_ids, dtype=torch.long, device=device),
        loss_mask=torch.tensor(row.loss_mask, dtype=torch.bool, device=device),
        states=fetched.features.to(device),
        final=fetched.final.to(device),
    )


def _prompts(verifier: Verifier, data: Sequence[Path], settings: TrialSettings) -> list[list[int]]:
    """Rendered prompts that leave room for an answer, the files' in turn."""
    tokenizer = verifier.tokenizer
    if tokenizer is None:
        raise VerifierError(f"the verifier {verifier.name} has no tokenizer files, which prompts need; add them to the folder")
    files = [read_prompts(file) for file in (data or find_prompt_files())]
    wanted = [prompt for turn in zip_longest(*files) for prompt in turn if prompt is not None]
    room = None if verifier.context_length is None else verifier.context_length - settings.max_new_tokens
    rendered = []
    for prompt in wanted:
        ids = _render(tokenizer, prompt)
        if ids and (room is None or len(ids) <= room):
            rendered.append(ids)
        if len(rendered) == settings.prompts:
            break
    if not rendered:
        raise DataError(f"no prompt leaves room for {settings.max_new_tokens} tokens in the context; give shorter ones")
    return rendered


def _render(tokenizer: Any, prompt: Prompt) -> list[int]:
    """With the chat template if there is one; a base model reads the last message's text."""
    if getattr(tokenizer, "chat_template", None):
        return render_prompt(tokenizer, prompt.messages, prompt.tools)
    return list(tokenizer(prompt.messages[-1]["content"])["input_ids"])


def measure(trial: Trial, reading: Reading) -> np.ndarray:
    """Tokens and rounds of every row ``[rows, 2]`` that the decoder would have under a reading.

    The config's own reading also fills in the trial's counts of tokens and surprises.
    """
    draft = ReadDraft(trial.draft, reading)
    sums, total = [], AcceptancePrediction()
    for row in trial.rows:
        replayed = replay_row(
            draft,
            trial.teacher,
            input_ids=row.input_ids,
            loss_mask=row.loss_mask,
            features=trial.features(row, reading),
            final_states=trial.targets(row, reading),
            num_draft_tokens=trial.num_draft_tokens,
            sampling=GREEDY,
            eos_ids=trial.eos_ids,
            max_new_tokens=trial.max_new_tokens,
        )
        one = AcceptancePrediction()
        one.add(replayed)
        total += one
        sums.append((one.emitted, one.rounds))
    if reading.targets == "as they are" and not trial.tokens:
        trial.tokens, trial.surprises = total.tokens, total.surprises
    return np.array(sums, dtype=np.float64)
