"""Style and script of the page of a data set."""

from __future__ import annotations

__all__ = ["SCRIPT", "STYLE"]

STYLE = """
:root { --ground: #fbfbfa; --card: #ffffff; --ink: #1d2328; --soft: #68727d; --line: #dfe3e7; --grid: #e3e6e9;
  --tokens: #7b8794; --supervised: #1a7f4b; --answer: #d9f2e3; --answer-ink: #0d3d24; --end: #1a7f4b; --end-ink: #ffffff;
  --special: #6a4fb3; --wrong: #c62828; --warn: #fff4d6; --warn-line: #e0a800; }
@media (prefers-color-scheme: dark) {
  :root { --ground: #14181c; --card: #1c2127; --ink: #e4e8ec; --soft: #97a1ab; --line: #30373f; --grid: #333b44;
    --tokens: #8b98a6; --supervised: #4cc38a; --answer: #173a29; --answer-ink: #c8f0d9; --end: #4cc38a; --end-ink: #0b1f14;
    --special: #b7a3f0; --wrong: #ff8a80; --warn: #332a12; --warn-line: #c79a2b; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--ground); color: var(--ink);
  font: 15px/1.5 system-ui, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
header, main { max-width: 62rem; margin: 0 auto; padding: 0 1.25rem; }
header { padding-top: 1.6rem; }
h1 { font-size: 1.5rem; margin: 0 0 .4rem; overflow-wrap: anywhere; }
h2 { font-size: 1.1rem; margin: 0 0 .7rem; }
nav a { color: var(--soft); margin-right: 1rem; text-decoration: none; white-space: nowrap; }
nav a:hover { color: var(--ink); text-decoration: underline; }
section { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 1rem 1.2rem; margin: 1rem 0; }
svg { display: block; width: 100%; max-width: 46rem; height: auto; }
ul { margin: .6rem 0; padding-left: 1.2rem; }
a { color: inherit; }
.cards { display: flex; flex-wrap: wrap; gap: .7rem 2.2rem; }
.cards b { display: block; font-size: 1.45rem; line-height: 1.2; font-variant-numeric: tabular-nums; }
.cards span, .note, small, .row summary span, .legend span { color: var(--soft); }
.note { font-size: .87rem; margin: .3rem 0; }
.good { color: var(--supervised); margin: 0; }
.warnings { list-style: none; padding: 0; margin: 0; }
.warnings li { background: var(--warn); border-left: 4px solid var(--warn-line); border-radius: 4px;
  padding: .5rem .8rem; margin: .5rem 0; }
table { border-collapse: collapse; margin: .4rem 0; }
th, td { text-align: left; font-weight: normal; padding: .15rem 1.2rem .15rem 0; vertical-align: top; overflow-wrap: anywhere; }
th { color: var(--soft); }
td { font-variant-numeric: tabular-nums; }
.counts td { text-align: right; white-space: nowrap; }
.counts .sum th, .counts .sum td { border-top: 1px solid var(--line); color: var(--ink); }
.counts .bar { width: 12rem; vertical-align: middle; }
.bar i { display: block; height: .6rem; border-radius: 3px; background: var(--tokens); min-width: 1px; }
summary { cursor: pointer; }
.row { border-top: 1px solid var(--line); padding: .45rem 0; }
.row summary b { margin-right: .5rem; }
.text { font: 13.5px/1.65 ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace; color: var(--soft);
  white-space: pre-wrap; overflow-wrap: anywhere; padding: .3rem 0; }
.part { unicode-bidi: isolate; }
.text i { font-style: normal; border-radius: 2px; }
.text b { font-weight: normal; color: var(--answer-ink); background: var(--answer);
  -webkit-box-decoration-break: clone; box-decoration-break: clone; }
.text i:hover { outline: 1.5px solid currentColor; }
.text .m { color: var(--special); }
.text .e { background: var(--end); color: var(--end-ink); padding: 0 .2em; }
.text .x { color: var(--wrong); text-decoration: underline wavy; }
.legend i { padding: .1em .5em; }
.legend b { padding: .1em 0; border-radius: 3px; }
#tip { position: absolute; background: var(--ink); color: var(--ground); font-size: .82rem;
  padding: .15rem .5rem; border-radius: 5px; pointer-events: none; white-space: nowrap; z-index: 2; }
@media print { section { border: 0; } }
"""

#: Counts the tokens before the one that is pointed at, so that a page holds every id once and no position at all.
SCRIPT = """
"use strict";
const tip = document.getElementById("tip");
const show = (event) => {
  const token = event.target.closest ? event.target.closest(".part i") : null;
  if (!token) { tip.hidden = true; return; }
  const part = token.closest(".part");
  let before = 0;
  for (const each of part.querySelectorAll("i")) {
    if (each === token) break;
    before += Number(each.dataset.n || 1);
  }
  const count = Number(token.dataset.n || 1), at = Number(part.dataset.at) + before;
  const ids = part.dataset.ids.split(" ").slice(before, before + count);
  const mask = token.closest("b") ? "supervised" : "context";
  tip.textContent = (count > 1 ? "ids " : "id ") + ids.join(", ") + " \u00b7 position " + at
    + (count > 1 ? "\u2013" + (at + count - 1) : "") + " \u00b7 " + mask;
  tip.hidden = false;
  const box = token.getClientRects()[0];
  const left = Math.min(box.left, document.documentElement.clientWidth - tip.offsetWidth - 8);
  tip.style.left = window.scrollX + Math.max(8, left) + "px";
  tip.style.top = window.scrollY + box.top - tip.offsetHeight - 4 + "px";
};
document.addEventListener("mouseover", show);
document.addEventListener("click", show);
const unfold = () => {
  const row = location.hash.startsWith("#row-") ? document.getElementById(location.hash.slice(1)) : null;
  if (row) { row.open = true; row.scrollIntoView(); }
};
window.addEventListener("hashchange", unfold);
unfold();
"""
