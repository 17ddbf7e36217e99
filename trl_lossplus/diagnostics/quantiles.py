"""Quantiles of what the loss read and made, over an optimizer step's valid tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from ..functional.masking import QUANTILES
from ..loss import LossOutput

# A micro-batch up to this many positions is taken whole; of a larger one SAMPLE positions at even distances, and the extremes of the
# log ratio from all.
WHOLE = 16384
SAMPLE = 512
LEVELS = {"summary": (0.0, 0.5, 1.0), "full": QUANTILES}


class Sample(NamedTuple):
    """Values (quantities, n) of one micro-batch at n positions, and which of these are valid tokens (n,)."""

    names: tuple[str, ...]
    values: Tensor
    valid: Tensor


def quantities(output: LossOutput) -> dict[str, Tensor]:
    """The tensors whose quantiles are shown: (B, T) or (B, 1) each, without gradient."""
    assert output.inputs is not None
    found: dict[str, Tensor] = {
        name: output.per_token[name] for name in ("log_ratio", "ratio", "policy", "kl", "entropy") if name in output.per_token
    }
    found["advantage"] = output.inputs.advantages
    if output.inputs.values is not None and output.inputs.returns is not None:
        found["value"] = output.inputs.values
        found["value_error"] = output.inputs.returns - output.inputs.values
    return found


def sample(output: LossOutput) -> Sample:
    """What one micro-batch contributes. Waits for no device."""
    assert output.inputs is not None
    mask = output.inputs.mask
    found = quantities(output)
    total = mask.numel()
    if total <= WHOLE:
        values = torch.stack([x.expand(mask.shape).reshape(-1) for x in found.values()])
        return Sample(tuple(found), values, mask.reshape(-1))
    positions = torch.arange(0, total, max(total // SAMPLE, 1), device=mask.device)
    rows, columns = positions // mask.shape[1], positions % mask.shape[1]
    parts = [x[rows, columns] if x.shape[1] > 1 else x[rows, 0] for x in found.values()]
    return Sample(tuple(found), torch.stack(parts), mask[rows, columns])


def summarize(samples: list[Sample], level: str) -> dict[str, list[float]]:
    """
    Values at `LEVELS[level]` and the number of tokens behind them, by quantity, of one process.

    Returns:
        {name: [count, q, q, ...]}; empty where no token is valid.
    """
    if not samples:
        return {}
    names = samples[0].names
    values = torch.cat([part.values[:, part.valid] for part in samples], 1)
    if values.shape[1] == 0:
        return {}
    q = torch.tensor(LEVELS[level], device=values.device)
    table = torch.quantile(values.float(), q, dim=1).T.tolist()
    return {name: [float(values.shape[1]), *row] for name, row in zip(names, table, strict=True)}


def merge(parts: list[Mapping[str, list[float]]], level: str) -> dict[str, float]:
    """
    The quantiles of several processes together, as `probe/NAME/qNN`.

    The extremes are exact; between them the processes' quantiles are averaged, weighted by tokens (processes hold random shares of
    one rollout, so theirs differ by sampling alone).
    """
    merged: dict[str, float] = {}
    for name in sorted({name for part in parts for name in part}):
        rows = [part[name] for part in parts if name in part]
        total = sum(row[0] for row in rows)
        for i, quantile in enumerate(LEVELS[level], 1):
            values = [row[i] for row in rows]
            mean = sum(row[0] * row[i] for row in rows) / total
            merged[f"probe/{name}/q{round(quantile * 100):02d}"] = (
                min(values) if quantile == 0 else max(values) if quantile == 1 else mean
            )
    return merged
