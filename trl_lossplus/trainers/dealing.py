"""Which rows of an optimizer step go into which of its micro-batches: rows that move no weight are left out, the rest balanced."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .budget import Load, Padded, Row, stretches
from .minibatch import MicroBatch, moving_rows


def deal_windows(
    micro_batches: Sequence[MicroBatch],
    *,
    per_window: int,
    facts: Callable[[MicroBatch], Tensor],
    drop_still: bool,
    load: Load,
    cuts: Sequence[int] | None = None,
    budget: int | None = None,
) -> list[list[MicroBatch]]:
    """
    Deals each window's rows anew to its micro-batches, so that they have about as many tokens; waits for the device once a window.

    The number of micro-batches stays, on every process; a part that gets no row holds a row that is outside the loss.

    Args:
        micro_batches: with `window`, `loss_mask` and what is used as `advantages`.
        facts: see `budget.row_facts`. drop_still: leave out rows whose advantage is 0 on every token of the loss.
        load: what rows cost.
        cuts: into how many parts each micro-batch of a window is cut, by window (None: one), so that each is within the budget.

    Returns:
        The parts of each micro-batch.
    """
    dealt: list[list[MicroBatch]] = []
    for number, first in enumerate(range(0, len(micro_batches), per_window)):
        window, each = micro_batches[first : first + per_window], 1 if cuts is None else cuts[number]
        rows = _together(window)
        prompt, completion, counts = facts(rows).long().unbind(1)
        moves = moving_rows(rows) if drop_still else torch.ones_like(counts)
        told = torch.stack([prompt, completion, rows["group_ids"], counts, moves.long()], 1).tolist()
        table = [row[:4] for row in told]
        dealt_out = [[row for row in part if told[row][4]] for part in deal(table, each * len(window), load, budget)]
        parts = [_take(rows, part) if part else _nothing(rows, table) for part in dealt_out]
        dealt.extend(parts[i : i + each] for i in range(0, len(parts), each))
    return dealt


def deal(table: Sequence[Row], parts: int, load: Load, budget: int | None = None) -> list[list[int]]:
    """Row numbers of each part, those that count: padded rows by length, packed ones so that the parts have as many tokens."""
    if not isinstance(load, Padded):
        return share_out(table, parts, load.share_prefix, budget)
    order = [row for row, (_, _, _, counts) in enumerate(table) if counts]
    return stretches(table, sorted(order, key=lambda row: -table[row][0] - table[row][1]), parts, load)


def share_out(table: Sequence[Row], parts: int, share_prefix: bool, budget: int | None = None) -> list[list[int]]:
    """
    Row numbers of each part, the largest units first, each to the lightest part.

    A group whose prompt is shared is one unit, or several where it is larger than a part or than the budget.
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
        while budget is not None and n < len(rows) and cost(by_length[::n]) > budget:
            n += 1
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
