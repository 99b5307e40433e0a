"""Rows: conversations, chat templates and loss masks, packing, anchors, vocabulary pruning."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from speculators.data.anchors import AnchorCoverage, DepthDrop, drop_depths, sample_anchors
    from speculators.data.batches import CutRows, attach_states, batch_rows, build_batch
    from speculators.data.packing import PackedRow, deal, packing_waste, plan_epoch, plan_steps
    from speculators.data.prompts import Conversation, Prompt, load_human_eval, read_conversations, read_prompts
    from speculators.data.rendering import (
        Rendered,
        on_policy_row,
        render_conversation,
        render_prompt,
        render_rows,
    )
    from speculators.data.rows import AnswerRecord, DataManifest, Origin, Row, RowBatch, RowDataset, SourceRecord, write_rows
    from speculators.data.splitting import split_rows
    from speculators.data.token_counts import (
        TokenCounts,
        count_dataset,
        count_tokens,
        load_counts,
        load_token_frequencies,
        merge_counts,
        save_counts,
        save_token_frequencies,
    )
    from speculators.data.tokenizers import LoadedTokenizer, check_tokenizer, load_tokenizer, template_hash, tokenizer_hash
    from speculators.data.vocabulary import VocabularyMapping, build_mapping, coverage_curve, size_for_coverage
    from speculators.data.vocabulary_files import load_mapping, load_mapping_files, mapping_for, save_mapping

# Imported when first used: the processes that render data start in a second because they load neither torch nor datasets.
_MODULES = {
    "AnchorCoverage": "speculators.data.anchors",
    "DepthDrop": "speculators.data.anchors",
    "drop_depths": "speculators.data.anchors",
    "sample_anchors": "speculators.data.anchors",
    "CutRows": "speculators.data.batches",
    "attach_states": "speculators.data.batches",
    "batch_rows": "speculators.data.batches",
    "build_batch": "speculators.data.batches",
    "PackedRow": "speculators.data.packing",
    "deal": "speculators.data.packing",
    "packing_waste": "speculators.data.packing",
    "plan_epoch": "speculators.data.packing",
    "plan_steps": "speculators.data.packing",
    "Conversation": "speculators.data.prompts",
    "Prompt": "speculators.data.prompts",
    "load_human_eval": "speculators.data.prompts",
    "read_conversations": "speculators.data.prompts",
    "read_prompts": "speculators.data.prompts",
    "Rendered": "speculators.data.rendering",
    "on_policy_row": "speculators.data.rendering",
    "render_conversation": "speculators.data.rendering",
    "render_prompt": "speculators.data.rendering",
    "render_rows": "speculators.data.rendering",
    "AnswerRecord": "speculators.data.rows",
    "DataManifest": "speculators.data.rows",
    "Origin": "speculators.data.rows",
    "Row": "speculators.data.rows",
    "RowBatch": "speculators.data.rows",
    "RowDataset": "speculators.data.rows",
    "SourceRecord": "speculators.data.rows",
    "write_rows": "speculators.data.rows",
    "split_rows": "speculators.data.splitting",
    "TokenCounts": "speculators.data.token_counts",
    "count_dataset": "speculators.data.token_counts",
    "count_tokens": "speculators.data.token_counts",
    "load_counts": "speculators.data.token_counts",
    "load_token_frequencies": "speculators.data.token_counts",
    "merge_counts": "speculators.data.token_counts",
    "save_counts": "speculators.data.token_counts",
    "save_token_frequencies": "speculators.data.token_counts",
    "LoadedTokenizer": "speculators.data.tokenizers",
    "check_tokenizer": "speculators.data.tokenizers",
    "load_tokenizer": "speculators.data.tokenizers",
    "template_hash": "speculators.data.tokenizers",
    "tokenizer_hash": "speculators.data.tokenizers",
    "VocabularyMapping": "speculators.data.vocabulary",
    "build_mapping": "speculators.data.vocabulary",
    "coverage_curve": "speculators.data.vocabulary",
    "size_for_coverage": "speculators.data.vocabulary",
    "load_mapping": "speculators.data.vocabulary_files",
    "load_mapping_files": "speculators.data.vocabulary_files",
    "mapping_for": "speculators.data.vocabulary_files",
    "save_mapping": "speculators.data.vocabulary_files",
}

__all__ = [
    "DepthDrop",
    "drop_depths",
    "AnchorCoverage",
    "AnswerRecord",
    "Conversation",
    "CutRows",
    "DataManifest",
    "LoadedTokenizer",
    "Origin",
    "PackedRow",
    "Prompt",
    "Rendered",
    "Row",
    "RowBatch",
    "RowDataset",
    "TokenCounts",
    "SourceRecord",
    "VocabularyMapping",
    "attach_states",
    "batch_rows",
    "build_batch",
    "build_mapping",
    "count_dataset",
    "check_tokenizer",
    "count_tokens",
    "coverage_curve",
    "deal",
    "load_human_eval",
    "load_counts",
    "load_mapping",
    "load_mapping_files",
    "load_token_frequencies",
    "load_tokenizer",
    "mapping_for",
    "merge_counts",
    "on_policy_row",
    "packing_waste",
    "plan_epoch",
    "plan_steps",
    "read_conversations",
    "read_prompts",
    "render_conversation",
    "render_prompt",
    "render_rows",
    "sample_anchors",
    "save_counts",
    "save_mapping",
    "save_token_frequencies",
    "size_for_coverage",
    "split_rows",
    "template_hash",
    "tokenizer_hash",
    "write_rows",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
