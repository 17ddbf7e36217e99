"""`trl-lossplus new FOLDER`: a project to start from, with a script, a configuration, a reward and its test, and sample data."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

from .arguments import Parser
from .functional.errors import LossPlusError

SUFFIX = ".tmpl"  # of the templates in project/; NAME in them is the project's
DATA = "data.jsonl"


def new_project(folder: str | Path) -> list[Path]:
    """
    Writes the project.

    Args:
        folder: made where it is missing; its last part is the project's name.

    Returns:
        The files.

    Raises:
        LossPlusError: the folder is there and holds something, or is a file, or its name would break the scripts. OSError: it cannot be
            written.
    """
    target = Path(folder)
    name = target.resolve().name
    if target.is_file():
        raise LossPlusError(f"{folder} is a file. Name a folder that is not there yet.")
    if target.is_dir() and any(target.iterdir()):
        raise LossPlusError(f"{folder} exists and is not empty; nothing was written. Name a folder that is not there yet.")
    if not name:
        raise LossPlusError(f"{folder}: the root of the file system is no project.")
    if not name.isprintable() or set(name) & set('"\\'):
        raise LossPlusError(
            f"{str(folder)!r}: the project's name stands in its scripts, so it may hold no double quote, backslash or unprintable character."
        )
    texts = {
        item.name.removesuffix(SUFFIX): item.read_text().replace("NAME", name)
        for item in sorted(files(__package__).joinpath("project").iterdir(), key=lambda item: item.name)
        if item.name.endswith(SUFFIX)
    }
    texts[DATA] = _sample()
    target.mkdir(parents=True, exist_ok=True)
    for file, text in texts.items():
        (target / file).write_text(text)
    return [target / file for file in sorted(texts)]


def _sample() -> str:
    """The toy's 48 prompts, each with the word that is the answer, as lines of JSON."""
    from .toy import toy_dataset

    return "".join(json.dumps({"prompt": row["prompt"], "answer": row["keyword"]}) + "\n" for row in toy_dataset())


def main(arguments: Sequence[str]) -> int:
    """`trl-lossplus new FOLDER`. Returns the exit status."""
    parser = Parser(prog="trl-lossplus new", description="Writes a project to start from.")
    parser.add_argument("folder", help="where; it must not be there yet, or be empty")
    folder = parser.parse_args(arguments).folder
    written = new_project(folder)
    print(f"{folder}: {', '.join(path.name for path in written)}")
    print(
        f"next: cd {shlex.quote(folder)} && pytest test_rewards.py && accelerate launch --config_file accelerate.yaml train.py --config config.yaml"
    )
    return 0
