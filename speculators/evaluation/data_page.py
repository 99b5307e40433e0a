"""A data set as one HTML file that needs no network: numbers, warnings, pictures, and rows with their loss masks.

Rows hold whatever people wrote. Every text is made visible and escaped, and the page's policy lets nothing run but its own
script and lets nothing be fetched.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np

from speculators.data.inspection import DataWarning, Survey
from speculators.data.row_views import RowView, Stretch
from speculators.data.rows import DataManifest
from speculators.data.token_text import visible
from speculators.data.vocabulary import coverage_curve
from speculators.evaluation.data_pictures import coverage_picture, lengths_picture, sources_picture
from speculators.evaluation.data_style import SCRIPT, STYLE
from speculators.evaluation.data_text import one_line, survey_lines

__all__ = ["PageFacts", "data_page"]

#: Draft vocabularies that are marked in the picture.
_MARKED = (1_000, 8_000, 32_000)

#: Points of the coverage curve.
_POINTS = 160

#: Rows that are unfolded when the page is opened.
_OPEN_ROWS = 3


@dataclass(frozen=True, slots=True)
class PageFacts:
    """What the page says besides numbers."""

    title: str  #: the data set's name
    manifest: DataManifest
    outcomes: Mapping[str, str]  #: what is said for every bucket of the account
    tokenizer: str  #: which tokenizer decoded the rows, or why there is none
    conversations: int | None  #: None when not known


def data_page(facts: PageFacts, survey: Survey, views: Sequence[RowView]) -> str:
    """The page.

    :param views: the rows to show, in order.
    """
    sections = [
        ("overview", "Overview", _overview(facts, survey)),
        ("warnings", "Warnings", _warnings(survey.warnings, {view.row_id for view in views})),
        ("account", "Account of the records", _account(facts)),
        ("lengths", "Lengths", lengths_picture(survey) + _scope(survey, "supervised tokens")),
        ("sources", "Sources", _sources(survey)),
        ("coverage", "Draft vocabulary", _coverage(survey)),
        ("rows", "Rows", _rows(views)),
    ]
    links = "".join(f'<a href="#{name}">{escape(title)}</a>' for name, title, _ in sections)
    body = "".join(f'<section id="{name}"><h2>{escape(title)}</h2>{content}</section>' for name, title, content in sections)
    title = escape(one_line(facts.title))
    digest = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta name="color-scheme" content="light dark"><title>{title}: data</title><style>{STYLE}</style></head>'
        f"<body><header><h1>{title}</h1><nav>{links}</nav></header><main>{body}</main>"
        f'<div id="tip" role="status" hidden></div><script>{SCRIPT}</script></body></html>\n'
    )


def _overview(facts: PageFacts, survey: Survey) -> str:
    rows, tokens = len(survey.lengths), int(survey.lengths.sum())
    cards = [
        (f"{rows:,}", "rows"),
        ("not known" if facts.conversations is None else f"{facts.conversations:,}", "conversations"),
        (f"{tokens:,}", "tokens"),
        (f"{100 * survey.supervised_share:.1f} %", "of them supervised" + (" (sample)" if survey.sampled else "")),
        (str(len(survey.warnings)), "warning" if len(survey.warnings) == 1 else "warnings"),
    ]
    shown = "".join(f"<div><b>{escape(value)}</b><span>{escape(name)}</span></div>" for value, name in cards)
    lines = "".join(f"<li>{escape(line)}</li>" for line in survey_lines(survey, facts.conversations)[1:3])
    return f'<div class="cards">{shown}</div><ul>{lines}</ul>{_origin(facts)}'


def _origin(facts: PageFacts) -> str:
    manifest = facts.manifest
    known: list[tuple[str, Any]] = [
        ("verifier", manifest.verifier),
        ("shown with", facts.tokenizer),
        ("tokenizer hash", manifest.tokenizer_hash),
        ("chat template hash", manifest.template_hash),
        ("fingerprint", manifest.fingerprint),
        ("settings hash", manifest.settings_hash),
        ("seed", manifest.seed if manifest.options or manifest.sources else None),
    ]
    if manifest.answers is not None:
        known.append(("answers", ", ".join(f"{key} {value}" for key, value in manifest.answers.model_dump().items())))
    known += [(f"option {key}", json.dumps(value, ensure_ascii=False)) for key, value in manifest.options.items()]
    cells = "".join(
        f"<tr><th>{escape(one_line(name))}</th><td><code>{escape(one_line(str(value)))}</code></td></tr>"
        for name, value in known
        if value not in (None, "")
    )
    return f"<details><summary>Where it comes from</summary><table>{cells}</table></details>"


def _warnings(warnings: Sequence[DataWarning], shown: set[int]) -> str:
    if not warnings:
        return '<p class="good">Nothing looks wrong.</p>'
    items = []
    for warning in warnings:
        rows = ", ".join(f'<a href="#row-{row}">{row}</a>' if row in shown else str(row) for row in warning.rows)
        more = ", …" if warning.count > len(warning.rows) else ""
        items.append(
            f"<li><b>{escape(warning.text)}</b><br>{escape(warning.meaning)}.<br>"
            f"<small>{escape(warning.id)} · row {rows}{more}</small></li>"
        )
    return f'<ul class="warnings">{"".join(items)}</ul>'


def _account(facts: PageFacts) -> str:
    counts = {key: count for key, count in facts.manifest.counts.items() if count}
    if not counts:
        return "<p>The data set does not say what became of its input records.</p>"
    total = sum(counts.values())
    rows = "".join(
        f"<tr><th>{escape(facts.outcomes.get(key, one_line(key)))}</th><td>{count:,}</td>"
        f'<td class="bar"><i style="width:{100 * count / total:.2f}%"></i></td></tr>'
        for key, count in counts.items()
    )
    broken = "".join(
        f"<li>{escape(one_line(source.name))} is broken: {escape(one_line(source.broken))}</li>"
        for source in facts.manifest.sources
        if source.broken
    )
    rows += f'<tr class="sum"><th>records</th><td>{total:,}</td><td></td></tr>'
    return f'<table class="counts">{rows}</table><ul>{broken}</ul>'


def _scope(survey: Survey, what: str) -> str:
    return f'<p class="note">{escape(what)}: of {escape(survey.scope)}</p>' if survey.sampled else ""


def _sources(survey: Survey) -> str:
    if not survey.sources:
        return "<p>The data set does not say which source a row is from.</p>"
    rows = "".join(
        f"<tr><th>{escape(one_line(source.name))}</th><td>{source.rows:,}</td><td>{source.tokens:,}</td>"
        f"<td>{source.supervised:,}</td></tr>"
        for source in survey.sources
    )
    head = "<tr><th>source</th><td>rows</td><td>tokens</td><td>supervised tokens</td></tr>"
    table = f'<details><summary>As numbers</summary><table class="counts">{head}{rows}</table></details>'
    return sources_picture(survey) + _scope(survey, "supervised tokens") + table


def _coverage(survey: Survey) -> str:
    counts = survey.counts[survey.counts > 0]
    if not len(counts):
        return "<p>No token is supervised.</p>"
    steps = np.unique(np.geomspace(1, len(counts), _POINTS).round().astype(np.int64)).tolist()
    curve = coverage_curve(counts, sizes=steps)
    said = coverage_curve(counts)
    marked = [(point.size, point.share) for point in said if point.size in _MARKED or point is said[-1]]
    picture = coverage_picture([point.size for point in curve], [point.share for point in curve], marked)
    cells = "".join(f"<tr><th>{point.size:,}</th><td>{100 * point.share:.3f} %</td></tr>" for point in said)
    table = f'<details><summary>As numbers</summary><table class="counts">{cells}</table></details>'
    text = f"{said[-1].tokens:,} supervised tokens are of {len(counts):,} different ids; the most frequent ones come first."
    return picture + f"<p>{text}</p>" + _scope(survey, "counts") + table


def _rows(views: Sequence[RowView]) -> str:
    legend = (
        '<p class="text legend"><i>context</i> <b><i>supervised</i></b> <b><i class="e">end of turn</i></b> '
        "<i class=m>special</i> <span>⏎ a line feed, · a space alone; point at a token for its id and position</span></p>"
    )
    return legend + "".join(_row(view, place < _OPEN_ROWS) for place, view in enumerate(views))


def _row(view: RowView, unfolded: bool) -> str:
    facts = " · ".join(escape(fact) for fact in view.facts())
    text = "".join(_stretch(view, stretch) for stretch in view.stretches)
    if view.left_out:
        text += _left_out(view.left_out)
    return (
        f'<details class="row" id="row-{view.row_id}"{" open" if unfolded else ""}><summary><b>row {view.row_id}</b> '
        f'<span>{facts}</span></summary><div class="text" dir="auto">{text}</div></details>'
    )


def _left_out(tokens: int) -> str:
    return f'<p class="note">… {tokens:,} tokens left out …</p>'


def _stretch(view: RowView, stretch: Stretch) -> str:
    """Tokens as ``i`` elements, ``b`` around supervised ones; their ids are written once, for the script to count into."""
    first = stretch.pieces[0].start
    ids = " ".join(str(token) for piece in stretch.pieces for token in view.input_ids[piece.start : piece.stop].tolist())
    parts, inside = [], False
    for piece in stretch.pieces:
        supervised = view.is_supervised(piece)
        if supervised != inside:
            parts.append("<b>" if supervised else "</b>")
            inside = supervised
        kind = "e" if view.ends_turn(piece) else "x" if piece.broken else "m" if piece.marker else ""
        attributes = (f" class={kind}" if kind else "") + (f" data-n={piece.count}" if piece.count > 1 else "")
        parts.append(f"<i{attributes}>{escape(visible(piece.text))}</i>")
    if inside:
        parts.append("</b>")
    before = _left_out(stretch.left_out) if stretch.left_out else ""
    return f'{before}<div class="part" data-at="{first}" data-ids="{ids}">{"".join(parts)}</div>'
