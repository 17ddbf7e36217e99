"""
How long the doctor takes on a long log.

    python benchmarks/doctor.py                  # 100,000 steps with the metrics of a run with probes=summary
    python benchmarks/doctor.py --level full     # seven quantiles of each
    python benchmarks/doctor.py --level trl      # a plain TRL run's metrics

Prints a line for reading and one for judging, and the whole of `python -m trl_lossplus.diagnostics.doctor` in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from trl_lossplus.diagnostics.doctor import diagnose
from trl_lossplus.diagnostics.rules import READS
from trl_lossplus.diagnostics.runlog import read_run

TRL = (
    "loss", "grad_norm", "learning_rate", "num_tokens", "completions/mean_length", "completions/min_length", "completions/max_length",
    "completions/clipped_ratio", "completions/mean_terminated_length", "completions/min_terminated_length",
    "completions/max_terminated_length", "rewards/keyword_reward/mean", "rewards/keyword_reward/std", "reward", "reward_std",
    "frac_reward_zero_std", "entropy", "kl", "clip_ratio/low_mean", "clip_ratio/low_min", "clip_ratio/high_mean", "clip_ratio/high_max",
    "clip_ratio/region_mean", "sampling/sampling_logp_difference/mean", "step_time",
)  # fmt: skip
OURS = (
    "loss/policy", "loss/kl", "loss/entropy", "kl_rollout", "kl_coef", "kl_penalty", "ratio/ess", "mask/outside_completion",
    "mask/eos_in_loss", "share/loss/policy", "share/loss/kl", "share/grad/policy", "share/grad/kl", "grad_logp/policy", "grad_logp/kl",
    "group_reward/mean_min", "group_reward/mean_max", "group_reward/std", "group_reward/std_min", "group_reward/std_max",
    "group_reward/frac_flat", "group_reward/unscored", "skipped_steps",
    *(f"nonfinite/{name}" for name in ("logps", "old_logps", "ref_logps", "ratio", "advantages", "values", "loss")),
)  # fmt: skip
QUANTITIES = ("log_ratio", "ratio", "advantage", "policy", "kl", "value", "value_error", "entropy")
QUANTILES = {"trl": (), "summary": ("00", "50", "100"), "full": ("00", "05", "25", "50", "75", "95", "100")}


def names(level: str) -> list[str]:
    """The metrics of a step."""
    probes = [f"probe/{quantity}/q{q}" for quantity in QUANTITIES for q in QUANTILES[level]]
    return [*TRL, *(OURS if level != "trl" else ()), *probes]


def write_log(path: Path, steps: int, level: str, seed: int = 0) -> None:
    """A trainer_state.json as transformers writes it: indented, keys sorted, numbers with all their digits."""
    rng = np.random.default_rng(seed)
    columns = sorted([*names(level), "epoch", "step"])
    zero = {name for name in columns if name.startswith(("nonfinite/", "mask/outside", "skipped"))}
    with path.open("w") as file:
        file.write(f'{{\n  "best_metric": null,\n  "global_step": {steps},\n  "log_history": [\n')
        for step in range(1, steps + 1):
            values = rng.random(len(columns)).tolist()
            row = {name: 0.0 if name in zero else value for name, value in zip(columns, values, strict=True)}
            row["step"], row["reward"] = step, 0.2 + 0.5 * step / steps + 0.1 * row["reward"]
            lines = ",\n".join(f"      {json.dumps(name)}: {value!r}" for name, value in row.items())
            file.write("    {\n" + lines + ("\n    },\n" if step < steps else "\n    }\n"))
        file.write(f'  ],\n  "logging_steps": 1,\n  "max_steps": {steps}\n}}\n')


def main() -> None:
    """Writes the log, reads it, judges it, and times it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--level", choices=QUANTILES, default="summary")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trainer_state.json"
        write_log(path, args.steps, args.level)
        print(f"{args.steps} steps, {len(names(args.level))} metrics, {path.stat().st_size / 1e6:.0f} MB")
        start, cpu = time.perf_counter(), time.process_time()
        run = read_run(path, READS)
        middle = time.perf_counter()
        found = diagnose(run)
        end = time.perf_counter()
        print(
            f"reading {middle - start:.2f} s, judging {end - middle:.2f} s, {time.process_time() - cpu:.2f} s of processor, {len(found)} findings"
        )
        command = [sys.executable, "-m", "trl_lossplus.diagnostics.doctor", str(path)]
        start = time.perf_counter()
        subprocess.run(command, stdout=subprocess.DEVNULL, check=False)
        print(f"whole command {time.perf_counter() - start:.2f} s")


if __name__ == "__main__":
    main()
