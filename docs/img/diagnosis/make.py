"""
Makes the pictures of docs/diagnosis.md: breaks the toy on purpose (recipes/break_it.py) and draws what the logs show.

    python docs/img/diagnosis/make.py            # about two minutes on a CPU
"""

from __future__ import annotations

import logging
import sys
import warnings
from pathlib import Path

if __name__ == "__main__":  # the repository's root, not this folder, is where imports start
    sys.path[0] = str(Path(__file__).resolve().parents[3])

import matplotlib
import numpy as np
import torch
from matplotlib.figure import Figure
from transformers.utils.logging import disable_progress_bar

from recipes.break_it import RUNS, execute
from trl_lossplus.diagnostics.report_plots import STYLE
from trl_lossplus.diagnostics.runlog import RunLog, read_run

HERE = Path(__file__).resolve().parent
FOLDER = HERE.parents[2] / "runs" / "diagnosis_pictures"
BLUE, RED, GREEN, GREY = "#0072b2", "#d55e00", "#009e73", "#8a8a8a"
Curve = tuple[str, str, str, str]  # run, metric, label, colour

# Picture: its panels; panel: a title and curves.
PICTURES: dict[str, list[tuple[str, list[Curve]]]] = {
    "reward_hacking": [
        ("rewards", [("reward_hacking", "rewards/polite/mean", "what is paid for", RED), ("reward_hacking", "rewards/keyword_reward/mean", "what was meant", BLUE)]),
        ("KL, nats a token", [("reward_hacking", "kl", "KL", RED)]),
        ("KL coefficient", [("reward_hacking", "kl_coef", "coefficient", RED)]),
    ],
    "nan": [
        ("largest raw log ratio, nats", [("nan_ratio", "probe/log_ratio/q100", "old log-probs of other tokens", RED), ("healthy_kl", "probe/log_ratio/q100", "healthy", BLUE)]),
        ("steps dropped so far", [("nan_ratio", "skipped_steps", "dropped", RED)]),
    ],
    "normalized_twice": [
        ("size of the policy term's gradient", [("double_normalization", "grad_logp/policy", "averaged twice", RED), ("healthy_kl", "grad_logp/policy", "averaged once", BLUE)]),
        ("reward", [("double_normalization", "reward", "averaged twice", RED), ("healthy_kl", "reward", "averaged once", BLUE)]),
    ],
    "loss_zero": [
        ("loss", [("healthy_on_policy", "loss", "loss", BLUE)]),
        ("grad_norm", [("healthy_on_policy", "grad_norm", "gradient", BLUE)]),
        ("reward", [("healthy_on_policy", "reward", "reward", BLUE)]),
    ],
    "clip": [
        ("fraction of clipped tokens", [("healthy_kl", "clip_ratio/region_mean", "rollouts reused", BLUE), ("healthy_on_policy", "clip_ratio/region_mean", "on-policy", GREY)]),
        ("smallest policy term", [("min_max_swapped", "probe/policy/q00", "max", RED), ("healthy_kl", "probe/policy/q00", "min", BLUE)]),
    ],
    "kl_flipped": [
        ("KL, nats a token", [("kl_flipped", "kl", "taken off the loss", RED), ("healthy_kl", "kl", "added", BLUE)]),
        ("loss/kl", [("kl_flipped", "loss/kl", "taken off the loss", RED), ("healthy_kl", "loss/kl", "added", BLUE)]),
    ],
    "ratio": [
        ("first pass: largest |ratio - 1|", [("dropout", "ratio/first_pass_deviation", "dropout", RED), ("stale_old_logps", "ratio/first_pass_deviation", "stale", GREEN), ("healthy_kl", "ratio/first_pass_deviation", "healthy", BLUE)]),
        ("median log ratio", [("dropout", "probe/log_ratio/q50", "dropout", RED), ("stale_old_logps", "probe/log_ratio/q50", "stale", GREEN)]),
    ],
    "no_signal": [
        ("fraction of flat groups", [("homogeneous", "group_reward/frac_flat", "greedy", RED), ("healthy_on_policy", "group_reward/frac_flat", "sampled", BLUE)]),
        ("reward", [("homogeneous", "reward", "greedy", RED), ("healthy_on_policy", "reward", "sampled", BLUE)]),
    ],
    "mask": [
        ("loss tokens outside of the completion", [("prompt_in_mask", "mask/outside_completion", "one token early", RED), ("healthy_on_policy", "mask/outside_completion", "right", BLUE)]),
        ("reward", [("prompt_in_mask", "reward", "one token early", RED), ("healthy_on_policy", "reward", "right", BLUE)]),
    ],
}  # fmt: skip


def draw(name: str, logs: dict[str, RunLog]) -> None:
    """Writes one picture beside this script."""
    panels = PICTURES[name]
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": name}):
        figure = Figure(figsize=(3.0 * len(panels), 2.2), layout="constrained")
        for ax, (title, curves) in zip(np.atleast_1d(figure.subplots(1, len(panels))), panels, strict=True):
            for run, metric, label, color in curves:
                values = logs[run].get(metric)
                kept = np.isfinite(values)
                ax.plot(logs[run].steps[kept], values[kept], color=color, label=label)
            if metric == "clip_ratio/region_mean":
                ax.axhspan(0.1, 0.3, color=GREEN, alpha=0.15, linewidth=0)
            ax.set_title(title)
            ax.set_xlabel("optimizer step")
            if len(curves) > 1:
                ax.legend()
        figure.savefig(HERE / f"{name}.svg", metadata={"Date": None})


def main() -> None:
    """Trains what is not there yet, and draws."""
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    disable_progress_bar()
    needed = sorted({run for panels in PICTURES.values() for _, curves in panels for run, *_ in curves})
    logs = {}
    for name in needed:
        folder = FOLDER / name
        if not (folder / "trainer_state.json").exists():
            execute(RUNS[name], folder)
        logs[name] = read_run(folder)
    for name in PICTURES:
        draw(name, logs)
        print(HERE / f"{name}.svg")


if __name__ == "__main__":
    main()
