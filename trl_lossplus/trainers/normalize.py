"""Whitening of advantages over a set of tokens that is spread over micro-batches and processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..functional.masking import Moments, keyed_moments, merge_moments, row_moments, whiten


def scope_keys(scope: str, group_ids: Tensor) -> Tensor:
    """Which rows are whitened together, as keys: one key for batch, the group's id for group, the row for sequence."""
    if scope == "batch":
        return torch.zeros_like(group_ids)
    return group_ids if scope == "group" else torch.arange(len(group_ids), device=group_ids.device)


def whiten_together(
    advantages: Sequence[Tensor],
    masks: Sequence[Tensor],
    group_ids: Sequence[Tensor],
    *,
    scope: str,
    num_groups: int,
    gather: Callable[[Tensor], Tensor],
    shift_mean: bool = True,
) -> list[Tensor]:
    """
    Advantages of several micro-batches with mean 0 and variance 1 (ddof 1) over all their valid tokens on all processes.

    Args:
        advantages: (B, T) or (B, 1) each, with masks (B, T) bool and group ids (B,) below `num_groups`.
        scope: batch (all tokens together), group (the tokens of one prompt's completions), sequence (each row alone).
        gather: stacks a tensor over processes along dim 0. shift_mean: False keeps the mean.

    Returns:
        (B, T) tensors, 0 on masked positions. They do not depend on the split into micro-batches and processes.
    """
    tokens = [a.expand(m.shape).float() for a, m in zip(advantages, masks, strict=True)]
    keys = [scope_keys(scope, ids) for ids in group_ids]
    rows = [row_moments(x, m) for x, m in zip(tokens, masks, strict=True)]
    if scope == "sequence":
        over = [(r.mean.unsqueeze(-1), r.variance().unsqueeze(-1)) for r in rows]
    else:
        num_keys = 1 if scope == "batch" else num_groups
        parts = [keyed_moments(r, k, num_keys) for r, k in zip(rows, keys, strict=True)]
        own = merge_moments(Moments(*(torch.stack(column) for column in zip(*(_columns(p) for p in parts), strict=True))))
        gathered = gather(torch.stack(_columns(own)).unsqueeze(0))  # (processes, 3, keys)
        everyone = merge_moments(Moments(*gathered.unbind(1)))
        over = [(everyone.mean[k].unsqueeze(-1), everyone.variance()[k].unsqueeze(-1)) for k in keys]
    return [
        whiten(x, m, mean=mean, variance=variance, shift_mean=shift_mean)
        for x, m, (mean, variance) in zip(tokens, masks, over, strict=True)
    ]


def _columns(moments: Moments) -> list[Tensor]:
    return [moments.n, moments.mean, moments.m2]
