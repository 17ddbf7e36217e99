"""Rewards for how a completion looks: its form and its length. Their fields are the settings that `reward_kwargs` may name."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from trl_lossplus import LossPlusError

from .answers import completion_text

THINK_ANSWER = r"\s*<think>(?:(?!</?think>).)*</think>\s*<answer>(?:(?!</?answer>).)*</answer>\s*"


@dataclass(frozen=True)
class Format:
    """1 where the whole completion matches `pattern` (a regular expression; `<think>..</think><answer>..</answer>`), else 0."""

    pattern: str = THINK_ANSWER
    __name__ = "format"

    def __post_init__(self) -> None:
        try:
            re.compile(self.pattern, re.DOTALL)
        except (re.error, TypeError) as error:
            raise LossPlusError(
                f"reward_kwargs: pattern={self.pattern!r} of format is no regular expression ({error})."
            ) from None

    def __call__(self, completions: list, **kwargs: Any) -> list[float | None]:
        form = re.compile(self.pattern, re.DOTALL)
        return [float(form.fullmatch(completion_text(completion)) is not None) for completion in completions]


@dataclass(frozen=True)
class LengthTarget:
    """Minus the distance from `tokens` (required) tokens as a part of them, at least -1: 0 at the target, -0.5 at half of it."""

    tokens: int | None = None
    __name__ = "length_target"

    def __post_init__(self) -> None:
        if not isinstance(self.tokens, int) or self.tokens < 1:
            raise LossPlusError(f"reward_kwargs: tokens={self.tokens!r} of length_target must be a whole number of at least 1.")

    def __call__(self, completion_ids: list[list[int]], **kwargs: Any) -> list[float | None]:
        assert self.tokens is not None
        return [max(-1.0, -abs(len(ids) - self.tokens) / self.tokens) for ids in completion_ids]
