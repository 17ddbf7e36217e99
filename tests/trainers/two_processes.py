"""Run by test_two_processes.py, on one or two processes: trains on fixed completions and saves weights and metrics."""

import json
import sys
from pathlib import Path

import torch
from peft import LoraConfig

sys.path.insert(0, str(Path(__file__).parent))
from toyrun import fixed_rollout, letter_reward, rollout_with_ratios, rollout_with_tools, trainer, vowel_rewards, weights

from trl_lossplus import PPOPlusConfig, PPOPlusTrainer


def one_sided_reward(prompts, completions, **kwargs):
    """Flat for every prompt but those of the first process of two."""
    flat = torch.distributed.is_initialized() and torch.distributed.get_rank() == 1
    return [0.5 if flat else len(text) / 10 for text in completions]


def without_compiled_communication():
    """DeepSpeed would compile its shared-memory communication first, which takes a minute; gloo gives the same numbers."""
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def main():
    model, out, settings = sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3])
    reward = one_sided_reward if settings.pop("one_sided", False) else letter_reward
    reward = [vowel_rewards, letter_reward] if settings.pop("by_token", False) else reward
    rollout = rollout_with_tools if settings.pop("tools", False) else fixed_rollout
    classes = {"trainer_class": PPOPlusTrainer, "config_class": PPOPlusConfig} if "critic" in settings else {}
    extra = {"peft_config": LoraConfig(r=4, target_modules="all-linear")} if settings.pop("lora", False) else {}
    if "deepspeed" in settings:
        without_compiled_communication()
    rollout = rollout_with_ratios if settings.pop("ratios", False) else rollout
    run = trainer(model, out, reward=reward, rollout=rollout, extra=extra, **classes, **settings)
    run.train()
    accelerator = run.accelerator
    if accelerator.is_main_process:
        torch.save(weights(run), out / "weights.pt")
        facts = {
            "processes": accelerator.num_processes,
            "wrapped": type(run.model_wrapped).__name__,
            "coef": run.kl_controller.coef,
            "log": run.state.log_history,
        }
        (out / "facts.json").write_text(json.dumps(facts))
    accelerator.wait_for_everyone()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


main()
