"""``speculators inspect-data``: rows with their loss masks as a person wants to see them, and what looks wrong."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    import numpy as np

    from speculators.data.rows import RowDataset
    from speculators.data.tokenizers import LoadedTokenizer

__all__ = ["inspect_data"]


def inspect_data(
    *,
    data: Annotated[Path, typer.Argument(help="Folder of a data set, of prepare-data or of upstream.", show_default=False)],
    rows: Annotated[
        list[str] | None,
        typer.Option(help="Rows to show: 0 5 17; by default the shortest, the longest, some others.", show_default=False),
    ] = None,
    conversation: Annotated[int | None, typer.Option(help="Show the rows of this conversation.", show_default=False)] = None,
    source: Annotated[
        str | None, typer.Option(help="Show rows of this source: its name, or the end of it.", show_default=False)
    ] = None,
    count: Annotated[int, typer.Option(min=0, help="How many rows to show when they are not named.")] = 4,
    max_tokens: Annotated[int, typer.Option(min=0, help="Most tokens of a row to show, about; 0 for all.")] = 1000,
    token_ids: Annotated[bool, typer.Option("--token-ids", help="Show rows as tables of position, id, text and mask.")] = False,
    html: Annotated[Path | None, typer.Option(help="Also write a page with pictures to this file.", show_default=False)] = None,
    html_rows: Annotated[int, typer.Option(min=0, help="Rows in the page.")] = 50,
    model: Annotated[
        str | None,
        typer.Option(help="Folder or hub id of the verifier; the one that the data set names by default.", show_default=False),
    ] = None,
    trust_remote_code: Annotated[bool, typer.Option("--trust-remote-code", help="Run code of the verifier's folder.")] = False,
    sample: Annotated[int, typer.Option(min=0, help="Most rows whose masks and ids are looked at; 0 for all.")] = 20_000,
    seed: Annotated[int, typer.Option(min=0, help="Of the rows chosen at random.")] = 0,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with 1 when something looks wrong.")] = False,
) -> None:
    """Show rows of a data set with what of them is supervised, its numbers, and warnings of what looks wrong.

    Supervised tokens are green and the token that ends a turn stands out; without colours they stand in [[...]].
    """
    import sys

    from rich.console import Console

    from speculators.data.accounting import OUTCOMES
    from speculators.data.inspection import choose_rows, survey
    from speculators.data.row_checks import TemplateFacts
    from speculators.data.row_views import view_row
    from speculators.data.rows import RowDataset
    from speculators.data.token_text import TokenTexts
    from speculators.evaluation.data_page import PageFacts, data_page
    from speculators.evaluation.data_text import manifest_lines, one_line, rows_text, survey_lines, warning_text
    from speculators.files import atomic_write

    dataset = RowDataset.load(data)
    among, named = _wanted(dataset, rows, conversation, source)
    loaded, note = _tokenizer(dataset, model, trust_remote_code)
    texts = TokenTexts(loaded.tokenizer if loaded else None)
    facts = TemplateFacts.of(loaded.tokenizer, texts, loaded.eos_ids) if loaded else TemplateFacts()
    seen = survey(dataset, facts, texts, sample=sample, seed=seed, progress=True)

    if hasattr(sys.stdout, "reconfigure"):  # a stream that cannot print a character shows its number
        sys.stdout.reconfigure(errors="backslashreplace")
    console = Console(highlight=False)
    conversations = None if dataset.conversations is None else _distinct(dataset.conversations)
    for line in [*survey_lines(seen, conversations), *manifest_lines(dataset.manifest, OUTCOMES), one_line(note)]:
        console.print(line, markup=False)
    chosen = named if named is not None else choose_rows(seen.lengths, count, seed, among)
    if chosen:
        rows_text(console, [view_row(dataset, row, texts, facts.ends, max_tokens) for row in chosen], token_ids=token_ids)
    console.print()
    for warning in seen.warnings:
        console.print(warning_text(warning))
    if not seen.warnings:
        console.print("nothing looks wrong")
    if html is not None:
        examples = [] if among is not None else [warning.rows[0] for warning in seen.warnings]
        spread = named if named is not None else choose_rows(seen.lengths, html_rows, seed, among)
        page_rows = list(dict.fromkeys([*examples, *spread]))[: max(html_rows, len(named or ()))]
        views = [view_row(dataset, row, texts, facts.ends, _PAGE_TOKENS) for row in page_rows]
        page = data_page(PageFacts(data.resolve().name, dataset.manifest, OUTCOMES, note, conversations), seen, views)
        atomic_write(html, lambda file: file.write_text(page, encoding="utf-8"))
        console.print(f"page: {one_line(str(html))}", markup=False)
    raise typer.Exit(1 if strict and seen.warnings else 0)


#: Most tokens of a row in the page, about: fifty such rows make a page of two or three megabytes.
_PAGE_TOKENS = 2000


def _distinct(conversations: np.ndarray) -> int:
    import numpy as np

    return len(np.unique(conversations))


def _wanted(
    dataset: RowDataset, rows: list[str] | None, conversation: int | None, source: str | None
) -> tuple[np.ndarray | None, list[int] | None]:
    """Rows to choose from (None for all), and rows that are named (None when there are none).

    :raises ConfigError: for rows that do not exist, and for more than one way to name rows.
    """
    from speculators.cli.arguments import parse_numbers
    from speculators.data.inspection import rows_of_conversation, rows_of_source
    from speculators.errors import ConfigError

    if sum(way is not None for way in (rows or None, conversation, source)) > 1:
        raise ConfigError("--rows, --conversation and --source each say which rows to show; give one of them")
    if conversation is not None:
        return rows_of_conversation(dataset, conversation), rows_of_conversation(dataset, conversation).tolist()
    if source is not None:
        return rows_of_source(dataset, source), None
    if not rows:
        return None, None
    named = parse_numbers(rows, "--rows")
    missing = next((row for row in named if row >= len(dataset)), None)
    if missing is not None:
        raise ConfigError(f"there is no row {missing}; the data set has the rows 0 to {len(dataset) - 1}")
    return None, named


def _tokenizer(dataset: RowDataset, model: str | None, trust_remote_code: bool) -> tuple[LoadedTokenizer | None, str]:
    """The tokenizer to show rows with, and a sentence about it.

    :raises VerifierError: when ``model`` has no tokenizer that can be loaded.
    :raises DataError: when the tokenizer is not that of the rows.
    """
    import warnings

    from speculators.data.provenance import require_tokenizer
    from speculators.data.tokenizers import load_tokenizer
    from speculators.errors import VerifierError

    name = model or dataset.manifest.verifier
    if not name:
        return None, "token ids are shown, for the data set names no verifier; pass --model to see text"
    try:
        loaded = load_tokenizer(name, trust_remote_code)
    except VerifierError as error:
        if model:
            raise
        return None, f"token ids are shown, for {error}"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        require_tokenizer(dataset.manifest, loaded.tokenizer, name)
    return loaded, "; ".join([f"shown with the tokenizer of {name}", *(str(warning.message) for warning in caught)])
