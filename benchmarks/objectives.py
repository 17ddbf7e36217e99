"""
How long each policy objective takes, forward and backward on (64, 2048) tokens, relative to ppo_clip.

    python benchmarks/objectives.py [--rows 64] [--tokens 2048] [--repeats 15] [--only NAME ...]

Prints CPU seconds (median), and the ratio to ppo_clip taken pairwise: each objective alternates with ppo_clip, so that whatever
else the machine does falls on both. `loss` is all of `compute_loss` and its backward, the batch being the whole optimizer step;
`objective` the objective's own function and its backward.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from trl_lossplus import LossBatch, LossSpec, Window, compute_loss
from trl_lossplus.batch import DeclaredView
from trl_lossplus.over_step import over_step
from trl_lossplus.registry import POLICY_LOSSES


def tensors(rows: int, length: int) -> dict[str, Tensor]:
    """A batch of everything that an objective reads: rows of unequal length, log ratios of .1, groups of 8."""
    g = torch.Generator().manual_seed(0)
    logps = -3 * torch.rand(rows, length, generator=g)

    def near() -> Tensor:
        return logps + 0.1 * torch.randn(rows, length, generator=g)

    return {
        "logps": logps,
        "old_logps": near(),
        "rollout_logps": near(),
        "rollout_weights": torch.ones(rows, 1),
        "advantages": torch.randn(rows, 1, generator=g),
        "mask": torch.arange(length) < torch.randint(length // 2, length + 1, (rows, 1), generator=g),
        "group_ids": torch.arange(rows) // 8,
    }


def once(name: str, batch: dict[str, Tensor], whole: bool) -> Callable[[], float]:
    """A function that computes the loss and its gradient once and returns the CPU seconds."""
    entry, spec = POLICY_LOSSES.get(name), LossSpec(policy_loss=name)
    made = {} if whole else over_step(LossBatch(**batch).clean(), spec)
    window = Window(int(batch["mask"].sum()), len(batch["mask"]))

    def run() -> float:
        logps = batch["logps"].clone().requires_grad_()
        start = time.process_time()
        own = LossBatch(**{**batch, "logps": logps}, **made)
        if whole:  # with what the objective computes over a step
            loss = compute_loss(own, spec, window).loss
        else:
            loss = entry.func(DeclaredView(own, name, entry.requires), spec).per_token.sum()  # type: ignore[arg-type]
        loss.backward()
        return time.process_time() - start

    return run


def compare(name: str, batch: dict[str, Tensor], repeats: int, whole: bool) -> tuple[float, float]:
    """Median CPU seconds, and the median of the ratios to ppo_clip's run just before."""
    own, base = once(name, batch, whole), once("ppo_clip", batch, whole)
    own(), base()
    pairs = [(base(), own()) for _ in range(repeats)]
    return statistics.median(b for _, b in pairs), statistics.median(b / a for a, b in pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--only", nargs="*", default=None)
    args = parser.parse_args()
    torch.set_num_threads(1)
    batch = tensors(args.rows, args.tokens)
    print(f"({args.rows}, {args.tokens}), {args.repeats} pairs, 1 thread, CPU milliseconds")
    print(f"{'objective':<14} {'loss':>8} {'x ppo_clip':>11} {'objective':>10} {'x ppo_clip':>11}")
    for name in args.only or POLICY_LOSSES.names():
        loss, loss_ratio = compare(name, batch, args.repeats, whole=True)
        own, own_ratio = compare(name, batch, args.repeats, whole=False)
        print(f"{name:<14} {1e3 * loss:>8.2f} {loss_ratio:>11.2f} {1e3 * own:>10.2f} {own_ratio:>11.2f}", flush=True)


if __name__ == "__main__":
    main()
