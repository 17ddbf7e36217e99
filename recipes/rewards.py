"""
Reward functions by name: ours, TRL's, or the user's own as `module:function`.

A reward function takes `completions` (strings, or conversations), the dataset's columns by name, and returns one number (or
None: cannot be scored) a completion.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from trl_lossplus import LossPlusError
from trl_lossplus.functional.errors import unknown_name
from trl_lossplus.toy import keyword_reward
from trl_lossplus.trainers.checks import check_model_path

from .answers import exact_match, math_accuracy, number_alone, reasoning_gym_score, right_number
from .shapes import Format, LengthTarget

Reward = Callable[..., list[float | None]]
Settings = Mapping[str, Any]

READY: dict[str, Reward] = {
    "keyword": keyword_reward,  # type: ignore[dict-item]
    "right_number": right_number,
    "number_alone": number_alone,
    "exact_match": exact_match,
    "math_accuracy": math_accuracy,
    "reasoning_gym": reasoning_gym_score,
}
MADE: dict[str, Callable[..., Reward]] = {"format": Format, "length_target": LengthTarget}
TRLS = ("accuracy_reward", "reasoning_accuracy_reward", "think_format_reward")
# TRL's makers of rewards, and short names for them.
MADE_BY_TRL = {
    "get_soft_overlong_punishment": "soft_overlong",
    "get_repetition_penalty_reward": "repetition",
    "get_cosine_scaled_reward": "cosine_length",
}
SHORT = {short: name for name, short in MADE_BY_TRL.items()}


def names() -> list[str]:
    """Every reward that has a name."""
    return [*READY, *MADE, *SHORT, *TRLS, *MADE_BY_TRL]


def _made_by_trl(name: str, max_completion_length: int | None, settings: Settings) -> Reward:
    """One of TRL's rewards that take settings; where they are not given, the paper's, relative to the completion length."""
    import trl.rewards

    maker = getattr(trl.rewards, name)
    needs = {"get_cosine_scaled_reward": "max_len", "get_soft_overlong_punishment": "max_completion_len"}.get(name)
    chosen = dict(settings)
    if needs is not None and needs not in chosen:
        if max_completion_length is None:
            raise LossPlusError(
                f"reward function {name!r} needs max_completion_length, which is None, or {needs} in reward_kwargs."
            )
        chosen[needs] = max_completion_length
    if name == "get_soft_overlong_punishment" and "soft_punish_cache" not in chosen:
        # DAPO: the last fifth of the room (4096 of 20480 tokens) is where the punishment grows.
        chosen["soft_punish_cache"] = max(1, chosen["max_completion_len"] // 5)
    return _make(name, maker, chosen)


def _make(name: str, maker: Callable[..., Reward], settings: Settings) -> Reward:
    """Calls a maker with settings that it knows."""
    allowed = list(inspect.signature(maker).parameters)
    for setting in settings:
        if setting not in allowed:
            raise unknown_name(f"setting of reward {name}", setting, allowed)
    try:
        return maker(**settings)
    except (TypeError, ValueError) as error:
        if isinstance(error, LossPlusError):
            raise
        raise LossPlusError(f"reward_kwargs of {name}: {error}.") from None


@dataclass(frozen=True)
class Bound:
    """A user's reward function with settings, which go before a dataset's columns of the same name."""

    function: Reward
    settings: Settings

    @property
    def __name__(self) -> str:
        return getattr(self.function, "__name__", type(self.function).__name__)

    def __call__(self, **columns: Any) -> list[float | None]:
        return self.function(**{**columns, **self.settings})


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


def _own_reward(name: str, settings: Settings) -> Reward:
    """The user's `module:function` or `file.py:function`; with settings, these are handed to it as well."""
    where, _, attribute = name.rpartition(":")
    module = _module(where, name)
    function = getattr(module, attribute, None)
    if not callable(function):
        functions = [key for key, value in vars(module).items() if inspect.isfunction(value)]
        raise unknown_name(f"reward function in {where}", attribute, functions)
    return Bound(function, settings) if settings else function


def _one(name: str, max_completion_length: int | None, settings: Settings) -> Reward | str:
    if name in MADE:
        return _make(name, MADE[name], settings)
    if name in MADE_BY_TRL or name in SHORT:
        return _made_by_trl(SHORT.get(name, name), max_completion_length, settings)
    if name not in READY and name not in TRLS and ":" in name:
        return _own_reward(name, settings)
    if settings:
        raise LossPlusError(f"reward_kwargs: {name} takes no settings, and got {', '.join(settings)}.")
    if name in READY:
        return READY[name]
    if name in TRLS:
        import trl.rewards

        return getattr(trl.rewards, name)
    if "/" in name or Path(name).is_dir():
        check_model_path(name, None)
        return name
    raise unknown_name("reward function", name, [*names(), "module:function", "owner/reward_model"])


def reward_functions(
    chosen: Sequence[str], max_completion_length: int | None = None, settings: Mapping[str, Settings] | None = None
) -> list[Reward | str]:
    """
    Reward functions by name.

    Args:
        chosen: each one of `names()`, `module:function`, `file.py:function`, or a reward model: a local folder, or a hub name with
            its owner (`owner/name`), which stays a string for the trainer.
        max_completion_length: in tokens, for the rewards that look at length.
        settings: by name; of `format`, `length_target`, TRL's makers, or a function of the user's.

    Raises:
        LossPlusError: an unknown name (lists the allowed ones and the nearest), a module, function or model that is not there;
            settings of a reward that is not chosen, that it does not have, or that are out of range.
    """
    settings = settings or {}
    for name, values in settings.items():
        if name not in chosen:
            raise unknown_name("reward_kwargs for a reward that is not in reward_funcs, ", name, chosen)
        if not isinstance(values, Mapping):
            raise LossPlusError(f"reward_kwargs: {name}={values!r} is not a mapping of settings to values.")
    return [_one(name, max_completion_length, settings.get(name, {})) for name in chosen]
