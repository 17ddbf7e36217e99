"""
What the loss alone costs in time and memory: ppo_clip with a k3 KL on (64, 2048) tokens in float32, forward and backward.

    python benchmarks/loss.py [--rows 64] [--tokens 2048] [--repeats 30]

`ours` is `compute_loss` with the statistics that it always takes; `plain` the same number as one PyTorch expression without them, masked by
a product; `compiled` that expression under torch.compile, which needs a C++ compiler on a CPU. They take turns; what is shown is the median
of CPU seconds and of the ratio to `plain` within a turn. Memory is the most that was allocated at a time and not freed (torch.profiler's
record of each allocation), in buffers of (B, T) float32 beyond the inputs, the gradient included.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from shutil import which
from typing import Any

if __name__ == "__main__":  # the repository's root, not this folder, is where imports start
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import torch
from torch import Tensor

from trl_lossplus import LossBatch, LossSpec, Window, compute_loss

EPSILON, BETA = 0.2, 0.04
Run = Callable[[dict[str, Tensor]], Any]


def tensors(rows: int, length: int) -> dict[str, Tensor]:
    """Rows of unequal length, log ratios of .1, an advantage a row."""
    draw = torch.Generator().manual_seed(0)
    logps = -3 * torch.rand(rows, length, generator=draw)
    return {
        "logps": logps.clone().requires_grad_(),
        "old_logps": logps + 0.1 * torch.randn(rows, length, generator=draw),
        "ref_logps": logps + 0.1 * torch.randn(rows, length, generator=draw),
        "advantages": torch.randn(rows, 1, generator=draw),
        "mask": torch.arange(length) < torch.randint(length // 2, length + 1, (rows, 1), generator=draw),
    }


def expression(logps: Tensor, old_logps: Tensor, ref_logps: Tensor, advantages: Tensor, mask: Tensor, tokens: float) -> Tensor:
    """ppo_clip + beta k3, mean over `tokens` valid tokens: (B, T) to a scalar."""
    ratio = torch.exp(logps - old_logps)
    policy = -torch.minimum(ratio * advantages, ratio.clamp(1 - EPSILON, 1 + EPSILON) * advantages)
    away = ref_logps - logps
    return ((policy + BETA * (torch.exp(away) - away - 1)) * mask).sum() / tokens


def forms(mask: Tensor) -> dict[str, Run]:
    """What is compared: each takes the tensors, gives something that holds the loss, and has taken the gradient."""
    spec = LossSpec(policy_loss="ppo_clip", epsilon=EPSILON, beta=BETA, kl_placement="loss", kl_estimator="k3")
    tokens = int(mask.sum())
    window = Window(tokens, len(mask))

    def ours(given: dict[str, Tensor]) -> Any:
        output = compute_loss(LossBatch(**given), spec, window)
        output.loss.backward()
        return output

    def plain(given: dict[str, Tensor]) -> Tensor:
        loss = expression(**given, tokens=float(tokens))
        loss.backward()
        return loss

    found: dict[str, Run] = {"plain": plain, "ours": ours}
    if which("g++") or which("clang++"):
        fused = torch.compile(expression)

        def compiled(given: dict[str, Tensor]) -> Tensor:
            loss = fused(**given, tokens=float(tokens))
            loss.backward()
            return loss

        found["compiled"] = compiled
    return found


def buffers(run: Run, given: dict[str, Tensor]) -> float:
    """The most that a run holds at a time beyond its inputs, in (B, T) float32 buffers."""
    given["logps"].grad = None
    run(given)
    given["logps"].grad = None
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        held = run(given)
    del held
    now = most = 0
    events = profile.profiler.kineto_results.events()  # type: ignore[union-attr]
    for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most / (4 * given["logps"].numel())


def seconds(run: Run, given: dict[str, Tensor]) -> float:
    """CPU seconds of a run."""
    given["logps"].grad = None
    start = time.process_time()
    run(given)
    return time.process_time() - start


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=30)
    words = parser.parse_args()
    torch.set_num_threads(1)
    given = tensors(words.rows, words.tokens)
    found = forms(given["mask"])
    if "compiled" not in found:
        print("torch.compile: no C++ compiler here, left out")
    for run in found.values():
        for _ in range(3):
            seconds(run, given)
    turns = [{name: seconds(run, given) for name, run in found.items()} for _ in range(words.repeats)]
    for name, run in found.items():
        own = statistics.median(turn[name] for turn in turns)
        ratio = statistics.median(turn[name] / turn["plain"] for turn in turns)
        print(f"{name:9} {1000 * own:7.2f} ms  {ratio:5.2f} x plain  {buffers(run, given):5.1f} buffers")
    return 0


if __name__ == "__main__":
    sys.exit(main())
