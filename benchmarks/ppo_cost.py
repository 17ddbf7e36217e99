"""
What one PPO optimizer step costs in time and memory, relative to a GRPO one.

    python benchmarks/ppo_cost.py              # the table; about 25 minutes on one core
    python benchmarks/ppo_cost.py --rounds 1   # coarser, about 8 minutes

The model is the toy with hidden size 256 and 4 layers, under LoRA (all linear layers, rank 32) in float32 on the CPU; 16 rows of 32
prompt tokens and 64 completion tokens, 4 completions a prompt. Completions come from a fixed `rollout_func`, so no token is
generated: generation costs both the same and hides the difference, as the last setting shows, in which it is part of the step.

What is timed: everything from the start to the end of an optimizer step (`on_step_begin` to `on_step_end`): scoring, the passes of
the rollout that the setting needs (old values, old log-probs, reference), GAE, forward, backward, clipping, optimizer. Where one
rollout serves several steps, the mean over those steps, so that its passes are shared among them. Each variant runs in a fresh
process, the variants take turns, and what is shown is the least over all rounds, as other work on the same cores can only add to it;
in CPU seconds, which it disturbs less than wall seconds. Beside it the multiplications and additions of the step's matrix products
(torch's FlopCounterMode; attention's own are not among them), which nothing disturbs.

`trl` is the installed TRL's GRPOTrainer. `kept` is the adapter critic with `critic_gradient_checkpointing` off.

What is counted as memory: tensors, as a GPU's peak of allocated memory would be: parameters, buffers and optimizer state, and on top
of them the peak of what torch allocates and has not freed during one step (torch.profiler's record of each allocation). Beside it
stand the megabytes of activations kept for the backward pass, and the growth of the process (peak resident size less that before
the trainer), which includes what the allocator keeps for itself.

Base parameters are counted by storage: policy, critic and reference use the same ones.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # the repository's root, not this folder, is where imports start
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

ROWS, GENERATIONS, PROMPT, COMPLETION = 16, 4, 32, 64
VARIANTS: dict[str, dict[str, Any]] = {
    "trl": {},
    "grpo": {},
    "adapter": {"critic": "adapter"},
    "kept": {"critic": "adapter", "critic_gradient_checkpointing": False},
    "shared": {"critic": "shared"},
    "model": {"critic": "model"},
}
SETTINGS: dict[str, dict[str, Any]] = {
    "TRL's defaults: on-policy, no reference, checkpointing": {"gradient_checkpointing": True},
    "the same without checkpointing": {"gradient_checkpointing": False},
    "KL to the reference, 4 steps a rollout, checkpointing": {
        "gradient_checkpointing": True,
        "kl_placement": "reward",
        "kl_reward_coef": 0.02,
        "kl_reward_level": "token",
        "num_iterations": 4,
    },
    "TRL's defaults, and the tokens are generated": {"gradient_checkpointing": True, "generate": True},
}
BOUNDS = {"adapter, kept": (1.8, 1.2), "shared": (1.15, 1.1)}
WARM, TIMED = 4, 16
FORWARD = "ppo_cost: loss"


def fixed_completions(prompts: list[str], trainer: Any) -> dict[str, Any]:
    """The same random words for every rollout: nothing is generated."""
    import torch

    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(4, len(trainer.processing_class), (len(prompts), COMPLETION), generator=generator).tolist()
    return {
        "prompt_ids": [trainer.processing_class(prompt)["input_ids"] for prompt in prompts],
        "completion_ids": ids,
        "logprobs": None,
    }


def spread_reward(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
    """Any rewards that differ."""
    return [ids[0] / 10 for ids in completion_ids]


def build(variant: str, settings: dict[str, Any], folder: str) -> Any:
    """A trainer of the variant."""
    from datasets import Dataset
    from peft import LoraConfig
    from trl import GRPOConfig, GRPOTrainer

    from trl_lossplus import GRPOPlusConfig, GRPOPlusTrainer, PPOPlusConfig, PPOPlusTrainer
    from trl_lossplus.toy import FILLERS, TOY_LORA, save_toy

    settings = dict(settings)
    rollout = {} if settings.pop("generate", False) else {"rollout_func": fixed_completions}
    words = FILLERS.split()
    prompts = [" ".join(words[(start + i) % len(words)] for i in range(PROMPT)) for start in range(len(words))]
    lora = {} if variant == "model" else {"peft_config": LoraConfig(**TOY_LORA)}
    common: dict[str, Any] = {
        "output_dir": folder, "use_cpu": True, "bf16": False, "report_to": "none", "disable_tqdm": True, "save_strategy": "no",
        "logging_steps": 1, "seed": 0, "num_generations": GENERATIONS, "per_device_train_batch_size": ROWS,
        "max_completion_length": COMPLETION, "max_steps": WARM + TIMED, "learning_rate": 1e-5, **settings,
    }  # fmt: skip
    grpo: dict[str, Any] = {"trl": (GRPOConfig, GRPOTrainer), "grpo": (GRPOPlusConfig, GRPOPlusTrainer)}
    config, trainer = grpo.get(variant, (PPOPlusConfig, PPOPlusTrainer))
    return trainer(
        model=save_toy(f"{folder}/toy", hidden_size=256, num_layers=4),
        reward_funcs=spread_reward,
        args=config(**common, **VARIANTS[variant]),
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        **rollout,
        **lora,
    )


def storages(tensors: Any) -> int:
    """Bytes of the storages behind tensors, each counted once."""
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def allocated(profile: Any) -> tuple[int, int]:
    """Bytes beyond those at the start, in a torch.profiler record: the most at a time, and those kept for the backward pass."""
    events = profile.profiler.kineto_results.events()
    loss_done = min(e.start_ns() + e.duration_ns() for e in events if e.name() == FORWARD)
    now = most = kept = 0
    for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        now += event.nbytes()
        most = max(most, now)
        if event.start_ns() <= loss_done:
            kept = now
    return most, kept


def a_step(seconds: list[float], at_once: int) -> float:
    """The least over rollouts of the mean over each rollout's `at_once` steps."""
    return min(sum(seconds[i : i + at_once]) / at_once for i in range(0, len(seconds) - at_once + 1, at_once))


def mark_forward(trainer: Any) -> None:
    """Gives the forward pass of each micro-batch a name in the profile."""
    import torch

    name = "micro_loss" if hasattr(trainer, "micro_loss") else "_compute_loss"
    inner = getattr(trainer, name)

    def marked(*inputs: Any) -> Any:
        with torch.profiler.record_function(FORWARD):
            return inner(*inputs)

    setattr(trainer, name, marked)


def measure(variant: str, settings: dict[str, Any]) -> dict[str, float]:
    """Runs one variant in this process: seconds a step, bytes, parameters."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode
    from transformers import TrainerCallback

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        trainer = build(variant, settings, folder)
        at_once = trainer.args.num_iterations
        cpu: list[float] = []
        wall: list[float] = []
        found: dict[str, float] = {}

        class Clock(TrainerCallback):
            profile: Any = None
            counter = FlopCounterMode(display=False)

            def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                if state.global_step == 0:
                    self.counter.__enter__()
                if state.global_step == WARM + TIMED - at_once:  # the last rollout is for memory, not for time
                    found["grown"] = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
                    self.profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True)
                    self.profile.__enter__()
                self.started = time.process_time(), time.perf_counter()

            def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                if state.global_step == at_once:
                    self.counter.__exit__(None, None, None)
                    found["flops"] = self.counter.get_total_flops() / at_once
                if self.profile is not None:
                    self.profile.__exit__(None, None, None)
                    found["peak"], found["kept"] = allocated(self.profile)
                    control.should_training_stop = True
                elif state.global_step > WARM:
                    cpu.append(time.process_time() - self.started[0])
                    wall.append(time.perf_counter() - self.started[1])

        mark_forward(trainer)
        trainer.add_callback(Clock())
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):  # the trainer prints each step
            trainer.train()
        module = trainer.model
        state = [v for s in trainer.optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor)]
        held = storages([*module.parameters(), *module.buffers(), *state])
        if trainer.ref_model is not None:
            held += storages([*trainer.ref_model.parameters()])
        return {
            "cpu": a_step(cpu, at_once),
            "wall": a_step(wall, at_once),
            "flops": found["flops"],
            "memory": held + found["peak"],
            "kept": found["kept"],
            "grown": found["grown"],
            "frozen": sum(p.numel() for p in module.parameters() if not p.requires_grad),
            "trained": sum(p.numel() for p in module.parameters() if p.requires_grad),
        }


def in_a_process(variant: str, settings: dict[str, Any]) -> dict[str, float]:
    """`measure` in a fresh process."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    words = [sys.executable, str(Path(__file__).resolve()), "--worker", json.dumps([variant, settings])]
    done = subprocess.run(words, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise SystemExit(done.stderr)
    return json.loads(done.stdout.strip().splitlines()[-1])


def table(title: str, rounds: list[dict[str, dict[str, float]]]) -> list[str]:
    """The lines of one setting: the least of the rounds, and ratios to GRPO."""

    def least(variant: str, name: str) -> float:
        return min(done[variant][name] for done in rounds)

    def ratio(variant: str, name: str) -> float:
        return least(variant, name) / (least("grpo", name) or math.nan)

    head = f"  {'':8} {'CPU s':>6} {'x GRPO':>6} {'x wall':>6}  {'GFLOP':>6} {'x GRPO':>6}  {'MB':>6} {'x GRPO':>6} {'kept':>6} {'x grown':>7}"
    lines = [title, f"{head}  {'frozen':>8} {'trained':>8}"]
    for variant in rounds[0]:
        row = [
            f"  {variant:8} {least(variant, 'cpu'):6.3f} {ratio(variant, 'cpu'):6.2f} {ratio(variant, 'wall'):6.2f}",
            f"{least(variant, 'flops') / 1e9:6.1f} {ratio(variant, 'flops'):6.2f}",
            f"{least(variant, 'memory') / 1e6:6.1f} {ratio(variant, 'memory'):6.2f} {least(variant, 'kept') / 1e6:6.1f} "
            f"{ratio(variant, 'grown'):7.2f}",
            f"{least(variant, 'frozen'):8.0f} {least(variant, 'trained'):8.0f}",
        ]
        lines.append("  ".join(row))
    return lines


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--variants", nargs="+", default=["trl", "grpo", "adapter", "kept", "shared"], choices=VARIANTS)
    parser.add_argument("--only", type=int, help="the setting of this number alone")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    words = parser.parse_args()
    if words.worker:
        print(json.dumps(measure(*json.loads(words.worker))))
        return 0
    for number, (title, settings) in enumerate(SETTINGS.items()):
        if words.only not in (None, number):
            continue
        lacking = {"kept": not settings["gradient_checkpointing"], "trl": "kl_placement" in settings}
        variants = [name for name in words.variants if not lacking.get(name)]
        rounds = [{variant: in_a_process(variant, settings) for variant in variants} for _ in range(words.rounds)]
        print("\n".join(table(title, rounds)), flush=True)
    print("bounds (issue 3): " + "; ".join(f"{name} {time_}x time, {memory}x memory" for name, (time_, memory) in BOUNDS.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
