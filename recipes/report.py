"""What a recipe prints: one line about the loss, one a logged step, one at the end."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from tqdm import tqdm
from transformers import PrinterCallback, ProgressCallback, Trainer, TrainerCallback

from trl_lossplus import LossSpec
from trl_lossplus.registry import POLICY_LOSSES

SHOWN = {
    "kl": "kl",
    "kl_rollout": "kl of the rollout",
    "kl_coef": "kl coef",
    "entropy": "entropy",
    "value/explained_variance": "explained variance",
}
CLIP_METRICS = ("clip_ratio/region_mean", "cispo_clip_ratio", "clip_ratio")


def describe_loss(spec: LossSpec) -> str:
    """The loss in one line: objective with its clip range, aggregation, advantages, KL."""
    reads = POLICY_LOSSES.get(spec.policy_loss).options
    clip = f" (epsilon {spec.epsilon:g} below, {spec.clip_high:g} above)" if "epsilon" in reads else ""
    if spec.policy_loss == "cispo":
        clip = f" (ratio at most {5.0 if spec.epsilon_high is None else spec.epsilon_high:g})"
    level = "" if spec.importance_sampling_level == "token" else ", one ratio a sequence"
    scale = "" if spec.scale_rewards == "none" else f" over the {spec.scale_rewards}'s std"
    whitened = "" if spec.advantage_normalization == "none" else f", whitened ({spec.advantage_normalization})"
    parts = [
        f"policy_loss {spec.policy_loss}{clip}{level}",
        f"aggregation {spec.loss_aggregation}",
        f"advantages {spec.advantage_estimator}{scale}{whitened}",
        _describe_kl(spec),
    ]
    if spec.vf_coef:
        clipped = "not clipped" if spec.cliprange_value is None else f"clipped at {spec.cliprange_value:g}"
        error = {"mse": "squared error", "huber": "Huber loss"}[spec.value_loss]
        parts.append(f"value loss {spec.vf_coef:g} x half the {error}, {clipped}")
    if spec.entropy_coef:
        parts.append(f"entropy bonus {spec.entropy_coef:g}")
    return "; ".join(parts)


def _describe_kl(spec: LossSpec) -> str:
    places = []
    if spec.kl_in_loss:
        places.append(f"{spec.beta:g} x {spec.kl_estimator} in the loss{', times ratio' if spec.use_bias_correction_kl else ''}")
    if spec.kl_in_reward:
        places.append(f"{spec.kl_reward_coef:g} x {spec.kl_estimator} in the reward, by {spec.kl_reward_level}")
    if not places:
        return "no KL"
    control = f" (adaptive to {spec.kl_target:g} nats a token)" if spec.kl_controller == "adaptive" else ""
    return f"KL {' and '.join(places)}{control}"


def _number(logs: dict[str, Any], name: str) -> float:
    """A logged value; NaN where it is missing, or None because nothing was counted."""
    value = logs.get(name)
    return math.nan if value is None else value


def step_line(logs: dict[str, Any], step: int, steps: int, rollout: int, reward: float) -> str:
    """One logged step in one line: the reward of the rollout in use, the loss and its parts, the fraction of clipped tokens."""
    names = sorted((name for name in logs if name.startswith("loss/")), reverse=True)
    terms = " ".join(f"{name.removeprefix('loss/')} {_number(logs, name):+.5f}" for name in names)
    line = f"step {step}/{steps}  rollout {rollout}  reward {reward:.3f}  loss {_number(logs, 'loss'):+.5f} = {terms}"
    clipped = next((name for name in CLIP_METRICS if name in logs), None)
    if clipped is not None:
        line += f"  clipped {_number(logs, clipped):.2%}"
    for name, shown in SHOWN.items():
        if name in logs:
            line += f"  {shown} {_number(logs, name):.4g}"
    return line + f"  grad {_number(logs, 'grad_norm'):.3g}"


class StepLines(TrainerCallback):
    """Prints `step_line` for each logged step, on the main process, above the progress bar."""

    def __init__(self) -> None:
        self.rollout, self.reward = 0, math.nan

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """A resumed run counts on."""
        logged = [entry for entry in state.log_history if "reward" in entry]
        self.rollout, self.reward = len(logged), _number(logged[-1], "reward") if logged else math.nan

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """A step that trains on an earlier step's rollout logs no reward: the line shows that rollout's."""
        if logs is None or "loss" not in logs:
            return
        if "reward" in logs:
            self.rollout, self.reward = self.rollout + 1, _number(logs, "reward")
        if state.is_world_process_zero:
            tqdm.write(step_line(logs, state.global_step, state.max_steps, self.rollout, self.reward))


class QuietProgress(ProgressCallback):
    """The progress bar alone."""

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Prints nothing."""


def use_step_lines(trainer: Trainer) -> None:
    """Replaces the trainer's printing of every metric; trackers and the log history keep them all."""
    trainer.remove_callback(PrinterCallback)
    if trainer.pop_callback(ProgressCallback) is not None:
        trainer.add_callback(QuietProgress)
    trainer.add_callback(StepLines)


def before_and_after(history: Sequence[dict[str, Any]], most: int = 5) -> tuple[float, float, int]:
    """Mean reward over the first and the last few logged rollouts, and how many those are (at most half of them)."""
    rewards = [entry["reward"] for entry in history if entry.get("reward") is not None]
    if not rewards:
        return math.nan, math.nan, 0
    few = max(1, min(most, len(rewards) // 2))
    return sum(rewards[:few]) / few, sum(rewards[-few:]) / few, few


def explained_variance(history: Sequence[dict[str, Any]], steps: int = 10) -> tuple[float, float]:
    """
    How much of the returns' variance the critic explained: at the first logged step, and the most over `steps` steps in a row.

    Steps whose returns did not vary at all say nothing and are left out. Once nearly every reward is the same, the value falls far
    below 0 however good the critic is: that is why the most is given, and not the last.
    """
    logged = [_number(entry, "value/explained_variance") for entry in history if "value/explained_variance" in entry]
    known = [value for value in logged if not math.isnan(value)]
    steps = min(steps, len(known))
    if not steps:
        return math.nan, math.nan
    return known[0], max(sum(known[start : start + steps]) / steps for start in range(len(known) - steps + 1))


def last_line(history: Sequence[dict[str, Any]], steps: int, seconds: float, where: str) -> str:
    """The line that closes a run."""
    before, after, few = before_and_after(history)
    over = "rollout" if few == 1 else f"{few} logged rollouts"
    return (
        f"done: reward {before:.3f} before, {after:.3f} after (mean of the first and of the last {over}), {steps} optimizer steps, "
        f"{seconds:.1f} s of training, model in {where}"
    )
