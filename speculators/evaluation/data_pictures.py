"""Pictures of a data set as SVG to be put into a page: lengths, sources, and the coverage of draft vocabularies.

Colours are the page's CSS variables, so that a picture is readable on light and on dark ground. Text stays text.
"""

from __future__ import annotations

import hashlib
import io
import re
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np

from speculators.data.inspection import Survey

__all__ = ["coverage_picture", "lengths_picture", "sources_picture"]

#: Colours that matplotlib is given, and the CSS that stands for them in the page.
_COLOURS = {"#010203": "currentColor", "#010204": "var(--tokens)", "#010205": "var(--supervised)", "#010206": "var(--grid)"}
_INK, _TOKENS, _SUPERVISED, _GRID = _COLOURS

_WIDTH = 7.2  # inches

#: Sources that have a bar of their own; the others share one.
_MOST_SOURCES = 12

#: Characters of a source's name beside its bar.
_NAME = 28


def lengths_picture(survey: Survey) -> str:
    """Histogram of the rows' tokens and supervised tokens, as shares of the rows."""
    longest = max(1, int(survey.lengths.max(initial=1)))
    shortest = max(1, min(int(values.min()) for values in (survey.lengths, survey.supervised) if len(values)))
    spread = longest > 30 * max(1, int(np.median(survey.lengths)))
    if spread:
        edges = np.unique(np.geomspace(shortest, longest + 1, 41).round())
    else:
        edges = np.unique(np.linspace(0, longest + 1, 41).round())
    figure, axes = _figure(2.6)
    for name, values, colour, alpha in (
        ("tokens", survey.lengths, _TOKENS, 0.35),
        ("supervised tokens", survey.supervised, _SUPERVISED, 0.45),
    ):
        share = 100 * np.histogram(np.maximum(values, edges[0]), edges)[0] / max(1, len(values))
        axes.stairs(share, edges, fill=True, color=colour, alpha=alpha)
        axes.stairs(share, edges, color=colour, linewidth=1.4, label=name)
    axes.set_xlabel("tokens of a row")
    axes.set_ylabel("% of rows")
    _thousands(axes.yaxis)
    if spread:
        axes.set_xscale("log")
        axes.set_xlim(edges[0], edges[-1])
    else:
        axes.set_xlim(0, edges[-1])
    _thousands(axes.xaxis)
    axes.legend(frameon=False, labelcolor=_INK)
    return _svg(figure, "lengths", "Histogram of tokens and supervised tokens of a row")


def sources_picture(survey: Survey) -> str:
    """Bars of how much of the rows and of their supervised tokens each source gave; the largest on top."""
    known = sorted(survey.sources, key=lambda source: -source.rows)
    names = [_short(source.name) for source in known]
    rows = np.array([source.rows for source in known], dtype=float)
    supervised = np.array([source.supervised for source in known], dtype=float)
    if len(known) > _MOST_SOURCES:
        cut = _MOST_SOURCES - 1
        names = [*names[:cut], f"{len(known) - cut} others"]
        rows, supervised = (np.append(values[:cut], values[cut:].sum()) for values in (rows, supervised))
    figure, axes = _figure(0.9 + 0.42 * len(names))
    places = np.arange(len(names))
    for offset, values, colour, name in (
        (-0.19, rows, _TOKENS, "rows"),
        (0.19, supervised, _SUPERVISED, "supervised tokens"),
    ):
        share = 100 * values / max(1.0, values.sum())
        axes.barh(places + offset, share, height=0.36, color=colour, label=name)
        for place, value in zip(places, share, strict=True):
            axes.text(value + 0.8, place + offset, f"{value:.1f} %", va="center", fontsize=8, color=_INK)
    axes.set_yticks(places, names)
    axes.invert_yaxis()
    axes.set_xlim(0, 112)
    axes.set_xticks(range(0, 101, 20))
    axes.set_xlabel("% of the data set")
    axes.grid(False, axis="y")
    axes.legend(frameon=False, labelcolor=_INK, loc="lower left", bbox_to_anchor=(0, 1), ncols=2)
    return _svg(figure, "sources", "Share of rows and of supervised tokens by source")


def coverage_picture(sizes: Sequence[int], covered: Sequence[float], marked: Sequence[tuple[int, float]]) -> str:
    """Share of the supervised tokens that a draft vocabulary of each size can say.

    :param sizes: ascending.
    :param covered: the share of each, from 0 to 1.
    :param marked: (size, share) to mark and to label.
    """
    figure, axes = _figure(2.8)
    shares = 100 * np.asarray(covered)
    axes.plot(sizes, shares, color=_SUPERVISED, linewidth=1.8)
    axes.fill_between(sizes, shares, color=_SUPERVISED, alpha=0.15, linewidth=0)
    for size, share in marked:
        axes.plot([size], [100 * share], "o", color=_SUPERVISED, markersize=4.5)
        label = f"{size:,}: {_percent(share)}"
        axes.annotate(label, (size, 100 * share), (4, -14), textcoords="offset points", fontsize=8, color=_INK)
    axes.set_xscale("log")
    axes.set_xlim(1, max(2, sizes[-1]) * 1.6)
    axes.set_ylim(0, 104)
    axes.set_xlabel("draft vocabulary size")
    axes.set_ylabel("% of supervised tokens")
    _thousands(axes.xaxis)
    return _svg(figure, "coverage", "Coverage of supervised tokens by draft vocabulary size")


def _percent(share: float) -> str:
    """A share that is not quite all of it is never shown as 100 %."""
    return "100 %" if share >= 1 else f"{min(100 * share, 99.99):.2f} %"


def _count(number: float) -> str:
    if number < 1000:
        return f"{number:g}"
    return f"{number / 1000:.3g}k" if number < 1e6 else f"{number / 1e6:.3g}M"


def _short(name: str) -> str:
    """The end of a source's name, which tells paths apart; printable characters only."""
    from speculators.evaluation.data_text import one_line

    name = one_line(name)
    return name if len(name) <= _NAME else "…" + name[1 - _NAME :]


def _thousands(axis: Any) -> None:
    from matplotlib.ticker import FuncFormatter, NullFormatter

    axis.set_major_formatter(FuncFormatter(lambda value, _: _count(value)))
    axis.set_minor_formatter(NullFormatter())


def _figure(height: float) -> tuple[Any, Any]:
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    settings: dict[Any, Any] = {
        "font.family": "sans-serif",
        "font.size": 9,
        "text.parse_math": False,  # names of sources are text, whatever dollars are in them
        "text.color": _INK,
        "axes.edgecolor": _GRID,
        "axes.labelcolor": _INK,
        "axes.axisbelow": True,
        "axes.grid": True,
        "grid.color": _GRID,
        "grid.linewidth": 0.6,
        "xtick.color": _INK,
        "ytick.color": _INK,
    }
    with rc_context(settings):
        figure = Figure(figsize=(_WIDTH, height), layout="constrained")
        axes = figure.subplots()
    axes.patch.set_visible(False)
    figure.patch.set_visible(False)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.tick_params(length=0)
    return figure, axes


def _svg(figure: Any, name: str, title: str) -> str:
    """The picture as an ``svg`` element that scales with the page.

    :param name: keeps the ids of several pictures in a page apart.
    """
    from matplotlib import rc_context

    buffer = io.StringIO()
    salt = hashlib.sha256(name.encode()).hexdigest()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": salt}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")  # text stays text, so the reader's fonts draw it
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->|<style.*?</style>", "", text, flags=re.DOTALL)
    for colour, css in _COLOURS.items():
        text = text.replace(colour, css)
    text = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", text, count=1)
    text = re.sub(r'(<svg[^>]*?) width="[^"]*"', rf'\1 role="img" aria-label="{title}"', text, count=1)
    return re.sub(r"font-family: [^;\"]*", "font-family: inherit", text)
