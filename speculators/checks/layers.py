"""The captured verifier layers: their number, range, order and numbering.

Here and in upstream id k is the residual stream after k decoder layers (0: embeddings); native configs of engines count decoder
layers from 0 (`target_layer_ids`), one less for the same state.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from speculators.checks.facts import CheckpointFacts
from speculators.checks.findings import Finding, Kind
from speculators.models.draft_config import default_layer_ids

__all__ = ["KINDS", "check_layers"]

NATIVE_KEY = Kind(
    "layer-ids-native-key",
    "error",
    "`target_layer_ids` stands in place of the speculators key.",
    "Speculators readers find no layer ids; read as if they were theirs, every state comes from one layer too early.",
    "Write `aux_hidden_state_layer_ids` with every id one higher, and drop `target_layer_ids`.",
)
NATIVE_CONTRADICTS = Kind(
    "layer-ids-native-contradict",
    "error",
    "`target_layer_ids` is there too and is not the speculators ids minus one.",
    "Engines that prefer the native key read other layers than the rest.",
    "Drop `target_layer_ids`; vLLM makes it from the speculators key.",
)
MALFORMED = Kind(
    "layer-ids-malformed",
    "error",
    "The layer ids are no list of whole numbers.",
    "No reader can capture states.",
    "Write the list of the training.",
)
NEGATIVE = Kind(
    "layer-ids-negative",
    "error",
    "A layer id is negative.",
    "Readers refuse it or count from the end: another layer than was trained.",
    "Write the id from 0 (the embeddings) up; what some trainers call -1 is 0 here.",
)
DUPLICATE = Kind(
    "layer-ids-duplicate",
    "error",
    "A layer id is listed twice.",
    "Engines capture a layer once, so the features have another width or order than `fc` was trained on.",
    "Write the list of the training; `fc.weight` has one block of hidden-size columns per id.",
)
UNORDERED = Kind(
    "layer-ids-unordered",
    "warning",
    "The layer ids do not ascend.",
    "`fc` reads states in the order of this list, but vLLM hands captured states on in ascending order.",
    "Sort the ids and the column blocks of `fc.weight` in the same way.",
)
OUT_OF_RANGE = Kind(
    "layer-ids-out-of-range",
    "error",
    "A layer id is above the verifier's number of layers.",
    "Capturing fails, or the state of another layer is taken.",
    "Give the verifier that the draft was trained for, or write the ids of the training.",
)
FINAL = Kind(
    "layer-ids-final-layer",
    "warning",
    "The state after the verifier's last layer is captured.",
    "Readers disagree on it: before the final norm for vLLM and this library, after it where Hugging Face's hidden_states[-1] "
    "is taken. Some engines cannot capture it.",
    "Run with `--verifier`, which shows which of the two was trained; choose earlier layers for the next training.",
)
EMBEDDINGS = Kind(
    "layer-ids-embeddings",
    "warning",
    "Layer id 0, the token embeddings, is captured.",
    "Some engines cannot capture it, and it is what a native -1 becomes: the ids may be one too low.",
    "Run with `--verifier`, which compares the neighbouring ids.",
)
OFF_BY_ONE = Kind(
    "layer-ids-off-by-one",
    "warning",
    "All layer ids are one below the usual choice [2, n // 2, n - 3].",
    "Native 0-based ids written under the speculators key look like this: every state would come from one layer too early, "
    "which costs much of the acceptance.",
    "Run with `--verifier`, which compares the neighbouring ids; add 1 to each if those fit better.",
)
FEATURES = Kind(
    "feature-width-mismatch",
    "error",
    "`fc.weight` does not have one block of hidden-size columns per layer id.",
    "Loading fails: layers are missing from the list, or there is one too many (often the verifier's last).",
    "Write the list of the training.",
)
KINDS = (
    NATIVE_KEY,
    NATIVE_CONTRADICTS,
    MALFORMED,
    NEGATIVE,
    DUPLICATE,
    UNORDERED,
    OUT_OF_RANGE,
    FINAL,
    EMBEDDINGS,
    OFF_BY_ONE,
    FEATURES,
)


def check_layers(facts: CheckpointFacts) -> Iterator[Finding]:
    """Faults of the layer ids, as far as the family has them."""
    if facts.family is None or facts.family == "mtp":
        return
    ids, native, key = facts.layer_ids, facts.config.get("target_layer_ids"), facts.layer_id_key
    if facts.config.get(key) is None:  # absent altogether: a required key of blocks, an open choice of chains
        if native is not None:
            yield NATIVE_KEY.found(f"target_layer_ids {native} and no {key}")
        return
    if ids is None:
        yield MALFORMED.found(f"{key} is {facts.config[key]!r}")
        return
    if native is not None and native != [k - 1 for k in ids]:
        yield NATIVE_CONTRADICTS.found(f"target_layer_ids {native} beside {key} {ids}")
    yield from _numbers(ids, key)
    if facts.verifier is not None:
        yield from _against(ids, key, facts.verifier.num_layers)
    yield from _features(facts, ids)


def _numbers(ids: Sequence[int], key: str) -> Iterator[Finding]:
    shown = f"{key} is {list(ids)}"
    if min(ids) < 0:
        yield NEGATIVE.found(shown)
    if len(set(ids)) < len(ids):
        yield DUPLICATE.found(shown)
    elif list(ids) != sorted(ids):
        yield UNORDERED.found(shown)
    if 0 in ids:
        yield EMBEDDINGS.found(shown)


def _against(ids: Sequence[int], key: str, layers: int) -> Iterator[Finding]:
    shown = f"{key} is {list(ids)}, the verifier has {layers} layers"
    if max(ids) > layers:
        yield OUT_OF_RANGE.found(shown)
    elif layers in ids:
        yield FINAL.found(shown)
    usual = default_layer_ids(layers)
    if len(usual) == 3 and min(usual) > 0 and sorted(ids) == [k - 1 for k in usual]:
        yield OFF_BY_ONE.found(f"{shown}, for which {usual} are usual")


def _features(facts: CheckpointFacts, ids: Sequence[int]) -> Iterator[Finding]:
    info = facts.raw.tensors.get("fc.weight")
    if info is None or facts.hidden is None or len(info.shape) != 2 or info.shape[0] != facts.hidden:
        return
    if info.shape[1] != len(ids) * facts.hidden:
        blocks = info.shape[1] / facts.hidden
        yield FEATURES.found(f"fc.weight has {blocks:g} blocks of {facts.hidden} columns, {facts.layer_id_key} {len(ids)} ids")
