"""A data set for a terminal: rows with their loss masks, what they add up to, and what looks wrong.

Nothing that data holds is printed as it is: every text has gone through ``token_text.visible``.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from speculators.data.inspection import DataWarning, Survey
from speculators.data.row_views import RowView
from speculators.data.rows import DataManifest
from speculators.data.token_text import NEWLINE, Piece, visible

__all__ = ["legend", "manifest_lines", "one_line", "row_text", "rows_text", "survey_lines", "token_table", "warning_text"]

#: Styles of tokens: (context, supervised) for text and for special tokens.
_TEXT, _SPECIAL = ("dim", "green"), ("cyan dim", "bold green")
_END, _BROKEN, _NOTE = "bold reverse green", "red", "italic yellow"

#: What stands around supervised text, and around an end of turn in it, where there are no colours.
_MARKS, _END_MARKS = ("[[", "]]"), ("«", "»")


def one_line(text: str) -> str:
    """``text`` fit to be printed in a sentence or a cell: visible, and on one line."""
    return visible(text).replace("\n", "")


def legend(colour: bool) -> Text:
    """How to read :func:`row_text`."""
    if not colour:
        return Text(f"[[supervised]], {_END_MARKS[0]}end of turn{_END_MARKS[1]}, {NEWLINE} a line feed, · a space alone")
    parts = (("context", _TEXT[0]), ("supervised", _TEXT[1]), ("end of turn", _END), ("special", _SPECIAL[0]))
    text = Text(", ").join(Text(name, style) for name, style in parts)
    return text.append(f", {NEWLINE} a line feed, · a space alone")


def row_text(view: RowView, *, colour: bool) -> Text:
    """A row's text, coloured by its loss mask, or with marks around what is supervised."""
    text = Text(overflow="fold")
    inside = False
    for stretch in view.stretches:
        if stretch.left_out:
            inside = _close(text, inside)
            _note(text, stretch.left_out)
        for piece in stretch.pieces:
            supervised = view.is_supervised(piece)
            if not colour and supervised != inside:
                text.append(_MARKS[0] if supervised else _MARKS[1])
                inside = supervised
            _append(text, view, piece, colour)
    _close(text, inside)
    if view.left_out:
        _note(text, view.left_out)
    if text.plain.endswith("\n"):
        text.right_crop(1)
    return text


def _close(text: Text, inside: bool) -> bool:
    if inside:
        text.append(_MARKS[1])
    return False


def _note(text: Text, tokens: int) -> None:
    line = "" if text.plain.endswith("\n") or not text.plain else "\n"
    text.append(f"{line}… {tokens:,} tokens left out …\n", _NOTE)


def _append(text: Text, view: RowView, piece: Piece, colour: bool) -> None:
    shown = visible(piece.text)
    end = view.ends_turn(piece)
    if not colour:
        text.append(shown if not end else f"{_END_MARKS[0]}{shown}{_END_MARKS[1]}")
        return
    supervised = view.is_supervised(piece)
    style = _BROKEN if piece.broken else (_SPECIAL if piece.marker else _TEXT)[supervised]
    text.append(shown, _END if end else style)


def token_table(view: RowView) -> Table:
    """Every token that is shown: position, id, text and mask value."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("position", "id"):
        table.add_column(name, justify="right")
    table.add_column("text", overflow="fold")
    table.add_column("mask", justify="right")
    for stretch in view.stretches:
        if stretch.left_out:
            table.add_row("…", "…", f"{stretch.left_out:,} tokens left out", "…", style=_NOTE)
        for piece in stretch.pieces:
            for place in range(piece.start, piece.stop):
                shown = one_line(piece.text).replace(" ", "·") if place == piece.start else "↑"
                style = _END if view.ends_turn(piece) else _TEXT[view.is_supervised(piece)]
                mask = str(int(view.loss_mask[place]))
                table.add_row(str(place), str(view.input_ids[place]), Text(shown), mask, style=style)
    if view.left_out:
        table.add_row("…", "…", f"{view.left_out:,} tokens left out", "…", style=_NOTE)
    return table


def rows_text(console: Console, views: Sequence[RowView], *, token_ids: bool = False) -> None:
    """Print rows, each under a line that says where it comes from."""
    colour = console.color_system is not None and not console.no_color
    console.print(legend(colour))
    for view in views:
        console.print()
        console.print(Text(f"row {view.row_id}: {', '.join(view.facts())}", style="bold"))
        console.print(token_table(view) if token_ids else row_text(view, colour=colour))


def survey_lines(survey: Survey, conversations: int | None) -> list[str]:
    """What a data set adds up to, a line each."""
    lengths = survey.lengths
    of = "" if conversations is None else f" of {conversations:,} conversations"
    about = "about " if survey.sampled else ""
    supervised = f"{about}{100 * survey.supervised_share:.1f} %"
    lines = [f"{_rows(len(lengths))}{of}, {int(lengths.sum()):,} tokens, {supervised} of them supervised"]
    for name, values in (("tokens", lengths), ("supervised tokens", survey.supervised)):
        low, middle, high, top = (int(value) for value in np.percentile(values, (0, 50, 95, 100), method="inverted_cdf"))
        lines.append(f"{name} of a row: {low:,} to {top:,}, median {middle:,}, 95 % of rows up to {high:,}")
    if survey.sampled:
        lines.append(f"masks and ids were looked at in {survey.scope}")
    for source in survey.sources:
        share = 100 * source.rows / max(1, len(lengths))
        lines.append(f"source {one_line(source.name)}: {_rows(source.rows)} ({share:.1f} %), {source.tokens:,} tokens")
    return lines


def _rows(count: int) -> str:
    return "1 row" if count == 1 else f"{count:,} rows"


def manifest_lines(manifest: DataManifest, outcomes: dict[str, str]) -> list[str]:
    """Where a data set comes from, a line each.

    :param outcomes: what is said for every bucket of the account.
    """
    lines = []
    if manifest.verifier:
        lines.append(f"verifier {one_line(manifest.verifier)}")
    hashes = [("tokenizer", manifest.tokenizer_hash), ("chat template", manifest.template_hash)]
    known = [f"{name} {one_line(value)}" for name, value in hashes if value]
    if known:
        lines.append(", ".join(known))
    if manifest.counts:
        counts = [f"{count:,} {outcomes.get(key, one_line(key))}" for key, count in manifest.counts.items() if count]
        lines.append(f"records: {', '.join(counts)}")
    for source in manifest.sources:
        if source.broken:
            lines.append(f"source {one_line(source.name)} is broken: {one_line(source.broken)}")
    return lines


def warning_text(warning: DataWarning) -> Text:
    """A warning with its meaning and example rows."""
    rows = ", ".join(str(row) for row in warning.rows) + (", ..." if warning.count > len(warning.rows) else "")
    text = Text("warning", style="bold yellow")
    return text.append(f" {warning.id}: {warning.text}; {warning.meaning} (row {rows})", style="not bold default")
