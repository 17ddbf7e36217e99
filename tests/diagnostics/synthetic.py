"""Made-up training logs: a healthy run, and changes to single metrics."""

import numpy as np

from trl_lossplus.diagnostics.runlog import RunLog

STEPS = 200


def ramp(start, end, n=STEPS, noise=0.02, seed=0):
    """From start to end in a straight line, with noise relative to the larger of the two."""
    wobble = np.random.default_rng(seed).normal(size=n) * noise * max(abs(start), abs(end))
    return np.linspace(start, end, n) + wobble


def healthy(n=STEPS):
    """The columns of a run that reuses its rollouts, with a KL in the loss, and learns."""
    flat = np.clip(ramp(0.3, 0.1, n, 0.1), 0, 1)
    return {
        "loss": ramp(0.01, 0.01, n), "grad_norm": ramp(1.0, 0.8, n), "reward": ramp(0.2, 0.7, n), "reward_std": ramp(0.4, 0.4, n),
        "rewards/right/mean": ramp(0.2, 0.7, n), "rewards/form/mean": ramp(0.5, 0.6, n),
        "group_reward/std": ramp(0.3, 0.3, n), "group_reward/std_min": np.zeros(n), "group_reward/frac_flat": flat,
        "group_reward/mean_min": np.zeros(n), "group_reward/mean_max": np.ones(n), "frac_reward_zero_std": flat,
        "loss/policy": ramp(0.005, 0.004, n), "loss/kl": ramp(0.002, 0.01, n, 0.02), "kl": ramp(0.05, 0.25, n),
        "kl_coef": np.full(n, 0.04), "share/loss/kl": ramp(0.3, 0.5, n), "share/grad/kl": ramp(0.1, 0.2, n),
        "share/grad/policy": ramp(0.9, 0.8, n), "grad_logp/policy": ramp(0.03, 0.03, n), "entropy": ramp(2.0, 1.2, n),
        "clip_ratio/region_mean": ramp(0.15, 0.15, n), "clip_ratio/low_mean": ramp(0.08, 0.08, n), "clip_ratio/high_mean": ramp(0.07, 0.07, n),
        "probe/log_ratio/q00": ramp(-0.8, -0.8, n), "probe/log_ratio/q50": ramp(0.0, 0.0, n) + 1e-3, "probe/log_ratio/q100": ramp(0.8, 0.8, n),
        "probe/ratio/q100": ramp(2.2, 2.2, n), "probe/advantage/q00": ramp(-2.0, -2.0, n), "probe/advantage/q100": ramp(2.0, 2.0, n),
        "probe/policy/q00": ramp(-2.2, -2.2, n), "ratio/first_pass_deviation": np.full(n, 1e-6), "ratio/ess": ramp(0.95, 0.95, n),
        "mask/outside_completion": np.zeros(n), "mask/eos_in_loss": np.ones(n), "skipped_steps": np.zeros(n),
        "completions/mean_length": ramp(50, 60, n), "completions/clipped_ratio": np.full(n, 0.1), "loss/value": ramp(0.05, 0.03, n),
        "value/explained_variance": ramp(0.2, 0.6, n),
        **{f"nonfinite/{name}": np.zeros(n) for name in ("logps", "old_logps", "ref_logps", "ratio", "advantages", "values", "loss")},
    }  # fmt: skip


SETTINGS = {"is_on_policy": False, "clip_objective": "min", "policy_loss": "ppo_clip", "epsilon": 0.2, "active_dropout": []}


def run(columns=None, settings=None, bad=None, base=None, n=STEPS):
    """A healthy run with some columns (None: not logged) and settings replaced; `bad` names columns that hold NaN from a step on."""
    merged = {**(healthy(n) if base is None else base), **(columns or {})}
    merged = {name: np.asarray(values, dtype=float) for name, values in merged.items() if values is not None}
    marks = {}
    for name, first in (bad or {}).items():
        marks[name] = np.arange(n) >= first
        merged[name] = np.where(marks[name], np.nan, merged.get(name, np.zeros(n)))
    chosen = {name: value for name, value in {**SETTINGS, **(settings or {})}.items() if value is not None}
    return RunLog("made-up", "made-up", "trl-lossplus", np.arange(1, n + 1), merged, marks, chosen)


def at(step, value, n=STEPS, otherwise=0.0):
    """A column that holds `value` from a step on."""
    return np.where(np.arange(1, n + 1) >= step, value, otherwise)
