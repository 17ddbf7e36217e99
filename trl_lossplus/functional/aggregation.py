"""
From per-token losses to one number.

The number belongs to a whole optimizer step. A `Window` holds the step's global counts (over micro-batches and processes), so
the sum of the micro-batches' gradients, averaged over processes as the backends do, is the gradient of the whole step's loss.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .errors import LossPlusError, unknown_name
from .masking import count, group_rows, group_sums, masked_sum, nonempty, row_means, row_sums

AGGREGATIONS = {
    "token_mean": "sum over tokens / number of tokens",
    "seq_mean_token_mean": "mean over rows of the row's token mean",
    "seq_mean_token_sum": "mean over rows of the row's token sum",
    "seq_mean_token_sum_norm": "mean over rows of the row's token sum / norm_length",
    "token_sum": "sum over tokens",
    "prompt_mean": "mean over prompts of the prompt's token mean",
}


@dataclass(frozen=True)
class Window:
    """
    Global counts of one optimizer step: the normalizers.

    Args:
        num_tokens: valid tokens over all micro-batches and processes.
        num_rows: rows over all micro-batches and processes.
        num_prompts: distinct prompts (groups), needed by `prompt_mean`.
        world_size: processes whose gradients the backend averages.
        group_tokens: (B,) for each row of this micro-batch, the valid tokens of its whole group in the step; None: the
            groups are whole in this batch.
    """

    num_tokens: int | float | Tensor
    num_rows: int | float | Tensor
    num_prompts: int | float | Tensor | None = None
    world_size: int = 1
    group_tokens: Tensor | None = None


def _count(value: int | float | Tensor) -> Tensor | float:
    return value.clamp(min=1) if isinstance(value, Tensor) else max(value, 1)


def _prompt_mean(x: Tensor, mask: Tensor, window: Window | None, group_ids: Tensor | None) -> Tensor:
    if group_ids is None:
        raise LossPlusError("aggregation 'prompt_mean' needs group_ids (B,), and there are none.")
    groups = group_rows(group_ids)
    lengths = mask.sum(-1)
    own = group_sums(lengths, groups)
    tokens = own[groups.rows] if window is None or window.group_tokens is None else window.group_tokens
    prompts = (own > 0).sum().clamp(min=1) if window is None or window.num_prompts is None else window.num_prompts
    return (row_sums(x, mask) / tokens.clamp(min=1)).sum() / _count(prompts)


def aggregate(
    mode: str,
    per_token: Tensor,
    mask: Tensor,
    window: Window | None = None,
    *,
    norm_length: float | None = None,
    group_ids: Tensor | None = None,
) -> Tensor:
    """
    Reduces per-token losses to this batch's share of the optimizer step's loss.

    Args:
        mode: one of token_mean, seq_mean_token_mean, seq_mean_token_sum, seq_mean_token_sum_norm, token_sum, prompt_mean.
        per_token: (B, T), or (B, 1) for one value a row, repeated over its tokens. mask: (B, T) bool.
        window: global counts; None: this batch is the whole step on one process, and rows without valid tokens do not
            count as rows.
        norm_length: divisor of seq_mean_token_sum_norm in tokens; None: T of this batch (give it
            where micro-batches differ in width).
        group_ids: (B,) integers, for prompt_mean.

    Returns:
        A scalar, connected to `per_token` even when the mask is empty (then 0), multiplied by the window's world size, since
        backends average gradients over processes.

    Raises:
        LossPlusError: unknown mode; prompt_mean without group ids.

    Source: token_mean and seq_mean_token_sum_norm as in DAPO (2503.14476) and Dr. GRPO (2503.20783), the other names as in verl.
    """
    if mode not in AGGREGATIONS:
        raise unknown_name("loss_aggregation", mode, AGGREGATIONS)
    x = (per_token.float() if per_token.dtype in (torch.bfloat16, torch.float16) else per_token).expand(mask.shape)
    rows: int | float | Tensor = nonempty(mask).sum() if window is None else window.num_rows
    if mode == "token_mean":
        share = masked_sum(x, mask) / _count(count(mask) if window is None else window.num_tokens)
    elif mode == "token_sum":
        share = masked_sum(x, mask)
    elif mode == "seq_mean_token_mean":
        share = row_means(x, mask).sum() / _count(rows)
    elif mode == "seq_mean_token_sum":
        share = masked_sum(x, mask) / _count(rows)
    elif mode == "seq_mean_token_sum_norm":
        share = masked_sum(x, mask) / (_count(rows) * (mask.shape[-1] if norm_length is None else norm_length))
    else:
        share = _prompt_mean(x, mask, window, group_ids)
    return share if window is None or window.world_size == 1 else share * window.world_size
