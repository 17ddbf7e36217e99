"""
Runs of test_invariance.py: algorithm, objective, layout, budget and split, each trained for three optimizer steps of 16 rows.

As a script, on any number of processes: trains the cells of a job one after another and saves their weights.
"""

import json
import sys
from pathlib import Path

import torch
from peft import LoraConfig
from toyrun import fixed_rollout, letter_reward, trainer, weights
from transformers import set_seed

from trl_lossplus import GRPOPlusConfig, GRPOPlusTrainer, PPOPlusConfig, PPOPlusTrainer

BASE = {"beta": 0.1, "num_iterations": 2, "optim": "sgd", "learning_rate": 0.3, "ddp_find_unused_parameters": False}
PPO = {"vf_coef": 0.5, "truncated_completions": "bootstrap", "num_generations": 4}
# Algorithm and objective; the sequence-level one beside the token-level one.
FAMILIES = {
    "GRPO ppo_clip": {"policy_loss": "ppo_clip"},
    "GRPO gspo": {"policy_loss": "gspo"},
    "PPO ppo_clip": {"policy_loss": "ppo_clip", "critic": "adapter", **PPO},
    "PPO gspo": {"policy_loss": "gspo", "critic": "shared", **PPO},
}
LAYOUTS = ("padded", "packed", "shared_prefix")
BUDGETS = (None, 40, 18)
SPLITS = (1, 2)  # micro-batches an optimizer step
EVERY = [(family, layout, budget, split) for family in FAMILIES for layout in LAYOUTS for budget in BUDGETS for split in SPLITS]


def train(toy, out, cell, processes=1):
    """The trained weights of a cell."""
    family, layout, budget, split = cell
    settings = {**BASE, **FAMILIES[family], "microbatch_layout": layout, "max_tokens_per_microbatch": budget}
    settings |= {"gradient_accumulation_steps": split, "per_device_train_batch_size": 16 // split // processes}
    set_seed(3)
    ppo = {"trainer_class": PPOPlusTrainer, "config_class": PPOPlusConfig} if "critic" in settings else {}
    classes = ppo or {"trainer_class": GRPOPlusTrainer, "config_class": GRPOPlusConfig}
    extra = {"peft_config": LoraConfig(r=4, target_modules="all-linear")} if settings.get("critic") == "adapter" else {}
    run = trainer(toy, out, reward=letter_reward, rollout=fixed_rollout, extra=extra, **classes, **settings)
    assert run.accelerator.num_processes == processes
    run.train()
    return weights(run), run.accelerator.is_main_process


def main():
    toy, out, cells = sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3])
    for number, cell in enumerate(cells):
        found, writes = train(toy, out / str(number), cell, processes=2)
        if writes:
            torch.save(found, out / f"{number}.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
