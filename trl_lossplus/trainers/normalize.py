"""Whitening over a set of tokens that is spread over micro-batches and processes, from one row of a table a completion."""

from __future__ import annotations

import torch
from torch import Tensor

from ..functional.masking import Moments, keyed_moments, whiten


def scope_keys(scope: str, group_ids: Tensor) -> tuple[Tensor, int]:
    """Which rows (N,) are whitened together, as keys, and how many keys there are: batch one, group its id, sequence the row."""
    if scope == "batch":
        return torch.zeros_like(group_ids), 1
    if scope == "group":
        return group_ids, int(group_ids.max()) + 1
    return torch.arange(len(group_ids), device=group_ids.device), len(group_ids)


def sets_of_rows(rows: Moments, keys: Tensor, num_keys: int) -> Moments:
    """
    For each row the moments of its set: of all rows with its key.

    Args:
        rows: moments of each row's tokens, (N,), of all processes, in float64. keys: (N,) below `num_keys`.

    Returns:
        (N,) tensors, the same on every process, whatever the split of the rows over them.
    """
    merged = keyed_moments(rows, keys, num_keys)
    return Moments(merged.n[keys], merged.mean[keys], merged.m2[keys])


def whiten_rows(x: Tensor, mask: Tensor, sets: Moments, *, shift_mean: bool = True) -> Tensor:
    """
    Mean 0 and variance 1 (ddof 1) over each row's set: (B, T), 0 on masked positions.

    Args:
        x: (B, T), mask: (B, T) bool. sets: (B,) moments of the sets that the rows belong to. shift_mean: False keeps the mean.
    """
    mean, variance = (value.to(x).unsqueeze(-1) for value in (sets.mean, sets.variance()))
    return whiten(x, mask, mean=mean, variance=variance, shift_mean=shift_mean)
