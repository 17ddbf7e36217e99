"""
Makes docs/launches.md: every launch x algorithm x method x KL, run on real processes and compared with one process.

    python tests/launch/matrix.py                                 # all; a quarter of an hour on two idle cores
    python tests/launch/matrix.py --launches DDP FSDP2 --only GRPO --folder /tmp/matrix
    python tests/launch/matrix.py --from /tmp/matrix              # the document again, from the results there
"""

# ruff: noqa: E402 - the folders of the modules come first

import argparse
import os
import sys
from importlib.metadata import version
from pathlib import Path

HERE = Path(__file__).parent
for place in (HERE, HERE.parents[0] / "trainers", HERE.parents[1]):
    sys.path.insert(0, str(place))
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from cells import ALGORITHMS, CASES, all_cells
from compare import faults, judge
from launches import LAUNCHES, ROOT, run_cells
from toyrun import toy_path

DOCUMENT = ROOT / "docs" / "launches.md"
TEXT = HERE / "launches.md.in"
DISTRIBUTED = [name for name in LAUNCHES if name != "single"]


def run(launches, cells, folder):
    """Runs the cells on one process and on each launch; failures are written beside the results."""
    folder.mkdir(parents=True, exist_ok=True)
    toy = toy_path(folder / "toy")
    for launch in ["single", *launches]:
        results = run_cells(launch, cells, folder / launch, toy, timeout=3600, say=lambda line: print(line, flush=True))
        for name, result in results.items():
            if "error" in result:
                (folder / launch / f"{name}.error").write_text(result["error"])


def shown(row):
    """A cell of the table."""
    wrong = faults(row)
    if wrong:
        return "**" + "; ".join(wrong).replace("|", "/") + "**"
    numbers = [row[name] for name in ("apart", "resume", "saved") if name in row]
    return " ".join("0" if number == 0 else f"{number:.0e}" for number in numbers)


def matrix_table(launches, rows):
    """launch x method x KL down, algorithms across."""
    lines = [f"| launch | method | KL | {' | '.join(ALGORITHMS)} |", "|---|---|---|" + "---|" * len(ALGORITHMS)]
    for launch in launches:
        for method in ("full", "LoRA"):
            for kl in ("beta0", "KL"):
                names = [f"{algorithm} {method} {kl}".replace(" ", "_") for algorithm in ALGORITHMS]
                cells = [shown(rows[launch, name]) if (launch, name) in rows else "needs LoRA" for name in names]
                lines.append(f"| {launch} | {method} | {'0' if kl == 'beta0' else '.05, adaptive'} | {' | '.join(cells)} |")
    return "\n".join(lines)


def case_table(launches, rows):
    """cases down, launches across."""
    lines = [f"| case | {' | '.join(launches)} |", "|---|" + "---|" * len(launches)]
    for cells in CASES.values():
        for cell in cells:
            found = [shown(rows[launch, cell["name"]]) for launch in launches]
            lines.append(f"| {cell['name'].replace('_', ' ')} | {' | '.join(found)} |")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--launches", nargs="*", default=DISTRIBUTED)
    parser.add_argument("--only", default="", help="only cells whose name begins so; no document is written")
    parser.add_argument("--folder", default="build/launches")
    parser.add_argument("--from", dest="made", help="folder of results; nothing is run")
    parser.add_argument("--document", default=str(DOCUMENT))
    arguments = parser.parse_args()
    folder = Path(arguments.made or arguments.folder).resolve()
    every = [*all_cells(), *(cell for cells in CASES.values() for cell in cells)]
    cells = [cell for cell in every if cell["name"].startswith(arguments.only)]
    if arguments.made is None:
        run(arguments.launches, cells, folder)
    rows = {(launch, cell["name"]): judge(launch, cell["name"], folder) for launch in arguments.launches for cell in cells}
    for (launch, name), row in rows.items():
        print(launch, name, "; ".join(faults(row)) or "green", row)
    if len(cells) == len(every) and arguments.launches == DISTRIBUTED:
        versions = ", ".join(
            f"{name} {version(name)}" for name in ("torch", "transformers", "accelerate", "peft", "deepspeed", "trl")
        )
        bad = sum(bool(faults(row)) for row in rows.values())
        text = TEXT.read_text()
        for key, value in {
            "@VERSIONS@": versions,
            "@COUNT@": f"{len(rows) - bad} of {len(rows)}",
            "@MATRIX@": matrix_table(arguments.launches, rows),
            "@CASES@": case_table(arguments.launches, rows),
        }.items():
            text = text.replace(key, value)
        Path(arguments.document).write_text(text)


if __name__ == "__main__":
    main()
