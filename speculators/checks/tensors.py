"""The tensors: which there are, of what shape and type, and whether their values can be weights at all.

What a family needs is read off its model class, built without memory from the checkpoint's own config.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from speculators.checks.facts import CheckpointFacts
from speculators.checks.findings import Finding, Kind
from speculators.config import SpeculatorModelConfig
from speculators.models.base import SpeculatorModel

__all__ = ["KINDS", "check_tensors", "expected_shapes"]

MISSING = Kind(
    "tensor-missing",
    "error",
    "A tensor that the config asks for is not in the file.",
    "Loading fails, or an engine leaves it random or drops the part silently (vLLM drops a confidence head without weights).",
    "Take the whole file of the training, or correct the config key that asks for the tensor.",
)
UNEXPECTED = Kind(
    "tensor-unexpected",
    "error",
    "The file holds a tensor that the config does not account for.",
    "Loading fails here and in vLLM; the names may be another family's or carry a prefix.",
    "Rename or remove it; foreign names are the business of `speculators convert`.",
)
SUPERFLUOUS = Kind(
    "tensor-superfluous",
    "warning",
    "The file holds the trainer's own copies of the verifier's parts.",
    "This library ignores them; an engine may refuse unknown names.",
    "Save the checkpoint again without them.",
)
SHAPE = Kind(
    "tensor-shape",
    "error",
    "A tensor has another shape than the config asks for.",
    "Loading fails.",
    "Correct the config's sizes, or take the file that belongs to it.",
)
NOT_BFLOAT16 = Kind(
    "weights-not-bfloat16",
    "warning",
    "The weights are not bfloat16.",
    "Engines serve bfloat16: float32 doubles the download and is cast on loading, float16 may overflow.",
    'Save with `save_pretrained(folder, dtype="bfloat16")`.',
)
MIXED = Kind(
    "weights-mixed-dtype",
    "warning",
    "The weights are of several floating-point types.",
    "A reader that takes the first tensor's type casts the others, or fails at the first product.",
    "Save all of them in bfloat16.",
)
DTYPE_KEY = Kind(
    "dtype-key-contradicts",
    "warning",
    "`dtype` in config.json is not the weights' type.",
    "Engines that allocate by the key cast every tensor, or serve in another precision than meant.",
    "Write the type of the file.",
)
NOT_FINITE = Kind(
    "tensor-not-finite",
    "error",
    "A tensor holds NaN or infinite values.",
    "Logits become NaN, and the draft proposes one constant token.",
    "Take an earlier checkpoint; upstream marks parts that it never loaded with NaN, so a part of the verifier may be unread.",
)
ZERO = Kind(
    "tensor-all-zero",
    "error",
    "A matrix is all zeros.",
    "It computes nothing: it was never trained, or never written.",
    "Take another checkpoint, or switch the part off in the config.",
)
KINDS = (MISSING, UNEXPECTED, SUPERFLUOUS, SHAPE, NOT_BFLOAT16, MIXED, DTYPE_KEY, NOT_FINITE, ZERO)

#: Parts that may be left to the verifier.
_BORROWED = ("embed_tokens.weight", "lm_head.weight")
_SUPERFLUOUS = ("verifier_lm_head.", "verifier_norm.")
_TABLES = ("d2t", "t2d")

#: Shapes that :mod:`speculators.checks.vocabulary` and :mod:`speculators.checks.layers` explain better.
_EXPLAINED = {
    "lm_head.weight": "lm-head-rows",
    "markov_head.markov_w1.weight": "markov-w1-rows",
    "markov_head.markov_w2.weight": "markov-w2-rows",
    "confidence_head.proj.weight": "confidence-width",
    "fc.weight": "feature-width-mismatch",
    "input_norm.weight": "feature-width-mismatch",
    "mask_hidden": "feature-width-mismatch",
}

#: Faults of the config from which wrong shapes follow.
_OF_CONFIG = frozenset({"draft-vocabulary-size-wrong", "heads-contradict", "vocab-size-mismatch", "hidden-size-mismatch"})

#: Most names in one sentence.
_SHOWN = 6


def check_tensors(facts: CheckpointFacts, known: frozenset[str] = frozenset()) -> Iterator[Finding]:
    """Faults of the tensors.

    :param known: ids already found, whose consequences are not reported again.
    """
    if not facts.raw.tensors:
        return
    yield from _dtypes(facts)
    yield from _values(facts)
    expected = expected_shapes(facts)
    if expected is None:
        return
    shapes, optional = expected
    present = facts.raw.tensors
    borrowed = set(_BORROWED[1:] if facts.value("embed_requires_grad") else _BORROWED)
    missing = sorted(set(shapes) - set(present) - borrowed - set(_TABLES) - optional - _explained_absences(known, shapes))
    if missing and facts.raw.complete:
        yield MISSING.found(f"absent: {_names(missing)}")
    superfluous = sorted(name for name in present if name.startswith(_SUPERFLUOUS))
    if superfluous:
        yield SUPERFLUOUS.found(f"there are {_names(superfluous)}")
    unexpected = sorted(set(present) - set(shapes) - set(superfluous) - set(_TABLES))
    if "midlayer-names" in known:
        unexpected = [name for name in unexpected if not name.startswith("midlayer.")]
    if unexpected:
        yield UNEXPECTED.found(f"not asked for: {_names(unexpected)}")
    if known & _OF_CONFIG:
        return
    wrong = [
        f"{name} is {list(present[name].shape)} instead of {list(shape)}"
        for name, shape in sorted(shapes.items())
        if name in present and name not in _TABLES and present[name].shape != shape and _EXPLAINED.get(name) not in known
    ]
    if wrong:
        yield SHAPE.found("; ".join(wrong[:_SHOWN]) + (f"; and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""))


def _explained_absences(known: frozenset[str], shapes: dict[str, tuple[int, ...]]) -> set[str]:
    """Tensors of whose absence another finding tells."""
    names = {"mask_hidden"} if "mask-hidden-missing" in known else set()
    return names | ({name for name in shapes if name.startswith("layers.0.")} if "midlayer-names" in known else set())


def _names(names: list[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")


def expected_shapes(facts: CheckpointFacts) -> tuple[dict[str, tuple[int, ...]], frozenset[str]] | None:
    """Shape of every tensor of the family's model, and the names of optional ones; None if the config describes no model.

    Values that do not change shapes are mended first, so that one fault does not hide the others.
    """
    if facts.family is None or not facts.decoder:
        return None
    try:
        config = SpeculatorModelConfig.from_dict(_mended(facts))
        model: Any = SpeculatorModel.without_weights(config)
    except Exception:  # what is wrong with it is for the checks of the config to say
        return None
    return {name: tuple(value.shape) for name, value in model.state_dict().items()}, model.optional_tensors


def _mended(facts: CheckpointFacts) -> dict[str, Any]:
    values = copy.deepcopy(facts.config)
    values.pop("speculators_config", None)
    fields = set(facts.config_class.model_fields) if facts.config_class is not None else set()
    if "mask_token_id" in fields:
        values["mask_token_id"] = 0
    if "block_size" in fields and facts.layout is None:
        values["block_size"] = 2
    if facts.layer_id_key in fields:
        count = facts.num_features or _blocks_of_features(facts)
        values[facts.layer_id_key] = list(range(1, count + 1)) if count else values.get(facts.layer_id_key)
    return values


def _blocks_of_features(facts: CheckpointFacts) -> int | None:
    info = facts.raw.tensors.get("fc.weight")
    if info is None or len(info.shape) != 2 or not facts.hidden:
        return None
    return info.shape[1] // facts.hidden


def _dtypes(facts: CheckpointFacts) -> Iterator[Finding]:
    by_type: dict[str, list[str]] = defaultdict(list)
    for name, info in facts.raw.tensors.items():
        if info.floating:
            by_type[str(info.dtype).removeprefix("torch.")].append(name)
    if not by_type:
        return
    if len(by_type) > 1:
        few = sorted(by_type, key=lambda kind: len(by_type[kind]))
        yield MIXED.found("; ".join(f"{kind}: {_names(sorted(by_type[kind]))}" for kind in few))
        return
    (kind,) = by_type
    if kind != "bfloat16":
        yield NOT_BFLOAT16.found(f"the weights are {kind}")
    written = facts.config.get("dtype") or facts.config.get("torch_dtype")
    if isinstance(written, str) and written.removeprefix("torch.") != kind:
        yield DTYPE_KEY.found(f"config.json says {written}, the weights are {kind}")


def _values(facts: CheckpointFacts) -> Iterator[Finding]:
    broken, empty = [], []
    for name, info in facts.raw.tensors.items():
        if not info.floating or not facts.raw.readable(name):
            continue
        finite, zero = True, True
        for part in facts.raw.parts(name):
            part = part.float() if part.dtype.itemsize == 1 else part  # eight bits are for storing
            finite = finite and bool(part.isfinite().all())
            zero = zero and not bool(part.any())
            if not finite:
                break
        if not finite:
            broken.append(name)
        elif zero and len(info.shape) > 1 and 0 not in info.shape:
            empty.append(name)
    if broken:
        yield NOT_FINITE.found(f"NaN or infinite values in {_names(sorted(broken))}")
    if empty:
        yield ZERO.found(f"all zeros: {_names(sorted(empty))}")
