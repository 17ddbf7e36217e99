"""
What the probes add to a step, in CPU seconds.

    python benchmarks/probes.py                # about two minutes
    python benchmarks/probes.py --rounds 300   # steadier

* A training step of the toy with hidden size 256, from on_step_begin to on_step_end: generation, reward, reference, forward, backward,
  optimizer.
* A loss step of 64 rows of 2048 tokens from logits over 64 words: log-probs and entropies, compute_loss with a KL, its statistics, the
  backward pass to the logits, the step's numbers on the host.
* The same from log-probs: compute_loss and nothing else, eight milliseconds of it. No training step is that short.

The levels take turns from step to step in one process. Shown are the median, and the median over the rounds of what a level costs beside
`off` in the same round.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # the repository's root, not this folder, is where imports start
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import torch
from transformers import PrinterCallback, ProgressCallback, TrainerCallback

from trl_lossplus import GRPOPlusConfig, GRPOPlusTrainer, LossBatch, LossSpec, compute_loss
from trl_lossplus.diagnostics.probes import StepStatistics
from trl_lossplus.toy import TOY_TRAINING, keyword_reward, save_toy, toy_dataset

LEVELS = ("off", "summary", "full")
BOUNDS = {"summary": 2.0, "full": 5.0}  # per cent
WARM = 3  # rounds that are not counted


def turns(rounds: int) -> list[str]:
    """The level of each step: all of them in each round, beginning with another one each time."""
    return [LEVELS[(i + shift) % len(LEVELS)] for i in range(rounds) for shift in range(len(LEVELS))]


def loss_step(words: int = 0, rows: int = 64, width: int = 2048) -> Callable[[str], dict[str, float]]:
    """A function that takes one loss step at a level and returns its metrics: from logits over `words`, or (0) from log-probs."""
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(rows, width, max(words, 1), generator=g)
    tokens = torch.randint(max(words, 1), (rows, width, 1), generator=g)
    logps, noise = -torch.rand(rows, width, generator=g), torch.randn(2, rows, width, generator=g)
    if words:
        logps = logits.log_softmax(-1).gather(-1, tokens).squeeze(-1)
    mask = torch.arange(width) < torch.randint(width // 4, width + 1, (rows, 1), generator=g)
    advantages, entropies = torch.randn(rows, generator=g), torch.rand(rows, width, generator=g)
    spec, old, ref = LossSpec(beta=0.04), logps + 0.1 * noise[0], logps + 0.1 * noise[1]

    def step(level: str) -> dict[str, float]:
        policy, entropy = logps.clone().requires_grad_(), entropies
        if words:
            all_logps = logits.requires_grad_().log_softmax(-1)
            policy = all_logps.gather(-1, tokens).squeeze(-1)
            entropy = -(all_logps.detach().exp() * all_logps.detach()).sum(-1)
        output = compute_loss(LossBatch(policy, old, advantages, mask, ref_logps=ref, entropies=entropy), spec)
        pooled = StepStatistics(level)
        pooled.add(output.statistics)
        pooled.add_terms(output, 1)
        pooled.probe(output, first_pass=LossSpec().log_ratio_clamp)
        values = pooled.pooled([pooled.take()])
        output.loss.backward()
        logits.grad = None
        return values | pooled.close()

    return step


def time_loss(rounds: int, words: int = 0) -> dict[str, list[float]]:
    """CPU seconds of each loss step by level."""
    step = loss_step(words)
    seconds: dict[str, list[float]] = {level: [] for level in LEVELS}
    for i, level in enumerate(turns(WARM + rounds)):
        start = time.process_time()
        step(level)
        if i >= WARM * len(LEVELS):
            seconds[level].append(time.process_time() - start)
    return seconds


class Turns(TrainerCallback):
    """Gives each optimizer step its level, and times it."""

    def __init__(self, rounds: int):
        self.order = turns(WARM + rounds)
        self.seconds: dict[str, list[float]] = {level: [] for level in LEVELS}
        self.trainer: Any = None
        self._start = 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Sets the level."""
        args.probes = self.order[state.global_step]
        self.trainer._statistics["train"] = StepStatistics(args.probes)
        self._start = time.process_time()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stops the clock."""
        if state.global_step > WARM * len(LEVELS):
            self.seconds[args.probes].append(time.process_time() - self._start)


def time_toy(rounds: int, hidden: int = 256) -> dict[str, list[float]]:
    """CPU seconds of each training step by level."""
    clock = Turns(rounds)
    with tempfile.TemporaryDirectory() as folder:
        settings = {**TOY_TRAINING, "max_steps": len(clock.order), "beta": 0.04, "learning_rate": 1e-6, "disable_tqdm": True}
        clock.trainer = GRPOPlusTrainer(
            model=save_toy(f"{folder}/toy", hidden_size=hidden),
            reward_funcs=keyword_reward,
            args=GRPOPlusConfig(output_dir=folder, **settings),
            train_dataset=toy_dataset(),
            callbacks=[clock],
        )
        for printer in (PrinterCallback, ProgressCallback):
            clock.trainer.remove_callback(printer)
        clock.trainer.train()
    return clock.seconds


def table(title: str, seconds: dict[str, list[float]], bounds: dict[str, float]) -> list[str]:
    """The lines of one measurement."""
    off = statistics.median(seconds["off"])
    lines = [f"{title}, {len(seconds['off'])} steps a level"]
    for level in LEVELS:
        extra = statistics.median(a - b for a, b in zip(seconds[level], seconds["off"], strict=True))
        bound = f" (at most {bounds[level]:g}%)" if level in bounds else ""
        lines.append(
            f"  {level:8}{1e3 * statistics.median(seconds[level]):9.2f} ms  {1e3 * extra:+6.2f} ms  {100 * extra / off:+6.2f}%{bound}"
        )
    return lines


def main() -> None:
    """Measures all three and prints the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=100, help="steps a level of each kind; five times as many from log-probs")
    args = parser.parse_args()
    torch.set_num_threads(1)
    gc.disable()
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
        toy = time_toy(args.rounds)
    print("\n".join(table("a training step of the toy, hidden size 256", toy, BOUNDS)), flush=True)
    print("\n".join(table("a loss step (64, 2048) from logits", time_loss(args.rounds, 64), BOUNDS)), flush=True)
    print("\n".join(table("compute_loss (64, 2048) alone, from log-probs", time_loss(5 * args.rounds), {})))


if __name__ == "__main__":
    main()
