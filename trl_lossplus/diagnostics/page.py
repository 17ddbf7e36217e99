"""The frame of our HTML pages: one file that needs no network, for a desk, a phone and paper. Every text is escaped by who puts it in."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

CSS = """
:root { color-scheme: light; --line: #d9d9d9; --soft: #5b5b5b; }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 76rem; padding: 1rem; font: 16px/1.5 system-ui, sans-serif; color: #1b1b1b; background: #fff; }
h1 { font-size: 1.5rem; margin: .2rem 0; overflow-wrap: anywhere; } h2 { font-size: 1.15rem; margin: 2rem 0 .6rem; }
h3 { font-size: 1rem; margin: 0; } p { margin: .3rem 0; } .soft { color: var(--soft); font-size: .9rem; }
.finding { border-left: .35rem solid #8a8a8a; background: #f6f6f6; padding: .6rem .9rem; margin: .6rem 0; border-radius: .2rem; }
.finding.error { border-color: #b3261e; background: #fdf1f0; } .finding.warning { border-color: #b26a00; background: #fdf6ea; }
.badge { font-size: .75rem; font-weight: 600; text-transform: uppercase; letter-spacing: .04em; margin-right: .4rem; }
.error .badge { color: #8c1d18; } .warning .badge { color: #7a4900; }
.charts { display: grid; gap: 1rem; grid-template-columns: repeat(auto-fit, minmax(min(100%, 23rem), 1fr)); align-items: start; }
figure { margin: 0; border: 1px solid var(--line); border-radius: .3rem; padding: .7rem; min-width: 0; }
figcaption { font-size: .85rem; color: var(--soft); margin-bottom: .4rem; } details { margin: .8rem 0; } svg { display: block; width: 100%; height: auto; }
.wide { overflow-x: auto; } table { border-collapse: collapse; width: 100%; font-size: .88rem; }
th, td { text-align: left; vertical-align: top; padding: .35rem .5rem; border-bottom: 1px solid var(--line); }
td.text, .settings td { white-space: pre-wrap; overflow-wrap: anywhere; } .settings td + td { min-width: 6rem; }
code { background: #efefef; padding: .05rem .3rem; border-radius: .2rem; overflow-wrap: anywhere; }
.run-a { color: #0072b2; font-weight: 600; } .run-b { color: #b14d00; font-weight: 600; }
@media (max-width: 40rem) {
  .completions thead { display: none; } .completions :is(table, tbody, tr, td) { display: block; } .completions td { border: 0; padding: .1rem 0; }
  .completions tr { border-bottom: 1px solid var(--line); padding: .5rem 0; }
  .completions td:not(.text) { display: inline-block; margin-right: .9rem; }
  .completions td::before { content: attr(data-name) ": "; color: var(--soft); }
}
@media print {
  body { max-width: none; padding: 0; font-size: 10pt; } .charts { grid-template-columns: 1fr 1fr; gap: .5rem; }
  figure, .finding, tr { break-inside: avoid; } details > * { display: block; } .finding { border: 1px solid #999; }
}
"""


def page(title: str, parts: Iterable[str], css: str = "") -> str:
    """
    A whole HTML page.

    Args:
        title: as text. parts: of the body, as HTML. css: rules beside the common ones.
    """
    head = '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
    return "\n".join([head, f"<title>{escape(title)}</title><style>{CSS}{css}</style></head><body>", *parts, "</body></html>"])


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], kind: str = "") -> str:
    """
    A table that can be scrolled sideways.

    Args:
        heads: the header's cells, as HTML. rows: their cells, as HTML. kind: class of the table.
    """
    head = "".join(f"<th>{cell}</th>" for cell in heads)
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="wide"><table class="{kind}"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def setting_table(rows: Iterable[tuple[str, str, str]]) -> str:
    """Settings that differ: name (as text), A's and B's value (as HTML)."""
    cells = [(escape(name), a, b) for name, a, b in rows]
    return table(["setting", '<span class="run-a">A</span>', '<span class="run-b">B</span>'], cells, "settings")
