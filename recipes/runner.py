"""
What the recipes share: from the words of a command line to a trained and saved model.

A script names its configuration and trainer in a `Recipe` and calls `main` with it. Wrong input ends in one line and exit status 2.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from trl import ModelConfig, get_peft_config, get_quantization_config

from trl_lossplus import GRPOPlusConfig, GRPOPlusTrainer, LossPlusError, PPOPlusConfig
from trl_lossplus.toy import save_toy
from trl_lossplus.trainers.output import check_output

from .arguments import TOY, Recipe, RecipeArguments, on_cpu, parse
from .holdout import Holdout, hold_out
from .report import describe_loss, last_line, use_step_lines
from .rewards import reward_functions
from .smollm2 import smollm2
from .stopping import LIBRARIES, TRAINERS, end, rank, refusals
from .toy_reward_model import TOY_REWARD_MODEL, toy_reward_model


def say(line: str) -> None:
    """Prints on the main process."""
    if rank() == 0:
        print(line, flush=True)


def model_folder(name: str, arguments: RecipeArguments, output: Path) -> str:
    """A model's path or hub name; `toy`, `toy_reward_model` and `smollm2` are made where they are not there yet."""
    if name == TOY_REWARD_MODEL:
        return toy_reward_model(model_folder(TOY, arguments, output), output / "toy_reward_model")
    if name == TOY:
        if on_cpu():
            torch.set_num_threads(1)  # its matrices are too small for more, and results do not depend on the machine's cores
        return save_toy(output / "toy_base")
    if name == "smollm2":
        return smollm2(arguments.smollm2_dir)
    return name


def model_settings(training: GRPOPlusConfig, model: ModelConfig) -> dict[str, Any]:
    """The trainer's arguments that come from TRL's ModelConfig; completes `training.model_init_kwargs`."""
    given = training.model_init_kwargs
    training.model_init_kwargs = {
        "revision": model.model_revision,
        "attn_implementation": model.attn_implementation,
        "dtype": model.dtype,
        **(given if isinstance(given, dict) else {}),
    }
    try:
        settings: dict[str, Any] = {"peft_config": get_peft_config(model)}
    except ValueError as error:  # PEFT is not installed
        raise LossPlusError(f"use_peft=True: {error}") from None
    quantization = get_quantization_config(model)
    return settings if quantization is None else {**settings, "quantization_config": quantization}


def check_processes(trainer: GRPOPlusTrainer) -> None:
    """
    Says how many processes train together.

    Raises:
        LossPlusError: the launcher started more, so that each would train alone.
    """
    accelerator = trainer.accelerator
    started, together = int(os.environ.get("WORLD_SIZE", "1")), accelerator.num_processes
    if started != together:
        raise LossPlusError(
            f"the launcher started {started} processes, but each of them sees {together}: they would train apart. On a machine "
            "without GPUs set use_cpu=True; on one with GPUs take accelerate_configs/multi_gpu.yaml."
        )
    say(f"processes: {together} ({accelerator.distributed_type.value}, device {accelerator.device.type})")


def build_trainer(recipe: Recipe, arguments: RecipeArguments, training: GRPOPlusConfig, model: ModelConfig) -> GRPOPlusTrainer:
    """
    The recipe's trainer, as the arguments describe it.

    Raises:
        LossPlusError: a model, dataset, reward function, checkpoint or output folder that is not to be had.
    """
    resume = training.resume_from_checkpoint
    if isinstance(resume, str) and not Path(resume).is_dir():
        raise LossPlusError(f"resume_from_checkpoint={resume!r}: there is no such folder.")
    if isinstance(resume, str) and not (Path(resume) / "trainer_state.json").is_file():
        inside = sorted(path.name for path in Path(resume).glob("checkpoint-*"))
        hint = f"; inside are {', '.join(inside[-3:])}" if inside else ""
        raise LossPlusError(f"resume_from_checkpoint={resume!r} is no checkpoint: it has no trainer_state.json{hint}.")
    rewards = reward_functions(arguments.reward_names(), training.max_completion_length, arguments.reward_kwargs)  # type: ignore[arg-type]
    output = check_output(training.output_dir)
    source = arguments.source()
    with training.main_process_first(desc="model and dataset"):
        path = model_folder(str(model.model_name_or_path), arguments, output)
        if isinstance(training, PPOPlusConfig) and training.critic_model_name_or_path is not None:
            training.critic_model_name_or_path = model_folder(training.critic_model_name_or_path, arguments, output)
        train_dataset, held_out = source.load(arguments.dataset_train_split), None
        if arguments.eval_holdout is not None:
            train_dataset, held_out = hold_out(train_dataset, arguments.eval_holdout, training.seed)
        evaluates = training.eval_strategy != "no"
        eval_dataset = source.load(arguments.dataset_test_split) if evaluates else None
    trainer = recipe.trainer_class(
        model=path,
        reward_funcs=rewards,
        args=training,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        **model_settings(training, model),
    )
    if held_out is not None:
        trainer.add_callback(Holdout(trainer, held_out, say))
    return trainer


def run(recipe: Recipe, argv: Sequence[str] | None = None) -> None:
    """Trains, saves, and prints what happened."""
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # for the user's own package.module:function
    with refusals(LIBRARIES):
        arguments, training, model = parse(recipe, argv, say)
        trainer = build_trainer(recipe, arguments, training, model)
    use_step_lines(trainer)
    check_processes(trainer)
    say(f"loss: {describe_loss(trainer.spec)}")
    opening = recipe.opening(trainer)
    if opening:
        say(opening)
    with refusals(TRAINERS):
        result = trainer.train(resume_from_checkpoint=training.resume_from_checkpoint)
    trainer.save_model(training.output_dir)
    if trainer.is_world_process_zero():
        trainer.state.save_to_json(str(Path(str(training.output_dir)) / "trainer_state.json"))
    if training.push_to_hub:
        trainer.push_to_hub(dataset_name=arguments.dataset_name)
    closing = last_line(
        trainer.state.log_history, trainer.state.global_step, result.metrics["train_runtime"], str(training.output_dir)
    )
    trainer.end()
    say(closing + recipe.closing(trainer))


def main(recipe: Recipe, argv: Sequence[str] | None = None) -> int:
    """
    Runs, and turns wrong input into one line.

    Returns:
        The exit status: 0, 2 for wrong input, 1 for a run that a guard stopped. Anything else that goes wrong is raised.
    """
    try:
        run(recipe, argv)
    except Exception as error:
        return end(error)
    return 0
