"""Types of configuration fields: numbers and booleans as YAML, the command line or a program give them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, get_args, get_type_hints

from .functional.errors import LossPlusError, unknown_name

TRUE, FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")
# TRL's and transformers' fields that the loss and the schedule are worked out from: (kind, may be None, least value).
INHERITED: dict[str, tuple[type, bool, float | None]] = {
    "beta": (float, False, None), "epsilon": (float, False, None), "epsilon_high": (float, True, None), "delta": (float, True, None),
    "sapo_temperature_pos": (float, False, None), "sapo_temperature_neg": (float, False, None), "vespo_k_pos": (float, False, None),
    "vespo_lambda_pos": (float, False, None), "vespo_k_neg": (float, False, None), "vespo_lambda_neg": (float, False, None),
    "entropy_coef": (float, False, None), "top_entropy_quantile": (float, False, None),
    "off_policy_mask_threshold": (float, True, None), "temperature": (float, False, 1e-9), "learning_rate": (float, False, 0),
    "num_iterations": (int, False, 1), "num_generations": (int, False, 1), "num_generations_eval": (int, True, 1),
    "steps_per_generation": (int, True, 1), "generation_batch_size": (int, True, 1), "gradient_accumulation_steps": (int, False, 1),
    "per_device_train_batch_size": (int, False, 1), "per_device_eval_batch_size": (int, False, 1),
    "max_completion_length": (int, True, 1), "seed": (int, False, None),
}  # fmt: skip


def own_kinds(config_class: type) -> dict[str, tuple[type, bool, float | None]]:
    """
    {field: (kind, may be None, None)} of the fields whose annotation is a number or a boolean.

    Annotations are read, not `dataclasses.fields`: HfArgumentParser rewrites the latter's types.
    """
    kinds: dict[str, tuple[type, bool, float | None]] = {}
    for name, annotation in get_type_hints(config_class).items():
        members = get_args(annotation) or (annotation,)
        found = [member for member in members if member in (int, float, bool)]
        if len(found) == 1 and set(members) <= {found[0], type(None)}:
            kinds[name] = (found[0], type(None) in members, None)
    return kinds


def read(name: str, value: Any, kind: type, optional: bool, least: float | None = None) -> Any:
    """
    A field's value as its kind.

    Raises:
        LossPlusError: it is not of that kind, or below `least`.
    """
    wanted = {int: "a whole number", float: "a number", bool: "true or false"}[kind]
    wrong = LossPlusError(f"{name}={value!r}: it must be {wanted}{' or None' if optional else ''}.")
    if value is None:
        if optional:
            return None
        raise wrong
    if kind is bool:
        if isinstance(value, bool):
            return value
        if str(value).lower() in TRUE + FALSE:
            return str(value).lower() in TRUE
        raise wrong
    if isinstance(value, bool):
        raise wrong
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise wrong from None
    if kind is int:
        if not number.is_integer():
            raise wrong
        number = int(number)
    elif isinstance(value, int | float):
        number = value
    if least is not None and number < least:
        raise LossPlusError(f"{name}={value!r} is out of range: it must be {'> 0' if least == 1e-9 else f'>= {least:g}'}.")
    return number


def read_path(name: str, value: Any) -> str | None:
    """
    A field that holds a path, or a name.

    Raises:
        LossPlusError: it holds something else, or nothing.
    """
    if value is None:
        return None
    if not isinstance(value, str | os.PathLike) or not os.fspath(value):
        raise LossPlusError(f"{name}={value!r}: it must be a path or a name, or None.")
    return str(os.fspath(value))


def step_numbers(name: str, value: Any) -> list[int] | None:
    """
    A field that holds a list of optimizer steps.

    Raises:
        LossPlusError: it is no list, or something in it is no whole number >= 0.
    """
    if value is None:
        return None
    wrong = LossPlusError(f"{name}={value!r}: it must be a list of whole numbers >= 0, or None.")
    if not isinstance(value, list | tuple):
        raise wrong
    try:
        return [read(name, item, int, False, 0) for item in value]
    except LossPlusError:
        raise wrong from None


def words(name: str, value: Any, allowed: Sequence[str]) -> list[str] | None:
    """
    A field that holds one or several of `allowed`: a list, a text with commas, or a list of such texts (as the command line gives it).

    Raises:
        LossPlusError: a word that is not allowed, or none at all.
    """
    if value is None:
        return None
    parts = value if isinstance(value, list | tuple) else [value]
    found = [word.strip() if isinstance(word, str) else word for part in parts for word in _split(part)]
    for word in found or [""]:
        if word not in allowed:
            raise unknown_name(name, word, allowed)
    return list(dict.fromkeys(found))


def _split(part: Any) -> list[Any]:
    return part.split(",") if isinstance(part, str) else [part]
