"""`trl-lossplus doctor RUN`: what is wrong with a run, from its log."""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from collections.abc import Sequence
from typing import Any

from ..arguments import Parser
from .rules import DOCS, READS, SEVERITIES, Finding, apply
from .runlog import RunLog, RunLogError, read_run
from .view import View

UNREADABLE = 3
LABELS = ("note", "warning", "error")


def diagnose(run: RunLog) -> list[Finding]:
    """The findings in a run: the worst first, and of those that are equally bad the cause before its symptom."""
    return apply(View(run))


def status(findings: Sequence[Finding]) -> int:
    """The exit status: 0 nothing but notes, 1 warnings, 2 errors."""
    return max((SEVERITIES.index(finding.severity) for finding in findings), default=0)


def as_dict(finding: Finding) -> dict[str, Any]:
    """A finding as plain data."""
    rule, seen = finding.rule, finding.seen
    return {
        "rule": rule.id,
        "severity": finding.severity,
        "title": rule.title,
        "seen": seen.text,
        "steps": [seen.first, seen.last],
        "numbers": seen.numbers,
        "means": rule.means,
        "change": rule.change,
        "fields": [{"field": name, "value": value} for name, value in rule.fields],
        "docs": f"{DOCS}#{rule.anchor}",
    }


def line(finding: Finding) -> str:
    """A finding in one line."""
    rule, seen = finding.rule, finding.seen
    where = f"step {seen.first}" if seen.first == seen.last else f"steps {seen.first} to {seen.last}"
    change = ", ".join(f"{name}: {value}" for name, value in rule.fields)
    label = LABELS[SEVERITIES.index(finding.severity)]
    return f"{label}: {rule.title} ({where}): {seen.text}." + (f" Change {change}." if change else "") + f" {DOCS}#{rule.anchor}"


def _block(finding: Finding) -> list[str]:
    rule, seen = finding.rule, finding.seen
    where = f"step {seen.first}" if seen.first == seen.last else f"steps {seen.first} to {seen.last}"
    change = rule.change + ("" if not rule.fields else " " + "; ".join(f"{name}: {value}" for name, value in rule.fields) + ".")
    rows = {"seen": f"{where}: {seen.text}", "means": rule.means, "change": change, "docs": f"{DOCS}#{rule.anchor}"}
    lines = [f"{LABELS[SEVERITIES.index(finding.severity)]:<8} {rule.title}  [{rule.id}]"]
    for name, text in rows.items():
        lines += textwrap.wrap(text, 110, initial_indent=f"  {name:<7}", subsequent_indent=" " * 9, break_on_hyphens=False)
    return lines


def text(run: RunLog, findings: Sequence[Finding]) -> str:
    """What `doctor` prints."""
    counts = [sum(finding.severity == severity for finding in findings) for severity in reversed(SEVERITIES)]
    words = ", ".join(f"{n} {word}{'s' * (n != 1)}" for n, word in zip(counts, reversed(LABELS), strict=True))
    head = f"{run.source}: a {run.kind} run, {len(run.steps)} logged steps ({run.steps[0]} to {run.steps[-1]}): {words}"
    blocks = ["\n".join(_block(finding)) for finding in findings]
    return "\n\n".join([head, *blocks]) + "\n"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `doctor`."""
    parser.add_argument("run", help="output folder, trainer_state.json, or csv export of wandb or tensorboard")
    parser.add_argument("--json", action="store_true", help="findings as JSON")


def run(args: argparse.Namespace) -> int:
    """
    Prints the findings.

    Returns:
        The exit status: 0 nothing but notes, 1 warnings, 2 errors, 3 a log that cannot be read (told in one line on stderr).
    """
    try:
        log = read_run(args.run, READS)
    except RunLogError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return UNREADABLE
    findings = diagnose(log)
    if args.json:
        report = {"run": log.source, "kind": log.kind, "steps": len(log.steps), "status": status(findings)}
        print(json.dumps(report | {"findings": [as_dict(finding) for finding in findings]}, indent=1))
    else:
        print(text(log, findings), end="")
    return status(findings)


def main(argv: Sequence[str] | None = None) -> int:
    """`trl-lossplus doctor`."""
    parser = Parser(prog="trl-lossplus doctor", description="What is wrong with a run, from its log.")
    add_arguments(parser)
    return run(parser.parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
