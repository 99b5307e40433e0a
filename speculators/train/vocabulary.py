"""The draft's vocabulary and mask token, chosen from settings, data and tokenizer."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np

from speculators.data.rows import DataManifest, RowDataset
from speculators.data.token_counts import TOKEN_FREQUENCIES, StaleCountsError, count_tokens, load_counts
from speculators.data.vocabulary import VocabularyMapping, build_mapping
from speculators.data.vocabulary_files import load_mapping_files, mapping_beside
from speculators.errors import ConfigError
from speculators.models.family import DraftModelConfig
from speculators.train.config.model import TrainConfig
from speculators.train.drafts import brings_weights

__all__ = ["choose_mapping", "choose_mask_token"]

logger = logging.getLogger("speculators.train")


def choose_mapping(
    config: TrainConfig,
    *,
    vocab_size: int,
    eos_ids: Collection[int],
    dataset: RowDataset | None,
    train_ids: np.ndarray | None,
    start: DraftModelConfig | None = None,
) -> VocabularyMapping | None:
    """Mapping of the pruned draft vocabulary; None for the whole vocabulary.

    Files named by ``--d2t-path`` and ``--t2d-path`` win. Otherwise there is ``--draft-vocab-size``: the mapping of this size
    that build-vocab made for these rows and left beside them, else the most frequent ids, counted by ``--token-freq-path``
    (which goes before the mapping), by the ``token_freq.pt`` of these rows beside them, or from the training rows themselves.

    :param start: config of ``--from-pretrained``: its vocabulary's size is kept, and its mapping is used when it has weights.
    :raises ConfigError: when the size does not fit, or there is nothing to count.
    :raises DataError: when a file is missing or does not fit.
    """
    draft = config.draft
    size = draft.draft_vocab_size if start is None else start.draft_vocabulary
    if size is not None and size > vocab_size:
        raise ConfigError(f"--draft-vocab-size {size} is larger than the verifier's vocabulary of {vocab_size}; choose less")
    if draft.d2t_path is not None and draft.t2d_path is not None:
        return load_mapping_files(draft.d2t_path, draft.t2d_path, size, vocab_size)
    if start is not None and brings_weights(config.draft.from_pretrained):
        return None
    if size is None:
        if draft.token_freq_path is not None:
            raise ConfigError("--token-freq-path alone prunes nothing; add --draft-vocab-size")
        return None
    if size == vocab_size:
        return None
    if draft.token_freq_path is None and dataset is not None and dataset.path is not None:
        made = mapping_beside(dataset.path, size, vocab_size, dataset.fingerprint)
        if made is not None:
            logger.info("the draft vocabulary is the one that build-vocab made for these rows in %s", dataset.path)
            return made
    return build_mapping(_counts(config, vocab_size, dataset, train_ids), size, vocab_size, mandatory_ids=eos_ids)


def _counts(config: TrainConfig, vocab_size: int, dataset: RowDataset | None, train_ids: np.ndarray | None) -> np.ndarray:
    manifest = DataManifest() if dataset is None else dataset.manifest
    tokenizer = manifest.tokenizer_hash
    if config.draft.token_freq_path is not None:
        return load_counts(config.draft.token_freq_path, tokenizer_hash=tokenizer).counts
    beside = Path(config.data.data_path) / TOKEN_FREQUENCIES
    if dataset is None or train_ids is None:
        if beside.is_file():
            return load_counts(beside).counts
        raise ConfigError("--draft-vocab-size needs token counts: give --token-freq-path, or --d2t-path and --t2d-path")
    # Rows from elsewhere, or in memory, are not those that the file counts.
    if beside.is_file() and dataset.path is not None and dataset.path.resolve() == beside.parent.resolve():
        # Others write no record of what they counted; of their rows we know as little, and take both as a pair.
        ours = bool(manifest.tokenizer_hash or manifest.combined_hash)
        try:
            return load_counts(beside, dataset.fingerprint if ours else None, tokenizer).counts
        except StaleCountsError as error:
            logger.warning("%s; the training rows are counted instead", error)
    return count_tokens((dataset.row(int(row)) for row in train_ids), vocab_size)


def choose_mask_token(explicit: int | None, tokenizer: Any, vocab_size: int) -> int:
    """Verifier id of the mask token: ``explicit``, the tokenizer's mask token, the first id past the tokenizer's own, or -
    with a warning, because they stand for something else in the data - its pad, eos or unk token.

    :param vocab_size: rows of the verifier's embedding.
    :raises ConfigError: when there is none, or it has no row in the embedding.
    """
    if explicit is not None:
        if explicit >= vocab_size:
            raise ConfigError(
                f"--mask-token-id {explicit} is outside the verifier's vocabulary of {vocab_size}; choose a reserved id in it"
            )
        return explicit
    named = getattr(tokenizer, "mask_token_id", None)
    if named is not None and named < vocab_size:
        return int(named)
    if tokenizer is not None and len(tokenizer) < vocab_size:
        return len(tokenizer)
    for name in ("pad", "eos", "unk"):
        token_id = getattr(tokenizer, f"{name}_token_id", None)
        if token_id is not None and token_id < vocab_size:
            warnings.warn(
                f"the tokenizer has no mask token and no unused id, so its {name} token {token_id} becomes the mask token; "
                "give --mask-token-id with a reserved id that the data does not use",
                UserWarning,
                stacklevel=2,
            )
            return int(token_id)
    raise ConfigError(
        "the tokenizer offers no mask token; give --mask-token-id with a reserved id of the verifier's vocabulary"
    )
