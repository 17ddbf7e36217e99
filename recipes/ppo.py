"""
PPO with a chosen loss and critic, for `accelerate launch` or plain python.

    accelerate launch --config_file accelerate_configs/cpu.yaml recipes/ppo.py       # the toy: no arguments needed
    python recipes/ppo.py --config recipes/configs/ppo_lora.yaml --max_steps 20      # YAML, and overrides
    python recipes/ppo.py --critic shared --num_generations 4                        # another critic, more completions a prompt

Arguments: those of RecipeArguments (dataset and rewards), PPOPlusConfig (training, loss and critic) and trl.ModelConfig (model,
LoRA, quantization). Beside a path or a name on the hub, `critic_model_name_or_path` takes `toy_reward_model`, which is trained on
the spot. Wrong input ends in one line and exit status 2.
"""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # the repository's root, not this folder, is where imports start
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from recipes import runner
from recipes.arguments import Recipe
from recipes.report import explained_variance
from trl_lossplus import PPOPlusConfig, PPOPlusTrainer
from trl_lossplus.toy import TOY_TRAINING, toy_dataset

TOY_PPO: dict[str, Any] = {
    **TOY_TRAINING,
    "num_generations": 1,
    "num_iterations": 4,
    "learning_rate": 5e-4,
    "critic_learning_rate": 1e-3,
    "vf_coef": 0.5,
    "gae_lambda": 0.8,
    "max_steps": 400,
}
"""Training arguments with which the toy is learned by PPO with a critic of its own, but for the number of rows."""


def toy_training() -> dict[str, Any]:
    """`TOY_PPO`, with as many rows a process as the toy has prompts: with one completion a prompt, a rollout takes them all."""
    return {**TOY_PPO, "per_device_train_batch_size": len(toy_dataset()) // int(os.environ.get("WORLD_SIZE", "1"))}


def opening(trainer: PPOPlusTrainer) -> str:
    """The critic in one line."""
    args = trainer.args
    mine = sum(p.numel() for name, p in trainer.model.named_parameters() if trainer.critic.own(name))
    start = args.critic_model_name_or_path
    rate = args.learning_rate if args.critic_learning_rate is None else args.critic_learning_rate
    warmup = f", {args.critic_warmup_steps} steps alone" if args.critic_warmup_steps else ""
    return (
        f"critic: {trainer.critic.kind}{f' from {start}' if start else ''}, {mine} parameters of its own, "
        f"learning rate {rate:g}{warmup}"
    )


def closing(trainer: PPOPlusTrainer) -> str:
    """How good the critic became, and where it is."""
    first, most = explained_variance(trainer.state.log_history)
    return (
        f", explained variance {first:.3f} at first, {most:.3f} at most (mean of 10 logged steps), critic in "
        f"{Path(str(trainer.args.output_dir)) / 'critic'}"
    )


RECIPE = Recipe("ppo", PPOPlusConfig, PPOPlusTrainer, toy_training, opening, closing)
main = partial(runner.main, RECIPE)

if __name__ == "__main__":
    sys.exit(main())
