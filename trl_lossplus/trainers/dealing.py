"""Which rows of an optimizer step go into which of its micro-batches: rows that move no weight are left out, the rest balanced."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .minibatch import MicroBatch, as_tokens


def moving_rows(micro: MicroBatch) -> Tensor:
    """Rows with a token in the loss whose advantage is not 0: (B,) bool."""
    advantages = as_tokens(micro["advantages"]).expand(micro["loss_mask"].shape)
    return ((advantages != 0) & micro["loss_mask"]).any(1)


def deal_windows(
    micro_batches: Sequence[MicroBatch], *, per_window: int, drop_still: bool, share_prefix: bool
) -> list[MicroBatch]:
    """
    Deals each window's rows anew to its micro-batches, so that they have about as many tokens; waits for the device once.

    The number of micro-batches stays, on every process; one that gets no row holds a row that is outside the loss.

    Args:
        micro_batches: with `window`, `loss_mask` and what is used as `advantages`.
        drop_still: leave out rows whose advantage is 0 on every token of the loss.
        share_prefix: rows with the same group id cost their prompt once, and stay together where that does not unbalance.
    """
    dealt: list[MicroBatch] = []
    for first in range(0, len(micro_batches), per_window):
        window = micro_batches[first : first + per_window]
        rows = _together(window)
        columns = [rows["prompt_mask"].sum(1), rows["completion_mask"].sum(1), rows["group_ids"]]
        columns.append(moving_rows(rows) if drop_still else torch.ones_like(columns[0]))
        table = torch.stack([column.long() for column in columns], 1).tolist()
        parts = share_out(table, len(window), share_prefix)
        dealt.extend(_take(rows, part) if part else _nothing(rows, table) for part in parts)
    return dealt


def share_out(table: Sequence[Sequence[int]], parts: int, share_prefix: bool) -> list[list[int]]:
    """
    Row numbers of each part, the largest units first, each to the lightest part.

    Args:
        table: [prompt tokens, completion tokens, group, whether it counts] of each row.
    """
    units: dict[int, list[int]] = {}
    for row, (_, _, group, counts) in enumerate(table):
        if counts:
            units.setdefault(group if share_prefix else row, []).append(row)

    def cost(rows: Sequence[int]) -> int:
        return table[rows[0]][0] + sum(table[row][1] for row in rows)

    target = sum(cost(rows) for rows in units.values()) / parts
    pieces: list[list[int]] = []
    for rows in units.values():
        n = min(len(rows), max(1, round(cost(rows) / target))) if target else 1
        by_length = sorted(rows, key=lambda row: -table[row][1])
        pieces.extend(by_length[i::n] for i in range(n))
    out: list[list[int]] = [[] for _ in range(parts)]
    load = [0] * parts
    for piece in sorted(pieces, key=cost, reverse=True):
        lightest = load.index(min(load))
        out[lightest].extend(piece)
        load[lightest] += cost(piece)
    return out


def _together(window: Sequence[MicroBatch]) -> MicroBatch:
    """A window's micro-batches as one: tensors that have a row each are joined, the rest is the first's."""
    first = window[0]
    rows = len(first["prompt_ids"])
    whole: dict[str, Any] = dict(first)
    for name, value in first.items():
        if isinstance(value, Tensor) and value.dim() > 0 and len(value) == rows:
            whole[name] = torch.cat([micro[name] for micro in window])
    tokens = first["window"].group_tokens
    if tokens is not None:
        whole["window"] = replace(first["window"], group_tokens=torch.cat([micro["window"].group_tokens for micro in window]))
    return whole


def _take(rows: MicroBatch, numbers: Sequence[int]) -> MicroBatch:
    """Some rows of a micro-batch."""
    count, index = len(rows["prompt_ids"]), torch.tensor(numbers, device=rows["prompt_ids"].device)
    taken = {
        name: value[index] if isinstance(value, Tensor) and value.dim() > 0 and len(value) == count else value
        for name, value in rows.items()
    }
    if rows["window"].group_tokens is not None:
        taken["window"] = replace(rows["window"], group_tokens=rows["window"].group_tokens[index])
    return taken


def _nothing(rows: MicroBatch, table: Sequence[Sequence[int]]) -> MicroBatch:
    """The row with the shortest prompt, outside the loss and without its completion: every process runs each micro-batch."""
    shortest = min(range(len(table)), key=lambda row: table[row][0])
    taken = _take(rows, [shortest])
    for name in ("loss_mask", "completion_mask"):
        taken[name] = torch.zeros_like(taken[name])
    return taken
