"""What is read from a snapshot's files is checked before anything uses it: every fault is one LossPlusError of one line."""

from __future__ import annotations

import json
import math
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..batch import IDS, LossBatch
from ..functional.errors import LossPlusError

KINDS = {
    "format": int, "spec": dict, "micro_batches": list, "facts": dict, "texts": dict, "tokens": dict,
    "sha256": str, "checksum": str,
}  # fmt: skip
NOT_FINITE = ("NaN", "Infinity", "-Infinity")
FLAGS = ("mask", "kl_mask", "entropy_mask", "selected_tokens")  # of a LossBatch, booleans


def plain_numbers(value: Any) -> Any:
    """The same nested value for strict JSON, which knows no NaN and no infinity: they become "NaN", "Infinity" and "-Infinity"."""
    if isinstance(value, dict):
        return {key: plain_numbers(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain_numbers(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def number(value: Any) -> float:
    """A number as `plain_numbers` wrote it. Raises LossPlusError for anything else."""
    if isinstance(value, bool) or not (isinstance(value, int | float) or value in NOT_FINITE):
        raise LossPlusError(f"a snapshot holds {value!r} where a number belongs; it is damaged.")
    return float(value)


def _is_text_table(value: dict[str, Any]) -> bool:
    return all(isinstance(rows, list) and all(isinstance(text, str) for text in rows) for rows in value.values())


def _is_micro_batch(part: Any) -> bool:
    """Whether it has a window, terms and statistics of the right form (their numbers are checked where they are read)."""
    if not isinstance(part, dict) or not all(isinstance(part.get(name), dict) for name in ("terms", "statistics")):
        return False
    known, statistics = ("mean", "min", "max"), part["statistics"].values()
    counted = all(isinstance(x, list) and len(x) == 3 and isinstance(x[0], str) and x[0] in known for x in statistics)
    return counted and "window" in part and (part["window"] is None or isinstance(part["window"], dict))


def read_described(path: Path, newest: int) -> dict[str, Any]:
    """
    The JSON half of a snapshot.

    Raises:
        LossPlusError: there is none, it is truncated, foreign, of a newer format, or has a part of the wrong form.
    """
    try:
        described = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        inside = sorted({part.parent.name for part in path.parent.glob("*/rank-*.json")}, key=lambda name: (len(name), name))
        hint = f"; folders in it that hold one: {', '.join(inside)}" if inside else ""
        raise LossPlusError(f"{path}: no snapshot here ({error.strerror}){hint}.") from None
    except (ValueError, RecursionError) as error:
        raise LossPlusError(f"{path}: not a snapshot, or a truncated one ({error}).") from None
    if not isinstance(described, dict) or not isinstance(described.get("format"), int):
        raise LossPlusError(f"{path}: not a snapshot of trl-lossplus (it lacks format).")
    if described["format"] > newest:
        raise LossPlusError(
            f"{path}: format {described['format']} is newer than this version of trl-lossplus reads ({newest}). Upgrade it."
        )
    wrong = [name for name, kind in KINDS.items() if not isinstance(described.get(name), kind)]
    if wrong:
        raise LossPlusError(f"{path}: not a snapshot of trl-lossplus (it lacks {', '.join(wrong)}).")
    sound = {
        "texts": _is_text_table(described["texts"]),
        "tokens": all(key.isdecimal() and isinstance(text, str) for key, text in described["tokens"].items()),
        "micro_batches": all(map(_is_micro_batch, described["micro_batches"])),
    }
    for name, is_sound in sound.items():
        if not is_sound:
            raise LossPlusError(f"{path}: {name} has not the form that a snapshot gives it; the file is damaged.")
    return described


def checked_window(path: Path, numbers: dict[str, Any]) -> dict[str, Any]:
    """The counts of a `Window`. Raises LossPlusError for other names, or for what is no count."""
    if numbers.keys() != {"num_tokens", "num_rows", "num_prompts", "world_size"}:
        raise LossPlusError(f"{path}: a window holds {', '.join(sorted(numbers))}; the snapshot is damaged.")
    for name, value in numbers.items():
        if not (value is None and name == "num_prompts") and not number(value) >= (1 if name == "world_size" else 0):
            raise LossPlusError(f"{path}: a window has {name} {value!r}; the snapshot is damaged.")
    return numbers


def checked_parts(
    where: str,
    batch: LossBatch,
    gradient: Tensor | None,
    per_token: dict[str, Tensor],
    beside: dict[str, Tensor],
    group_tokens: Tensor | None,
) -> None:
    """Types and shapes of one micro-batch's tensors. Raises LossPlusError, which names the tensor and what it must be."""
    rows, length = batch.logps.shape
    if gradient is None:
        raise LossPlusError(f"{where} has no gradient; the snapshot is damaged.")
    for item in fields(batch):
        tensor = getattr(batch, item.name)
        if tensor is None:
            continue
        kind = "boolean" if item.name in FLAGS else "integer" if item.name in IDS else "floating-point"
        if not {"boolean": tensor.dtype == torch.bool, "floating-point": tensor.is_floating_point()}.get(
            kind, not tensor.is_floating_point()
        ):
            raise LossPlusError(f"{where}: {item.name} has dtype {tensor.dtype}; it must be {kind}.")
    shapes = {"gradient": (gradient, (rows, length)), "group_tokens": (group_tokens, (rows,))}
    shapes |= {name: (tensor, (rows, length)) for name, tensor in per_token.items()}
    for name, (given, shape) in shapes.items():
        if given is not None and tuple(given.shape) != shape:
            raise LossPlusError(f"{where}: {name} has shape {tuple(given.shape)}; it must be {shape}.")
    for name, given in beside.items():
        if given.dim() == 0 or len(given) != rows:
            raise LossPlusError(f"{where}: {name} has shape {tuple(given.shape)}; it must have {rows} rows.")
