"""Rows: conversations, chat templates and loss masks, packing, anchors, vocabulary pruning."""

from speculators.data.anchors import AnchorCoverage, DepthDrop, drop_depths, sample_anchors
from speculators.data.batches import CutRows, attach_states, batch_rows, build_batch
from speculators.data.packing import PackedRow, deal, packing_waste, plan_epoch, plan_steps
from speculators.data.prompts import Conversation, Prompt, load_human_eval, read_conversations, read_prompts
from speculators.data.rendering import Rendered, on_policy_row, render_conversation, render_prompt, render_rows, tokenizer_hash
from speculators.data.rows import AnswerRecord, DataManifest, Row, RowDataset, split_rows
from speculators.data.vocabulary import (
    VocabularyMapping,
    build_mapping,
    count_tokens,
    load_mapping,
    load_mapping_files,
    load_token_frequencies,
    mapping_for,
    save_mapping,
    save_token_frequencies,
)

__all__ = [
    "DepthDrop",
    "drop_depths",
    "AnchorCoverage",
    "AnswerRecord",
    "Conversation",
    "CutRows",
    "DataManifest",
    "PackedRow",
    "Prompt",
    "Rendered",
    "Row",
    "RowDataset",
    "VocabularyMapping",
    "attach_states",
    "batch_rows",
    "build_batch",
    "build_mapping",
    "count_tokens",
    "deal",
    "load_human_eval",
    "load_mapping",
    "load_mapping_files",
    "load_token_frequencies",
    "mapping_for",
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
    "save_mapping",
    "save_token_frequencies",
    "split_rows",
    "tokenizer_hash",
]
