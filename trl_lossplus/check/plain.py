"""
Objectives by hand: from the log-probs and advantages of one row to its per-token losses, straight from the formulas.

Plain Python floats and lists, the math module and nothing else: no tensors, and no line in common with what they check. A row is a
dictionary of lists over its own tokens (masked ones are left out, so nothing here can forget a mask):

    logps, old_logps, advantages, and where there are any ref_logps, rollout_logps (None: not scored), rollout_weights, entropies,
    values, old_values, returns

`spec` is a dictionary of the configuration's fields (`LossSpec`'s names). An objective takes a row and returns a loss for each of
its tokens; one that compares rows (BATCH_OBJECTIVES) takes all of them. Notation: d = logp - old_logp, r = exp(d), A = advantage.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

Row = dict[str, Any]
Spec = dict[str, Any]


def mean(xs: list[float]) -> float:
    """The mean; 0 of nothing."""
    return sum(xs) / len(xs) if xs else 0.0


def clip(x: float, low: float | None, high: float | None) -> float:
    """x moved into [low, high]; None: no bound."""
    if low is not None and x < low:
        return low
    return high if high is not None and x > high else x


def epsilons(spec: Spec) -> tuple[float, float]:
    """The clip range below and above 1."""
    return spec["epsilon"], spec["epsilon"] if spec["epsilon_high"] is None else spec["epsilon_high"]


# Ratios.


def differences(row: Row) -> list[float]:
    """d of each token."""
    return [new - old for new, old in zip(row["logps"], row["old_logps"], strict=True)]


def bounded(row: Row, spec: Spec) -> list[float]:
    """d of each token, bounded before anything is exponentiated."""
    return [clip(d, -spec["log_ratio_clamp"], spec["log_ratio_clamp"]) for d in differences(row)]


def token_ratios(row: Row, spec: Spec) -> list[float]:
    """r = exp(d)."""
    return [math.exp(d) for d in bounded(row, spec)]


def sequence_ratio(row: Row, spec: Spec) -> float:
    """exp(mean of d over the row), the geometric mean of its ratios (GSPO)."""
    return math.exp(clip(mean(differences(row)), -spec["log_ratio_clamp"], spec["log_ratio_clamp"]))


def is_sequence_level(spec: Spec) -> bool:
    """Whether there is one ratio a row."""
    by_name = spec["policy_loss"] in ("gspo", "luspo") or spec.get("sequence_level", False)
    return by_name or spec["importance_sampling_level"] == "sequence"


def ratios(row: Row, spec: Spec) -> list[float]:
    """The importance ratio of each token at the level that the spec names."""
    return [sequence_ratio(row, spec)] * len(row["logps"]) if is_sequence_level(spec) else token_ratios(row, spec)


# The clipped objectives.


def clipped_loss(r: float, a: float, spec: Spec) -> float:
    """-min(r A, clip(r, 1 - lo, 1 + hi) A), with the two-sided and the dual clip where they are set."""
    low, high = epsilons(spec)
    free = r if spec["delta"] is None else min(r, spec["delta"])
    inside = clip(r, 1 - low, 1 + high)
    gain = min(free * a, inside * a) if spec["clip_objective"] == "min" else max(free * a, inside * a)
    if spec["clip_ratio_c"] is not None and a < 0:
        gain = max(gain, spec["clip_ratio_c"] * a)
    return -gain


def ppo_clip(row: Row, spec: Spec) -> list[float]:
    """PPO; one ratio a row with importance_sampling_level=sequence."""
    return [clipped_loss(r, a, spec) for r, a in zip(ratios(row, spec), row["advantages"], strict=True)]


def gspo(row: Row, spec: Spec) -> list[float]:
    """PPO on the row's geometric mean ratio. GSPO-token and LUSPO have the same value (another gradient, another aggregation)."""
    s = sequence_ratio(row, spec)
    return [clipped_loss(s, a, spec) for a in row["advantages"]]


def clip_flags(row: Row, spec: Spec) -> tuple[list[bool], list[bool]]:
    """Of each token, whether the clip acts below (r < 1 - lo, A < 0) and above (r > 1 + hi, A > 0), r at most delta."""
    low, high = epsilons(spec)
    rs = token_ratios(row, spec)
    if spec["policy_loss"] == "rollout_ppo":
        rs = [math.exp(d) for d in sampler_differences(row, spec)]
    elif spec["policy_loss"] == "gspo_token" or (is_sequence_level(spec) and spec["policy_loss"] not in ("clip_cov", "fipo")):
        rs = [sequence_ratio(row, spec)] * len(row["logps"])
    bound = None if spec["policy_loss"] == "clip_cov" else spec["delta"]
    pairs = list(zip((clip(r, None, bound) for r in rs), row["advantages"], strict=True))
    return [r < 1 - low and a < 0 for r, a in pairs], [r > 1 + high and a > 0 for r, a in pairs]


def cispo(row: Row, spec: Spec) -> list[float]:
    """-clip(r, cispo_ratio_min, epsilon_high) A logp; epsilon_high bounds the ratio itself, 5 if not set."""
    top = 5.0 if spec["epsilon_high"] is None else spec["epsilon_high"]
    tokens = zip(ratios(row, spec), row["advantages"], row["logps"], strict=True)
    return [-clip(r, spec["cispo_ratio_min"], top) * a * logp for r, a, logp in tokens]


def sapo(row: Row, spec: Spec) -> list[float]:
    """-(4 / tau) sigmoid(tau (r - 1)) A, tau by the sign of A."""
    losses = []
    for r, a in zip(ratios(row, spec), row["advantages"], strict=True):
        tau = spec["sapo_temperature_pos"] if a > 0 else spec["sapo_temperature_neg"]
        losses.append(-4 / tau * sigmoid(tau * (r - 1)) * a)
    return losses


def sigmoid(x: float) -> float:
    """1 / (1 + exp(-x)), without overflow."""
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))


def gmpo(row: Row, spec: Spec) -> list[float]:
    """-mean(A) exp(mean of d'), d' = d, at most hi where A > 0, at least -lo where A < 0, 0 where A = 0."""
    low, high = epsilons(spec)
    kept = []
    for d, a in zip(differences(row), row["advantages"], strict=True):
        kept.append(min(d, high) if a > 0 else max(d, -low) if a < 0 else 0.0)
    geometric = math.exp(clip(mean(kept), -spec["log_ratio_clamp"], spec["log_ratio_clamp"]))
    return [-mean(row["advantages"]) * geometric] * len(kept)


def vespo(row: Row, spec: Spec) -> list[float]:
    """-phi A logp, phi = w^k exp(lambda (1 - w)), w the product of the row's ratios (and its rollout weights)."""
    floor = math.log(1e-8)
    log_w = sum(clip(d, -20, 20) for d in bounded(row, spec))
    for weight in row.get("rollout_weights") or []:
        log_w += clip(math.log(weight), floor, 20) if weight > 0 else floor
    log_w = clip(log_w, floor, 20)
    losses = []
    for a, logp in zip(row["advantages"], row["logps"], strict=True):
        sign = "pos" if a >= 0 else "neg"
        k, decay = spec[f"vespo_k_{sign}"], max(spec[f"vespo_lambda_{sign}"], 1e-4)
        losses.append(-math.exp(k * log_w + decay * (1 - math.exp(log_w))) * a * logp)
    return losses


# Weighted log-probs.


def reinforce(row: Row, spec: Spec) -> list[float]:
    """-A logp."""
    return [-a * logp for a, logp in zip(row["advantages"], row["logps"], strict=True)]


def importance_weight(d: float, spec: Spec, mode: str) -> float:
    """r truncated to [is_ratio_min, is_ratio_max], or 0 outside of it."""
    low, high = spec["is_ratio_min"], spec["is_ratio_max"]
    r = math.exp(clip(d, -spec["log_ratio_clamp"], spec["log_ratio_clamp"]))
    inside = clip(r, low, high)
    return inside if mode == "truncate" or inside == r else 0.0


def tis(row: Row, spec: Spec) -> list[float]:
    """-w A logp, w truncated."""
    return [importance_weight(d, spec, "truncate") * x for d, x in zip(differences(row), reinforce(row, spec), strict=True)]


def mis(row: Row, spec: Spec) -> list[float]:
    """-w A logp, w masked."""
    return [importance_weight(d, spec, "mask") * x for d, x in zip(differences(row), reinforce(row, spec), strict=True)]


def topr(row: Row, spec: Spec) -> list[float]:
    """-w A logp, w = 1 for A > 0, else min(r, 1)."""
    tokens = zip(token_ratios(row, spec), row["advantages"], row["logps"], strict=True)
    return [-(1.0 if a > 0 else min(r, 1.0)) * a * logp for r, a, logp in tokens]


def sampler_differences(row: Row, spec: Spec) -> list[float]:
    """log pi / pi_sampler of each token, bounded; a token that the sampler could not score counts as no difference."""
    pairs = zip(row["logps"], row["rollout_logps"], strict=True)
    ds = [0.0 if sampled is None else logp - sampled for logp, sampled in pairs]
    return [clip(d, -spec["log_ratio_clamp"], spec["log_ratio_clamp"]) for d in ds]


def rollout_is(row: Row, spec: Spec) -> list[float]:
    """-w A logp, w = pi / pi_sampler of the token or of the whole row."""
    pairs = zip(row["logps"], row["rollout_logps"], strict=True)
    ds = [0.0 if sampled is None else logp - sampled for logp, sampled in pairs]
    ds = [sum(ds)] * len(ds) if spec["importance_sampling_level"] == "sequence" else ds
    losses = [importance_weight(d, spec, spec["is_mode"]) * x for d, x in zip(ds, reinforce(row, spec), strict=True)]
    return [x if keep else 0.0 for x, keep in zip(losses, kept_tokens(row, spec), strict=True)]


def rollout_ppo(row: Row, spec: Spec) -> list[float]:
    """PPO with r = pi / pi_sampler."""
    tokens = zip(sampler_differences(row, spec), row["advantages"], strict=True)
    losses = [clipped_loss(math.exp(d), a, spec) for d, a in tokens]
    return [x if keep else 0.0 for x, keep in zip(losses, kept_tokens(row, spec), strict=True)]


def kept_tokens(row: Row, spec: Spec) -> list[bool]:
    """Which tokens rollout_rs keeps, by statistics of d = log pi / pi_sampler: d, d^2 / 2, or e^d - 1 - d."""
    pairs = zip(row["logps"], row["rollout_logps"], strict=True)
    ds = [0.0 if sampled is None else clip(logp - sampled, -20.0, 20.0) for logp, sampled in pairs]
    keep = [True] * len(ds)
    if spec["rollout_rs"] is None:
        return keep
    names = list(dict.fromkeys(name.strip() for name in spec["rollout_rs"].split(",") if name.strip()))
    texts = [text.strip() for text in str(spec["rollout_rs_threshold"]).split(",") if text.strip()]
    for name, text in zip(names, texts * len(names) if len(texts) == 1 else texts, strict=False):
        level, kind = name.rsplit("_", 1)
        values = [{"k1": d, "k2": d * d / 2, "k3": math.expm1(d) - d}[kind] for d in ds]
        pooled = {"seq_sum": sum(values), "seq_mean": mean(values), "seq_max": max(values, default=0.0)}
        values = values if level == "token" else [pooled[level]] * len(ds)
        numbers = [float(number) for number in text.split("_")]
        low, high = -math.inf, numbers[-1]
        if kind == "k1":  # its bounds are those of the ratio
            low, high = (-math.log(high), math.log(high)) if len(numbers) == 1 else (math.log(numbers[0]), math.log(high))
        keep = [k and low <= value <= high for k, value in zip(keep, values, strict=True)]
    return keep


# A trust region on the probability, and quadratic penalties.


def dppo_tv(row: Row, spec: Spec) -> list[float]:
    """-min(r, c) A logp while p - p_old <= hi (A > 0) or >= -lo (A <= 0)."""
    low, high = epsilons(spec)
    losses = []
    for r, a, logp, old in zip(token_ratios(row, spec), row["advantages"], row["logps"], row["old_logps"], strict=True):
        move = math.exp(logp) - math.exp(old)
        keep = move <= high if a > 0 else move >= -low
        losses.append(-min(r, spec["dppo_ratio_max"]) * a * logp if keep else 0.0)
    return losses


def binary_kl(old: float, logp: float) -> float:
    """KL of "this token or another": p_old (old - logp) + (1 - p_old) log((1 - p_old) / (1 - p)), both complements plus 1e-8."""
    old, logp = min(old, 0.0), min(logp, 0.0)
    rest_old, rest = -math.expm1(old), -math.expm1(logp)
    return math.exp(old) * (old - logp) + rest_old * math.log((rest_old + 1e-8) / (rest + 1e-8))


def dppo_kl(row: Row, spec: Spec) -> list[float]:
    """-min(r, c) A logp while the binary KL is within the threshold, or the token moved against A."""
    low, high = epsilons(spec)
    losses = []
    for r, a, logp, old in zip(token_ratios(row, spec), row["advantages"], row["logps"], row["old_logps"], strict=True):
        kl = binary_kl(old, logp)
        keep = (kl <= high or logp <= old) if a > 0 else (kl <= low or logp >= old)
        losses.append(-min(r, spec["dppo_ratio_max"]) * a * logp if keep else 0.0)
    return losses


def ipo(row: Row, spec: Spec) -> list[float]:
    """-r A where |p - p_old| (or only the move along A) is <= threshold, plus kl_coef d^2."""
    losses, signed = [], spec["ipo_by_sign"]
    for d, a, logp, old in zip(bounded(row, spec), row["advantages"], row["logps"], row["old_logps"], strict=True):
        move = math.exp(logp) - math.exp(old)
        near = ((move if a > 0 else -move) if signed else abs(move)) <= spec["ipo_threshold"]
        losses.append((-math.exp(d) * a if near else 0.0) + spec["ipo_kl_coef"] * d * d)
    return losses


def dro(row: Row, spec: Spec) -> list[float]:
    """-(A logp - beta / 2 d^2)."""
    tokens = zip(bounded(row, spec), row["advantages"], row["logps"], strict=True)
    return [-(a * logp - spec["dro_beta"] / 2 * d * d) for d, a, logp in tokens]


def fipo(row: Row, spec: Spec) -> list[float]:
    """f times the clipped loss, f = clip(exp(F_t)), F_t = sum over s >= t of 2^(-(s - t) / decay) d_s."""
    ds, losses = bounded(row, spec), []
    counted = [0.0 if spec["delta"] is not None and math.exp(d) > spec["delta"] else d for d in ds]
    for t, (d, a) in enumerate(zip(ds, row["advantages"], strict=True)):
        future = sum(2 ** (-(s - t) / spec["fipo_decay_rate"]) * counted[s] for s in range(t, len(ds)))
        f, reach, safety = math.exp(clip(future, -20.0, 20.0)), spec["fipo_clip_range"], spec["fipo_safety_threshold"]
        if reach is not None:
            f = clip(f, 1.0 if spec["fipo_clip_high_only"] else 1 - reach, 1 + reach)
        if safety is not None and a < 0 and math.exp(d) > safety:
            f = clip(f, 0.8, 1.0)
        losses.append(f * clipped_loss(math.exp(d), a, {**spec, "clip_objective": "min", "clip_ratio_c": None}))
    return losses


# For stale data.


def rec_keeps(r: float, a: float, spec: Spec) -> bool:
    """Whether REC trains on a token."""
    low, high = epsilons(spec)
    if spec["rec_clip"] == "none":
        return True
    if spec["rec_clip"] == "one_side":
        return not (r > 1 + high and a > 0) and not (r < 1 - low and a < 0)
    far = (a > 0 and r <= 1 - spec["rec_ring_low"]) or (a < 0 and r >= 1 + spec["rec_ring_high"])
    return 1 - low <= r <= 1 + high or (spec["rec_clip"] == "ring" and far)


def rec(row: Row, spec: Spec) -> list[float]:
    """-w A logp on the tokens kept, w = 1, r or exp(A / temperature)."""
    losses = []
    for r, a, logp in zip(ratios(row, spec), row["advantages"], row["logps"], strict=True):
        weights = {"none": 1.0, "importance": r, "advantage": math.exp(min(a / spec["rec_temperature"], 20.0))}
        losses.append(-weights[spec["rec_weight"]] * a * logp if rec_keeps(r, a, spec) else 0.0)
    return losses


def sppo(row: Row, spec: Spec) -> list[float]:
    """-A log(clip(r, 1 / (1 + lo), 1 + hi))."""
    low, high = epsilons(spec)
    tokens = zip(token_ratios(row, spec), row["advantages"], strict=True)
    return [-a * math.log(clip(r, 1 / (1 + low), 1 + high)) for r, a in tokens]


OBJECTIVES: dict[str, Callable[[Row, Spec], list[float]]] = {
    "ppo_clip": ppo_clip, "gspo": gspo, "gspo_token": gspo, "luspo": gspo, "cispo": cispo, "sapo": sapo, "gmpo": gmpo,
    "vespo": vespo, "reinforce": reinforce, "gpg": reinforce, "tis": tis, "mis": mis, "topr": topr, "rollout_is": rollout_is,
    "rollout_ppo": rollout_ppo, "dppo_tv": dppo_tv, "dppo_kl": dppo_kl, "ipo": ipo, "dro": dro, "fipo": fipo,
    "rec": rec, "sppo": sppo,
}  # fmt: skip
