"""Cuts a rollout into optimizer-step windows: their normalizers, learner-side normalization, trimming."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from ..batch import LossBatch
from ..functional.aggregation import Window
from ..functional.masking import Moments, row_moments
from ..spec import LossSpec
from .normalize import scope_keys, sets_of_rows, whiten_rows

MicroBatch = dict[str, Any]
PARTS = "parts"  # key of the parts that a micro-batch is run in, where it is cut into several
KEEP = "sampler_keep"  # key of a (B, T) bool: False for the tokens that rollout_rs rejects

# Tensors along the completion, and along prompt and completion together, that trimming shortens.
COMPLETION = (
    "completion_ids", "completion_mask", "tool_mask", "loss_mask", "old_per_token_logps", "ref_per_token_logps",
    "sampling_per_token_logps", "importance_sampling_ratio", "advantages", "returns", "old_values", "token_weights", KEEP,
    "logps_at_rollout", "logps", "entropies", "values", "sum_pi_squared",
)  # fmt: skip
WHOLE = ("token_type_ids", "mm_token_type_ids")
# What the forward passes of the loss gave, where a micro-batch holds it already.
PASSES = ("logps", "entropies", "aux_loss")


def parts_of(micro: MicroBatch) -> list[MicroBatch]:
    """What is run of a micro-batch, one after the other."""
    return micro.get(PARTS, [micro])


def token_mask(micro: MicroBatch) -> Tensor:
    """(B, T) bool: generated tokens, without tool tokens."""
    mask = micro["completion_mask"].bool()
    return mask if micro.get("tool_mask") is None else mask & micro["tool_mask"].bool()


def kept_mask(micro: MicroBatch) -> Tensor:
    """(B, T) bool: `token_mask` without the tokens that are rejected."""
    mask = token_mask(micro)
    return mask if micro.get(KEEP) is None else mask & micro[KEEP]


def entropies_for(spec: LossSpec, reads: Collection[str], entropies: Tensor) -> Tensor:
    """Entropies (B, T) as the loss takes them: without a graph where nothing differentiates them. reads: of the objective."""
    return entropies if spec.entropy_coef != 0.0 or "entropies" in reads else entropies.detach()


def loss_batch(
    micro: MicroBatch, spec: LossSpec, logps: Tensor, entropies: Tensor | None = None, entropy_mask: Tensor | None = None
) -> LossBatch:
    """What the loss reads of a micro-batch. logps, entropies: (B, T) of the policy; entropy_mask: (B, T) bool, the high-entropy tokens."""
    return LossBatch(
        logps=logps,
        old_logps=micro.get("old_per_token_logps"),
        advantages=micro["advantages"],
        mask=micro["loss_mask"],
        ref_logps=micro.get("ref_per_token_logps"),
        entropies=entropies,
        rollout_weights=micro.get("importance_sampling_ratio"),
        rollout_logps=micro.get("sampling_per_token_logps"),
        group_ids=micro["group_ids"],
        token_weights=micro.get("token_weights"),
        kl_mask=~micro["flat"].unsqueeze(-1) if spec.zero_std_groups == "no_kl" else None,
        entropy_mask=entropy_mask,
        selected_tokens=micro.get("selected_tokens"),
        row_terms=micro.get("row_terms"),
    )


def _normalized_mask(micro: MicroBatch, normalization: str) -> Tensor:
    """The tokens whose advantages are counted: of scored rows where they are whitened; over a rollout also those of dropped groups."""
    mask = kept_mask(micro) if normalization == "rollout" else micro["loss_mask"]
    return mask if normalization == "none" else mask & micro["scored"].unsqueeze(-1)


class RowTable(NamedTuple):
    """
    What every process knows of the rollout's rows on all processes, (N,) each, in the order of use, process after process.

    row: its number in generation order. window: number of its optimizer step. tokens: valid ones. counted: counts as a row. advantages:
    moments of its advantages over the tokens that normalization looks at. first: where this process's rows begin. width: columns of the
    longest completion. more: (N, k), what `row_table` was asked to tell beside.
    """

    row: Tensor
    window: Tensor
    group: Tensor
    tokens: Tensor
    counted: Tensor
    advantages: Moments
    first: int
    width: int
    more: Tensor | None = None


def row_table(
    micro_batches: Sequence[MicroBatch],
    *,
    per_window: int,
    process: int,
    gather: Callable[[Tensor], Tensor],
    empty_rows: bool,
    normalization: str,
    drop_flat: bool,
    more: Callable[[MicroBatch], Tensor] | None = None,
) -> RowTable:
    """
    Adds `loss_mask` to each micro-batch and tells every process of its rows (the one collective of this file).

    Args:
        micro_batches: one process's, in the order in which they are used.
        per_window: micro-batches an optimizer step. process: this one's number.
        gather: concatenates a tensor over processes along dim 0.
        empty_rows: whether rows without valid tokens count as rows; those of which every token was rejected never do.
        normalization: none, rollout (flat groups are normalized with the others even if dropped) or learner.
        drop_flat: rows of groups without spread leave the loss and never count.
        more: further numbers (B, k) of a micro-batch's rows.
    """
    columns: list[Tensor] = []
    for i, micro in enumerate(micro_batches):
        mask = kept_mask(micro)
        lost = token_mask(micro).any(-1) & ~mask.any(-1)
        micro["loss_mask"] = mask & ~micro["flat"].unsqueeze(-1) if drop_flat else mask
        tokens = micro["loss_mask"].sum(-1)
        over = _normalized_mask(micro, normalization)
        advantages = row_moments(as_tokens(micro["advantages"]).expand(mask.shape).float(), over)
        counted = ~lost if empty_rows else tokens > 0
        counted = counted & ~micro["flat"] if drop_flat else counted
        width = torch.full_like(tokens, mask.shape[1])
        window = torch.full_like(tokens, i // per_window)
        facts = (micro["row"], window, micro["group_ids"], tokens, counted, width, *advantages)
        columns.append(torch.cat([torch.stack([fact.float() for fact in facts], 1), *([more(micro)] if more else [])], 1))
    mine = torch.cat(columns)
    everyone = gather(mine).cpu().double()
    row, window, group, tokens, counted, width = everyone[:, :6].long().unbind(1)
    moments, told = Moments(*everyone[:, 6:9].unbind(1)), everyone[:, 9:].long() if more else None
    return RowTable(row, window, group, tokens, counted, moments, process * len(mine), int(width.max()), told)


def cut_windows(micro_batches: Sequence[MicroBatch], table: RowTable, *, per_window: int, world_size: int) -> None:
    """Adds to each micro-batch the `window` of its optimizer step."""
    num_windows = -(-len(micro_batches) // per_window)
    rows = torch.zeros(num_windows, dtype=torch.long).index_add_(0, table.window, table.counted)
    groups = torch.zeros(num_windows, int(table.group.max()) + 1, dtype=torch.long)
    groups.index_put_((table.window, table.group), table.tokens, accumulate=True)
    for i, micro in enumerate(micro_batches):
        device, tokens = micro["loss_mask"].device, groups[i // per_window]
        whole = Window(tokens.sum().to(device), rows[i // per_window].to(device), (tokens > 0).sum().to(device), world_size)
        micro["window"] = replace(whole, group_tokens=tokens.to(device)[micro["group_ids"]])


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


def normalize(micro_batches: Sequence[MicroBatch], table: RowTable, *, normalization: str, scope: str) -> Tensor:
    """
    Whitens the advantages: over the rollout's scored tokens, or (learner) over each optimizer step's, on all processes.

    Returns:
        (N,) mean advantage of each row's valid tokens as it is used now, in generation order.
    """
    means = table.advantages.mean
    if normalization != "none":
        keys, num_keys = scope_keys(scope, table.group)
        if normalization == "learner":
            keys, num_keys = keys + table.window * num_keys, num_keys * (int(table.window.max()) + 1)
        sets = sets_of_rows(table.advantages, keys, num_keys)
        first = table.first
        for micro in micro_batches:
            here = slice(first, first := first + len(micro["row"]))
            own = Moments(*(value[here] for value in sets))
            over = _normalized_mask(micro, normalization)
            micro["advantages"] = whiten_rows(as_tokens(micro["advantages"]).expand(over.shape).float(), over, own)
        means = whiten_rows(means.unsqueeze(-1), (table.advantages.n > 0).unsqueeze(-1), sets).squeeze(-1)
    return (means * (table.tokens > 0))[table.row.argsort()]


def moving_rows(micro: MicroBatch) -> Tensor:
    """Rows with a token in the loss whose advantage is not 0: (B,) bool."""
    advantages = as_tokens(micro["advantages"]).expand(micro["loss_mask"].shape)
    return ((advantages != 0) & micro["loss_mask"]).any(1)


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
