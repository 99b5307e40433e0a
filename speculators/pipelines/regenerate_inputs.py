"""The records that are answered again: files, folders, data sets of a hub, and the names upstream has for some of those."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from speculators.data.hub_sets import DEFAULT_SPLIT, HubSet
from speculators.data.readers import block_records, read_blocks
from speculators.data.sources import Source, find_sources, source_hash
from speculators.errors import ConfigError
from speculators.pipelines.regenerate import Records

__all__ = ["PRESETS", "open_records"]

#: Name -> data set, subset and split on the hub.
PRESETS: dict[str, tuple[str, str | None, str]] = {
    "sharegpt": ("Aeala/ShareGPT_Vicuna_unfiltered", None, "train"),
    "ultrachat": ("HuggingFaceH4/ultrachat_200k", None, "train_sft"),
    "gsm8k": ("openai/gsm8k", "main", "train"),
    "magpie": ("Magpie-Align/Magpie-Llama-3.1-Pro-300K-Filtered", None, "train"),
    "nemotron": ("nvidia/Nemotron-Post-Training-Dataset-v2", None, "chat"),
    "open-perfectblend": ("mlabonne/open-perfectblend", None, "train"),
    "hermes-fc": ("NousResearch/hermes-function-calling-v1", "func_calling", "train"),
}


def open_records(dataset: str, split: str | None = None, subset: str | None = None) -> Records:
    """The records of a file or folder, of ``hf:ID[:SUBSET[:SPLIT]]``, or of one of :data:`PRESETS`.

    A file or folder that is there goes before a preset of the same name.

    :param split: of a data set on a hub, instead of its own.
    :param subset: the same.
    :raises ConfigError: for ``split`` or ``subset`` of a file.
    :raises DataError: for data that are not there.
    """
    name = _on_hub(dataset, split, subset)
    if name is None and (split or subset):
        raise ConfigError(f"--split and --subset choose from a data set on a hub, and {dataset} is none; leave them out")
    sources = find_sources([name or dataset])
    hashes = {source.name: source_hash(source) for source in sources}
    on_disk = all(source.kind != "hub" for source in sources)  # nothing is downloaded only to be counted
    return Records(_records(sources), hashes, sum(len(block) for block in read_blocks(sources)) if on_disk else None)


def _on_hub(dataset: str, split: str | None, subset: str | None) -> str | None:
    """``hf:ID:SUBSET:SPLIT`` for what is on a hub; None for files."""
    if Path(dataset).exists() or dataset.startswith("hf://"):
        return None
    if dataset in PRESETS:
        found = HubSet(*PRESETS[dataset])
    elif dataset.startswith("hf:"):
        found = HubSet.parse(dataset)
    else:
        return None
    chosen = HubSet(found.name, subset or found.subset, split or found.split or (DEFAULT_SPLIT if subset else None))
    return str(chosen)


def _records(sources: list[Source]) -> Iterator[tuple[str, int, Any]]:
    for block in read_blocks(sources):
        for index, record in block_records(block):
            yield sources[block.source].name, index, record
