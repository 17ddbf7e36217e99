"""`trl-lossplus snapshot show|diff` and `trl-lossplus replay`."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from itertools import product
from pathlib import Path
from typing import Any

import yaml

from ..arguments import Parser
from ..functional.errors import LossPlusError, unknown_name
from ..registry import ADVANTAGE_ESTIMATORS, POLICY_LOSSES, import_module
from ..spec import LossSpec
from .describe import as_html, as_text, text_table
from .diff import diff
from .replay import Replay, replay
from .store import Snapshot
from .validate import plain_numbers


def _value(text: str) -> Any:
    """A flag's value as YAML reads it: numbers, booleans and null as themselves, the rest as text (1e-3 too is a number)."""
    try:
        return float(text) if "e" in text.lower() and text[:1].isdigit() else yaml.safe_load(text)
    except (ValueError, yaml.YAMLError):
        return text


def spec_changes(words: Sequence[str]) -> list[tuple[str, list[Any]]]:
    """
    `--field value` pairs; a value with commas is a list of values to sweep over.

    Raises:
        LossPlusError: a word that is no flag, a flag without a value, or no field of LossSpec.
    """
    known = {item.name for item in fields(LossSpec)}
    changes: list[tuple[str, list[Any]]] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--"):
            raise LossPlusError(f"{word!r}: expected --field value.")
        name, _, value = word[2:].replace("-", "_").partition("=")
        if name not in known:
            raise unknown_name("LossSpec field", name, known)
        if not value:
            if not rest:
                raise LossPlusError(f"--{name} needs a value after it.")
            value = rest.pop(0)
        parts = value.split(",")
        if not all(part.strip() for part in parts):
            raise LossPlusError(f"--{name} {value!r}: a value is empty. Write null for None.")
        changes.append((name, [_value(part) for part in parts]))
    return changes


def _fields_of(path: Path) -> dict[str, Any]:
    """A YAML file's mapping of fields to values. Raises LossPlusError for another file, OSError for one that cannot be read."""
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise LossPlusError(f"config={str(path)!r} is not YAML: {' '.join(str(error).split())}.") from None
    if found is not None and not isinstance(found, dict):
        raise LossPlusError(
            f"config={str(path)!r}: it must map fields of the loss to values, and holds a {type(found).__name__}."
        )
    return found or {}


def _with_own(parser: Parser) -> Parser:
    """The parser with the flag that imports a module of the user's."""
    help = "a module of your own to import first, in which losses, advantage or KL estimators are registered; may be given again"
    parser.add_argument("--import", dest="modules", metavar="MODULE", action="append", default=[], help=help)
    return parser


def _import_own(modules: Sequence[str], named: Sequence[tuple[str, Any]] = ()) -> None:
    """
    Imports the modules that are named on the command line: a snapshot keeps a function's bare name, which they register.

    Args:
        named: fields of the loss with their values; those that are `module:function` are imported too.

    Raises:
        LossPlusError: a module cannot be imported, or has no such function.
    """
    for module in modules:
        import_module(f"--import {module}", module)
    for registry in (POLICY_LOSSES, ADVANTAGE_ESTIMATORS):
        for name, value in named:
            if name == registry.kind and ":" in str(value):
                registry.get(value)


def snapshot_main(argv: Sequence[str]) -> int:
    """
    `snapshot show A` or `snapshot diff A B [--rank N] [--import MODULE] [--json] [--html FILE]`.

    Returns:
        0 (equal), or 1 where a diff found something. Raises LossPlusError for what cannot be read.
    """
    parser = _with_own(Parser(prog="trl-lossplus snapshot", description="Looks at snapshots, or compares two."))
    parser.add_argument("action", choices=("show", "diff"))
    parser.add_argument("folders", nargs="+", help="one folder to show, two to compare")
    parser.add_argument("--rank", type=int, help="whose part to read (default: all processes' together)")
    parser.add_argument("--json", action="store_true", help="as JSON")
    parser.add_argument("--html", metavar="FILE", help="diff: also write one HTML page, with the tokens coloured, to this file")
    arguments = parser.parse_args(list(argv))
    wanted = 1 if arguments.action == "show" else 2
    if len(arguments.folders) != wanted:
        raise LossPlusError(f"snapshot {arguments.action} takes {wanted} folder(s), and got {len(arguments.folders)}.")
    if arguments.html and arguments.action == "show":
        raise LossPlusError(f"--html={arguments.html}: only snapshot diff writes a page.")
    _import_own(arguments.modules)
    loaded = [Snapshot.load(folder, arguments.rank) for folder in arguments.folders]
    if arguments.action == "show":
        (one,) = loaded
        shown = {"facts": one.facts, "rows": one.rows, "micro_batches": len(one.micro), "loss": one.loss, "terms": one.terms}
        print(json.dumps(plain_numbers(shown | {"stats": one.stats, "spec": asdict(one.spec)}), indent=1))
        return 0
    found = diff(loaded[0], loaded[1])
    if arguments.html:
        Path(arguments.html).write_text(as_html(found, (arguments.folders[0], arguments.folders[1])), encoding="utf-8")
    print(json.dumps(plain_numbers(asdict(found)), indent=1) if arguments.json else as_text(found))
    return 0 if found.same else 1


def _row(label: str, result: Replay, original: Replay) -> list[str]:
    clip = result.stats.get("clip_ratio/region_mean", result.stats.get("cispo_clip_ratio", math.nan))
    terms = " ".join(f"{name} {value:+.5f}" for name, value in result.terms.items())
    clipped = "-" if math.isnan(clip) else f"{clip:.2%}"  # many an objective has no clip
    return [label, f"{result.loss:+.6f}", terms, clipped, f"{result.gradient_norm:.5g}", f"{result.cosine(original):+.4f}"]


def _moved_tokens(snapshot: Snapshot, result: Replay, original: Replay, count: int = 5) -> list[str]:
    """The tokens whose gradient grew and fell most, as text."""
    lines = []
    change = (result.gradient.abs() - original.gradient.abs()).cpu()
    sizes = [gradient.numel() for gradient in result.gradients]
    for word, order in (("gain", change.topk(min(count, len(change)))), ("lose", (-change).topk(min(count, len(change))))):
        for value, flat in zip(order.values.tolist(), order.indices.tolist(), strict=True):
            if value <= 0:
                continue
            micro = 0
            while flat >= sizes[micro]:
                flat -= sizes[micro]
                micro += 1
            row, token = divmod(flat, result.gradients[micro].shape[1])
            number = row + sum(len(gradient) for gradient in result.gradients[:micro])
            texts = snapshot.texts.get("completion", [])
            text = texts[number][:60] if number < len(texts) else ""
            lines.append(f"  {word}: row {number} token {token} by {value:.4g}  {text!r}")
    return lines


def replay_main(argv: Sequence[str]) -> int:
    """
    `replay SNAPSHOT [--config FILE] [--field value[,value...] ...] [--rank N] [--import MODULE] [--plot FILE]`.

    Prints a table of the snapshot's own loss and of each variant. Raises LossPlusError for bad input.
    """
    about = "A snapshot's tensors under another loss. Further flags are fields of the loss; commas sweep."
    parser = _with_own(Parser(prog="trl-lossplus replay", description=about))
    parser.add_argument("snapshot")
    parser.add_argument("--rank", type=int, help="whose part to read (default: all processes' together)")
    parser.add_argument("--config", help="YAML of fields of the loss")
    parser.add_argument("--plot", help="write a plot of loss, clip fraction and cosine over the variants to this file")
    arguments, words = parser.parse_known_args(list(argv))
    changes, of_file = spec_changes(words), _fields_of(Path(arguments.config)) if arguments.config else {}
    _import_own(arguments.modules, [*of_file.items(), *((name, value) for name, values in changes for value in values)])
    snapshot = Snapshot.load(arguments.snapshot, arguments.rank)
    base = LossSpec.from_dict({**asdict(snapshot.spec), **of_file}) if arguments.config else snapshot.spec
    original = replay(snapshot)
    rows = [["loss", "value", "terms", "clipped", "gradient norm", "cosine"], _row("as it was", original, original)]
    variants: list[tuple[str, Replay]] = []
    for values in product(*(options for _, options in changes)):
        chosen = dict(zip((name for name, _ in changes), values, strict=True))
        label = ", ".join(f"{name} {value}" for name, value in chosen.items()) or "as the file says"
        if chosen or arguments.config:
            variants.append((label, replay(snapshot, replace(base, **chosen))))
    rows += [_row(label, result, original) for label, result in variants]
    print(text_table(rows))
    if len(variants) == 1:
        print("\n".join(_moved_tokens(snapshot, variants[0][1], original)))
    if arguments.plot:
        plot(variants or [("as it was", original)], original, arguments.plot)
    return 0


def plot(variants: Sequence[tuple[str, Replay]], original: Replay, path: str) -> None:
    """Loss, clip fraction and cosine to the original over the variants, as an image. Raises LossPlusError without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        raise LossPlusError("--plot needs matplotlib: pip install 'trl-lossplus[report]'.") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(3, 1, sharex=True, figsize=(7, 7), layout="constrained")
    labels = [label for label, _ in variants]
    series = (
        ("loss", [result.loss for _, result in variants]),
        ("clip fraction", [result.stats.get("clip_ratio/region_mean", math.nan) for _, result in variants]),
        ("cosine to the original", [result.cosine(original) for _, result in variants]),
    )
    for axis, (title, values) in zip(axes, series, strict=True):
        axis.plot(labels, values, marker="o")
        axis.set_ylabel(title)
    axes[-1].tick_params(axis="x", rotation=30)
    figure.savefig(path)
    pyplot.close(figure)
