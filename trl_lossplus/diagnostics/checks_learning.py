"""What the health rules look for after the ratio: advantages, KL, loss, outcome. See checks.py."""

from __future__ import annotations

import numpy as np

from .checks import span
from .runlog import Array
from .view import Seen, View, number


def _whole(view: View) -> tuple[int, int]:
    return int(view.steps[0]), int(view.steps[-1])


def _from_to(view: View, name: str) -> str:
    """How a metric went, in words."""
    found = view.trend(name)
    return f"{name} is not known" if found is None else f"{name} went from {number(found.start)} to {number(found.end)}"


# Advantages.


def no_signal(view: View, low: float, high: float) -> Seen | None:
    """In window after window every group is flat, and not because the task is learned."""
    if view.flat is None or not view.enough(view.flat) or view.solved:
        return None
    windows = view.windows(view.flat)
    full = windows.median > high
    if not full.any() or full.mean() < low:
        return None
    text = f"every group of every rollout is flat in {full.sum()} of {len(full)} windows"
    spread = view.end("reward_std")
    within = view.end("group_reward/std")
    if np.isfinite(within) and spread > 0:
        text += f"; rewards differ by {number(spread)} between prompts and by {number(within)} inside a group"
    text += f" ({_from_to(view, 'reward')})"
    at = np.flatnonzero(full)
    return Seen(text, int(windows.first[at[0]]), int(windows.last[at[-1]]), {"windows": float(full.sum())})


def groups_flat(view: View, low: float, high: float) -> Seen | None:
    """Most groups have no spread at the end."""
    if view.flat is None or not view.enough(view.flat):
        return None
    tail = view.windows(view.flat).tail(3)
    flat = view.end(view.flat)
    if flat < high or no_signal(view, 0.5, 0.999) is not None:
        return None
    text = f"{flat:.0%} of the groups have no spread at the end"
    if view.solved:
        text += f", because the task is learned: {_from_to(view, 'reward')}, alike in all groups"
    return Seen(text, int(tail.first[0]), int(tail.last[-1]), {"flat": flat}, "info" if view.solved else None)


def spread_collapse(view: View, low: float, high: float) -> Seen | None:
    """The spread inside the groups fell to a fraction of what it was."""
    name = "group_reward/std"
    found = view.trend(name)
    if found is None or not found.falls or found.end > low * found.start or view.solved:
        return None
    if no_signal(view, 0.5, 0.999) is not None:
        return None
    return Seen(f"{_from_to(view, name)}", *span(view, name), {"start": found.start, "end": found.end})


def advantage_extreme(view: View, low: float, high: float) -> Seen | None:
    """Advantages that no normalization of a group makes."""
    names = [f"probe/advantage/q{q}" for q in ("00", "100")]
    if not view.has(*names):
        return None
    widest = np.maximum(np.abs(view.run.get(names[0])), np.abs(view.run.get(names[1])))
    over = np.nan_to_num(widest) > high
    if not over.any() or (over.sum() < 0.05 * np.isfinite(widest).sum() and np.nanmax(widest) < 10 * high):
        return None  # whitening makes a single failure among many successes stand out: that is no fault
    worst, at = float(np.nanmax(widest)), view.steps[over]
    return Seen(f"advantages reach {number(worst)} in {over.sum()} steps", int(at[0]), int(at[-1]), {"advantage": worst})


def one_sign(view: View, low: float, high: float) -> Seen | None:
    """The learner's batches hold advantages of one sign only."""
    names = [f"probe/advantage/q{q}" for q in ("00", "100")]
    if not view.has(*names):
        return None
    least, most = view.run.get(names[0]), view.run.get(names[1])
    counts = np.isfinite(least) & np.isfinite(most) & ((least != 0) | (most != 0))
    up, down = counts & (least > 0), counts & (most < 0)
    share = (up | down).sum() / max(counts.sum(), 1)
    if counts.sum() < 5 or share < high:
        return None
    at = view.steps[up | down]
    text = f"in {share:.0%} of the optimizer steps all advantages have one sign (all positive in {up.sum()}, all negative in {down.sum()})"
    return Seen(text, int(at[0]), int(at[-1]), {"share": float(share)})


def policy_vanishes(view: View, low: float, high: float) -> Seen | None:
    """The policy's gradient is nearly nothing, though the rewards have spread."""
    if not view.enough("grad_logp/policy") and not view.enough("share/grad/policy"):
        return None
    if view.flat is not None and view.end(view.flat) > 0.9:
        return None
    if not view.reward_rises and not view.end("reward_std") > 0 and not view.end("group_reward/std") > 0:
        return None
    share = view.end("share/grad/policy", 10)
    beside_kl = view.has("share/grad/kl") and view.end("share/grad/kl", 10) > 0
    if beside_kl and share < low:
        text = f"the policy term makes {share:.2%} of the gradient, the KL {1 - share:.0%}, though the rewards differ inside the groups"
        return Seen(text, *span(view, "share/grad/policy"), {"share/grad/policy": share})
    gradient, expected = view.end("grad_logp/policy", 10), _expected_gradient(view)
    if not gradient < high * expected:
        return None
    text = f"the policy term's gradient with respect to the log-probs is {number(gradient)}; these advantages and lengths give about {number(expected)}"
    return Seen(text, *span(view, "grad_logp/policy"), {"gradient": gradient, "expected": expected})


def _expected_gradient(view: View) -> float:
    """Norm of A / N over the N tokens of a step with a mean over tokens, from the log; NaN where it does not tell."""
    rows, cuts = view.setting("generation_batch_size"), view.setting("steps_per_generation")
    mean = view.setting("loss_aggregation") in ("token_mean", "seq_mean_token_mean", "prompt_mean")
    if not mean or not rows or not cuts or not view.has("probe/advantage/q00", "probe/advantage/q100", "completions/mean_length"):
        return float("nan")
    tokens = view.end("completions/mean_length") * rows / cuts * view.setting("gradient_accumulation_steps", 1)
    largest = max(abs(view.end("probe/advantage/q00", 10)), abs(view.end("probe/advantage/q100", 10)))
    return 0.2 * largest / np.sqrt(max(tokens, 1.0))


# The KL.


def kl_sign(view: View, low: float, high: float) -> Seen | None:
    """The KL term rewards distance: its value and the KL have opposite signs, or an estimate is negative that cannot be."""
    kl, term = view.run.get("kl"), view.run.get("loss/kl")
    both = np.isfinite(kl) & np.isfinite(term) & (np.abs(kl) > 1e-6)
    against = both & (np.sign(kl) * term < 0)
    if both.sum() >= 3 and against.sum() > high * both.sum():
        at = view.steps[against]
        text = (
            f"loss/kl is {number(float(np.median(term[against])))} while kl is {number(float(np.median(kl[against])))} (medians): "
            f"opposite signs in {against.sum()} of {both.sum()} steps"
        )
        return Seen(
            text, int(at[0]), int(at[-1]), {"loss/kl": float(np.median(term[against])), "kl": float(np.median(kl[against]))}
        )
    windows = view.windows("kl")
    scale = np.abs(windows.median).max(initial=0.0)
    if len(windows.median) >= 3 and scale > 1e-3 and (windows.median < -0.1 * scale).mean() > high:
        least = float(windows.median.min())
        text = f"kl is negative in {(windows.median < 0).sum()} of {len(windows.median)} windows (down to {number(least)})"
        return Seen(text, int(windows.first[0]), int(windows.last[-1]), {"kl": least})
    return None


def kl_metric(view: View) -> str | None:
    """The metric that holds the mean KL, if any."""
    return next((name for name in ("kl", "kl_rollout") if view.has(name)), None)


def kl_explodes(view: View, low: float, high: float) -> Seen | None:
    """The KL is `high` times what it was in the first tenth, and large. Where the reward pays for it, it is but said."""
    name = kl_metric(view)
    if name is None:
        return None
    windows = view.windows(name)
    values = np.abs(windows.median)
    if len(values) < 4:
        return None
    base = max(float(np.median(values[: max(2, len(values) // 10)])), low / high)
    last = float(values[-max(1, len(values) // 10) :].max())
    if last < high * base or last < low:
        return None
    text = f"{name} went from {number(base)} to {number(last)} nats a token, {last / base:.0f}-fold"
    at = int(np.argmax(values >= high * base))
    paid = view.reward_rises
    text += f", while {_from_to(view, 'reward')}"
    numbers = {"from": base, "to": last}
    return Seen(text, int(windows.first[at]), int(windows.last[-1]), numbers, "info" if paid else None)


def kl_flat(view: View, low: float, high: float) -> Seen | None:
    """Neither the KL nor the reward moves."""
    name, reward = kl_metric(view), view.trend("reward")
    if name is None or reward is None or len(view.steps) < 30 or reward.rises or reward.falls:
        return None
    last = float(np.abs(view.windows(name).median).max())
    if last >= high or no_signal(view, 0.5, 0.999) is not None:
        return None
    text = f"{name} never exceeds {number(last)} nats a token, and {_from_to(view, 'reward')}: the policy stays where it started"
    return Seen(text, *_whole(view), {name: last})


def _held_share(view: View, name: str) -> Array:
    """The KL's share by windows, without the steps in which nearly all groups are flat: there it is all that is left."""
    share = view.run.get(name)
    if view.flat is not None:
        share = np.where(np.nan_to_num(view.run.get(view.flat)) > 0.8, np.nan, share)
    return view.cut(share).median


def reward_hacking(view: View, low: float, high: float) -> Seen | None:
    """The reward rises while what should hold it falls: the KL's share of the gradient, its coefficient, or another of the rewards."""
    if not view.reward_rises:
        return None
    evidence: list[str] = []
    numbers: dict[str, float] = {}
    moves = view.trend(kl_metric(view) or "kl")
    if moves is not None and moves.rises:
        name = "share/grad/kl" if view.has("share/grad/kl") else "share/loss/kl"
        shares = _held_share(view, name)
        if len(shares) >= 4 and (name == "share/grad/kl" or view.on_policy is False):
            most, end = float(shares[: -len(shares) // 4].max()), float(np.median(shares[-max(1, len(shares) // 4) :]))
            if most >= low and end < high * most:
                evidence.append(
                    f"the KL's share of the {'gradient' if 'grad' in name else 'loss'} fell from {most:.2%} to {end:.2%} and the KL rose"
                )
                numbers |= {"share at most": most, "share at the end": end}
        coef = view.logged("kl_coef")[1]
        if len(coef) >= 8 and coef[-1] < 0.4 * high * coef[0]:
            evidence.append(
                f"the KL's coefficient fell from {number(float(coef[0]))} to {number(float(coef[-1]))} and the KL rose"
            )
            numbers |= {"kl_coef": float(coef[-1])}
    for part in sorted(n for n in view.run.columns if n.startswith("rewards/") and n.endswith("/mean")):
        found = view.trend(part)
        if found is not None and found.falls and found.end < found.start - 0.2 * abs(found.start):
            evidence.append(_from_to(view, part))
            numbers |= {part: found.end}
    if not evidence:
        return None
    text = f"{_from_to(view, 'reward')}, while " + ", and ".join(evidence)
    return Seen(text, *_whole(view), numbers, "error" if len(evidence) > 1 else None)


def kl_dominates(view: View, low: float, high: float) -> Seen | None:
    """The KL term makes nearly all of the gradient and the reward does not rise."""
    share = view.end("share/grad/kl", 10)
    if (
        not view.enough("share/grad/kl")
        or not share > high
        or view.reward_rises
        or (view.flat is not None and view.end(view.flat) > 0.9)
    ):
        return None
    if policy_vanishes(view, 0.01, 0.1) is not None:
        return None
    return Seen(
        f"the KL makes {share:.0%} of the gradient, and {_from_to(view, 'reward')}",
        *span(view, "share/grad/kl"),
        {"share": share},
    )


def kl_share(view: View, low: float, high: float) -> Seen | None:
    """How much of the loss the KL makes."""
    share = view.end("share/loss/kl", 10)
    if not np.isfinite(share) and view.has("loss/policy", "loss/kl"):
        parts = [np.abs(view.run.get(f"loss/{name}")) for name in ("kl", "policy")]
        share = float(np.nanmedian(parts[0] / np.maximum(parts[0] + parts[1], 1e-30)))
    if not np.isfinite(share) or not view.has("kl"):
        return None
    text = f"the KL makes {share:.1%} of |policy| + |KL| in the loss"
    gradient = view.end("share/grad/kl", 10)
    if np.isfinite(gradient):
        text += f" and {gradient:.1%} of the gradient"
    penalty = view.end("kl_penalty")
    if np.isfinite(penalty):
        text += f"; a completion pays {number(penalty)} of reward for it"
    return Seen(text, *span(view, "kl"), {"share/loss/kl": share})


# Loss, critic, outcome.


def loss_zero(view: View, low: float, high: float) -> Seen | None:
    """The loss is 0, or nearly, at ratio 1 with centred advantages, while the gradient is not."""
    name = "loss/policy" if view.has("loss/policy") else "loss"
    gradient = view.end("grad_norm", 20)
    if not view.has(name) or not view.on_policy or not gradient > 0 or not view.has("reward"):
        return None
    loss = float(np.median(np.abs(view.logged(name)[1])))
    if loss > high:
        return None
    text = f"|{name}| is {number(loss)} (median), and grad_norm {number(gradient)}"
    return Seen(text, *span(view, name), {name: loss, "grad_norm": gradient})


def entropy_collapse(view: View, low: float, high: float) -> Seen | None:
    """The entropy fell to a fraction of what it was."""
    found = view.trend("entropy")
    if found is None or found.start <= 0 or not found.falls or view.end("entropy") > low * found.start:
        return None
    text = f"{_from_to(view, 'entropy')} nats a token, while {_from_to(view, 'reward')}"
    return Seen(text, *span(view, "entropy"), {"start": found.start, "end": found.end}, "info" if view.reward_rises else None)


def truncated(view: View, low: float, high: float) -> Seen | None:
    """Nearly all completions are cut off."""
    name = "completions/clipped_ratio"
    share = view.end(name)
    if not view.enough(name) or not share > high:
        return None
    masked = bool(view.setting("mask_truncated_completions"))
    severity = "error" if masked else "info" if view.reward_rises else None
    text = f"{share:.0%} of the completions are cut off at max_completion_length" + (
        ", and masked out of the loss" if masked else ""
    )
    return Seen(text, *span(view, name), {name: share}, severity)


def length_growth(view: View, low: float, high: float) -> Seen | None:
    """Completions grow, the reward does not."""
    name = "completions/mean_length"
    found = view.trend(name)
    if found is None or not found.rises or found.end < high * found.start or view.reward_rises or not view.has("reward"):
        return None
    return Seen(
        f"{_from_to(view, name)} tokens, while {_from_to(view, 'reward')}",
        *span(view, name),
        {"start": found.start, "end": found.end},
    )


def reward_falls(view: View, low: float, high: float) -> Seen | None:
    """The reward is lower at the end than at the beginning."""
    found = view.trend("reward")
    if found is None or not found.falls or len(view.steps) < 20:
        return None
    loss = view.trend("loss")
    text = _from_to(view, "reward") + (f", while {_from_to(view, 'loss')}" if loss is not None and loss.falls else "")
    return Seen(text, *span(view, "reward"), {"start": found.start, "end": found.end})


def value_diverges(view: View, low: float, high: float) -> Seen | None:
    """The value loss is many times what it was."""
    windows = view.windows("loss/value")
    if len(windows.median) < 4:
        return None
    base = float(np.median(windows.median[: max(2, len(windows.median) // 10)]))
    last = float(np.median(windows.median[-2:]))
    explained = view.end("value/explained_variance")
    if not last > high * max(base, 1e-8) or explained > low:  # where rewards begin to differ, a good critic's loss grows too
        return None
    return Seen(
        f"loss/value went from {number(base)} to {number(last)}",
        int(windows.first[0]),
        int(windows.last[-1]),
        {"from": base, "to": last},
    )


def variance_negative(view: View, low: float, high: float) -> Seen | None:
    """The critic is worse than a constant, where the rewards still vary."""
    name = "value/explained_variance"
    values = view.run.get(name)
    spread = view.run.get("reward_std")
    if np.isfinite(spread).any():
        spread = np.where(np.isfinite(spread), spread, np.inf)
        values = np.where(spread > 0.3 * np.nanmax(np.where(np.isfinite(spread), spread, 0)), values, np.nan)
    windows = view.cut(values)
    half = windows.median[len(windows.median) // 2 :]
    if len(windows.median) < 4 or not np.median(half) < low:
        return None
    text = f"{name} is {number(float(np.median(half)))} in the last half of the run (1 is perfect, 0 a constant)"
    return Seen(text, int(windows.first[len(windows.first) // 2]), int(windows.last[-1]), {name: float(np.median(half))})
