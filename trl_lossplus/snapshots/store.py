"""
A snapshot: the tensors that one optimizer step's loss read and returned on one process, with the spec and the texts.

On disk it is a folder with, for each process, `rank-R.safetensors` (tensors named `micro-batch/name`) and `rank-R.json` (everything
else). Both are read without this package by any safetensors and JSON reader; nothing in them is executed. The JSON file is written
last, so a folder without it holds no snapshot.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from .. import __version__
from ..batch import LossBatch
from ..functional.aggregation import Window
from ..functional.errors import LossPlusError
from ..loss import LossOutput
from ..spec import LossSpec

FORMAT = 1
BATCH_FIELDS = tuple(item.name for item in fields(LossBatch))


@dataclass
class MicroSnapshot:
    """One micro-batch: the cleaned batch, the window's counts, what the loss gave, and tensors beside them."""

    batch: LossBatch
    window: Window | None
    per_token: dict[str, Tensor]
    beside: dict[str, Tensor] = field(default_factory=dict)


@dataclass
class Snapshot:
    """
    One optimizer step of one process.

    Attributes:
        spec: the loss. micro: its micro-batches. terms: sums over the micro-batches by name; loss: their sum.
        facts: step, rank, processes, versions, seed, rows_left_out, and what else was given.
        texts: {"prompt": [...], "completion": [...]} by row, over the micro-batches in order.
    """

    spec: LossSpec
    micro: list[MicroSnapshot]
    loss: float
    terms: dict[str, float]
    facts: dict[str, Any] = field(default_factory=dict)
    texts: dict[str, list[str]] = field(default_factory=dict)

    def save(self, folder: str | os.PathLike[str], rank: int = 0) -> Path:
        """
        Writes the snapshot into `folder`, whole or not at all.

        Returns:
            The path of the JSON file. Raises OSError where the folder cannot be written.
        """
        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        tensors: dict[str, Tensor] = {}
        windows = []
        for i, micro in enumerate(self.micro):
            parts = {f"batch/{name}": getattr(micro.batch, name) for name in BATCH_FIELDS}
            parts |= {f"out/{name}": tensor for name, tensor in micro.per_token.items()}
            parts |= {f"beside/{name}": tensor for name, tensor in micro.beside.items()}
            if micro.window is not None and micro.window.group_tokens is not None:
                parts["window/group_tokens"] = micro.window.group_tokens
            tensors |= {f"{i}/{n}": t.detach().cpu().contiguous().clone() for n, t in parts.items() if t is not None}
            windows.append(None if micro.window is None else _window_numbers(micro.window))
        described = {
            "format": FORMAT,
            "spec": asdict(self.spec),
            "windows": windows,
            "loss": self.loss,
            "terms": self.terms,
            "facts": {**self.facts, "trl_lossplus": __version__},
            "texts": self.texts,
        }
        with tempfile.TemporaryDirectory(dir=path) as inside:
            save_file(tensors, Path(inside) / "t", metadata={"format": "pt"})
            (Path(inside) / "j").write_text(json.dumps(described))
            os.replace(Path(inside) / "t", path / f"rank-{rank}.safetensors")
            os.replace(Path(inside) / "j", path / f"rank-{rank}.json")
        return path / f"rank-{rank}.json"

    @classmethod
    def load(cls, folder: str | os.PathLike[str], rank: int = 0) -> Snapshot:
        """
        Reads a snapshot.

        Args:
            folder: the snapshot's folder. rank: whose.

        Raises:
            LossPlusError: there is none, it is truncated, foreign, or of a newer format; one line that says which.
        """
        path = Path(folder)
        described = _read_json(path / f"rank-{rank}.json")
        spec = LossSpec.from_dict(described["spec"])
        try:
            tensors = load_file(path / f"rank-{rank}.safetensors")
        except (SafetensorError, OSError) as error:
            raise LossPlusError(f"{path}: rank-{rank}.safetensors cannot be read ({error}).") from None
        micro = [_micro(path, i, numbers, tensors) for i, numbers in enumerate(described["windows"])]
        return cls(spec, micro, described["loss"], described["terms"], described["facts"], described["texts"])

    @property
    def rows(self) -> int:
        """Rows of all micro-batches."""
        return sum(len(part.batch.mask) for part in self.micro)


def _window_numbers(window: Window) -> dict[str, float | int | None]:
    def number(value: Any) -> float | int | None:
        return value.item() if isinstance(value, Tensor) else value

    names = ("num_tokens", "num_rows", "num_prompts", "world_size")
    return {name: number(getattr(window, name)) for name in names}


def _read_json(path: Path) -> dict[str, Any]:
    try:
        described = json.loads(path.read_text())
    except OSError as error:
        raise LossPlusError(f"{path}: no snapshot here ({error.strerror}).") from None
    except ValueError as error:
        raise LossPlusError(f"{path}: not a snapshot, or a truncated one ({error}).") from None
    wanted = {"format": int, "spec": dict, "windows": list, "terms": dict, "facts": dict, "texts": dict}
    if not isinstance(described, dict) or any(not isinstance(described.get(name), kind) for name, kind in wanted.items()):
        raise LossPlusError(f"{path}: not a snapshot of trl-lossplus (it lacks {', '.join(wanted)}).")
    if described["format"] > FORMAT:
        raise LossPlusError(
            f"{path}: format {described['format']} is newer than this version of trl-lossplus reads ({FORMAT}). Upgrade it."
        )
    return described


def _micro(path: Path, i: int, numbers: dict[str, Any] | None, tensors: dict[str, Tensor]) -> MicroSnapshot:
    def under(kind: str) -> dict[str, Tensor]:
        prefix = f"{i}/{kind}/"
        return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}

    batch = under("batch")
    for name in ("logps", "advantages", "mask"):
        if name not in batch:
            raise LossPlusError(f"{path}: micro-batch {i} has no {name}; the snapshot is damaged.")
    unknown = batch.keys() - set(BATCH_FIELDS)
    if unknown:
        raise LossPlusError(f"{path}: micro-batch {i} holds {', '.join(sorted(unknown))}, which no LossBatch has.")
    given = LossBatch(**{name: batch.get(name) for name in BATCH_FIELDS})  # type: ignore[arg-type]
    given.validate()
    window = None if numbers is None else Window(**numbers, group_tokens=under("window").get("group_tokens"))
    return MicroSnapshot(given, window, under("out"), under("beside"))


def take(
    spec: LossSpec,
    outputs: Sequence[tuple[LossOutput, dict[str, Any]]],
    *,
    facts: dict[str, Any],
    texts: dict[str, list[str]],
    max_rows: int,
) -> Snapshot:
    """
    A snapshot of an optimizer step from its micro-batches.

    Args:
        outputs: what the loss gave and the micro-batch's dictionary (`window`, ids, flags), in order.
        texts: prompts and completions by row. max_rows: rows kept; those left out are counted in `facts["rows_left_out"]`.
    """
    micro, left, total = [], max_rows, 0
    for output, inputs in outputs:
        assert output.inputs is not None
        rows = len(output.inputs.mask)
        total += rows
        keep = slice(0, min(rows, left))
        left -= keep.stop
        if keep.stop == 0:
            continue
        values: dict[str, Any] = {name: getattr(output.inputs, name) for name in BATCH_FIELDS}
        batch = replace(output.inputs, **{name: tensor[keep] for name, tensor in values.items() if tensor is not None})
        beside = {
            n: inputs[n][keep] for n in ("completion_ids", "prompt_ids", "row", "score") if isinstance(inputs.get(n), Tensor)
        }
        window = inputs.get("window")
        if window is not None and window.group_tokens is not None:
            window = replace(window, group_tokens=window.group_tokens[keep])
        micro.append(MicroSnapshot(batch, window, {name: t[keep] for name, t in output.per_token.items()}, beside))
    kept = sum(len(part.batch.mask) for part in micro)
    facts = {**facts, "rows_left_out": total - kept}
    terms: dict[str, float] = {}
    for output, _ in outputs:
        for name, value in output.terms.items():
            terms[name] = terms.get(name, 0.0) + float(value.detach())
    return Snapshot(spec, micro, sum(terms.values()), terms, facts, {name: rows[:kept] for name, rows in texts.items()})


def snapshot_folder(root: str | os.PathLike[str], step: int, reason: str) -> Path:
    """
    `root/step-SSSSSSSS-reason`, which must lie inside `root`.

    Raises:
        LossPlusError: `reason` would leave the folder.
    """
    if not re.fullmatch(r"[\w-]+", reason):
        raise LossPlusError(f"snapshot reason {reason!r}: only letters, digits, _ and - may stand in a folder's name.")
    return Path(root) / f"step-{step:08d}-{reason}"
