"""A short run that is interrupted and resumed, for the tests of resuming."""

import shutil
from pathlib import Path

from peft import LoraConfig
from toyrun import trainer

from trl_lossplus import GRPOPlusConfig, GRPOPlusTrainer, PPOPlusConfig, PPOPlusTrainer
from trl_lossplus.toy import toy_dataset

LORA = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
# A rollout is 8 rows of 4 prompts in two halves, each an optimizer step, used twice: 4 steps. The 6 prompts give one rollout a pass, so
# steps 4 and 8 are between two rollouts and two passes, and all others inside a rollout.
FIELDS = {
    "per_device_train_batch_size": 4, "steps_per_generation": 2, "num_iterations": 2, "num_generations": 2, "max_steps": 10,
    "max_completion_length": 4, "save_strategy": "steps", "save_steps": 1, "learning_rate": 3e-2, "lr_scheduler_type": "linear",
}  # fmt: skip
# train_loss: transformers' mean over the steps since the resume
CLOCKS = ("runtime", "per_second", "step_time", "flos", "train_loss")
KL = {"kl_placement": "reward", "kl_reward_coef": 0.1, "kl_controller": "adaptive", "kl_target": 0.01, "kl_horizon": 30.0}


def letters(completions, **kwargs):
    """Any spread will do, and sampling decides it: the number of letters, over 10."""
    return [len(text) / 10 for text in completions]


def build(toy, folder, **fields):
    critic = fields.get("critic")
    classes = (GRPOPlusTrainer, GRPOPlusConfig) if critic is None else (PPOPlusTrainer, PPOPlusConfig)
    lora = fields.pop("lora", LORA if critic == "adapter" else None)
    extra = {"peft_config": LoraConfig(**lora)} if lora else {}
    dataset = fields.pop("dataset", None) or toy_dataset().select(range(6))
    run = trainer(
        toy, folder, reward=letters, dataset=dataset, extra=extra, trainer_class=classes[0], config_class=classes[1], **FIELDS | fields
    )  # fmt: skip
    run.rollouts, make = [], run.make_rollout
    run.make_rollout = lambda out, rewards: run.rollouts.append(out["prompt_ids"].tolist()) or make(out, rewards)
    return run


def resumed(toy, folder, step, **fields):
    run = build(toy, folder.with_name(f"{folder.name}-from-{step}"), **fields)
    run.train(resume_from_checkpoint=str(folder / f"checkpoint-{step}"))
    return run


def copied(folder, tmp_path, step):
    return Path(shutil.copytree(folder / f"checkpoint-{step}", tmp_path / "run" / f"checkpoint-{step}"))


def entries(run):
    """The logged metrics by step, but for clocks and the end's."""
    kept = [{name: x for name, x in entry.items() if not any(word in name for word in CLOCKS)} for entry in run.state.log_history]
    return {entry["step"]: entry for entry in kept if "loss" in entry}
