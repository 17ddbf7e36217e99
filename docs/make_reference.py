"""
The reference pages, from signatures, docstrings, field help and usage texts. `make docs` makes them; they are not kept.

    python docs/make_reference.py python        prints one page: python, functional, fields, commands
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import inspect
import io
import pkgutil
import re
import sys
import textwrap
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import trl_lossplus
from trl_lossplus import functional

SECTIONS = re.compile(r"^(Args|Attributes|Returns|Raises|Yields):$")
ENTRY = re.compile(r"^ {4}(\S[^:]*): (.*)$")
CODE = re.compile(r"(`[^`]*`)")


def escaped(text: str) -> str:
    """Prose of a docstring for Markdown: what would be read as HTML or emphasis is text; what stands in backticks stays."""
    parts = CODE.split(text)
    return "".join(part if part.startswith("`") else re.sub(r"([*_\[])", r"\\\1", part).replace("<", "&lt;") for part in parts)


def _section(title: str, lines: list[str], names: list[str]) -> list[str]:
    """`Args:` and the like as a list, one item an entry; a line may hold several of the parameters `names`."""
    items: list[str] = []
    if title == "Args" and names:
        lines = re.sub(rf"(?<=[.]) (?=(?:{'|'.join(names)}): )", "\n    ", "\n".join(lines)).splitlines()
    for line in lines:
        entry = ENTRY.match(line)
        if entry and title != "Returns":
            items.append(f"`{entry[1].strip('`')}`: {escaped(entry[2])}")
        elif items and line.strip():
            items[-1] += f" {escaped(line.strip())}"
        elif line.strip():
            items.append(escaped(line.strip()))
    return ["", f"**{title}**", "", *(f"* {item}" for item in items), ""]


def docstring(thing: Any) -> list[str]:
    """A docstring as Markdown lines: paragraphs, indented blocks as code, sections as lists."""
    lines = inspect.cleandoc(inspect.getdoc(thing) or "").splitlines()
    names = [item.name for item in _parameters(thing)]
    made: list[str] = []
    at = 0
    while at < len(lines):
        found = SECTIONS.match(lines[at])
        if not found:
            indented = lines[at].startswith("    ")
            made.append(lines[at] if indented else escaped(lines[at]))
            at += 1
            continue
        end = at + 1
        while end < len(lines) and (not lines[end] or lines[end].startswith("    ")):
            end += 1
        made += _section(found[1], lines[at + 1 : end], names)
        at = end
    return made


def _parameters(thing: Any) -> list[inspect.Parameter]:
    """What a call takes; of a module and the like nothing."""
    try:
        return [item for item in inspect.signature(thing).parameters.values() if item.name != "self"]
    except (TypeError, ValueError):
        return []


def _shown_parameter(item: inspect.Parameter) -> str:
    """As it is written: a type that is kept as text without quotes, a default with its own."""
    name, equals, default = str(item.replace(annotation=inspect.Parameter.empty)).partition("=")
    kind = getattr(item.annotation, "__forward_arg__", item.annotation)
    kind = kind if isinstance(kind, str) else inspect.formatannotation(kind)
    typed = name if item.annotation is inspect.Parameter.empty else f"{name}: {kind}"
    return f"{typed} = {default.replace('<factory>', '...')}" if equals else typed


def signature(name: str, thing: Any) -> list[str]:
    """The call as code; one parameter a line where it is long."""
    if not callable(thing):
        return []
    shown = [_shown_parameter(item) for item in _parameters(thing)]
    text = f"{name}({', '.join(shown)})"
    if len(text) > 100:
        text = f"{name}(\n" + "".join(f"    {item},\n" for item in shown) + ")"
    return ["```text", text, "```", ""]


def _methods(kind: type) -> Iterator[tuple[str, Any]]:
    """Public methods and properties that the class itself defines and documents, a callback's events left out."""
    for name, member in vars(kind).items():
        plain = member.__func__ if isinstance(member, classmethod | staticmethod) else member
        if not name.startswith(("_", "on_")) and (inspect.isfunction(plain) or isinstance(plain, property)) and plain.__doc__:
            yield name, plain


def entry(name: str, thing: Any, level: int = 2) -> list[str]:
    """One class or function: heading, call, docstring; of a class its public methods too."""
    is_config = dataclasses.is_dataclass(thing) and len(dataclasses.fields(thing)) > 60
    is_trainer = inspect.isclass(thing) and name.endswith("Trainer")
    lines = [f"{'#' * level} {name}", ""]
    lines += ["Its fields: [Configuration fields](fields.md).", ""] if is_config else signature(name, thing)
    lines += [*docstring(thing), ""]
    if inspect.isclass(thing) and not is_config and not is_trainer:
        for method, member in _methods(thing):
            call = [] if isinstance(member, property) else signature(f"{name}.{method}", member)
            lines += [f"{'#' * (level + 1)} {name}.{method}", "", *call, *docstring(member), ""]
    return lines


def python_page() -> str:
    """Everything that `from trl_lossplus import ...` gives."""
    lines = ["# Python", "", "What `from trl_lossplus import ...` gives. Made from the docstrings.", ""]
    for name in trl_lossplus.__all__:
        lines += entry(name, getattr(trl_lossplus, name))
    return "\n".join(lines)


def _own(module: ModuleType) -> Iterator[tuple[str, Callable[..., Any]]]:
    for name, thing in vars(module).items():
        defined_here = getattr(thing, "__module__", None) == module.__name__
        if defined_here and not name.startswith("_") and (inspect.isfunction(thing) or inspect.isclass(thing)):
            yield name, thing


def functional_page() -> str:
    """The pure functions of trl_lossplus.functional, module by module."""
    lines = ["# Functions on tensors", "", "`trl_lossplus.functional`: pure functions that import nothing but torch.", ""]
    for found in pkgutil.iter_modules(functional.__path__):
        module = importlib.import_module(f"trl_lossplus.functional.{found.name}")
        lines += [f"## {found.name}", "", *docstring(module), ""]
        for name, thing in _own(module):
            lines += entry(name, thing, level=3)
    return "\n".join(lines)


def _shown(item: dataclasses.Field[Any]) -> str:
    default = item.default if item.default_factory is dataclasses.MISSING else item.default_factory()
    return "" if default is dataclasses.MISSING else f"`{default!r}`"


def fields_page() -> str:
    """The fields of each configuration that are not those of the class it extends, each under a heading of its own."""
    from trl import GRPOConfig

    from trl_lossplus import GRPOPlusConfig, PPOPlusConfig

    lines = ["# Configuration fields", "", "What is ours; TRL's `GRPOConfig` has the rest. Made from the fields' help texts.", ""]
    for kind, base in ((GRPOPlusConfig, GRPOConfig), (PPOPlusConfig, GRPOPlusConfig)):
        known = {item.name: item.metadata for item in dataclasses.fields(base)}
        lines += [f"## {kind.__name__}", ""]
        for item in dataclasses.fields(kind):
            if item.init and item.metadata.get("help") and item.metadata != known.get(item.name):
                lines += [f"### {item.name}", "", f"{escaped(item.metadata['help'])} Default {_shown(item)}.", ""]
    return "\n".join(lines)


def commands_page() -> str:
    """What each command prints with --help."""
    from trl_lossplus import cli

    def wrapped(line: str) -> str:
        start = len(line) - len(line.lstrip())
        return textwrap.fill(
            line, 96, subsequent_indent=" " * (start and start + 4), break_long_words=False, break_on_hyphens=False
        )

    lines = ["# Commands", "", "`trl-lossplus COMMAND --help` prints the same.", ""]
    for name in cli.COMMANDS:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
            cli.main([name, "--help"])
        lines += [f"## {name}", "", "```text", *map(wrapped, printed.getvalue().strip().splitlines()), "```", ""]
    return "\n".join(lines)


PAGES: dict[str, Callable[[], str]] = {
    "python": python_page,
    "functional": functional_page,
    "fields": fields_page,
    "commands": commands_page,
}


if __name__ == "__main__":
    if sys.argv[1:] == [] or sys.argv[1] not in PAGES:
        sys.exit(f"usage: python docs/make_reference.py {'|'.join(PAGES)}")
    print(PAGES[sys.argv[1]]())
