"""Measuring what a draft gives: acceptance and wall clock against plain decoding, tables and the results file."""

from __future__ import annotations

from speculators.evaluation.results import EvaluationResults, read_results, write_results
from speculators.evaluation.tables import markdown_table, rich_tables

__all__ = ["EvaluationResults", "markdown_table", "read_results", "rich_tables", "write_results"]
