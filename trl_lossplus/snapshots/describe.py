"""A difference for people: the same tables, in the order of the data flow, as text and as one HTML page."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import Any, NamedTuple

from ..diagnostics.page import page, table
from .diff import Change, Difference

LONGEST = 60  # characters of a prompt or completion in a table
TURNED = 5  # rows that are listed by how far their gradient turned
CSS = """
.tokens { white-space: pre-wrap; overflow-wrap: anywhere; font: 15px/2.1 ui-monospace, Menlo, Consolas, monospace; margin: .2rem 0; }
.t { padding: .2rem .12rem; border-radius: .2rem; border-bottom: 2px solid transparent; print-color-adjust: exact; -webkit-print-color-adjust: exact; }
.up { background: rgb(213 94 0 / calc(var(--s) * 70%)); border-bottom-color: #b14d00; }
.down { background: rgb(0 114 178 / calc(var(--s) * 60%)); border-bottom: 2px dotted #00568a; }
.out { color: #8a8a8a; text-decoration: line-through; }
.verdict { border-left: .35rem solid #0072b2; background: #eef5fa; padding: .6rem .9rem; font-weight: 600; overflow-wrap: anywhere; print-color-adjust: exact; }
.verdict.differs { border-color: #b26a00; background: #fdf6ea; }
.row { border: 1px solid var(--line); border-radius: .3rem; padding: .5rem .7rem; margin: .6rem 0; break-inside: avoid; }
table.numbers { width: auto; min-width: min(100%, 26rem); font-variant-numeric: tabular-nums; }
@media (max-width: 40rem) {
  h1 { font-size: 1.15rem; } table.numbers { width: 100%; font-size: .78rem; } .numbers :is(th, td) { padding: .25rem .2rem; }
  .with-completions :is(th, td):last-child { display: none; }
}
@media print { .with-completions :is(th, td):last-child { display: none; } table.numbers { font-size: 8.5pt; } .numbers :is(th, td) { padding: .12rem .4rem; } h2 { margin: 1rem 0 .3rem; } }
"""


class Section(NamedTuple):
    """One table: its title, its header and its rows, as text."""

    title: str
    heads: list[str]
    rows: list[list[str]]


def _short(text: str) -> str:
    text = text.replace("\n", "\\n")
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."


def _tensors(title: str, changes: Sequence[Change]) -> Section:
    heads = ["tensor", "differs in", "largest", "places", "first at"]
    rows = [
        [c.name, ", ".join(filter(None, (c.how, c.relation))), f"{c.largest:.4g}", str(c.positions), _place(c)] for c in changes
    ]
    return Section(title, heads, rows)


def _place(change: Change) -> str:
    """Where a tensor first differs: micro-batch, row in it, token."""
    return " ".join(f"{word} {i}" for word, i in zip(("micro-batch", "row", "token"), change.where, strict=False))


def sections(found: Difference) -> list[Section]:
    """The tables of a difference, in the order of the data flow; those without rows are left out."""
    numbers = [[name, f"{a:.4g}", f"{b:.4g}", f"{b - a:+.3g}"] for name, (a, b) in found.update.items()]
    if numbers:
        numbers.append(["gradient cosine", "", f"{found.cosine:.5f}", ""])
    turned = [i for i, x in enumerate(found.row_cosines) if x < 1 - 1e-6 and not math.isnan(x)]
    turned.sort(key=lambda i: found.row_cosines[i])
    tokens = [
        [str(t["row"]), str(t["token"]), repr(t.get("text", t.get("id", ""))), f"{t['a']:.4g}", f"{t['b']:.4g}", f"{t['change']:+.4g}",
         _short(t.get("completion", ""))]
        for t in found.tokens
    ]  # fmt: skip
    tables = [
        Section("Settings", ["field", "A", "B"], [[n, repr(old), repr(new)] for n, (old, new) in found.settings.items()]),
        Section("Of the run", ["fact", "A", "B"], [[n, str(old), str(new)] for n, (old, new) in found.facts.items()]),
        _tensors("Inputs", found.inputs),
        _tensors("Normalizer", found.window),
        _tensors("Outputs", found.outputs),
        _tensors("Gradient with respect to the log-probs", found.gradient),
        Section("Update", ["", "A", "B", "change"], numbers),
        Section(
            "Rows whose gradient turned most",
            ["row", "cosine"],
            [[str(i), f"{found.row_cosines[i]:.4f}"] for i in turned[:TURNED]],
        ),
        Section("Tokens whose loss changed most", ["row", "token", "text", "A", "B", "change", "completion"], tokens),
    ]
    return [section for section in tables if section.rows]


def text_table(rows: Sequence[Sequence[str]]) -> str:
    """Rows of cells in columns; the first row is the header."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)


def as_text(found: Difference) -> str:
    """The headline, then the tables."""
    lines = [found.headline]
    for section in sections(found):
        lines += ["", section.title, *(f"  {line}" for line in text_table([section.heads, *section.rows]).splitlines())]
    return "\n".join(lines)


def as_html(found: Difference, names: tuple[str, str] = ("A", "B")) -> str:
    """
    One page that needs no network: the headline, the tables, and the rows with the largest changes, each token coloured.

    Args:
        names: what A and B are called on the page.
    """
    kind = "verdict" if found.same else "verdict differs"
    parts = [
        f'<h1 class="{kind}">{escape(found.headline).replace("-&gt;", "&rarr;")}</h1>',
        f'<p class="soft"><span class="run-a">A</span> {escape(names[0])}<br><span class="run-b">B</span> {escape(names[1])}</p>',
    ]
    for section in sections(found):
        rows = [[escape(cell) for cell in row] for row in section.rows]
        kind = "numbers with-completions" if section.heads[-1] == "completion" else "numbers"
        parts += [f"<h2>{escape(section.title)}</h2>", table([escape(head) for head in section.heads], rows, kind)]
    if found.rows:
        parts += [
            "<h2>Loss of each token, A to B</h2>",
            '<p class="soft"><span class="t up" style="--s:.7">loss rose</span> <span class="t down" style="--s:.7">loss fell</span> '
            '<span class="out">not in the loss</span>; the stronger the colour, the larger the change.</p>',
            *_coloured(found.rows),
        ]
    return page(f"{names[0]} and {names[1]}: what differs", parts, CSS)


def _coloured(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Each row as its prompt and its tokens, coloured by the change of their loss."""
    sizes = [abs(t["b"] - t["a"]) for row in rows for t in row["tokens"]]
    largest = max((size for size in sizes if math.isfinite(size)), default=0.0) or 1.0
    parts = []
    for row in rows:
        change = sum(t["b"] - t["a"] for t in row["tokens"])
        head = f"row {row['row']}: sum of its tokens' losses {change:+.4g}, gradient cosine {row['cosine']:.4f}"
        spans = "".join(_token(i, token, largest) for i, token in enumerate(row["tokens"]))
        prompt = f'<p class="soft">{escape(_short(row["prompt"]))}</p>' if row["prompt"] else ""
        parts.append(f'<div class="row"><h3>{escape(head)}</h3>{prompt}<p class="tokens">{spans}</p></div>')
    return parts


def _token(place: int, token: dict[str, Any], largest: float) -> str:
    text = escape(token["text"].replace("\n", "\u23ce\n")) or "&#8709;"
    if not token["counts"]:
        return f'<span class="t out">{text}</span> '
    change = token["b"] - token["a"]
    strength = min(abs(change) / largest, 1.0) if math.isfinite(change) else 1.0
    kind = "" if change == 0 else " up" if change > 0 or math.isnan(change) else " down"
    title = f"token {place}: {token['a']:.4g} to {token['b']:.4g}"
    return f'<span class="t{kind}" style="--s:{strength:.2f}" title="{title}">{text}</span> '
