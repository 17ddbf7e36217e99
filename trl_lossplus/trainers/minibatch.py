"""Cuts a rollout into optimizer-step windows: their normalizers, learner-side normalization, trimming."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from ..functional.aggregation import Window
from .normalize import whiten_together

MicroBatch = dict[str, Any]

# Tensors along the completion, and along prompt and completion together, that trimming shortens.
COMPLETION = (
    "completion_ids", "completion_mask", "tool_mask", "loss_mask", "old_per_token_logps", "ref_per_token_logps",
    "sampling_per_token_logps", "importance_sampling_ratio", "advantages", "returns", "old_values", "token_weights",
)  # fmt: skip
WHOLE = ("token_type_ids", "mm_token_type_ids")


def loss_masks(micro_batches: Sequence[MicroBatch], *, drop_flat: bool) -> None:
    """Adds `loss_mask` (B, T) bool to each micro-batch: generated tokens, without tool tokens and (if asked) flat groups."""
    for micro in micro_batches:
        mask = micro["completion_mask"].bool()
        if micro.get("tool_mask") is not None:
            mask = mask & micro["tool_mask"].bool()
        if drop_flat:
            mask = mask & ~micro["flat"].unsqueeze(-1)
        micro["loss_mask"] = mask


def cut_windows(
    micro_batches: Sequence[MicroBatch],
    *,
    per_window: int,
    num_groups: int,
    world_size: int,
    reduce: Callable[[Tensor], Tensor],
    empty_rows: bool,
    dropped: str | None = None,
) -> None:
    """
    Adds to each micro-batch the `window` of its optimizer step.

    Args:
        micro_batches: one process's, in the order in which they are used; each with loss_mask and group_ids.
        per_window: micro-batches an optimizer step.
        num_groups: groups of the rollout on all processes; group ids are below it.
        reduce: sums a tensor over processes (the one collective of this function).
        empty_rows: whether rows without valid tokens count as rows.
        dropped: key of a (B,) bool tensor of rows that never count, or None.
    """
    windows = [micro_batches[i : i + per_window] for i in range(0, len(micro_batches), per_window)]
    table = torch.stack([_counts(window, num_groups, empty_rows, dropped) for window in windows])  # (windows, 1 + groups)
    table = reduce(table)
    for counts, window in zip(table, windows, strict=True):
        rows, group_tokens = counts[0], counts[1:]
        whole = Window(group_tokens.sum(), rows, (group_tokens > 0).sum(), world_size)
        for micro in window:
            micro["window"] = replace(whole, group_tokens=group_tokens[micro["group_ids"]])


def _counts(window: Sequence[MicroBatch], num_groups: int, empty_rows: bool, dropped: str | None) -> Tensor:
    """[rows, tokens of group 0, 1, ...] of one process's share of a window."""
    mask_sums = torch.cat([micro["loss_mask"].sum(-1) for micro in window])
    ids = torch.cat([micro["group_ids"] for micro in window])
    counts = torch.ones_like(mask_sums, dtype=torch.bool) if empty_rows else mask_sums > 0
    if dropped is not None:
        counts = counts & ~torch.cat([micro[dropped] for micro in window])
    groups = torch.zeros(num_groups, dtype=mask_sums.dtype, device=mask_sums.device).index_add_(0, ids, mask_sums)
    return torch.cat([counts.sum().unsqueeze(0), groups])


def share_windows(micro_batches: Sequence[MicroBatch]) -> None:
    """
    Where an optimizer step is not within one rollout: gives each micro-batch the rollout's mean a micro-batch.

    `cut_windows` must have taken the rollout as one window. `scaled_window` turns the mean into a step's normalizer, as TRL does.
    """
    n = len(micro_batches)
    for micro in micro_batches:
        whole = micro["window"]
        micro["window"] = replace(
            whole, num_tokens=whole.num_tokens / n, num_rows=whole.num_rows / n, num_prompts=None, group_tokens=None
        )


def scaled_window(window: Window, micro_batches: int) -> Window:
    """The normalizer of a step of `micro_batches` from a window that holds the mean of one (see `share_windows`)."""
    return replace(
        window,
        num_tokens=cast(Tensor, window.num_tokens) * micro_batches,
        num_rows=cast(Tensor, window.num_rows) * micro_batches,
    )


def normalize_windows(
    micro_batches: Sequence[MicroBatch],
    *,
    per_window: int,
    scope: str,
    num_groups: int,
    gather: Callable[[Tensor], Tensor],
) -> None:
    """Learner-side normalization: whitens the advantages over each optimizer step's scored tokens on all processes."""
    for i in range(0, len(micro_batches), per_window):
        window = micro_batches[i : i + per_window]
        white = whiten_together(
            [as_tokens(micro["advantages"]) for micro in window],
            [micro["loss_mask"] & micro["scored"].unsqueeze(-1) for micro in window],
            [micro["group_ids"] for micro in window],
            scope=scope,
            num_groups=num_groups,
            gather=gather,
        )
        for micro, advantages in zip(window, white, strict=True):
            micro["advantages"] = advantages


def as_tokens(advantages: Tensor) -> Tensor:
    """(B,) as (B, 1); the rest unchanged."""
    return advantages.unsqueeze(-1) if advantages.dim() == 1 else advantages


def trim(micro_batches: Sequence[MicroBatch], *, left: bool, multiple: int = 1) -> None:
    """
    Shortens each micro-batch to its own longest row, on the right of the completion and (if `left`) on the left of the prompt.

    Exact for causal models; on the left only where positions are relative, since the padded forward counts the padding. At least
    one column of each side stays; widths stay multiples of `multiple` (TRL's pad_to_multiple_of) where they were.
    """
    lengths = [_lengths(micro, left) for micro in micro_batches]
    for micro, (start, stop) in zip(micro_batches, torch.stack(lengths).tolist(), strict=True):
        prompt = micro["prompt_ids"].shape[1]
        total = prompt + micro["completion_ids"].shape[1]
        start -= (multiple - (prompt - start) % multiple) % multiple
        stop += (multiple - stop % multiple) % multiple
        start, stop = max(start, 0), min(stop, total - prompt)
        for name in ("prompt_ids", "prompt_mask"):
            micro[name] = micro[name][:, start:]
        for name in COMPLETION:
            tensor = micro.get(name)
            if tensor is not None and tensor.dim() == 2 and tensor.shape[1] == total - prompt:
                micro[name] = tensor[:, :stop]
        for name in WHOLE:
            if micro.get(name) is not None:
                micro[name] = micro[name][:, start : prompt + stop]


def _lengths(micro: MicroBatch, left: bool) -> Tensor:
    """[first used prompt column, number of used completion columns]."""
    prompt, completion = micro["prompt_mask"].bool().any(0), micro["completion_mask"].bool().any(0)
    start = (prompt.int().argmax() * prompt.any()) if left else torch.zeros((), dtype=torch.long, device=prompt.device)
    columns = torch.arange(1, len(completion) + 1, device=completion.device)
    stop = (columns * completion).amax().clamp(min=1)
    return torch.stack([start, stop])
