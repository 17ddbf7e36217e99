"""
Rewards for the right answer: 1 or 0 against the `answer` column, or a reasoning_gym task's own score.

Each takes `completions`, strings or conversations, and None stands for a row that cannot be scored.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from trl_lossplus import LossPlusError

_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
_ALONE = re.compile(r"\s*(-?\d[\d,]*(?:\.\d+)?)\.?\s*")
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def completion_text(completion: Any) -> str:
    """A completion's text: itself, or the joined contents of a conversation's messages."""
    return completion if isinstance(completion, str) else " ".join(str(message["content"]) for message in completion)


def tagged(text: str) -> str:
    """What stands in the last `<answer>...</answer>`, or the whole text where there is no such tag."""
    found = _ANSWER.findall(text)
    return (found[-1] if found else text).strip()


def last_number(text: str) -> float | None:
    """The last number in a text, thousands separators ignored; None where there is none."""
    numbers = _NUMBER.findall(re.sub(r"(?<=\d),(?=\d{3})", "", text))
    return float(numbers[-1]) if numbers else None


def right_number(completions: list, answer: list, **kwargs: Any) -> list[float | None]:
    """1 where the completion's last number equals the last one in the `answer` column, else 0; None where that has no number."""
    wanted = [last_number(str(value)) for value in answer]
    found = [last_number(completion_text(completion)) for completion in completions]
    return [None if right is None else float(right == number) for right, number in zip(wanted, found, strict=True)]


def number_alone(completions: list, answer: list, **kwargs: Any) -> list[float | None]:
    """`right_number`, but 0 too where the completion holds anything beside the number (white space and a full stop aside)."""
    alone = [_ALONE.fullmatch(completion_text(completion)) is not None for completion in completions]
    scores = right_number(completions, answer)
    return [None if score is None else score * bare for score, bare in zip(scores, alone, strict=True)]


def exact_match(completions: list, answer: list, **kwargs: Any) -> list[float | None]:
    """1 where the completion is the `answer` column's text, white space around it aside, else 0."""
    return [float(completion_text(done).strip() == str(right).strip()) for done, right in zip(completions, answer, strict=True)]


def math_accuracy(
    completions: list, answer: Sequence[Any] | None = None, solution: Sequence[Any] | None = None, **kwargs: Any
) -> list[float | None]:
    """
    1 where math-verify finds the completion's answer equal to the one in the `answer` (or `solution`) column, else 0.

    Of the column, what follows the last `####` counts (GSM8K), else all of it, plain or LaTeX; None where it holds no expression.
    Of the completion, what stands in the last `<answer>` tag, else all of it, where math-verify takes the last `\\boxed{}`, formula
    or number that it finds.

    Raises:
        LossPlusError: math-verify is not installed, or there is neither column.
    """
    try:
        from math_verify import parse, verify
    except ImportError:
        raise LossPlusError("reward math_accuracy needs the math-verify package: pip install 'trl-lossplus[real]'.") from None
    column = answer if answer is not None else solution
    if column is None:
        raise LossPlusError(
            "reward math_accuracy: the dataset has neither an 'answer' nor a 'solution' column (dataset_answer_column)."
        )
    alone = (
        threading.current_thread() is not threading.main_thread()
    )  # its time limits are signals, which only the main thread gets
    limits: tuple[dict[str, Any], dict[str, Any]] = ({"parsing_timeout": None}, {"timeout_seconds": None}) if alone else ({}, {})
    scores: list[float | None] = []
    for completion, right in zip(completions, column, strict=True):
        wanted = str(right).rpartition("####")[2].strip()
        gold = parse(wanted, **limits[0]) or parse(f"${wanted}$", **limits[0])
        found = parse(tagged(completion_text(completion)), **limits[0]) if gold else []
        scores.append(float(verify(gold, found, **limits[1])) if gold else None)
    return scores


@lru_cache(maxsize=8)
def _task(description: str) -> Any:
    """The reasoning_gym dataset that a row's `task` column describes; its entries are made again, the same."""
    import reasoning_gym

    task = json.loads(description)
    return reasoning_gym.create_dataset(task["name"], **task["kwargs"])


def reasoning_gym_score(completions: list, task: list[str], entry: list[int], **kwargs: Any) -> list[float | None]:
    """The task's own scorer (0 to 1) of the last `<answer>`, or of the whole completion, for datasets named reasoning_gym:TASK."""
    scores: list[float | None] = []
    for completion, description, index in zip(completions, task, entry, strict=True):
        dataset = _task(description)
        scores.append(float(dataset.score_answer(tagged(completion_text(completion)), dataset[index])))
    return scores
