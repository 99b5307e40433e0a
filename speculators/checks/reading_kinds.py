"""The readings of a draft: the config's own, and those that trainers and engines have been seen to take by mistake."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor

from speculators.batch import PackedBatch
from speculators.checks.facts import CheckpointFacts, rope_of
from speculators.checks.findings import Kind
from speculators.layout import BlockLayout
from speculators.models.backbone import LayerWindow, RotaryEmbedding
from speculators.models.draft_config import build_draft_config
from speculators.models.heads import DraftHeads
from speculators.models.verifier_weights import VerifierHead

if TYPE_CHECKING:
    from speculators.checks.trial import Trial

__all__ = ["KINDS", "ReadDraft", "Reading", "readings_of"]

LAYOUT = Kind(
    "trained-other-layout",
    "error",
    "Drafted text fits the other block layout better.",
    "Served as written, acceptance is a fraction of what was trained.",
    "Flip `sample_from_anchor`, and set `speculative_tokens` to K (anchor-first) or K - 1 (fill-in).",
)
LAYERS = Kind(
    "trained-layer-ids-shifted",
    "error",
    "Drafted text fits layer ids that are one higher or lower better.",
    "Served as written, every feature comes from the wrong layer.",
    "Shift the ids by one: id k is the state after k decoder layers, native 0-based ids are one less.",
)
FEATURES_NORMED = Kind(
    "trained-features-normed",
    "error",
    "Drafted text fits features better that went through the verifier's final norm.",
    "Engines hand over the residual stream as it is.",
    "Train again on states before the norm (Hugging Face's hidden_states[-1] is after it).",
)
TARGETS = Kind(
    "trained-wrong-targets",
    "error",
    "Drafted text fits a verifier better whose final norm is left out or applied twice.",
    "The draft imitates a distribution that the verifier does not have.",
    "Train again with the right `--final-state` / `--apply-verifier-norm`; the start-up self-check tells.",
)
ROPE = Kind(
    "trained-other-rope-theta",
    "error",
    "Drafted text fits another rope_theta better.",
    "Served as written, acceptance falls with depth and context length.",
    "Write the rope_theta of the training into transformer_layer_config.",
)
POSITIONS = Kind(
    "trained-positions-shifted",
    "error",
    "Drafted text fits blocks better that sit one position off.",
    "Engines seed the block at the anchor's own position; acceptance falls with the context length.",
    "Train again: slot k of a block sits at anchor + k.",
)
CAUSALITY = Kind(
    "trained-other-block-attention",
    "error",
    "Drafted text fits the other attention inside the block (causal or bidirectional) better.",
    "Served as written, slots see one another as they were not trained to.",
    "Flip `sliding_window_non_causal` (sliding layers), or convert the layers' types.",
)
WINDOW = Kind(
    "trained-without-window",
    "error",
    "Drafted text fits full attention better than the config's sliding window.",
    "Served as written, the draft forgets what it was trained to see.",
    "Write the layer types and the window of the training.",
)
MARKOV = Kind(
    "markov-head-hurts",
    "error",
    "Without the Markov head more is accepted.",
    "The head was never trained, belongs to another draft, or is read in the wrong vocabulary (W1 verifier ids, W2 draft ids).",
    "Take the head of the training, or drop it with `markov_rank` 0.",
)
STATE = Kind(
    "trained-other-state",
    "error",
    "Drafted text fits the verifier's last state on the other side of its final norm better.",
    "Read as written, the MTP layer gets another input than in training.",
    "Flip `hidden_state_input` (upstream's checkpoints, which have no such key, mean pre_norm).",
)
RESIDUAL = Kind(
    "trained-other-residual",
    "error",
    "Drafted text fits the other value of `norm_before_residual` better.",
    "Served as written, the first layer's residual is another state than in training.",
    "Flip `norm_before_residual`; vLLM takes true where the key is absent, upstream false.",
)
OUTPUT = Kind(
    "trained-other-output-norm",
    "error",
    "Drafted text fits the other value of `norm_output` better.",
    "Served as written, every token after the first is drafted from another state than in training.",
    "Flip `norm_output`.",
)
LOW = Kind(
    "acceptance-low",
    "warning",
    "Hardly any drafted token is accepted under any reading.",
    "Decoding with this draft is no faster than without.",
    "Check that it is trained, for this verifier, and on such text; `speculators evaluate` measures with your own prompts.",
)
FEW_ROWS = Kind(
    "too-few-answers",
    "note",
    "Too few prompts for a verdict on the readings.",
    "The table shows acceptance lengths only.",
    "Give more prompts with `--data`, or a larger `--limit`.",
)
NOT_REBUILT = Kind(
    "verifier-not-rebuilt",
    "warning",
    "The verifier's final states and head do not rebuild its own answers.",
    "Figures of the readings compare the draft with another distribution than the verifier's.",
    "Check that the verifier's weights are unquantised and its head is one that this library reads.",
)
UNTRIED = Kind(
    "readings-not-tried",
    "note",
    "The draft was not tried on text.",
    "Whether it was trained as its config says is not known.",
    "Mend the errors above, then run again.",
)
KINDS = (
    LAYOUT,
    LAYERS,
    FEATURES_NORMED,
    TARGETS,
    ROPE,
    POSITIONS,
    CAUSALITY,
    WINDOW,
    MARKOV,
    STATE,
    RESIDUAL,
    OUTPUT,
    LOW,
    FEW_ROWS,
    NOT_REBUILT,
    UNTRIED,
)

#: Values of rope_theta that readers fall back to.
FALLBACK_THETAS = (10000.0, 1000000.0)

#: A target reading of which one token makes up more than this share says nothing: a draft that repeats it fits by chance.
DEGENERATE = 0.5


@dataclass(frozen=True)
class Swap:
    """An attribute of a model, or of a part of it, and another value for it."""

    owner: Any
    name: str
    value: Any


@dataclass(frozen=True)
class Reading:
    """One way to read a checkpoint; what is not set is as the config says."""

    name: str
    text: str
    kind: Kind = UNTRIED  #: of the finding if this reading wins; the config's own has none
    layout: BlockLayout | None = None
    layer_shift: int = 0
    normed: tuple[int, ...] = ()  #: places in the layer ids whose features go through the verifier's final norm
    targets: Literal["as they are", "unnormed", "normed twice"] = "as they are"
    position_shift: int = 0
    markov: bool = True
    swaps: tuple[Swap, ...] = ()  #: parts of the model that are others under this reading

    def degenerate(self, trial: Trial) -> bool:
        """Whether this reading's targets are too plain to be judged by."""
        return self.targets != "as they are" and trial.commonest_target(self) > DEGENERATE


class ReadDraft:
    """A draft under a reading, as :class:`speculators.decoding.replay.ReplayModel`."""

    def __init__(self, model: Any, reading: Reading) -> None:
        self.model = model
        self.reading = reading
        self.draft_vocab_size: int = model.draft_vocab_size
        self.layout: Any = reading.layout or model.layout
        heads = model.heads
        self.heads = heads if reading.markov else DraftHeads(heads.lm_head)
        self.draft_to_verifier = model.draft_to_verifier
        self.verifier_to_draft = model.verifier_to_draft

    def heads_of(self, hidden: Tensor, anchor_ids: Tensor) -> DraftHeads:
        """See :meth:`speculators.models.family.DraftModel.heads_of`."""
        return self.heads.after(hidden, anchor_ids, self.layout.first_predicting_slot)

    def draft_hidden(self, batch: PackedBatch, num_slots: int | None = None) -> Tensor:
        """See :meth:`speculators.models.family.DraftModel.draft_hidden`; the batch's features are the reading's."""
        with _swapped(self.reading.swaps):
            if not self.reading.position_shift:
                return self.model.draft_hidden(batch, num_slots or self.layout.block_size)
            return self.model.run_blocks(
                self.model.embed_blocks(batch.anchor_ids, num_slots or self.layout.block_size),
                self.model.context(batch.features),
                batch.position_ids,
                batch.anchors,
                batch.anchor_positions + self.reading.position_shift,
                batch.document_ids,
            )


@contextmanager
def _swapped(swaps: Sequence[Swap]) -> Iterator[None]:
    """Other parts inside this context."""
    kept = [Swap(swap.owner, swap.name, getattr(swap.owner, swap.name)) for swap in swaps]
    try:
        for swap in swaps:
            setattr(swap.owner, swap.name, swap.value)
        yield
    finally:
        for swap in kept:
            setattr(swap.owner, swap.name, swap.value)


def readings_of(
    model: Any, teacher: VerifierHead, facts: CheckpointFacts, *, longest_row: int
) -> tuple[Reading, list[Reading]]:
    """The config's own reading and the wrong ones that differ from it.

    :param model: a draft of any family.
    :param longest_row: tokens; windows that no row fills are not tried.
    """
    own = Reading("the config", f"{model.layout.name}, layer ids {list(model.target_layer_ids)}, as config.json says")
    wrong = [*_layout_readings(model), *_layer_readings(model, facts), *_norm_readings(model, teacher, facts)]
    wrong += _rope_readings(model, facts)
    if isinstance(model.layout, BlockLayout):
        wrong += _block_readings(model, longest_row)
    else:
        wrong += _chain_readings(model)
    if getattr(model, "markov_head", None) is not None:
        wrong.append(Reading("no Markov head", "logits without the Markov head's term", MARKOV, markov=False))
    return own, wrong


def _layout_readings(model: Any) -> Iterator[Reading]:
    layout = model.layout
    if isinstance(layout, BlockLayout) and layout.block_size > 1:
        other = BlockLayout(layout.block_size, not layout.sample_from_anchor)
        yield Reading(f"the {other.name} layout", f"blocks in the {other.name} layout", LAYOUT, layout=other)


def _layer_readings(model: Any, facts: CheckpointFacts) -> Iterator[Reading]:
    if facts.family == "mtp":
        before = model.config.hidden_state_input == "pre_norm"
        text = f"the verifier's last state {'after' if before else 'before'} its final norm"
        yield Reading("the other state", text, STATE, layer_shift=1 if before else -1)
        return
    for shift in (-1, 1):
        ids = [k + shift for k in model.target_layer_ids]
        if min(ids) >= 0 and (facts.verifier is None or max(ids) <= facts.verifier.num_layers):
            yield Reading(f"layer ids {shift:+d}", f"layer ids {ids}", LAYERS, layer_shift=shift)


def _norm_readings(model: Any, teacher: VerifierHead, facts: CheckpointFacts) -> Iterator[Reading]:
    if not teacher.can_normalize:
        return
    ids = model.target_layer_ids
    text = "features after the verifier's final norm"
    if facts.family != "mtp":
        yield Reading("normed features", text, FEATURES_NORMED, normed=tuple(range(len(ids))))
    last = facts.verifier.num_layers if facts.verifier is not None else None
    if last in ids and len(ids) > 1:
        text = "the last layer's feature after the verifier's final norm"
        yield Reading("normed last feature", text, FEATURES_NORMED, normed=(ids.index(last),))
    yield Reading("unnormed targets", "targets without the verifier's final norm", TARGETS, targets="unnormed")
    yield Reading("twice-normed targets", "targets with the verifier's final norm twice", TARGETS, targets="normed twice")


def _rope_readings(model: Any, facts: CheckpointFacts) -> Iterator[Reading]:
    decoder = model.config.transformer_layer_config
    own = float((rope_of(decoder.to_dict()) or {}).get("rope_theta", 10000.0))
    thetas = dict.fromkeys(FALLBACK_THETAS, "a fallback of readers")
    if facts.verifier is not None:
        usual = build_draft_config(facts.verifier.config, num_layers=1)
        theirs = float((rope_of(usual.to_dict()) or {}).get("rope_theta", 10000.0))
        thetas = {theirs: "the verifier's"} | thetas
    for theta, whose in thetas.items():
        if theta == own:
            continue
        changed = copy.deepcopy(decoder)
        changed.rope_parameters = dict(changed.rope_parameters or {}) | {"rope_theta": theta}
        rotary = RotaryEmbedding(changed).to(model.embed_tokens.weight.device)
        swaps = (Swap(model, "rotary", rotary),)
        yield Reading(f"rope theta {theta:g}", f"rope_theta {theta:g} ({whose})", ROPE, swaps=swaps)


def _block_readings(model: Any, longest_row: int) -> Iterator[Reading]:
    for shift in (-1, 1):
        where = "before" if shift < 0 else "after"
        text = f"blocks one position {where} the anchor's"
        yield Reading(f"positions {shift:+d}", text, POSITIONS, position_shift=shift)
    windows: tuple[LayerWindow, ...] = model.windows
    for causal, name in ((True, "causal"), (False, "bidirectional")):
        changed = tuple(replace(window, causal_block=causal) for window in windows)
        if changed != windows:
            text = f"{name} attention inside the block in every layer"
            yield Reading(f"{name} blocks", text, CAUSALITY, swaps=(Swap(model, "windows", changed),))
    if any(window.window is not None and window.window < longest_row for window in windows):
        full = tuple(replace(window, window=None) for window in windows)
        yield Reading("no window", "full attention in every layer", WINDOW, swaps=(Swap(model, "windows", full),))


def _chain_readings(model: Any) -> Iterator[Reading]:
    config, first = model.config, model.layers[0]
    if hasattr(config, "norm_before_residual"):
        other = not config.norm_before_residual
        text = f"norm_before_residual {str(other).lower()}"
        yield Reading("the other residual", text, RESIDUAL, swaps=(Swap(first, "norm_before_residual", other),))
    if hasattr(config, "norm_output") and model.layout.recurrent:
        other = not config.norm_output
        text = f"norm_output {str(other).lower()}"
        yield Reading("the other output", text, OUTPUT, swaps=(Swap(config, "norm_output", other),))
