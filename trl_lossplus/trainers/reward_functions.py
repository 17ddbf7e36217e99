"""
Reward functions: wrapped so that what they return is checked, TRL gets one number a completion, and token rewards are kept beside.

A function returns, for each completion, one of

    0.5                                   a number: the completion's reward
    None                                  not scored by this function
    [0.0, 0.2, 0.3]                       a number for each token of the completion (list, tuple, array or tensor)
    {"token": {3: 0.5, -1: 1.0}}          rewards of tokens by their index
    {"char": {17: 1.0}}                   of the token that holds this character of the decoded completion (special tokens left out)
    {"turn": {0: 0.2, -1: 1.0}}           of the last token of a turn: a stretch of the model's own tokens between tool outputs

Negative indexes count from the end; the keys of one dictionary add up. TRL sees the sum; see `token_rewards` for where each part goes.
"""

from __future__ import annotations

import inspect
import logging
import math
import operator
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

from ..functional.errors import LossPlusError, unknown_name

logger = logging.getLogger(__name__)

PLACES = ("token", "char", "turn")
# What a function said of one completion's tokens: a number each, or {place: {index: number}}.
Parts = list[float] | dict[str, dict[int, float]]


class RewardBook:
    """
    What the reward functions said of single tokens since the last `take`, by column; and which were told of a nan.

    try_out: called with a function's name, its parts and the token ids, while the function is called, so that an error is that function's.
    """

    def __init__(self) -> None:
        self.try_out: Callable[[str, list[Parts | None], list[list[int]]], None] | None = None
        self.warned: set[str] = set()
        self._columns: dict[int, list[Parts | None]] = {}
        self._rows: list[dict[int, Parts]] | None = None

    def put(self, column: int, parts: list[Parts | None]) -> None:
        """The parts of each completion by one function; None for a completion that got a number."""
        self._columns[column] = parts

    def put_back(self, rows: list[dict[int, Parts]]) -> None:
        """What an earlier `take` gave for these completions: the next one gives it again."""
        self._rows = rows

    def take(self, rows: int) -> list[dict[int, Parts]]:
        """{column: parts} of each of the last call's completions, which are then forgotten."""
        (columns, self._columns), (back, self._rows) = (self._columns, {}), (self._rows, None)
        if back is not None:
            return back
        return [{k: part for k, parts in columns.items() if (part := parts[i]) is not None} for i in range(rows)]

    def warn_of_nan(self, name: str, row: int, rows: int) -> None:
        """Says once a function that its nan counts as not scored."""
        if name not in self.warned:
            self.warned.add(name)
            logger.warning(
                "Reward function %r returned nan for completion %d of %d: it counts as not scored, as None does. Return None where that "
                "is meant; a nan is often a division by 0. (Said once.)",
                name,
                row,
                rows,
            )


def wrong(name: str, row: int, what: str) -> LossPlusError:
    """An error that names the function and the completion."""
    return LossPlusError(f"reward function {name!r}, completion {row}: {what}")


def _finite(name: str, row: int, where: str, value: Any) -> float:
    """A token's reward. Raises LossPlusError where it is no finite number."""
    if not isinstance(value, int | float) and not (hasattr(value, "__float__") and not hasattr(value, "__len__")):
        raise wrong(name, row, f"{value!r} for {where} is no number.")
    if not math.isfinite(float(value)):
        raise wrong(name, row, f"{value!r} for {where}: a token's reward must be finite.")
    return float(value)


def _placed(name: str, row: int, value: Mapping[Any, Any]) -> dict[str, dict[int, float]]:
    """A dictionary of rewards, checked. Raises LossPlusError for an unknown key, or what is no index or number."""
    parts: dict[str, dict[int, float]] = {}
    for place, rewards in value.items():
        if place not in PLACES:
            raise unknown_name(f"reward function {name!r}, completion {row}: key", place, PLACES)
        if not isinstance(rewards, Mapping):
            raise wrong(
                name,
                row,
                f"{place!r} holds {rewards!r}; it must map indexes to rewards, for instance {{{place!r}: {{-1: 1.0}}}}.",
            )
        parts[place] = {}
        for index, reward in rewards.items():
            try:
                where = operator.index(index) if not isinstance(index, bool) else None
            except TypeError:
                where = None
            if where is None:
                raise wrong(name, row, f"{index!r} is no index of a {place}: it must be a whole number.")
            parts[place][where] = _finite(name, row, f"{place} {index}", reward)
    return parts


def _read(name: str, row: int, value: Any) -> tuple[float | None, Parts | None]:
    """The sum of what was returned for one completion, and its parts where it speaks of tokens. Raises LossPlusError."""
    if hasattr(value, "tolist"):  # torch, numpy
        value = value.tolist()
    if value is None:
        return None, None
    if isinstance(value, Mapping):
        placed = _placed(name, row, value)
        return math.fsum(r for rewards in placed.values() for r in rewards.values()), placed
    if isinstance(value, list | tuple):
        tokens = [_finite(name, row, f"token {t}", r) for t, r in enumerate(value)]
        return math.fsum(tokens), tokens
    if not isinstance(value, int | float) and not hasattr(value, "__float__"):
        raise LossPlusError(
            f"reward function {name!r} returned {value!r} for completion {row}; a reward is a number, None if not scored, a list of "
            f"numbers a token, or a dictionary with {', '.join(PLACES)}."
        )
    return float(value), None


def _check(name: str, rewards: Any, given: dict[str, Any], book: RewardBook, column: int) -> list[float | None]:
    """One number or None a completion; what was said of tokens goes into the book. Raises LossPlusError."""
    expected = len(given["completions"])
    if hasattr(rewards, "tolist"):  # torch, numpy
        rewards = rewards.tolist()
    if not hasattr(rewards, "__len__") or isinstance(rewards, str | Mapping):
        raise LossPlusError(
            f"reward function {name!r} returned {type(rewards).__name__}; it must return a list "
            f"of {expected} numbers, one a completion."
        )
    if len(rewards) != expected:
        raise LossPlusError(
            f"reward function {name!r} returned {len(rewards)} rewards for {expected} completions; it must return "
            "one a completion."
        )
    read = [_read(name, i, value) for i, value in enumerate(rewards)]
    for i, (total, _) in enumerate(read):
        if total is not None and math.isnan(total):
            book.warn_of_nan(name, i, expected)
            break
    if any(parts is not None for _, parts in read):
        book.put(column, [parts for _, parts in read])
        if book.try_out is not None:
            book.try_out(name, [parts for _, parts in read], given["completion_ids"])
    return [total for total, _ in read]


def checked_reward(func: Callable[..., Any], book: RewardBook, column: int) -> Callable[..., Any]:
    """A reward function (plain or async) whose result is checked: one number or None a completion. Keeps its name."""
    name = getattr(func, "__name__", type(func).__name__)

    def check_call(args: Any, kwargs: Any) -> None:
        try:
            inspect.signature(func).bind(*args, **kwargs)
        except TypeError as error:
            raise LossPlusError(
                f"reward function {name!r} cannot be called with what it is given: {error}. It gets {', '.join(sorted(kwargs))} by name; "
                "let it end in **kwargs, and see that the dataset has the columns that it needs."
            ) from None
        except ValueError:
            pass  # no signature to look at

    if inspect.iscoroutinefunction(func) or inspect.iscoroutinefunction(getattr(func, "__call__", None)):  # noqa: B004

        async def checked(*args: Any, **kwargs: Any) -> list[float | None]:
            check_call(args, kwargs)
            return _check(name, await func(*args, **kwargs), kwargs, book, column)

    else:

        def checked(*args: Any, **kwargs: Any) -> list[float | None]:  # type: ignore[misc]
            check_call(args, kwargs)
            return _check(name, func(*args, **kwargs), kwargs, book, column)

    result = wraps(func)(checked)
    result.__name__ = name
    return result
