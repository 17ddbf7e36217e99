"""
What rows cost in tokens, by layout, and into how many parts a budget of tokens cuts them.

A row is [prompt tokens, completion tokens, group, whether it counts], as in dealing.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .minibatch import MicroBatch, moving_rows

Row = Sequence[int]


class Padded(NamedTuple):
    """The cost of rows one under the other: as many as they are, each as wide as the longest prompt and the longest completion."""

    multiple: int = 1  # of which each width is
    rows: int = 0
    prompt: int = 0
    completion: int = 0

    def plus(self, row: Row) -> Padded:
        """With one row more."""
        prompt, completion = (-(-length // self.multiple) * self.multiple for length in (row[0], max(row[1], 1)))
        return Padded(self.multiple, self.rows + 1, max(self.prompt, prompt), max(self.completion, completion))

    @property
    def tokens(self) -> int:
        """Places that the model computes."""
        return self.rows * (self.prompt + self.completion)


class Packed(NamedTuple):
    """The cost of rows one after the other; with `share_prefix` neighbours of one group have their prompt once."""

    share_prefix: bool
    tokens: int = 0
    group: int | None = None  # of the last row

    def plus(self, row: Row) -> Packed:
        """With one row more."""
        shared = self.share_prefix and row[2] == self.group
        return Packed(self.share_prefix, self.tokens + row[1] + (0 if shared else row[0]), row[2])


Load = Padded | Packed


def cost(table: Sequence[Row], rows: Sequence[int], load: Load) -> int:
    """Tokens of the rows with these numbers, in this order."""
    for row in rows:
        load = load.plus(table[row])
    return load.tokens


def cut(table: Sequence[Row], order: Sequence[int], cap: int, load: Load) -> list[list[int]]:
    """Rows in order, in stretches of at most `cap` tokens; a row above it is a stretch of its own."""
    out: list[list[int]] = []
    now = load
    for row in order:
        more = now.plus(table[row])
        if out and more.tokens <= cap:
            out[-1].append(row)
            now = more
        else:
            out.append([row])
            now = load.plus(table[row])
    return out


def stretches(table: Sequence[Row], order: Sequence[int], parts: int, load: Load) -> list[list[int]]:
    """Rows in order, in `parts` stretches whose largest costs as little as it can; one of them is empty only where rows are fewer."""
    low, high = 0, max(cost(table, order, load), 1)
    while low < high:
        middle = (low + high) // 2
        if len(cut(table, order, middle, load)) <= parts:
            high = middle
        else:
            low = middle + 1
    out = cut(table, order, high, load)
    while len(out) < min(parts, len(order)):
        longest = max(range(len(out)), key=lambda i: len(out[i]))
        half = len(out[longest]) // 2
        out[longest : longest + 1] = [out[longest][:half], out[longest][half:]]
    return out + [[] for _ in range(parts - len(out))]


def too_large(table: Sequence[Row], parts: Sequence[Sequence[int]], budget: int, load: Load) -> bool:
    """Whether a part of more than one row is over the budget."""
    return any(len(part) > 1 and cost(table, part, load) > budget for part in parts)


def least(enough: Callable[[int], bool]) -> int:
    """A number from 1 that is enough where one less is not: doubled until it is, then halved in between."""
    high = 1
    while not enough(high):
        high *= 2
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


def row_facts(left: bool, drop_still: bool) -> Callable[[MicroBatch], Tensor]:
    """
    Prompt tokens, completion tokens and whether it counts, of a micro-batch's rows: a function that gives (B, 3).

    Args:
        left: whether padding on the left is taken away. drop_still: whether rows whose advantage is 0 do not count.
    """

    def facts(micro: MicroBatch) -> Tensor:
        completion = micro["completion_mask"].sum(1)
        prompt = micro["prompt_mask"].sum(1) if left else torch.full_like(completion, micro["prompt_mask"].shape[1])
        counts = moving_rows(micro) if drop_still else torch.ones_like(completion)
        return torch.stack([prompt.float(), completion.float(), counts.float()], 1)

    return facts
