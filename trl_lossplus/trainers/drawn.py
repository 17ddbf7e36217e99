"""Completions that were generated and scored, row by row: what can be kept, left out, or sent to another process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..functional.errors import LossPlusError

# TRL's generation step returns, in this order: prompt ids, completion ids, tool mask, completions, the sampler's log-probs, columns of
# a rollout function's own, images, images that tools gave. Each is a list with one entry a row, or None (or empty) for all rows.
COMPLETION_IDS, TOOL_MASK, COMPLETIONS, LOGPROBS, EXTRA_FIELDS, IMAGES = 1, 2, 3, 4, 5, 6
Generated = tuple[Any, ...]


@dataclass
class DrawnRow:
    """
    One scored completion.

    example: the dataset's row, with the columns that a rollout function added. generated: what generation gave for it, in TRL's
    order, None where it gave nothing. logged: what reward functions logged for it, by column. beside: what else they left for it.
    """

    example: dict[str, Any]
    generated: Generated
    logged: dict[str, Any]
    beside: Any = None


class Drawn(Exception):
    """Ends TRL's method once completions are generated and scored: `result` holds the rows and the gathered (N, K) rewards."""

    def __init__(self, result: tuple[list[DrawnRow], Tensor]):
        self.result = result


def as_rows(
    examples: Sequence[dict[str, Any]], generated: Generated, logged: dict[str, list[Any]], beside: Sequence[Any]
) -> list[DrawnRow]:
    """
    What generation and the reward functions gave for these examples, row by row.

    Raises:
        LossPlusError: images, which are not kept by row; a logged column without one value a row.
    """
    if generated[IMAGES] is not None:
        raise LossPlusError(
            "zero_std_groups='resample' does not take prompts with images: their tensors cannot be told apart by row. "
            "Set zero_std_groups to keep or drop."
        )
    for name, values in logged.items():
        if len(values) != len(examples):
            raise LossPlusError(
                f"log_extra: column {name!r} got {len(values)} values for {len(examples)} completions; it must be one each."
            )
    columns = [None if place == EXTRA_FIELDS else values for place, values in enumerate(generated)]
    return [
        DrawnRow(
            example,
            tuple(values[i] if values else None for values in columns),
            {name: values[i] for name, values in logged.items()},
            beside[i],
        )
        for i, example in enumerate(examples)
    ]


def as_generated(rows: Sequence[DrawnRow]) -> Generated:
    """
    What TRL's generation step would have returned for these rows; a rollout function's columns are in the examples already.

    Raises:
        LossPlusError: some rows have the sampler's log-probs, or a tool mask, and others have none.
    """
    columns: list[Any] = [list(column) for column in zip(*(row.generated for row in rows), strict=True)]
    for place, words in ((LOGPROBS, "logprobs"), (TOOL_MASK, "env_mask")):
        missing = [value is None for value in columns[place]]
        if any(missing) and not all(missing):
            raise LossPlusError(f"rollout_func gave {words} in some of its calls and none in others; give them always or never.")
    for place in (TOOL_MASK, LOGPROBS, IMAGES):
        if columns[place][0] is None:
            columns[place] = None
    columns[EXTRA_FIELDS] = {}
    return tuple(columns)
