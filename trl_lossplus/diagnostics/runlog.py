"""A run's log as arrays: from our output folder, from a plain TRL run's trainer_state.json, or from a csv export."""

from __future__ import annotations

import csv
import json
import math
import mmap
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..functional.errors import LossPlusError

Array = NDArray[np.float64]

STATE_FILE = "trainer_state.json"
SETTINGS_FILE = "lossplus.json"
STOPPED_FILE = "stopped.json"  # what the guard said when it stopped the run: step, tensor, sentence
STEP_COLUMNS = ("step", "Step", "_step", "global_step", "train/global_step")
# A csv is a run's log if it holds one of these; anything else is somebody else's table.
TELLTALES = ("loss", "reward", "kl", "entropy", "grad_norm", "completions/mean_length", "clip_ratio/region_mean")
BIG = 32_000_000  # bytes from which a log is read column by column


class RunLogError(LossPlusError):
    """A log that is missing, cut short, or not the log of a run."""


@dataclass(frozen=True, eq=False)
class RunLog:
    """
    One run's training log.

    Attributes:
        name: for people. source: the file. kind: trl-lossplus, trl or csv.
        steps: (N,) optimizer steps, ascending. columns: {metric: (N,)}, NaN where a step did not log it.
        bad: {metric: (N,) bool} where a value was logged that is not finite (NaN, infinite, null), for metrics that have any.
        settings: fields of the loss and of the configuration, as far as they were written down.
        folder: the output folder, where completions lie; None for a csv.
    """

    name: str
    source: str
    kind: str
    steps: NDArray[np.int64]
    columns: dict[str, Array]
    bad: dict[str, NDArray[np.bool_]] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    folder: Path | None = None

    def get(self, name: str) -> Array:
        """A metric's values (N,), NaN where it was not logged."""
        column = self.columns.get(name)
        return np.full(len(self.steps), math.nan) if column is None else column


def read_run(path: str | Path, names: Iterable[str] | None = None) -> RunLog:
    """
    Reads a run.

    Args:
        path: an output folder (its trainer_state.json, or that of its last checkpoint), such a file, a csv export of wandb or
            tensorboard, or a folder of tensorboard's csv files.
        names: metrics that are needed, with * for any part; None: all. A long log is read much faster with it.

    Raises:
        RunLogError: nothing there, cut short, or no training log.
    """
    source = _find(Path(path))
    if not isinstance(source, list) and source.name == STOPPED_FILE:
        return _without_log(source)
    wanted = None if names is None else tuple(names)
    if isinstance(source, list):
        return _from_csv(source, Path(path), wanted)
    if source.suffix == ".csv":
        return _from_csv([source], source, wanted)
    return _from_state(source, wanted)


def _find(path: Path) -> Path | list[Path]:
    if path.is_file():
        if path.suffix not in (".json", ".csv"):
            raise RunLogError(f"{path}: a log is a trainer_state.json or a .csv export; this is neither.")
        return path
    if not path.is_dir():
        raise RunLogError(f"{path}: no such file or folder.")
    if (path / STATE_FILE).is_file():
        return path / STATE_FILE
    numbered = [(int(m[1]), p) for p in path.glob(f"checkpoint-*/{STATE_FILE}") if (m := re.search(r"-(\d+)$", p.parent.name))]
    if numbered:
        return max(numbered)[1]
    if (path / STOPPED_FILE).is_file():
        return path / STOPPED_FILE
    tables = sorted(path.glob("*.csv"))
    if tables:
        return tables
    raise RunLogError(
        f"{path}: holds no {STATE_FILE}, no checkpoint-N/{STATE_FILE} and no .csv export: not a run's output folder."
    )


# trainer_state.json


def _from_state(path: Path, names: tuple[str, ...] | None) -> RunLog:
    folder = path.parent.parent if path.parent.name.startswith("checkpoint-") else path.parent
    settings = _read_settings([path.parent, folder])
    try:
        table = _fast(path, names) if path.stat().st_size >= BIG and names is not None else None
        if table is None:
            table = columns_of(_entries(path.read_bytes(), path), names)
    except OSError as error:
        raise RunLogError(f"{path}: cannot be read ({error.strerror}).") from None
    steps, columns, bad = table
    if not len(steps):
        raise RunLogError(f"{path}: its log_history holds no training step: nothing was logged yet.")
    stopped = _read_stopped(folder, int(steps[-1]))
    if stopped:
        settings = {**settings, "stopped": stopped}
    ours = bool(settings) or any(name.startswith(("loss/", "probe/", "group_reward/")) for name in columns)
    name = folder.name or str(folder.resolve().name)
    return RunLog(name, str(path), "trl-lossplus" if ours else "trl", steps, columns, bad, settings, folder)


def _entries(raw: bytes, path: Path) -> list[dict[str, Any]]:
    try:
        state = json.loads(raw)
    except UnicodeDecodeError:
        raise RunLogError(f"{path}: not text, so not a {STATE_FILE}.") from None
    except json.JSONDecodeError as error:
        end = len(raw.decode(errors="replace").rstrip())
        cut = not raw.strip() or error.pos >= end - 1 or "Unterminated" in error.msg
        what = "the file is cut short" if cut else "not valid JSON"
        raise RunLogError(f"{path}: {what} (line {error.lineno}: {error.msg}). Take an earlier checkpoint-N/.") from None
    history = state.get("log_history") if isinstance(state, dict) else None
    if not isinstance(history, list):
        raise RunLogError(f"{path}: valid JSON, but no log_history in it: not a {STATE_FILE}.")
    if not all(isinstance(entry, dict) and isinstance(entry.get("step"), int) for entry in history):
        raise RunLogError(f"{path}: an entry of log_history has no step: not a {STATE_FILE}.")
    return [entry for entry in history if not any(key.startswith(("eval_", "train_")) for key in entry)]


def _read_settings(folders: Sequence[Path]) -> dict[str, Any]:
    """The fields of lossplus.json in one flat mapping; empty where there is no such file, or none that can be read."""
    for folder in folders:
        try:
            found = json.loads((folder / SETTINGS_FILE).read_text())
        except (OSError, ValueError):
            continue
        if isinstance(found, dict):
            nested = [found.get(key) for key in ("config", "spec")]
            flat = {key: value for key, value in found.items() if key not in ("config", "spec")}
            return {key: value for part in [*nested, flat] if isinstance(part, dict) for key, value in part.items()}
    return {}


def _read_stopped(folder: Path, last: int) -> dict[str, Any] | None:
    """Why the guard stopped the run; None where it did not, or where training went on after it."""
    try:
        found = json.loads((folder / STOPPED_FILE).read_text())
        return (
            {"step": int(found["step"]), "tensor": str(found["tensor"]), "sentence": str(found["sentence"])}
            if found["step"] >= last
            else None
        )
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _without_log(path: Path) -> RunLog:
    """A run that the guard stopped before anything was logged."""
    stopped = _read_stopped(path.parent, 0)
    if stopped is None:
        raise RunLogError(f"{path}: cannot be read, and there is no {STATE_FILE} beside it.")
    settings = {**_read_settings([path.parent]), "stopped": stopped}
    return RunLog(path.parent.name, str(path), "trl-lossplus", np.array([stopped["step"]]), {}, {}, settings, path.parent)


Table = tuple[NDArray[np.int64], dict[str, Array], dict[str, NDArray[np.bool_]]]


def matches(name: str, patterns: tuple[str, ...] | None) -> bool:
    """Whether a metric is among the names, which may hold *."""
    return patterns is None or any(name == p or ("*" in p and fnmatchcase(name, p)) for p in patterns)


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan


def columns_of(entries: Sequence[dict[str, Any]], names: tuple[str, ...] | None = None) -> Table:
    """Rows as columns. A value that is None, NaN or infinite counts as logged and bad; text is left out."""
    by_step: dict[int, dict[str, Any]] = {}
    for entry in entries:  # one row a step; a step that was logged again (a resumed run) counts as it was last
        by_step.setdefault(entry["step"], {}).update(entry)
    rows = [by_step[step] for step in sorted(by_step)]
    keys = dict.fromkeys(key for row in rows for key in row)
    columns: dict[str, Array] = {}
    bad: dict[str, NDArray[np.bool_]] = {}
    missing = object()
    for key in keys:
        if key in ("step", "epoch") or not matches(key, names):
            continue
        cells = [row.get(key, missing) for row in rows]
        if all(isinstance(cell, str | list | dict | bool) for cell in cells if cell is not missing):
            continue
        _put(columns, bad, key, np.array([_number(cell) for cell in cells]), np.array([cell is not missing for cell in cells]))
    return np.array(sorted(by_step), dtype=np.int64), columns, bad


def _put(
    columns: dict[str, Array], bad: dict[str, NDArray[np.bool_]], key: str, values: Array, logged: NDArray[np.bool_]
) -> None:
    wrong = logged & ~np.isfinite(values)
    if wrong.any():
        bad[key] = wrong
    columns[key] = np.where(np.isfinite(values), values, math.nan)


ENTRY_END = b"\n    },"
PIECE = 1 << 24  # bytes that are parsed at a time


def _fast(path: Path, names: tuple[str, ...] | None) -> Table | None:
    """
    The wanted columns of a long log as transformers writes it, parsed by Arrow piece by piece.

    None where the file is not laid out like that, is cut short, or Arrow is not there: the plain way then decides.
    """
    try:
        import pyarrow as pa

        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as raw:
            start = raw.find(b'"log_history": [') + len(b'"log_history": [')
            stop = raw.rfind(b"\n  ]")
            while stop > start and raw[stop - 6 : stop].strip() != b"}":  # a list that comes after log_history
                stop = raw.rfind(b"\n  ]", 0, stop)
            json.loads(raw[:start] + raw[stop:])  # the rest must be whole
            kept = sorted(key for key in _sampled_keys(raw, start, stop) if matches(key, names))
            schema = pa.schema([(key, pa.float64()) for key in ["step", *kept]])
            table = pa.concat_tables(_pieces(raw, start, stop, schema))
        at = table["step"].to_numpy()
        data = {key: table[key].to_numpy() for key in kept}
        logged = {key: table[key].is_valid().to_numpy() if table[key].null_count else None for key in kept}
    except (ImportError, ValueError):  # Arrow's errors are ValueErrors
        return None
    train = ~np.all([np.isnan(column) for column in data.values()], 0) if data else np.zeros(len(at), dtype=bool)
    if not np.isfinite(at).all() or (np.diff(at[train]) <= 0).any():
        return None
    columns: dict[str, Array] = {}
    bad: dict[str, NDArray[np.bool_]] = {}
    for key, values in data.items():
        valid = logged[key]
        _put(columns, bad, key, values[train], np.ones(train.sum(), dtype=bool) if valid is None else valid[train])
    return at[train].astype(np.int64), columns, bad


def _sampled_keys(raw: mmap.mmap, start: int, stop: int) -> set[str]:
    """The metrics of the first, middle and last entries."""
    size = 1_000_000
    places = (start, (start + stop) // 2, max(start, stop - size))
    keys = {key.decode() for at in places for key in re.findall(rb'\n      "([^"\n]+)":', raw[at : min(at + size, stop)])}
    return keys - {"step", "epoch"}


def _pieces(raw: mmap.mmap, start: int, stop: int, schema: Any) -> Iterator[Any]:
    """The entries between two places as Arrow tables. Raises ValueError for text that is no list of flat objects."""
    import pyarrow as pa
    import pyarrow.json as pj

    while start < stop:
        end = min(start + PIECE, stop)
        if end < stop:
            end = raw.rfind(ENTRY_END, start, end) + len(ENTRY_END)
            if end < start + len(ENTRY_END):
                raise ValueError("an entry longer than a piece")
        piece = raw[start:end]
        lines = piece.replace(b": null", b":  NaN").replace(b"\n", b" ")  # logged without a value is not missing
        lines = lines.replace(b" " + ENTRY_END[1:], b" " + ENTRY_END[1:-1] + b"\n")  # one entry a line
        table = pj.read_json(
            pa.BufferReader(lines),
            read_options=pj.ReadOptions(block_size=PIECE // 4),
            parse_options=pj.ParseOptions(explicit_schema=schema, unexpected_field_behavior="ignore"),
        )
        if table.num_rows != piece.count(b'\n      "step": '):
            raise ValueError("entries that were not read")
        yield table
        start = end


# csv


def _from_csv(paths: Sequence[Path], where: Path, names: tuple[str, ...] | None) -> RunLog:
    cells: dict[int, dict[str, Any]] = {}
    for path in paths:
        for step, key, value in _csv_cells(path):
            cells.setdefault(step, {"step": step})[key] = value
    steps, columns, bad = columns_of(list(cells.values()), None)
    if not any(name in columns for name in TELLTALES):
        seen = ", ".join(sorted(columns)[:5]) or "nothing"
        raise RunLogError(
            f"{where}: no metric of a training run in it (found {seen}): export loss, reward, kl, ... with their steps."
        )
    kept = {name: column for name, column in columns.items() if matches(name, names)}
    return RunLog(where.stem, str(where), "csv", steps, kept, {name: b for name, b in bad.items() if name in kept})


def _metric(column: str) -> str | None:
    """The metric that a column of an export holds; None for one that is no training metric (eval, minima and maxima)."""
    name = column.strip()
    if " - " in name:  # wandb: "run - train/loss", with __MIN and __MAX beside it
        name = name.rsplit(" - ", 1)[1]
    if name.endswith(("__MIN", "__MAX")) or name.startswith(("eval/", "eval_")) or name in STEP_COLUMNS:
        return None
    return name.removeprefix("train/")


def _csv_cells(path: Path) -> Iterable[tuple[int, str, float | None]]:
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            rows = list(csv.reader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise RunLogError(f"{path}: cannot be read as csv ({error}).") from None
    header = rows[0] if rows else []
    at = next((header.index(name) for name in STEP_COLUMNS if name in header), None)
    if at is None:
        raise RunLogError(f"{path}: no step column (one of {', '.join(STEP_COLUMNS)}): not an export of a run.")
    lower = [name.strip().lower() for name in header]
    long = "value" in lower and (("tag" in lower) or ("metric" in lower) or "wall time" in lower)
    for number, row in enumerate(rows[1:], 2):
        if not row:
            continue
        if len(row) != len(header):
            raise RunLogError(
                f"{path}: line {number} has {len(row)} cells, the header {len(header)}: the file is cut short or no csv."
            )
        if row[at] == "":
            continue
        step = int(_cell(row[at], path, number) or 0)
        if long:
            key = row[lower.index("tag" if "tag" in lower else "metric")] if {"tag", "metric"} & set(lower) else _tag(path)
            name = _metric(key)
            if name is not None:
                yield step, name, _cell(row[lower.index("value")], path, number)
            continue
        for column, text in zip(header, row, strict=True):
            name = _metric(column)
            if name is not None and text != "" and (value := _cell(text, None, number)) is not None:
                yield step, name, value


def _tag(path: Path) -> str:
    """The metric of a file that tensorboard's page exports: run-NAME-tag-train_reward.csv, / written as _."""
    name = path.stem.partition("tag-")[2] or path.stem
    name = name.removeprefix("train_").removeprefix("train/")
    for head in (
        "loss",
        "probe",
        "share",
        "clip_ratio",
        "group_reward",
        "completions",
        "value",
        "rewards",
        "nonfinite",
        "mask",
        "ratio",
    ):
        if name.startswith(f"{head}_") and name not in TELLTALES:
            return name.replace("_", "/", 1)
    return name


def _cell(text: str, path: Path | None, number: int) -> float | None:
    """A number; None for a text. Raises RunLogError where `path` is given, since then it must be a number."""
    try:
        return float(text)
    except ValueError:
        if path is None:
            return None
        raise RunLogError(f"{path}: line {number}: {text!r} is not a number.") from None
