"""The configuration of the check: the loss is the user's, batch sizes, schedule and length are the check's own."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml

from ..cli import _mapping, choose_trainer, config_classes, field_names, left_aside, parse_config
from ..config import GRPOPlusConfig
from ..functional.errors import LossPlusError
from ..spec import LossSpec

# What the check sets, where the command line does not.
SETTINGS: dict[str, Any] = {
    "max_steps": 3, "per_device_train_batch_size": 16, "gradient_accumulation_steps": 2, "num_iterations": 2,
    "max_completion_length": 6, "learning_rate": 1e-2, "lr_scheduler_type": "constant", "warmup_steps": 0, "seed": 0,
    "temperature": 1.0, "gradient_checkpointing": False, "probes": "off", "report_to": "none", "disable_tqdm": True,
    "save_strategy": "no", "eval_strategy": "no", "logging_strategy": "no",
}  # fmt: skip
# TRL's fields, and ours beside LossSpec's, that are part of the loss and so are read from a recipe.
LOSS_FIELDS = (
    "loss_type", "mask_truncated_completions", "use_adaptive_entropy", "entropy_coef_min", "entropy_coef_max",
    "entropy_coef_delta", "entropy_target", "reward_weights", "multi_objective_aggregation", "critic", "critic_detach",
    "truncated_completions", "missing_eos_penalty", "rollout_is_correction", "vllm_importance_sampling_mode",
    "vllm_importance_sampling_clip_min", "vllm_importance_sampling_clip_max",
)  # fmt: skip


def loss_fields(values: dict[str, Any], kind: type[GRPOPlusConfig]) -> dict[str, Any]:
    """Of a recipe's keys, those that are part of the loss."""
    allowed = {item.name for item in dataclasses.fields(LossSpec)} | set(LOSS_FIELDS)
    return {key: value for key, value in values.items() if key in allowed and key in field_names(kind)}


def build_config(
    words: Sequence[str], file: str | None, named: str | None, folder: str, say: Callable[[str], Any]
) -> GRPOPlusConfig:
    """
    The configuration of the check: the loss from the recipe and the command line, the rest its own.

    Raises:
        LossPlusError: see `cli.parse_config`.
    """
    recipe = {} if file is None else _mapping(file)
    trainer = choose_trainer(named, recipe, words, say)
    kind = config_classes()[trainer]
    of_loss = loss_fields(recipe, kind)
    everything = field_names(config_classes()["ppo"])
    for line in left_aside(recipe, field_names(kind), everything)[1:]:
        say(line)
    aside = [key for key in recipe if key not in of_loss]
    if aside:
        say(f"of the recipe, not part of the loss: {', '.join(aside)}")
    values = {**SETTINGS, "output_dir": folder, **of_loss}
    if trainer == "grpo":
        values["num_generations"] = 4
    path = Path(folder) / "check.yaml"
    path.write_text(yaml.safe_dump(values))
    config = parse_config(["--config", str(path), *words, "--trainer", trainer], say=lambda line: None)
    if config.use_vllm:
        raise LossPlusError("use_vllm=True: the check samples its own completions, on the CPU. Remove it.")
    return config
