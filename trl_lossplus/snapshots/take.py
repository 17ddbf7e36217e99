"""A snapshot from an optimizer step's micro-batches, and the folder that it goes into."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..functional.errors import LossPlusError
from ..loss import LossOutput
from ..spec import LossSpec
from .replay import numbers_of, run_micro_batch, statistics_of
from .store import BATCH_FIELDS, MicroSnapshot, Snapshot, summed

BESIDE = ("prompt_ids", "completion_ids", "row", "rewards")


def _kept(output: LossOutput, inputs: dict[str, Any], rows: int, spec: LossSpec) -> MicroSnapshot:
    """The first `rows` rows of a micro-batch as the loss saw them; where some are left out, what it makes of the rest."""
    assert output.inputs is not None
    keep, whole = slice(0, rows), rows == len(output.inputs.mask)
    values: dict[str, Any] = {name: getattr(output.inputs, name) for name in BATCH_FIELDS}
    batch = replace(output.inputs, **{name: tensor[keep] for name, tensor in values.items() if tensor is not None})
    window = inputs.get("window")
    if window is not None and window.group_tokens is not None:
        window = replace(window, group_tokens=window.group_tokens[keep])
    again, gradient = run_micro_batch(batch, spec, window, critic_alone="policy" not in output.terms)
    aux = {"aux": output.terms["aux"]} if "aux" in output.terms else {}
    given = output if whole else replace(again, terms={**again.terms, **aux})
    beside = {name: inputs[name][keep] for name in BESIDE if isinstance(inputs.get(name), Tensor)}
    return MicroSnapshot(batch, window, given.per_token, gradient, numbers_of(given), statistics_of(given), beside)


def take(
    spec: LossSpec,
    outputs: Sequence[tuple[LossOutput, dict[str, Any]]],
    *,
    facts: dict[str, Any],
    texts: dict[str, list[str]],
    max_rows: int,
    tokens: dict[int, str] | None = None,
) -> Snapshot:
    """
    A snapshot of an optimizer step from its micro-batches.

    Args:
        outputs: what the loss gave and the micro-batch's dictionary (`window`, ids, flags), in order.
        texts: prompts and completions by row. tokens: texts of the completions' token ids.
        max_rows: rows kept; how many are left out is said in `facts["rows_left_out"]`, and loss and terms are then those of the rows
            that are kept, with the whole step's normalizers (`facts["step_loss"]` is the loss of all).
    """
    kept: list[MicroSnapshot] = []
    left, total = max_rows, 0
    for output, inputs in outputs:
        assert output.inputs is not None
        total += len(output.inputs.mask)
        rows = min(len(output.inputs.mask), left)
        left -= rows
        if rows:
            kept.append(_kept(output, inputs, rows, spec))
    rows = sum(len(part.batch.mask) for part in kept)
    facts = {**facts, "rows_left_out": total - rows}
    if total > rows:
        facts["step_loss"] = sum(summed([numbers_of(output) for output, _ in outputs]).values())
    if outputs:
        facts |= {"device": outputs[0][0].loss.device.type, "threads": torch.get_num_threads()}
    return Snapshot(spec, kept, facts, {name: lines[:rows] for name, lines in texts.items()}, tokens or {})


def snapshot_folder(root: str | os.PathLike[str], step: int, reason: str) -> Path:
    """
    `root/step-SSSSSSSS-reason`, which must lie inside `root`.

    Raises:
        LossPlusError: `reason` would leave the folder.
    """
    if not re.fullmatch(r"[\w-]+", reason):
        raise LossPlusError(f"snapshot reason {reason!r}: only letters, digits, _ and - may stand in a folder's name.")
    return Path(root) / f"step-{step:08d}-{reason}"
