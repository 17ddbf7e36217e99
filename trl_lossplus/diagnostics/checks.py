"""
What the health rules look for in the tensors: mask, log-probs, ratio.

A check takes a `View` and the two ends of its rule's band, and returns what it saw, or None. Those of the rest of the chain
(advantages, KL, loss, outcome) are in checks_learning.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .view import NOISE, Seen, View, number

Check = Callable[[View, float, float], Seen | None]


def span(view: View, name: str) -> tuple[int, int]:
    """First and last step that logged a metric."""
    steps, _ = view.logged(name)
    return int(steps[0]), int(steps[-1])


def counted(name: str, what: str) -> Check:
    """A check of a count that must be 0 at every step, or of a value of that name logged as not finite."""

    def check(view: View, low: float, high: float) -> Seen | None:
        steps, values = view.logged(name)
        hits = values > high
        if not hits.any():
            return None
        at = steps[hits]
        worst = float(values[hits].max())
        text = f"{name} is up to {number(worst)} {what}, above 0 in {hits.sum()} of {len(steps)} steps"
        return Seen(text, int(at[0]), int(at[-1]), {name: worst, "steps": float(hits.sum())})

    return check


def eos_left_out(view: View, low: float, high: float) -> Seen | None:
    """The end token of ended completions is not part of the loss."""
    name = "mask/eos_in_loss"
    if not view.enough(name) or view.end(name) >= low:
        return None
    share = view.end(name)
    return Seen(f"the end token is in the loss for {share:.0%} of the ended completions", *span(view, name), {name: share})


# Values that are not finite. The chain decides which is the cause: the first one in it.

LATER = ("logps", "old_logps", "ref_logps", "ratio", "advantages", "values", "loss")


# The probe in which a tensor's bad values show, for a run that did not count them.
SHOWN_IN = {"logps": "entropy", "ratio": "probe/ratio/q100", "advantages": "probe/advantage/q100", "values": "probe/value/q100"}


def bad_steps(view: View, tensor: str) -> NDArray[np.bool_]:
    """(N,) the steps at which a tensor held values that are not finite: as counted, else by its probe at a step that was dropped."""
    counted_as = f"nonfinite/{tensor}"
    if counted_as in view.run.columns:
        return np.nan_to_num(view.run.get(counted_as)) > 0
    shown = view.run.bad.get(SHOWN_IN.get(tensor, ""))
    dropped = np.diff(np.nan_to_num(view.run.get("skipped_steps")), prepend=0.0) > 0
    if tensor == "loss":
        return view.run.bad.get("loss/policy", np.zeros_like(dropped)) & dropped
    return np.zeros_like(dropped) if shown is None else shown & dropped


def _stopped(stopped: dict[str, Any]) -> Seen:
    return Seen(f"the run was stopped: {stopped['sentence'].rstrip('.')}", stopped["step"], stopped["step"])


def nonfinite(tensor: str) -> Check:
    """A check for non-finite values in a tensor, unless an earlier one in the chain already held some by then."""

    def check(view: View, low: float, high: float) -> Seen | None:
        stopped = view.setting("stopped")
        if stopped is not None and stopped["tensor"] == tensor:
            return _stopped(stopped)
        hits = bad_steps(view, tensor)
        if not hits.any():
            return None
        first = int(np.argmax(hits))
        if any(bad_steps(view, earlier)[: first + 1].any() for earlier in LATER[: LATER.index(tensor)]):
            return None
        at = view.steps[hits]
        count = view.run.get(f"nonfinite/{tensor}")[first]
        many = "" if np.isnan(count) else f"{number(float(count))} "
        text = f"{many}values of {tensor} were not finite at step {at[0]}" + _beside(view, tensor, int(at[0]))
        return Seen(
            text, int(at[0]), int(at[-1]), {"steps": float(hits.sum())} | ({} if np.isnan(count) else {"values": float(count)})
        )

    return check


def _value_at(view: View, name: str, step: int) -> float:
    """A metric's last finite value up to a step; NaN if none."""
    steps, values = view.logged(name)
    before = values[steps <= step]
    return float(before[-1]) if len(before) else float("nan")


def _beside(view: View, tensor: str, step: int) -> str:
    """What the log says about the cause."""
    if tensor == "advantages" and view.flat is not None:
        flat = _value_at(view, view.flat, step)
        least = _value_at(view, "group_reward/std_min", step)
        if flat > 0 or least == 0:
            return f"; {flat:.0%} of its groups had no spread at all, so their advantage was 0 / 0"
    if tensor == "ratio" and view.has("probe/log_ratio/q100"):
        widest = max(abs(_value_at(view, f"probe/log_ratio/q{q}", step)) for q in ("00", "100"))
        bound = view.setting("log_ratio_clamp")
        bounded = "" if bound is None else f" (log_ratio_clamp is {bound:g})"
        return f"; the log ratio reached {number(widest)} nats, and exp() of more than 88 is infinite in float32{bounded}"
    return ""


NAN_NAMES = ("loss/policy", "loss/kl", "loss/value", "loss", "grad_norm")


def nan_logged(view: View, low: float, high: float) -> Seen | None:
    """Loss, gradient or their parts were logged as not finite: all that a run without our counts tells."""
    if any(bad_steps(view, tensor).any() for tensor in LATER):
        return None
    stopped = view.setting("stopped")
    if stopped is not None and stopped["tensor"] == "gradient":
        return _stopped(stopped)
    gaps = {name: view.run.bad[name] for name in NAN_NAMES if name in view.run.bad}
    if view.setting("fp16"):
        gaps.pop("grad_norm", None)  # the gradient scaler looks for its scale by overflowing
    if not gaps:
        return None
    rows = np.any(list(gaps.values()), 0)
    at = view.steps[rows]
    at_first = int(np.argmax(rows))
    here = [name for name in ("entropy", "kl", *gaps) if name in view.run.bad and view.run.bad[name][at_first]]
    text = f"{', '.join(here)} became NaN or infinite at step {at[0]}"
    loss = _value_at(view, "loss", int(at[0]))
    if "loss" not in here and loss == 0.0:
        text += "; the loss shows 0 there because transformers logs a NaN as 0 (logging_nan_inf_filter)"
    return Seen(text, int(at[0]), int(at[-1]), {"steps": float(rows.sum())})


# The ratio.


def _first_pass(view: View, high: float) -> tuple[float, float, int, int, float] | None:
    """(deviation at the first step, median later, first and last step over the bound, the bound)."""
    steps, values = view.logged("ratio/first_pass_deviation")
    if not len(steps):
        return None
    bound = high * (10.0 if view.setting("bf16") or view.setting("fp16") or view.setting("use_vllm") else 1.0)
    over = values > bound
    if over.sum() < max(1, 0.2 * len(values)):
        return None
    return float(values[0]), float(np.median(values[len(values) // 2 :])), int(steps[over][0]), int(steps[over][-1]), bound


def _both_ways(view: View) -> bool:
    """
    Whether the log ratios of the first passes lie on both sides of 0 alike, as noise does.

    Tokens that the new policy sampled are on average likelier under it than under an older one, so stale old log-probs shift them up.
    """
    first = np.isfinite(view.run.get("ratio/first_pass_deviation"))
    median = view.run.get("probe/log_ratio/q50")[first]
    median = median[np.isfinite(median) & (median != 0.0)]
    if len(median) < 4:
        return False
    return bool(median.mean() < NOISE * median.std(ddof=1) / np.sqrt(len(median)))


def _is_noise(view: View, at_first: float, bound: float) -> bool:
    """Whether two passes of the same weights disagree: from the first step on, or by dropout, or both ways alike."""
    dropout = view.setting("active_dropout")
    if at_first > bound or dropout:
        return True
    return dropout is None and _both_ways(view)


def ratio_off(view: View, low: float, high: float) -> Seen | None:
    """The ratio of the first pass over a rollout is off 1 although no weight has changed: two forward passes disagree."""
    found = _first_pass(view, high)
    if found is None or not _is_noise(view, found[0], found[-1]):
        return None
    first, later, start, stop, _ = found
    text = f"in the first pass over a rollout the ratio is off 1 by up to {number(first)} at first and {number(later)} later, both ways"
    dropout = view.setting("active_dropout")
    if dropout:
        text += f"; dropout acts in {', '.join(map(str, list(dropout)[:3]))}"
    elif view.setting("disable_dropout") is False:
        text += "; disable_dropout is False"
    return Seen(text, start, stop, {"at first": first, "later": later})


def stale_old_logps(view: View, low: float, high: float) -> Seen | None:
    """The ratio of the first pass is 1 at the first step, then drifts: the old log-probs are not those of the weights that sampled."""
    found = _first_pass(view, high)
    if found is None or _is_noise(view, found[0], found[-1]):
        return None
    first, later, start, stop, _ = found
    text = f"in the first pass over a rollout the ratio is off 1 by up to {number(first)} at first and {number(later)} later, mostly upwards"
    return Seen(text, start, stop, {"at first": first, "later": later})


def ratio_extreme(view: View, low: float, high: float) -> Seen | None:
    """Raw log ratios, before any clamp, that no clip range expects."""
    names = [f"probe/log_ratio/q{q}" for q in ("00", "100")]
    if not view.has(*names):
        return None
    steps, least = view.logged(names[0])
    most = view.logged(names[1])[1]
    if len(least) != len(most):
        return None
    widest = np.maximum(np.abs(least), np.abs(most))
    over = widest > high
    if over.sum() < max(1, 0.01 * len(steps)):
        return None
    worst, at = float(widest.max()), steps[over]
    text = f"raw log ratios reach {number(worst)} nats (a ratio of {np.exp(min(worst, 700)):.2g}) in {over.sum()} of {len(steps)} steps"
    return Seen(text, int(at[0]), int(at[-1]), {"log_ratio": worst, "steps": float(over.sum())})


def ess_low(view: View, low: float, high: float) -> Seen | None:
    """Few tokens carry most of the importance weight."""
    name = "ratio/ess"
    if not view.enough(name) or view.end(name) >= low:
        return None
    tail = view.windows(name).tail(3)
    share = view.end(name)
    return Seen(
        f"the weights are worth {share:.0%} of the tokens (effective sample size)",
        int(tail.first[0]),
        int(tail.last[-1]),
        {name: share},
    )


# The clip.


def wrong_side(view: View, low: float, high: float) -> Seen | None:
    """The clip lets tokens through that PPO's minimum stops: by the setting, or by policy terms below the bound."""
    if view.setting("clip_objective") == "max":
        return Seen("clip_objective is max", int(view.steps[0]), int(view.steps[-1]))
    if view.setting("policy_loss", "ppo_clip") != "ppo_clip" or not view.has("probe/policy/q00", "probe/advantage/q100"):
        return None
    epsilon = view.setting("epsilon_high", view.setting("epsilon", 0.2))
    bound = -(1 + float(epsilon)) * np.maximum(view.run.get("probe/advantage/q100"), 0.0)
    term = view.run.get("probe/policy/q00")
    both = np.isfinite(term) & np.isfinite(bound)
    over = both & (term < high * bound - 1e-6)
    if over.sum() < max(1, 0.1 * both.sum()):
        return None
    worst, at = int(np.nanargmin(np.where(over, term - bound, np.nan))), view.steps[over]
    text = (
        f"policy terms of {number(float(term[worst]))}, where the clip bounds them at {number(float(bound[worst]))} "
        f"(-(1 + epsilon) times the largest advantage), in {over.sum()} of {both.sum()} steps"
    )
    return Seen(text, int(at[0]), int(at[-1]), {"policy term": float(term[worst]), "bound": float(bound[worst])})


def _clip(view: View) -> tuple[float, int, int] | None:
    """(median clip fraction over the last half of the run, its steps)."""
    values = view.clip()
    if values is None or len(values) < 5:
        return None
    half = len(values) // 2
    return float(np.mean(values[half:])), int(view.steps[len(view.steps) // 2]), int(view.steps[-1])


def on_policy(view: View, low: float, high: float) -> Seen | None:
    """The clip fraction is 0 because the ratio is exactly 1."""
    found = _clip(view)
    if found is None or found[0] > 0 or not view.on_policy:
        return None
    served = view.setting("optimizer_steps_per_rollout")
    why = "" if served is None else f": one rollout serves {number(float(served))} optimizer step{'s' * (served != 1)}"
    return Seen(f"the clip fraction is 0 at every step{why}", int(view.steps[0]), int(view.steps[-1]))


def never_moves(view: View, low: float, high: float) -> Seen | None:
    """Several updates a rollout, and the ratio is exactly 1 in all of them."""
    names = [f"probe/log_ratio/q{q}" for q in ("00", "100")]
    if view.setting("is_on_policy") is not False or not view.has(*names) or not view.has("grad_norm"):
        return None
    widest = max(float(np.abs(view.logged(name)[1]).max()) for name in names)
    if widest > high or view.end("grad_norm") == 0.0 or len(view.steps) < 5:
        return None
    text = "the settings reuse each rollout, but the ratio is exactly 1 in every step"
    return Seen(text, int(view.steps[0]), int(view.steps[-1]), {"log_ratio": widest})


def clip_low(view: View, low: float, high: float) -> Seen | None:
    """Fewer clipped tokens than healthy, off-policy."""
    found = _clip(view)
    if found is None or found[0] >= low or view.on_policy is not False:
        return None
    return Seen(
        f"{found[0]:.1%} of the tokens are clipped (mean of the last half); 10% to 30% is usual",
        *found[1:],
        {"clipped": found[0]},
    )


def clip_high(view: View, low: float, high: float) -> Seen | None:
    """More clipped tokens than healthy."""
    found = _clip(view)
    if found is None or found[0] <= high:
        return None
    return Seen(
        f"{found[0]:.1%} of the tokens are clipped (mean of the last half); 10% to 30% is usual",
        *found[1:],
        {"clipped": found[0]},
    )
