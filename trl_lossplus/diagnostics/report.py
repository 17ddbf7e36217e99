"""`trl-lossplus report RUN [RUN2]`: findings and charts of a run, or two overlaid, as one HTML file that needs no network."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any

from ..arguments import Parser
from ..functional.errors import LossPlusError
from .doctor import LABELS, UNREADABLE, diagnose
from .page import page, setting_table
from .report_plots import draw_all
from .rules import DOCS, SEVERITIES, Finding
from .runlog import RunLog, RunLogError, read_run

LONGEST = 600  # characters of a prompt or completion that are shown
NOT_SETTINGS = ("versions", "output_dir", "logging_dir", "run_name")


def report(run: RunLog, other: RunLog | None = None) -> str:
    """
    One HTML page.

    Args:
        run: is described; its findings stand on top. other: a second run, overlaid, with the settings that differ.

    Raises:
        LossPlusError: matplotlib is not installed.
    """
    runs = [run] if other is None else [run, other]
    names = " and ".join(item.name for item in runs)
    parts = [
        *_head(runs),
        *(part for i, item in enumerate(runs) for part in _findings(item, i, len(runs) > 1)),
        *_charts(runs),
        *(_differences(run, other) if other is not None else []),
        *(part for i, item in enumerate(runs) for part in _completions(item, i, len(runs) > 1)),
        *(_settings(run) if other is None else []),
    ]
    return page(f"{names}: loss report", parts)


def _mark(index: int, several: bool) -> str:
    return f'<span class="run-{"ab"[index]}">{"AB"[index]}</span> ' if several else ""


def _head(runs: Sequence[RunLog]) -> Iterator[str]:
    yield f"<h1>{escape(' and '.join(run.name for run in runs))}</h1>"
    for i, run in enumerate(runs):
        steps = f"{len(run.steps)} logged steps, {run.steps[0]} to {run.steps[-1]}"
        yield f'<p class="soft">{_mark(i, len(runs) > 1)}{escape(run.source)}: a {run.kind} run, {steps}</p>'


def _findings(run: RunLog, index: int, several: bool) -> Iterator[str]:
    findings = diagnose(run)
    prefix = f"{'ab'[index]}-finding" if several else "finding"
    yield f'<section class="findings"><h2>{_mark(index, several)}Findings</h2>'
    told = [finding for finding in findings if finding.severity != "info"]
    notes = [finding for finding in findings if finding.severity == "info"]
    if not told:
        yield "<p>No warning and no error.</p>"
    yield from (_finding(finding, prefix) for finding in told)
    if notes:
        yield f"<details><summary>{len(notes)} note{'s' * (len(notes) != 1)}</summary>"
        yield from (_finding(finding, prefix) for finding in notes)
        yield "</details>"
    yield "</section>"


def _finding(finding: Finding, prefix: str) -> str:
    rule, seen = finding.rule, finding.seen
    where = f"Step {seen.first}" if seen.first == seen.last else f"Steps {seen.first} to {seen.last}"
    fields = ", ".join(f"<code>{escape(name)}: {escape(value)}</code>" for name, value in rule.fields)
    return (
        f'<article class="finding {finding.severity}" id="{prefix}-{rule.id}"><h3><span class="badge">'
        f"{LABELS[SEVERITIES.index(finding.severity)]}</span>{escape(rule.title)}</h3><p>{where}: {escape(seen.text)}.</p>"
        f"<p>{escape(rule.means)}</p><p>{escape(rule.change)} {fields}</p>"
        f'<p class="soft">{DOCS}#{escape(rule.anchor)}</p></article>'
    )


def _charts(runs: Sequence[RunLog]) -> Iterator[str]:
    try:
        drawn = list(draw_all(runs))
    except ImportError as error:
        raise LossPlusError(f"a report needs matplotlib ({error}): pip install 'trl-lossplus[report]'.") from None
    if len(runs) > 1:
        yield f"<h2>Charts: {', '.join(_mark(i, True) + escape(run.name) for i, run in enumerate(runs))}</h2>"
    else:
        yield "<h2>Charts</h2>"
    yield '<div class="charts">'
    for chart, svg in drawn:
        if svg is not None:
            note = f"<figcaption>{escape(chart.note)}</figcaption>" if chart.note else ""
            yield f'<figure id="chart-{chart.id}"><h3>{escape(chart.title)}</h3>{note}{svg}</figure>'
    yield "</div>"
    missing = [chart.title.lower() for chart, svg in drawn if svg is None]
    if missing:
        yield f'<p class="soft">Not logged in this run: {escape(", ".join(missing))}.</p>'


def _shown(value: Any, digits: int = 6) -> str:
    return escape("not set" if value is None else f"{value:.{digits}g}" if isinstance(value, float) else str(value))


def _differences(run: RunLog, other: RunLog) -> Iterator[str]:
    yield '<section id="differences"><h2>Settings that differ</h2>'
    for i, item in enumerate((run, other)):
        if not item.settings:
            yield f'<p class="soft">{_mark(i, True)}wrote no lossplus.json: its settings are not known.</p>'
    if run.settings and other.settings:
        names = [n for n in dict.fromkeys([*run.settings, *other.settings]) if n not in NOT_SETTINGS]
        rows = [(n, run.settings.get(n), other.settings.get(n)) for n in sorted(names)]
        rows = [row for row in rows if row[1] != row[2]]
        yield setting_table([(n, _shown(a), _shown(b)) for n, a, b in rows])
        if not rows:
            yield "<p>None.</p>"
    yield "</section>"


def _settings(run: RunLog) -> Iterator[str]:
    rows = [(n, v) for n, v in sorted(run.settings.items()) if n not in NOT_SETTINGS and v is not None]
    if rows:
        yield '<details id="settings"><summary>Settings</summary><div class="wide"><table class="settings"><tbody>'
        yield from (f'<tr><td>{escape(name)}</td><td class="text">{_shown(value)}</td></tr>' for name, value in rows)
        yield "</tbody></table></div></details>"


def _plain(value: Any) -> str:
    """A prompt or completion as text: conversations as their messages."""
    if isinstance(value, str):
        text = value
    elif hasattr(value, "__iter__") and not isinstance(value, dict):
        text = "\n".join(str(item.get("content", "")) if isinstance(item, dict) else str(item) for item in value)
    else:
        text = str(value)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]} ..."


def sample_completions(run: RunLog, rows: int = 3) -> list[tuple[int, list[dict[str, Any]]]]:
    """
    Logged completions at the start, middle and end of a run: (step, rows), the best and the worst of each by advantage.

    Empty where `log_completions` was off, or its files cannot be read.
    """
    files = sorted((run.folder / "completions").glob("completions_*.parquet")) if run.folder is not None else []
    chosen = list(dict.fromkeys([0, len(files) // 2, len(files) - 1])) if files else []
    found = []
    for index in chosen:
        try:
            import pandas as pd

            table = pd.read_parquet(files[index])
        except (ImportError, OSError, ValueError):
            continue
        if not {"prompt", "completion"} <= set(table.columns) or not len(table):
            continue
        by = "advantage" if "advantage" in table.columns else None
        ordered = table.sort_values(by, ascending=False, kind="stable") if by else table
        picked = ordered if len(ordered) <= rows else pd.concat([ordered.head(rows - rows // 2), ordered.tail(rows // 2)])
        number = re.search(r"(\d+)\.parquet$", files[index].name)
        found.append((int(number[1]) if number else 0, picked.to_dict("records")))
    return found


def loss_rows(run: RunLog) -> list[tuple[int, list[dict[str, Any]]]]:
    """
    What `loss_table_rows` wrote at the first, middle and last step: (step, rows), largest policy loss first.

    Empty where it was 0; lines that cannot be read are left out.
    """
    steps: dict[int, list[dict[str, Any]]] = {}
    try:
        lines = (run.folder / "loss_table.jsonl").read_text(encoding="utf-8").splitlines() if run.folder is not None else []
    except (OSError, UnicodeDecodeError):
        return []
    for line in lines:
        try:
            row = json.loads(line)
            steps.setdefault(int(row["step"]), []).append({"prompt": "", "completion": "", **row})
        except (ValueError, KeyError, TypeError):
            continue
    numbers = sorted(steps)
    chosen = dict.fromkeys([numbers[0], numbers[len(numbers) // 2], numbers[-1]]) if numbers else {}
    return [(number, steps[number]) for number in chosen]


def _texts(kind: str, title: str, samples: list[tuple[int, list[dict[str, Any]]]]) -> Iterator[str]:
    """A section with a table of rows of text and numbers, by step."""
    if not samples:
        return
    columns = [name for name in samples[0][1][0] if name not in ("step", "prompt", "completion")]
    yield f'<section class="{kind}"><h2>{title}</h2><div class="wide"><table>'
    yield f"<thead><tr><th>step</th><th>prompt</th><th>completion</th>{''.join(f'<th>{escape(c)}</th>' for c in columns)}</tr></thead><tbody>"
    for step, rows in samples:
        for row in rows:
            cells = "".join(f'<td data-name="{escape(column)}">{_shown(row.get(column), 4)}</td>' for column in columns)
            texts = (f'<td class="text" data-name="{name}">{escape(_plain(row[name]))}</td>' for name in ("prompt", "completion"))
            yield f'<tr><td data-name="step">{step}</td>{"".join(texts)}{cells}</tr>'
    yield "</tbody></table></div></section>"


def _completions(run: RunLog, index: int, several: bool) -> Iterator[str]:
    mark = _mark(index, several)
    yield from _texts("completions", f"{mark}Completions at the start, middle and end", sample_completions(run))
    yield from _texts("completions losstable", f"{mark}Rows with the largest and the smallest policy loss", loss_rows(run))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `report`."""
    parser.add_argument("run", help="output folder, trainer_state.json, or csv export of wandb or tensorboard")
    parser.add_argument("other", nargs="?", help="a second run to lay over it")
    parser.add_argument("--output", "-o", default="report.html", help="the file that is written (default report.html)")


def run(args: argparse.Namespace) -> int:
    """
    Writes the report.

    Returns:
        0, or 3 for a log that cannot be read (told in one line on stderr). Raises LossPlusError for a file that cannot be written.
    """
    try:
        logs = [read_run(path) for path in (args.run, args.other) if path is not None]
        page = report(*logs)
    except (RunLogError, OSError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return UNREADABLE
    try:
        Path(args.output).write_text(page, encoding="utf-8")
    except OSError as error:
        raise LossPlusError(f"--output={args.output}: cannot be written ({error.strerror}).") from None
    print(f"{args.output}: {len(page) / 1000:.0f} kB")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """`trl-lossplus report`. Raises LossPlusError where matplotlib is not installed."""
    parser = Parser(prog="trl-lossplus report", description="Findings and charts of a run as one HTML file.")
    add_arguments(parser)
    return run(parser.parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
