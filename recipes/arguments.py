"""A recipe's arguments: YAML and command line, the toy as default, and one line for what is wrong with them."""

from __future__ import annotations

import argparse
import difflib
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NoReturn

import torch
import yaml
from trl import ModelConfig, TrlParser

from trl_lossplus import GRPOPlusConfig, GRPOPlusTrainer, LossPlusError, PPOPlusConfig
from trl_lossplus.toy import TOY_TRAINING

from .data import GYM, DataSource
from .rewards import names as reward_names

TOY = "toy"
PPO_FIELDS = {item.name for item in fields(PPOPlusConfig)}


def _nothing(trainer: Any) -> str:
    return ""


@dataclass(frozen=True)
class Recipe:
    """
    What sets one script apart from another.

    Attributes:
        name: part of the default output folder.
        config_class: of the training arguments. trainer_class: takes them.
        toy: gives the training arguments' defaults on the toy.
        opening: a line about the trainer before it trains, "" for none.
        closing: what the last line says of the trainer after its model's folder.
    """

    name: str
    config_class: type[GRPOPlusConfig]
    trainer_class: type[GRPOPlusTrainer]
    toy: Callable[[], dict[str, Any]] = TOY_TRAINING.copy
    opening: Callable[[Any], str] = _nothing
    closing: Callable[[Any], str] = _nothing


def _field(help: str, default: Any = None) -> Any:
    return field(default=default, metadata={"help": help})


@dataclass
class RecipeArguments:
    """What a recipe needs beside the training's and the model's arguments. Names as TRL's where it has them."""

    dataset_name: str | None = _field(
        "toy, reasoning_gym:TASK, a .jsonl, .json, .parquet or .csv file, a folder, or a name on the hub. It needs a 'prompt' "
        "column. None, with no model either: the toy."
    )
    dataset_config: str | None = _field("Configuration of a hub dataset.")
    dataset_kwargs: dict | str | None = _field(
        "Settings of a reasoning_gym task (size, seed, and the task's own, for instance min_terms), or more arguments for "
        "load_dataset. A mapping in YAML, JSON on the command line."
    )
    dataset_train_split: str = _field("Split to train on.", "train")
    dataset_test_split: str = _field("Split to evaluate on, where eval_strategy is set.", "test")
    dataset_prompt_column: str | None = _field("Column that becomes 'prompt'.")
    dataset_answer_column: str | None = _field(
        "Column that becomes 'answer', which right_number, exact_match and math_accuracy read."
    )
    as_chat: bool = _field("Make a text prompt a user's message, so that the tokenizer's chat template applies.", False)
    system_prompt: str | None = _field("System message before each prompt; implies as_chat.")
    reward_funcs: list[str] | None = field(
        default=None,
        metadata={
            "help": f"Reward functions, one or more of {', '.join(reward_names())}, module:function, file.py:function, or a reward "
            "model. None: what belongs to the toy or to the reasoning_gym task."
        },
    )
    reward_kwargs: dict | str | None = _field(
        "Settings of reward functions by name, for instance {soft_overlong: {soft_punish_cache: 100}}. A mapping in YAML, JSON on the "
        "command line."
    )
    eval_holdout: int | None = _field(
        "So many different prompts of the dataset are kept out of training; before and after it the mean rewards on them are printed, "
        "and kept in holdout.json in output_dir. num_generations_eval completions of each, sampled as in training."
    )
    smollm2_dir: str | None = _field("Folder of the converted model for model_name_or_path=smollm2. None: in the user's cache.")

    def __post_init__(self) -> None:
        for name in ("dataset_kwargs", "reward_kwargs"):
            value = getattr(self, name)
            if isinstance(value, str):
                try:
                    setattr(self, name, json.loads(value))
                except json.JSONDecodeError as error:
                    raise LossPlusError(f"{name}={value!r} is not JSON ({error}).") from None
            if not isinstance(getattr(self, name), dict | None):
                raise LossPlusError(f"{name}={value!r} is not a mapping of names to values.")

    def source(self) -> DataSource:
        """The dataset that these arguments name."""
        assert self.dataset_name is not None  # `parse` fills it in
        return DataSource(
            name=self.dataset_name,
            config=self.dataset_config,
            kwargs=self.dataset_kwargs,  # type: ignore[arg-type]
            prompt_column=self.dataset_prompt_column,
            answer_column=self.dataset_answer_column,
            as_chat=self.as_chat,
            system_prompt=self.system_prompt,
        )

    def reward_names(self) -> list[str]:
        """
        The reward functions' names.

        Raises:
            LossPlusError: none is named, and the dataset has none of its own.
        """
        if self.reward_funcs:
            return self.reward_funcs
        if self.dataset_name == TOY:
            return ["keyword"]
        if (self.dataset_name or "").startswith(GYM):
            return ["reasoning_gym"]
        raise LossPlusError(f"reward_funcs is not set: dataset {self.dataset_name!r} has no reward of its own.")


class RecipeParser(TrlParser):
    """TrlParser that raises what is wrong as a LossPlusError, instead of printing three hundred options."""

    def error(self, message: str) -> NoReturn:
        """Raises LossPlusError; argparse would print the usage and exit."""
        raise LossPlusError(message)

    def refuse_unknown(self, names: Sequence[str], where: str) -> None:
        """Raises LossPlusError for a name that is no argument, with the nearest that is, or the recipe that has it."""
        known = {action.dest for action in self._actions}
        for name in names:
            if name in PPO_FIELDS - known:
                raise LossPlusError(f"{where}: {name} is a field of PPO alone, which has a critic. Take recipes/ppo.py.")
            if name not in known:
                close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
                hint = f" Did you mean {close[0]!r}?" if close else " See --help for all."
                raise LossPlusError(f"{where}: no argument is called {name!r}.{hint}")


def _option(word: str) -> str:
    return word.split("=", 1)[0].removeprefix("--").replace("-", "_")


def _read_yaml(words: list[str]) -> tuple[dict[str, Any], list[str]]:
    """The file behind --config, its `env` put into the environment, and the words without it. Raises LossPlusError."""
    if "--config" not in words:
        return {}, words
    at = words.index("--config")
    if at + 1 == len(words):
        raise LossPlusError("--config needs the path of a YAML file.")
    path = words[at + 1]
    try:
        values = yaml.safe_load(Path(path).read_text()) or {}
    except OSError as error:
        raise LossPlusError(f"--config {path}: cannot be read ({error.strerror}).") from None
    except yaml.YAMLError as error:
        raise LossPlusError(f"--config {path}: is not YAML ({' '.join(str(error).split())}).") from None
    if not isinstance(values, dict) or not isinstance(values.get("env") or {}, dict):
        raise LossPlusError(f"--config {path}: is not a mapping of names to values.")
    os.environ.update({name: str(value) for name, value in (values.pop("env", None) or {}).items()})
    return values, words[:at] + words[at + 2 :]


def _given(words: list[str], values: dict[str, Any]) -> dict[str, Any]:
    """
    What the user gave, by name; a null for model or dataset gives nothing.

    Of the command line only model and dataset have their values here, the others are True.
    """
    named = ("model_name_or_path", "dataset_name")
    peek = argparse.ArgumentParser(add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    for name in named:
        peek.add_argument(f"--{name}", f"--{name.replace('_', '-')}", dest=name, nargs="?")
    options = {_option(word): True for word in words if word.startswith("--")}
    given = {**values, **options, **vars(peek.parse_known_args(words)[0])}
    return {name: value for name, value in given.items() if value is not None or name not in named}


def on_cpu() -> bool:
    """Whether there is no accelerator, or `accelerate launch` was told not to use it."""
    return not torch.accelerator.is_available() or os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes")


def _defaults(recipe: Recipe, given: dict[str, Any], say: Callable[[str], None]) -> dict[str, Any]:
    """The defaults that differ from TRL's: the toy where nothing is named, and what a machine without accelerator needs."""
    model, dataset = given.get("model_name_or_path"), given.get("dataset_name")
    if (model is None) != (dataset is None):
        missing, there = ("dataset_name", f"model_name_or_path={model!r}") if dataset is None else ("model_name_or_path", dataset)
        raise LossPlusError(f"{missing} is not set, but {there} is. Set both, or neither for the toy.")
    model = TOY if model is None else model
    defaults: dict[str, Any] = {
        "model_name_or_path": model,
        "dataset_name": TOY if dataset is None else dataset,
        "output_dir": f"runs/{recipe.name}-{Path(str(model)).name}",
        "logging_steps": 1,
    }
    if model == TOY:
        defaults |= recipe.toy()
        if "num_train_epochs" in given:
            del defaults["max_steps"]
    elif on_cpu():
        precision = {} if {"bf16", "no_bf16", "fp16"} & set(given) else {"bf16": False}
        chosen = {**({} if "use_cpu" in given else {"use_cpu": True}), **precision}
        if chosen:
            say(f"no accelerator is used: {', '.join(f'{name}={value}' for name, value in chosen.items())}")
        defaults |= chosen
    return defaults


def parse(
    recipe: Recipe, argv: Sequence[str] | None = None, say: Callable[[str], None] = print
) -> tuple[RecipeArguments, Any, ModelConfig]:
    """
    The arguments: the command line over the YAML file behind `--config` over the recipe's defaults over TRL's.

    Args:
        recipe: whose configuration and defaults.
        argv: the command line's words; None: this process's.
        say: called with the line that tells of a choice made for the user.

    Raises:
        LossPlusError: whatever is wrong with them, be it found by us, by TRL or by transformers.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    words = [part for word in words for part in (word.split("=", 1) if word.startswith("--config=") else [word])]
    values, words = _read_yaml(words)
    parser = RecipeParser((RecipeArguments, recipe.config_class, ModelConfig))  # type: ignore[arg-type]
    parser.refuse_unknown(list(values), "--config")
    given = _given(words, values)
    values = {name: value for name, value in values.items() if name in given}
    parser.set_defaults_with_config(**{**_defaults(recipe, given, say), **values})
    try:
        *parsed, unknown = parser.parse_args_into_dataclasses(words, return_remaining_strings=True)
    except LossPlusError:
        raise
    except ValueError as error:
        raise LossPlusError(str(error)) from None
    parser.refuse_unknown([_option(word) for word in unknown], "command line")
    arguments, training, model = parsed
    return arguments, training, model
