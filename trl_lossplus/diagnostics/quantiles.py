"""
Quantiles of what the loss read and made, over an optimizer step's valid tokens on all processes.

They are exact where each micro-batch has at most `WHOLE` positions (and, on several processes, each process at most `SENT` / processes
valid tokens a step). Of a larger micro-batch positions at even distances stand for the rest, `TAKEN` of them: a median of 256 tokens lies
within 6.2 percentile points of the true one in 19 of 20 steps, one of 512 within 4.4. The extremes of `EXTREMES` are over all tokens even
then, unless they coincide with what masked positions hold (0; 1 for the ratio), as the least KL and entropy do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..functional.masking import QUANTILES
from ..loss import LossOutput

WHOLE, SENT = 16384, 2048
TAKEN = {"summary": 256, "full": 512}
LEVELS = {"summary": (0.0, 0.5, 1.0), "full": QUANTILES}
PER_TOKEN = {"summary": ("log_ratio", "ratio", "policy", "kl"), "full": ("log_ratio", "ratio", "policy", "kl", "entropy")}
EXTREMES = {
    "summary": ("log_ratio",),
    "full": ("log_ratio", "ratio", "policy", "kl", "entropy", "advantage", "value", "value_error"),
}

Array = NDArray[np.float32]


class Sample(NamedTuple):
    """
    What one micro-batch contributes, on the device.

    names: of the Q quantities. stride: between the positions taken. rows: their values, (n,) each, then 0 where a token is valid, else -inf.
    ended, ends: quantities of which least and largest over all positions, masked ones too, are known; none where stride is 1.
    """

    names: tuple[str, ...]
    stride: int
    rows: list[Tensor]
    ended: tuple[str, ...]
    ends: list[Tensor]


class Spread(NamedTuple):
    """
    One process's step, on the host.

    names: of the Q quantities. values: (Q, k), ascending. weight: tokens that each value stands for. ends: least and largest over all
    tokens, where they are known. ratio: tokens, sum of their ratios, sum of the squares.
    """

    names: tuple[str, ...]
    values: Array
    weight: float
    ends: dict[str, tuple[float, float]]
    ratio: tuple[float, float, float]


def quantities(output: LossOutput, level: str) -> dict[str, Tensor]:
    """The tensors whose quantiles are shown: (B, T) or (B, 1) each, without gradient."""
    assert output.inputs is not None
    found: dict[str, Tensor] = {name: output.per_token[name] for name in PER_TOKEN[level] if name in output.per_token}
    found["advantage"] = output.inputs.advantages
    if output.inputs.values is not None and output.inputs.returns is not None:
        found["value"] = output.inputs.values
        found["value_error"] = output.inputs.returns - output.inputs.values
    return found


@lru_cache(maxsize=4)
def _rows_of(total: int, width: int, stride: int, device: torch.device) -> Tensor:
    """The row of each position taken."""
    return torch.arange(0, total, stride, device=device) // width


def sample(output: LossOutput, level: str) -> Sample:
    """What one micro-batch contributes. Waits for no device."""
    assert output.inputs is not None
    mask, found = output.inputs.mask, quantities(output, level)
    width, stride = mask.shape[1], 1
    if mask.numel() > WHOLE:
        stride = mask.numel() // TAKEN[level]
        while math.gcd(stride, width) > 1:  # every column is to be met
            stride -= 1
    ended = tuple(name for name in EXTREMES[level] if name in found) if stride > 1 else ()
    ends = [end for name in ended for end in found[name].aminmax()]
    rows = [
        x.reshape(-1)[::stride] if x.shape[1] == width else x.reshape(-1)[_rows_of(mask.numel(), width, stride, x.device)]
        for x in (*found.values(), mask)
    ]
    rows[-1] = rows[-1].log()
    return Sample(tuple(found), stride, rows, ended, ends)


def spread(samples: Sequence[Sample], ends: Sequence[float], numbers: Array, processes: int = 1) -> Spread | None:
    """
    A process's step from its micro-batches, on the host.

    Args:
        ends, numbers: the samples' `ends` and `rows`, each concatenated. processes: with how many it will be merged.

    Returns:
        None where no token that was taken is valid.
    """
    if not samples:
        return None
    widest, names, at, tables = max(part.stride for part in samples), samples[0].names, 0, []
    for part in samples:
        shape = (len(part.rows), len(part.rows[0]))
        table = numbers[at : at + shape[0] * shape[1]].reshape(shape)
        at += table.size
        every = round(widest / part.stride)  # each value is to stand for as many tokens
        tables.append(table if every == 1 else table[:, ::every])
    table = tables[0] if len(tables) == 1 else np.concatenate(tables, 1)
    count = int(table.shape[1] - np.count_nonzero(table[-1]))
    if not count:
        return None
    table = table[:-1] - table[-1]
    table.sort(axis=1)
    for i, last in enumerate(table[:, -1].tolist()):
        if last != last:  # NaN is sorted behind the masked ones
            table[i] = last
    known: dict[str, tuple[float, float]] = {}
    for name, low, high in zip((name for part in samples for name in part.ended), ends[::2], ends[1::2], strict=True):
        least, largest = known.get(name, (math.inf, -math.inf))
        masked = 1.0 if name == "ratio" else 0.0
        known[name] = (least if low == masked else min(low, least), largest if high == masked else max(high, largest))
    values = table[:, :count]
    r = values[names.index("ratio")]
    one = Spread(names, values, float(widest), known, (count * widest, float(r.sum()) * widest, float(r @ r) * widest))
    return one if processes == 1 else thinned(one, processes)


def thinned(one: Spread, processes: int) -> Spread:
    """At most `SENT` / processes values of each quantity, at even ranks, each standing for more tokens."""
    n, most = one.values.shape[1], max(SENT // processes, 16)
    if n <= most:
        return one
    ranks = np.linspace(0, n - 1, most).round().astype(int)
    return one._replace(values=one.values[:, ranks], weight=one.weight * n / most)


def merge(parts: Sequence[Spread], level: str) -> dict[str, float]:
    """
    All processes' tokens together: quantiles as `probe/NAME/qNN`, and `ratio/ess` = mean(r)^2 / mean(r^2), the effective sample size.

    1: every token counts alike; near 0: a few tokens carry the update. Source: Kish's effective sample size over the sample size.
    """
    if not parts:
        return {}
    table = quantiles([part.values for part in parts], [part.weight for part in parts], LEVELS[level])
    found: dict[str, float] = {}
    for name, row in zip(parts[0].names, table, strict=True):
        for low, high in (part.ends[name] for part in parts if name in part.ends):
            row[0], row[-1] = min(row[0], low), max(row[-1], high)
        found |= zip(_names(name, level), row, strict=True)
    tokens, total, square = (sum(numbers) for numbers in zip(*(part.ratio for part in parts), strict=True))
    found["ratio/ess"] = total**2 / (square * tokens) if square > 0 else math.nan
    return found


@lru_cache
def _names(quantity: str, level: str) -> list[str]:
    return [f"probe/{quantity}/q{round(100 * q):02d}" for q in LEVELS[level]]


def quantiles(parts: Sequence[NDArray[np.floating]], weights: Sequence[float], levels: Sequence[float]) -> list[list[float]]:
    """
    (Q, L) quantiles of several sets of ascending values (Q, n), each value of a set standing for `weights` tokens.

    Linear between the middles of neighbouring values' tokens: torch.quantile's (Hyndman and Fan's seventh) where all weights are equal.
    """
    if len(parts) == 1:
        (values,) = parts
        places = [q * (values.shape[1] - 1) for q in levels]
        rows = values[:, [int(end) for place in places for end in (place, math.ceil(place))]].tolist()
        pairs = [list(zip(row[::2], row[1::2], places, strict=True)) for row in rows]
        return [[low + (high - low) * (place - int(place)) if high != low else low for low, high, place in row] for row in pairs]
    values = np.concatenate(parts, 1)
    each = np.concatenate([np.full(part.shape[1], weight) for part, weight in zip(parts, weights, strict=True)])
    order = np.argsort(values, axis=1, kind="stable")
    values, each = np.take_along_axis(values, order, 1), each[order]
    middles = np.cumsum(each, 1) - each / 2
    middles -= middles[:, :1]
    return [np.interp(np.array(levels) * at[-1], at, row).tolist() for at, row in zip(middles, values, strict=True)]
