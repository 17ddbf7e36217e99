"""
Reward functions by name: ours, TRL's, or the user's own as `module:function`.

A reward function takes `completions` (strings, or conversations), the dataset's columns by name, and returns one number (or
None: cannot be scored) a completion.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import re
import sys
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

from trl_lossplus import LossPlusError
from trl_lossplus.functional.errors import unknown_name
from trl_lossplus.toy import keyword_reward
from trl_lossplus.trainers.checks import check_model_path

Reward = Callable[..., list[float | None]]

_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def completion_text(completion: Any) -> str:
    """A completion's text: itself, or the joined contents of a conversation's messages."""
    return completion if isinstance(completion, str) else " ".join(str(message["content"]) for message in completion)


def last_number(text: str) -> float | None:
    """The last number in a text, thousands separators ignored; None where there is none."""
    numbers = _NUMBER.findall(re.sub(r"(?<=\d),(?=\d{3})", "", text))
    return float(numbers[-1]) if numbers else None


def right_number(completions: list, answer: list, **kwargs: Any) -> list[float | None]:
    """1 where the completion's last number equals the one in the `answer` column, else 0; None where that has no number."""
    wanted = [last_number(str(value)) for value in answer]
    found = [last_number(completion_text(completion)) for completion in completions]
    return [None if right is None else float(right == number) for right, number in zip(wanted, found, strict=True)]


def exact_match(completions: list, answer: list, **kwargs: Any) -> list[float | None]:
    """1 where the completion is the `answer` column's text, white space around it aside, else 0."""
    return [float(completion_text(done).strip() == str(right).strip()) for done, right in zip(completions, answer, strict=True)]


@lru_cache(maxsize=8)
def _task(description: str) -> Any:
    """The reasoning_gym dataset that a row's `task` column describes; its entries are made again, the same."""
    import reasoning_gym

    task = json.loads(description)
    return reasoning_gym.create_dataset(task["name"], **task["kwargs"])


def reasoning_gym_score(completions: list, task: list[str], entry: list[int], **kwargs: Any) -> list[float | None]:
    """
    The task's own scorer (0 to 1), for datasets named `reasoning_gym:TASK`.

    It is given what stands in the last `<answer>...</answer>`, or the whole completion where there is no such tag.
    """
    scores: list[float | None] = []
    for completion, description, index in zip(completions, task, entry, strict=True):
        text = completion_text(completion)
        tagged = _ANSWER.findall(text)
        dataset = _task(description)
        scores.append(float(dataset.score_answer((tagged[-1] if tagged else text).strip(), dataset[index])))
    return scores


OURS: dict[str, Reward] = {
    "keyword": keyword_reward,  # type: ignore[dict-item]
    "right_number": right_number,
    "exact_match": exact_match,
    "reasoning_gym": reasoning_gym_score,
}
TRLS = ("accuracy_reward", "reasoning_accuracy_reward", "think_format_reward")
MADE_BY_TRL = ("get_soft_overlong_punishment", "get_repetition_penalty_reward", "get_cosine_scaled_reward")


def _trl_reward(name: str, max_completion_length: int | None) -> Reward:
    """One of TRL's rewards; those that take settings get the paper's, relative to the completion length."""
    import trl.rewards

    made = getattr(trl.rewards, name)
    if name in TRLS:
        return made
    if name == "get_repetition_penalty_reward":
        return made()
    if max_completion_length is None:
        raise LossPlusError(f"reward function {name!r} needs max_completion_length, which is None.")
    if name == "get_cosine_scaled_reward":
        return made(max_len=max_completion_length)
    # DAPO: the last fifth of the room (4096 of 20480 tokens) is where the punishment grows.
    return made(max_completion_len=max_completion_length, soft_punish_cache=max(1, max_completion_length // 5))


def _module(where: str, name: str) -> ModuleType:
    """A module by its name, also from the current folder, or by its file."""
    if where.endswith(".py"):
        path = Path(where)
        if not path.is_file():
            raise LossPlusError(f"reward function {name!r}: there is no file {where}.")
        if path.stem in sys.modules and getattr(sys.modules[path.stem], "__file__", None) == str(path.resolve()):
            return sys.modules[path.stem]
        spec = importlib.util.spec_from_file_location(path.stem, path.resolve())
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[path.stem] = module
        spec.loader.exec_module(module)
        return module
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.import_module(where)
    except ModuleNotFoundError as error:
        if error.name is None or not (where == error.name or where.startswith(error.name + ".")):
            raise  # the module is there, and fails on an import of its own
        raise LossPlusError(f"reward function {name!r}: there is no module {where!r} (looked in {Path.cwd()} as well).") from None


def _own_reward(name: str) -> Reward:
    """The user's `module:function` or `file.py:function`."""
    where, _, attribute = name.rpartition(":")
    module = _module(where, name)
    function = getattr(module, attribute, None)
    if not callable(function):
        functions = [key for key, value in vars(module).items() if inspect.isfunction(value)]
        raise unknown_name(f"reward function in {where}", attribute, functions)
    return function


def reward_functions(names: Sequence[str], max_completion_length: int | None = None) -> list[Reward | str]:
    """
    Reward functions by name.

    Args:
        names: each one of ours or of TRL's by name, `module:function`, `file.py:function`, or a reward model: a local folder,
            or a hub name with its owner (`owner/name`), which stays a string for the trainer.
        max_completion_length: in tokens, for the rewards that look at length.

    Raises:
        LossPlusError: an unknown name (lists the allowed ones and the nearest), a module, function or model that is not there.
    """
    found: list[Reward | str] = []
    for name in names:
        if name in OURS:
            found.append(OURS[name])
        elif name in TRLS or name in MADE_BY_TRL:
            found.append(_trl_reward(name, max_completion_length))
        elif ":" in name:
            found.append(_own_reward(name))
        elif "/" in name or Path(name).is_dir():
            check_model_path(name, None)
            found.append(name)
        else:
            raise unknown_name("reward function", name, [*OURS, *TRLS, *MADE_BY_TRL, "module:function", "owner/reward_model"])
    return found
