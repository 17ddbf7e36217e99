"""Problems that are kept out of training, and how many of them the policy solves before and after it."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import TrainerCallback

from trl_lossplus import GRPOPlusTrainer, LossPlusError

FILE = "holdout.json"


def key_of(prompt: Any) -> str:
    """What tells one prompt (a text or a conversation) from another."""
    return prompt if isinstance(prompt, str) else json.dumps(prompt, sort_keys=True)


def hold_out(dataset: Dataset, problems: int, seed: int = 0) -> tuple[Dataset, Dataset]:
    """
    Splits a dataset so that no prompt is on both sides.

    Args:
        dataset: with a `prompt` column; a prompt may stand in it more than once.
        problems: how many different prompts are kept out. seed: of the choice among them.

    Returns:
        What is left to train on, every row of it, and one row for each problem that is kept out.

    Raises:
        LossPlusError: fewer different prompts than `problems` and one to train on; fewer than 1 asked for; no prompts.
    """
    if problems < 1:
        raise LossPlusError(f"eval_holdout={problems}: it must be at least 1, or not set.")
    if "prompt" not in dataset.column_names:
        raise LossPlusError(f"eval_holdout={problems}: the dataset has no 'prompt' column. Set dataset_prompt_column.")
    keys = [key_of(prompt) for prompt in dataset["prompt"]]
    first: dict[str, int] = {}
    for row, key in enumerate(keys):
        first.setdefault(key, row)
    if len(first) <= problems:
        raise LossPlusError(f"eval_holdout={problems}: the dataset has {len(first)} different prompts, and one must be left.")
    kept = random.Random(seed).sample(sorted(first), problems)
    out = set(kept)
    return dataset.select([row for row, key in enumerate(keys) if key not in out]), dataset.select([first[key] for key in kept])


def share(rows: Sequence[Any], rank: int, processes: int) -> list[Any]:
    """This process's rows: as many on each, consecutive, the last ones filled up from the beginning."""
    each = -(-len(rows) // processes)
    return [rows[i % len(rows)] for i in range(rank * each, (rank + 1) * each)]


class Holdout(TrainerCallback):
    """
    Measures the mean reward on the held-out problems when training begins and when it ends.

    Completions are sampled as in training (same temperature and length), `num_generations_eval` a problem, both times from the
    same random numbers; training's own are not touched. What was measured is printed and kept in `holdout.json` in the output
    folder, `measured` by optimizer step.

    Args:
        trainer: whose policy and reward functions. problems: held-out rows. say: takes the line.
    """

    def __init__(self, trainer: GRPOPlusTrainer, problems: Dataset, say: Callable[[str], None]):
        self.trainer, self.problems, self.say = trainer, problems, say
        self.path = Path(str(trainer.args.output_dir)) / FILE

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Before the first step (of this run, where it was resumed)."""
        self._tell("before", state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """After the last step."""
        self._tell("after", state.global_step)

    def rewards(self) -> dict[str, float]:
        """The mean of each reward function over all completions; a completion that it does not score is left out."""
        trainer = self.trainer
        policy, processes = trainer.model, trainer.accelerator.num_processes
        training, seen = policy.training, trainer.state.num_input_tokens_seen
        policy.eval()
        try:
            with torch.random.fork_rng(devices=self._devices()):
                torch.manual_seed(trainer.args.seed + trainer.accelerator.process_index)
                times = trainer.group_size
                rows = [
                    row for row in share(list(self.problems), trainer.accelerator.process_index, processes) for _ in range(times)
                ]
                found = trainer.draw(rows, measured=False)[1][: len(self.problems) * times]
        finally:
            policy.train(training)
            trainer.state.num_input_tokens_seen = seen
        means = found.nanmean(0).tolist()
        return dict(zip(trainer.reward_func_names, means, strict=True))

    def _devices(self) -> list[Any]:
        device = self.trainer.accelerator.device
        return [] if device.type == "cpu" else [device]

    def _tell(self, when: str, step: int) -> None:
        rewards, args, times = self.rewards(), self.trainer.args, self.trainer.num_generations_eval
        shown = ", ".join(f"{name} {value:.3f}" for name, value in rewards.items())
        self.say(
            f"held out, {when} training: {shown} ({len(self.problems)} problems that are not trained on, {times} "
            f"completion{'s' if times > 1 else ''} of each at temperature {args.temperature:g}, at most {args.max_completion_length} tokens)"
        )
        if self.trainer.is_world_process_zero():
            self._keep(step, rewards, times)

    def _keep(self, step: int, rewards: dict[str, float], times: int) -> None:
        args = self.trainer.args
        kept = json.loads(self.path.read_text()) if step and self.path.is_file() else {"measured": {}}
        kept |= {
            "problems": len(self.problems),
            "completions_each": times,
            "temperature": args.temperature,
            "max_completion_length": args.max_completion_length,
        }
        kept["measured"][str(step)] = rewards
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(kept, indent=1) + "\n")
