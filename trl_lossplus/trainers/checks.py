"""What is checked before training starts: model, dataset, reward functions, dropout, positions."""

from __future__ import annotations

import logging
from typing import Any

from torch import nn
from transformers import AutoConfig

from ..functional.errors import LossPlusError
from .reward_functions import RewardBook, checked_reward

logger = logging.getLogger(__name__)


def check_model_path(model: Any, init_kwargs: dict[str, Any] | str | None, trust_remote_code: bool = False) -> None:
    """Raises LossPlusError when a model is named that neither the disk nor the hub has."""
    if not isinstance(model, str):
        return
    kwargs = init_kwargs if isinstance(init_kwargs, dict) else {}
    passed = {name: kwargs[name] for name in ("revision", "gguf_file", "subfolder") if name in kwargs}
    try:
        AutoConfig.from_pretrained(model, trust_remote_code=trust_remote_code, **passed)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise LossPlusError(f"model={model!r}: no such local folder, and not to be had from the hub ({reason})") from None


def check_dataset(name: str, dataset: Any) -> None:
    """Raises LossPlusError for a dataset that is missing, empty or has no `prompt` column."""
    if dataset is None:
        raise LossPlusError(f"{name} is None: GRPO needs a dataset with a 'prompt' column.")
    columns = getattr(dataset, "column_names", None)
    if columns is not None and "prompt" not in columns:
        raise LossPlusError(
            f"{name} has no 'prompt' column, but {', '.join(columns) or 'no column at all'}. Rename one to prompt."
        )
    if hasattr(dataset, "__len__") and len(dataset) == 0:
        raise LossPlusError(f"{name} is empty.")


def check_datasets(train_dataset: Any, eval_dataset: Any, prompts: int) -> None:
    """Raises LossPlusError for a training or evaluation dataset that cannot be used; `prompts`: those that one rollout takes."""
    check_dataset("train_dataset", train_dataset)
    check_rollout_size(train_dataset, prompts)
    for name, dataset in eval_dataset.items() if isinstance(eval_dataset, dict) else [("eval_dataset", eval_dataset)]:
        if dataset is not None:
            check_dataset(name, dataset)


def check_rollout_size(dataset: Any, prompts: int) -> None:
    """Raises LossPlusError when a rollout asks for more prompts than the dataset has: the sampler would give none at all."""
    if hasattr(dataset, "__len__") and len(dataset) < prompts:
        raise LossPlusError(
            f"train_dataset has {len(dataset)} prompts, and one rollout takes {prompts} (generation_batch_size / num_generations): no "
            "step could be trained. Lower per_device_train_batch_size, gradient_accumulation_steps or steps_per_generation, raise "
            "num_generations, or add prompts."
        )


def check_rewards(reward_funcs: Any, weights: list[float] | None, book: RewardBook) -> list[Any] | None:
    """
    The reward functions as a list, each callable one wrapped so that what it returns is checked.

    Args:
        weights: reward_weights. book: gets what the functions say of single tokens.

    Raises:
        LossPlusError: one is neither callable, nor a module, nor a model's name; not one weight a function.
    """
    if reward_funcs is None:
        return None
    funcs = reward_funcs if isinstance(reward_funcs, list) else [reward_funcs]
    for func in funcs:
        if not (isinstance(func, str | nn.Module) or callable(func)):
            raise LossPlusError(f"reward_funcs holds a {type(func).__name__}; allowed: a function, a model, or a model's name.")
    if weights is not None and len(weights) != len(funcs):
        raise LossPlusError(
            f"reward_weights={weights}: {len(weights)} weights for {len(funcs)} reward functions; it must hold one a function, or be None."
        )
    return [
        func if isinstance(func, str | nn.Module) else checked_reward(func, book, column) for column, func in enumerate(funcs)
    ]


def has_rotary_positions(model: nn.Module) -> bool:
    """
    Whether the model's attention sees positions relative to each other only, so that columns of left padding can go.

    Told by the rotary settings in its text configuration; a model without them (learned or counted positions) keeps its padding.
    """
    config = model.config.get_text_config()  # type: ignore[union-attr, operator]
    return any(getattr(config, name, None) is not None for name in ("rope_parameters", "rope_theta", "rope_scaling"))


def active_dropout(model: nn.Module) -> list[str]:
    """Names of the dropout modules that act in training mode."""
    return [name for name, module in model.named_modules() if isinstance(module, nn.Dropout) and module.p > 0]


def warn_of_dropout(model: nn.Module, ratio_is_one: bool) -> None:
    """
    Warns where dropout makes the first pass's importance ratio differ from 1.

    `ratio_is_one`: old log-probs are those of the very forward pass that is differentiated, so dropout cannot show.
    """
    names = active_dropout(model)
    if names and not ratio_is_one:
        shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        logger.warning(
            "Dropout acts in %s: old and new log-probs are taken under different dropout masks, so the importance ratio is not 1 "
            "even before the first update. Set disable_dropout=True, or lora_dropout=0.",
            shown,
        )
