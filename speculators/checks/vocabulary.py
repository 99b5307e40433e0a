"""The vocabulary: sizes, the two tables, the mask token, and the heads that are indexed by either vocabulary.

``d2t`` holds offsets (verifier id = draft id + d2t[draft id]), ``t2d`` marks the kept verifier ids; see
:mod:`speculators.models.vocabulary`. Shape letters: V verifier and D draft vocabulary, H hidden size, R Markov rank.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from speculators.checks.facts import CheckpointFacts
from speculators.checks.findings import Finding, Kind
from speculators.models.vocabulary import d2t_from_t2d

__all__ = ["KINDS", "check_vocabulary"]

MASK_RANGE = Kind(
    "mask-token-out-of-range",
    "error",
    "The mask token is no row of the embedding.",
    "Loading fails, or every masked slot reads a wrong row.",
    "Write the id of the training; it must be a row of the verifier's embedding, a reserved one.",
)
MASK_SPECIAL = Kind(
    "mask-token-is-special",
    "warning",
    "The mask token is the verifier's end-of-text, padding or start token.",
    "Masked slots look like ends of text; trainers fall back to it silently when they find no mask token.",
    "Check that the draft was trained with this id; train with a reserved id.",
)
MASK_ZERO = Kind(
    "mask-embedding-zero",
    "warning",
    "The mask token's row of the embedding is all zeros.",
    "Masked slots read nothing: an id that the verifier added but never filled, or one that a resize appended.",
    "Check that the id is the one of the training.",
)
ABOVE = Kind(
    "draft-vocabulary-above-verifier",
    "error",
    "`draft_vocab_size` exceeds `vocab_size`.",
    "The draft would propose ids that do not exist; loading fails.",
    "Write the sizes of the training; vocab_size is the verifier's.",
)
SIZE_WRONG = Kind(
    "draft-vocabulary-size-wrong",
    "error",
    "`draft_vocab_size` is not the number of rows of the tensors.",
    "Loading fails.",
    "Write the number of rows of `lm_head.weight`.",
)
D2T_MISSING = Kind(
    "d2t-missing",
    "error",
    "A reduced vocabulary without `d2t`.",
    "vLLM reads draft ids as verifier ids, or refuses the checkpoint; acceptance collapses.",
    "Add the table of the training (d2t.npy); from t2d it is t2d.nonzero() - arange(D).",
)
T2D_MISSING = Kind(
    "t2d-missing",
    "warning",
    "A reduced vocabulary without `t2d`.",
    "vLLM does not read it and this library makes it from d2t, but upstream needs it.",
    "Add it: a bool mask of the verifier's vocabulary, true at draft_id + d2t[draft_id].",
)
D2T_LENGTH = Kind(
    "d2t-length",
    "error",
    "`d2t` does not have one entry per draft id.",
    "Loading fails, or the last draft ids map to nothing.",
    "Take the table that belongs to this draft vocabulary; an older run's may have been picked up.",
)
D2T_TYPE = Kind(
    "d2t-dtype",
    "warning",
    "`d2t` is not int64.",
    "Readers that index with it fail, and floats above 2**24 are rounded.",
    "Save it as int64.",
)
D2T_ABSOLUTE = Kind(
    "d2t-absolute-ids",
    "error",
    "`d2t` holds verifier ids instead of offsets.",
    "Engines add the draft id once more, so that almost every proposal is another token.",
    "Save d2t - arange(D).",
)
D2T_RANGE = Kind(
    "d2t-out-of-range",
    "error",
    "`d2t` maps a draft id outside the verifier's vocabulary.",
    "Engines propose ids that do not exist: a crash, or garbage.",
    "Build the mapping again for this verifier.",
)
D2T_ORDER = Kind(
    "d2t-not-ascending",
    "error",
    "The verifier ids of successive draft ids do not ascend.",
    "Two draft ids share a token, or the rows of lm_head are in another order than readers of t2d assume.",
    "Sort the kept ids, and the rows of lm_head and markov_w2 with them.",
)
T2D_LENGTH = Kind(
    "t2d-length",
    "error",
    "`t2d` does not have one entry per verifier id.",
    "Upstream and this library refuse it.",
    "Build the mapping again for this verifier.",
)
T2D_COUNT = Kind(
    "t2d-count",
    "error",
    "`t2d` does not keep exactly `draft_vocab_size` ids.",
    "Upstream and this library refuse it.",
    "Take the mapping that belongs to this draft.",
)
CONTRADICT = Kind(
    "t2d-contradicts-d2t",
    "error",
    "`t2d` and `d2t` keep different ids.",
    "vLLM goes by d2t, other readers by t2d: they propose different tokens from the same logits.",
    "Take both from one mapping; lm_head's rows, compared with the verifier's, show which is right.",
)
UNNEEDED = Kind(
    "vocabulary-tables-unneeded",
    "warning",
    "Vocabulary tables with a whole vocabulary.",
    "Readers may apply them; anything but offsets of 0 changes every token.",
    "Remove d2t and t2d.",
)
HEAD_MISSING = Kind(
    "lm-head-missing",
    "error",
    "A reduced vocabulary without `lm_head.weight`.",
    "vLLM needs it: without it the verifier's whole head is read in draft ids.",
    "Add the verifier's rows of the kept ids (saving the checkpoint with this library does).",
)
HEAD_ROWS = Kind(
    "lm-head-rows",
    "error",
    "`lm_head.weight` is not [draft_vocab_size, hidden_size].",
    "Loading fails.",
    "Save the rows of the kept ids, in their order.",
)
W1_ROWS = Kind(
    "markov-w1-rows",
    "error",
    "`markov_head.markov_w1.weight` does not have one row per verifier id.",
    "The previous token may be any of the verifier's; loading fails or rows are mixed up.",
    "Save the table in verifier ids, [V, R].",
)
W2_ROWS = Kind(
    "markov-w2-rows",
    "error",
    "`markov_head.markov_w2.weight` does not have one row per draft id.",
    "Its product is added to draft logits; loading fails.",
    "Save the rows of the kept ids, [D, R].",
)
CONFIDENCE = Kind(
    "confidence-width",
    "error",
    "The confidence head's input is not the one that the config describes.",
    "Loading fails: the width is H, or H + R with `confidence_head_with_markov`.",
    "Correct `confidence_head_with_markov`, or take the head of the training.",
)
KINDS = (
    MASK_RANGE,
    MASK_SPECIAL,
    MASK_ZERO,
    ABOVE,
    SIZE_WRONG,
    D2T_MISSING,
    T2D_MISSING,
    D2T_LENGTH,
    D2T_TYPE,
    D2T_ABSOLUTE,
    D2T_RANGE,
    D2T_ORDER,
    T2D_LENGTH,
    T2D_COUNT,
    CONTRADICT,
    UNNEEDED,
    HEAD_MISSING,
    HEAD_ROWS,
    W1_ROWS,
    W2_ROWS,
    CONFIDENCE,
)

HEAD, W1, W2, CONFIDENCE_PROJ = (
    "lm_head.weight",
    "markov_head.markov_w1.weight",
    "markov_head.markov_w2.weight",
    "confidence_head.proj.weight",
)


def check_vocabulary(facts: CheckpointFacts) -> Iterator[Finding]:
    """Faults of vocabularies, tables and mask token."""
    if facts.family is None:
        return
    yield from _mask_token(facts)
    vocab, draft_vocab = facts.vocab, facts.draft_vocab
    if vocab is None or draft_vocab is None or not facts.raw.tensors:
        return
    if draft_vocab > vocab:
        yield ABOVE.found(f"draft_vocab_size is {draft_vocab:,}, vocab_size {vocab:,}")
        return
    rows = _rows_of_draft_vocabulary(facts)
    if len(rows) > 1 and len(set(rows.values())) == 1 and draft_vocab not in rows.values():
        yield SIZE_WRONG.found(
            f"draft_vocab_size is {draft_vocab:,}, but {' and '.join(rows)} have {min(rows.values()):,} rows"
        )
        return
    yield from _heads(facts, vocab, draft_vocab)
    if facts.reduced:
        yield from _tables(facts, vocab, draft_vocab)
    elif {"d2t", "t2d"} & set(facts.raw.tensors):
        yield UNNEEDED.found(f"draft_vocab_size is vocab_size {vocab:,}, and the file holds d2t or t2d")


def _mask_token(facts: CheckpointFacts) -> Iterator[Finding]:
    mask = facts.mask_token
    if mask is None:
        return
    embedding = facts.raw.tensors.get("embed_tokens.weight")
    sizes = [facts.vocab, embedding.shape[0] if embedding is not None and embedding.shape else None]
    smallest = min((size for size in sizes if size is not None), default=None)
    if mask < 0 or (smallest is not None and mask >= smallest):
        yield MASK_RANGE.found(f"mask_token_id is {mask}, the embedding has {smallest} rows")
        return
    special = facts.verifier.special_ids if facts.verifier is not None else {}
    if mask in special:
        yield MASK_SPECIAL.found(f"mask_token_id {mask} is the verifier's {special[mask]}")
    row: Tensor | None = None
    if facts.raw.readable("embed_tokens.weight"):
        row = facts.raw.read("embed_tokens.weight", slice(mask, mask + 1))
    elif embedding is None and facts.verifier is not None:
        theirs = facts.verifier.part("embed_tokens")
        row = theirs[mask : mask + 1] if theirs is not None and mask < theirs.shape[0] else None
    if row is not None and not bool(row.any()):
        yield MASK_ZERO.found(f"row {mask} of the embedding is all zeros")


def _rows_of_draft_vocabulary(facts: CheckpointFacts) -> dict[str, int]:
    shapes = {name: facts.raw.tensors[name].shape for name in (HEAD, W2, "d2t") if name in facts.raw.tensors}
    return {name: shape[0] for name, shape in shapes.items() if shape}


def _heads(facts: CheckpointFacts, vocab: int, draft_vocab: int) -> Iterator[Finding]:
    shapes = {name: info.shape for name, info in facts.raw.tensors.items()}
    if facts.reduced and HEAD not in shapes and facts.raw.complete:
        yield HEAD_MISSING.found(f"draft_vocab_size is {draft_vocab:,} of {vocab:,}, and there is no {HEAD}")
    if HEAD in shapes and facts.hidden is not None and shapes[HEAD] != (draft_vocab, facts.hidden):
        yield HEAD_ROWS.found(f"{HEAD} is {list(shapes[HEAD])}, the config asks for [{draft_vocab}, {facts.hidden}]")
    if facts.family != "dspark":
        return
    if W1 in shapes and shapes[W1][:1] != (vocab,):
        yield W1_ROWS.found(f"{W1} is {list(shapes[W1])}, vocab_size is {vocab:,}")
    if W2 in shapes and shapes[W2][:1] != (draft_vocab,):
        yield W2_ROWS.found(f"{W2} is {list(shapes[W2])}, draft_vocab_size is {draft_vocab:,}")
    rank = facts.value("markov_rank") if facts.value("confidence_head_with_markov") else 0
    if CONFIDENCE_PROJ in shapes and facts.hidden is not None and isinstance(rank, int):
        width = facts.hidden + rank
        if shapes[CONFIDENCE_PROJ] != (1, width):
            yield CONFIDENCE.found(f"{CONFIDENCE_PROJ} is {list(shapes[CONFIDENCE_PROJ])}, the config asks for [1, {width}]")


def _tables(facts: CheckpointFacts, vocab: int, draft_vocab: int) -> Iterator[Finding]:
    tensors = facts.raw.tensors
    t2d: Tensor | None = None
    if "t2d" not in tensors:
        if "d2t" in tensors and facts.raw.complete:
            yield T2D_MISSING.found("the file holds d2t and no t2d")
    elif tensors["t2d"].shape != (vocab,):
        yield T2D_LENGTH.found(f"t2d is {list(tensors['t2d'].shape)}, vocab_size {vocab:,}")
    elif facts.raw.readable("t2d"):
        t2d = facts.raw.read("t2d").bool()
        if int(t2d.sum()) != draft_vocab:
            yield T2D_COUNT.found(f"t2d keeps {int(t2d.sum()):,} ids, draft_vocab_size is {draft_vocab:,}")
            t2d = None
    if "d2t" not in tensors:
        if not facts.raw.complete:
            return
        yield D2T_MISSING.found(f"draft_vocab_size is {draft_vocab:,} of {vocab:,}, and there is no d2t")
        return
    if tensors["d2t"].shape != (draft_vocab,):
        yield D2T_LENGTH.found(f"d2t is {list(tensors['d2t'].shape)}, draft_vocab_size {draft_vocab:,}")
        return
    if tensors["d2t"].dtype is not torch.int64:
        yield D2T_TYPE.found(f"d2t is {str(tensors['d2t'].dtype).removeprefix('torch.')}")
    if facts.raw.readable("d2t"):
        yield from _offsets(facts.raw.read("d2t").long(), t2d, vocab)


def _offsets(d2t: Tensor, t2d: Tensor | None, vocab: int) -> Iterator[Finding]:
    """The first fault of ``d2t`` ``[D]``; the others would follow from it."""
    kept = d2t + torch.arange(d2t.shape[0])
    own = t2d.nonzero().squeeze(-1) if t2d is not None else None
    # Offsets that ascend strictly would leave a gap after every kept id; ids always ascend.
    ids = torch.equal(d2t, own) if own is not None else d2t.shape[0] > 8 and bool((d2t[1:] > d2t[:-1]).all())
    offsets_too = own is not None and torch.equal(d2t, d2t_from_t2d(t2d)) if t2d is not None else False
    if ids and not offsets_too:
        yield D2T_ABSOLUTE.found(f"d2t runs {d2t[0]}, {d2t[1] if len(d2t) > 1 else ''}, ..., {d2t[-1]}: these are ids")
    elif int(kept.min()) < 0 or int(kept.max()) >= vocab:
        yield D2T_RANGE.found(f"draft_id + d2t runs from {int(kept.min()):,} to {int(kept.max()):,}, vocab_size is {vocab:,}")
    elif not bool((kept[1:] > kept[:-1]).all()):
        place = int((kept[1:] <= kept[:-1]).nonzero()[0])
        yield D2T_ORDER.found(f"draft ids {place} and {place + 1} map to {int(kept[place]):,} and {int(kept[place + 1]):,}")
    elif own is not None and not torch.equal(kept, own):
        differ = int((kept != own).sum())
        yield CONTRADICT.found(f"{differ:,} of {len(kept):,} draft ids stand for another id by t2d than by d2t")
