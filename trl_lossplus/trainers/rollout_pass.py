"""
A pass without gradient over a rollout: its rows some at a time, each time without the padding that only others need.

So many rows at a time, or so many tokens; rows of like length together where they are padded, neighbours where they are packed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .budget import Load, Packed, cut, stretches
from .minibatch import MicroBatch, trim

ROWS = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")
# Row numbers (b,), and these rows.
Chunk = tuple[Tensor, MicroBatch]


def chunks(
    rollout: MicroBatch,
    *,
    rows: int,
    load: Load,
    left: bool,
    multiple: int = 1,
    budget: int | None = None,
    most: Callable[[int], int] = lambda number: number,
) -> list[Chunk]:
    """
    The rollout's rows, `rows` at a time, or as many as cost `budget` tokens; waits for the device twice.

    Args:
        rollout: prompts and completions with their masks. load: what rows cost; left, multiple: as for `minibatch.trim`.
        most: the largest of a number over processes. Each runs as many chunks: where weights are gathered layer by layer, all take part.
    """
    prompt, mask = rollout["prompt_ids"], rollout["prompt_mask"].bool()
    new = ((prompt[1:] != prompt[:-1]) & mask[1:] | (mask[1:] != mask[:-1])).any(1)
    group = torch.cat([new.new_zeros(1), new]).cumsum(0)
    lengths = mask.sum(1) if left or isinstance(load, Packed) else torch.full_like(group, mask.shape[1])
    table = torch.stack([lengths, rollout["completion_mask"].sum(1).long(), group], 1).tolist()
    order = list(range(len(table)))
    if not isinstance(load, Packed):
        order.sort(key=lambda row: table[row][0] + table[row][1])
    if budget is None:
        pieces = [order[i : i + rows] for i in range(0, len(order), rows)]
    else:
        pieces = stretches(table, order, most(len(cut(table, order, budget, load))), load)
    index = [torch.tensor(piece, device=prompt.device) for piece in pieces]
    found = [(piece, {name: rollout[name][piece] for name in ROWS}) for piece in index]
    trim([chunk for _, chunk in found], left=left, multiple=multiple)
    return found


def placed(parts: Sequence[Chunk], found: Sequence[Tensor], shape: tuple[int, int]) -> Tensor:
    """What was found for each chunk (b, t) as one table (B, T), 0 after its columns."""
    whole = found[0].new_zeros(shape)
    for (index, _), values in zip(parts, found, strict=True):
        whole[index, : values.shape[1]] = values
    return whole
