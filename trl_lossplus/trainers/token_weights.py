"""Token weights from a user's function: lists of floats, or spans of characters, to a tensor beside the completion tokens."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..functional.errors import LossPlusError
from ..spec import LossSpec

TokenWeightFunc = Callable[..., list[Any]]
Span = tuple[int, int, float]  # first character, one past the last, weight


def token_at(character: int, ids: Sequence[int], decode: Callable[[list[int]], str]) -> int:
    """
    The token that holds a character of the decoded completion, as its index in `ids`. `decode` keeps special tokens out.

    It is the first with which the tokens so far make more text than comes before the character; a few prefixes are decoded.
    """
    return bisect_right(range(len(ids)), character, key=lambda t: len(decode(list(ids[: t + 1]))))


def spans_to_weights(spans: Sequence[Span], ids: Sequence[int], decode: Callable[[list[int]], str]) -> list[float]:
    """
    Weights by token from spans of characters.

    A token gets the weight of the last span that it shares a character with, else 1; one without text that of a span around it.
    """
    weights, characters = [1.0] * len(ids), len(decode(list(ids)))
    for first, last, weight in spans:
        first, last = max(first, 0), min(last, characters)
        if first < last:
            for t in range(token_at(first, ids, decode), token_at(last - 1, ids, decode) + 1):
                weights[t] = float(weight)
    return weights


def check_function(spec: LossSpec, func: TokenWeightFunc | None) -> None:
    """Raises LossPlusError where the objective reads token weights and nothing gives them."""
    if "token_weights" in spec.required() and func is None:
        raise LossPlusError(f"policy_loss {spec.policy_loss!r} reads token_weights: pass token_weight_func to the trainer.")


def evaluate(
    func: TokenWeightFunc,
    prompts: list[Any],
    completions: list[Any],
    completion_ids: list[list[int]],
    columns: dict[str, list[Any]],
    decode: Callable[[list[int]], str],
) -> list[list[float]]:
    """
    Calls the user's function and checks what it gives.

    Args:
        func: called with prompts, completions, completion_ids and the dataset's columns as keywords; returns, for each completion, a
            list of as many floats as it has tokens, or a list of (first character, one past the last, weight) triples, or None (1 each).

    Returns:
        One list of floats a completion, as long as its tokens.

    Raises:
        LossPlusError: the wrong number of lists, a list of the wrong length, or a weight that is no finite number; names the row.
    """
    name = getattr(func, "__name__", type(func).__name__)
    given = func(prompts=prompts, completions=completions, completion_ids=completion_ids, **columns)
    if not isinstance(given, list | tuple) or len(given) != len(completion_ids):
        size = len(given) if hasattr(given, "__len__") else type(given).__name__
        raise LossPlusError(
            f"token_weight_func {name!r} returned {size} lists for {len(completion_ids)} completions; it must be one each."
        )
    return [_row(name, i, row, ids, decode) for i, (row, ids) in enumerate(zip(given, completion_ids, strict=True))]


def _row(name: str, i: int, row: Any, ids: list[int], decode: Callable[[list[int]], str]) -> list[float]:
    if row is None:
        return [1.0] * len(ids)
    if isinstance(row, Tensor):
        row = row.tolist()
    if not isinstance(row, list | tuple):
        raise LossPlusError(
            f"token_weight_func {name!r}, row {i}: a {type(row).__name__}; it must be a list of floats or of spans."
        )
    if row and all(isinstance(part, list | tuple) and len(part) == 3 for part in row):
        row = spans_to_weights([(int(a), int(b), float(w)) for a, b, w in row], ids, decode)
    if len(row) != len(ids):
        raise LossPlusError(f"token_weight_func {name!r}, row {i}: {len(row)} weights for a completion of {len(ids)} tokens.")
    for t, weight in enumerate(row):
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not math.isfinite(weight):
            raise LossPlusError(f"token_weight_func {name!r}, row {i}: weight {weight!r} of token {t} is no finite number.")
    return [float(weight) for weight in row]


def as_tensor(rows: list[list[float]], width: int, device: torch.device) -> Tensor:
    """(B, width) float32, 1 beyond each row's tokens (which are padding)."""
    return torch.tensor([row + [1.0] * (width - len(row)) for row in rows], dtype=torch.float32, device=device)
