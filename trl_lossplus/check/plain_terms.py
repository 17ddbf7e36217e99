"""
Everything around the policy objective by hand: KL, entropy, value, what drops or weights tokens, and the aggregation.

Rows and spec as in plain.py: lists over a row's own tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from .plain import Row, Spec, clip, mean, ratios

# From logits.


def log_prob(logits: list[float], token: int, temperature: float) -> float:
    """log softmax(logits / temperature) of the token."""
    scaled = [x / temperature for x in logits]
    top = max(scaled)
    return scaled[token] - top - math.log(sum(math.exp(x - top) for x in scaled))


def squared_sum(logits: list[float], temperature: float) -> float:
    """Sum over the vocabulary of the squares of softmax(logits / temperature)."""
    top = max(logits)
    weights = [math.exp((x - top) / temperature) for x in logits]
    return sum(w * w for w in weights) / sum(weights) ** 2


def entropy(logits: list[float], temperature: float) -> float:
    """-sum p log p of softmax(logits / temperature), in nats."""
    scaled = [x / temperature for x in logits]
    top = max(scaled)
    weights = [math.exp(x - top) for x in scaled]
    total = sum(weights)
    return math.log(total) - sum(w / total * (x - top) for w, x in zip(weights, scaled, strict=True))


# KL.


def k1(d: float, bound: float) -> float:
    """d = logp - ref_logp."""
    return d


def k2(d: float, bound: float) -> float:
    """d^2 / 2."""
    return d * d / 2


def k3(d: float, bound: float) -> float:
    """exp(-d) + d - 1, d at least -bound."""
    d = max(d, -bound)
    return math.expm1(-d) + d


def k_abs(d: float, bound: float) -> float:
    """|d|."""
    return abs(d)


KL: dict[str, Callable[[float, float], float]] = {
    "k1": k1, "kl": k1, "kl_div": k1, "k2": k2, "mse": k2, "biased_kl": k2, "k3": k3, "low_var_kl": k3, "abs": k_abs,
}  # fmt: skip


def kl_estimates(name: str, logps: list[float], ref_logps: list[float], bound: float) -> list[float]:
    """Per-token KL; a name with + has the same value (and another gradient)."""
    estimate = KL[name.removesuffix("+")]
    return [estimate(logp - ref, bound) for logp, ref in zip(logps, ref_logps, strict=True)]


def kl_in_loss(row: Row, spec: Spec) -> list[float]:
    """The KL of each token as the loss takes it: times the importance ratio where the spec corrects its bias."""
    kl = kl_estimates(spec["kl_estimator"], row["logps"], row["ref_logps"], spec["log_ratio_clamp"])
    if not spec["use_bias_correction_kl"]:
        return kl
    return [x * r for x, r in zip(kl, ratios(row, spec), strict=True)]


def adaptive_coefficient(coef: float, kl: float, rows: int, spec: Spec) -> float:
    """coef (1 + clip(kl / target - 1, -0.2, 0.2) rows / horizon)."""
    return coef * (1 + clip(kl / spec["kl_target"] - 1, -0.2, 0.2) * rows / spec["kl_horizon"])


# Entropy.


def quantile(values: list[float], q: float) -> float:
    """The q quantile, linear between neighbours; infinity of nothing."""
    if not values:
        return math.inf
    ordered, place = sorted(values), q * (len(values) - 1)
    below = math.floor(place)
    above = min(below + 1, len(values) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


def entropy_term(rows: list[Row], tokens: float, coef: float) -> float:
    """-coef times the mean entropy: over all tokens, or over a selection, which counts by the rows' share of the step's tokens."""
    everything = [h for row in rows for h in row["entropies"]]
    if rows and rows[0].get("entropy_selected") is not None:
        pairs = [pair for row in rows for pair in zip(row["entropies"], row["entropy_selected"], strict=True)]
        return -coef * mean([h for h, chosen in pairs if chosen]) * len(everything) / max(tokens, 1)
    return -coef * sum(everything) / max(tokens, 1)


# What drops or weights a token of the policy term.


def drifted(row: Row, spec: Spec) -> list[bool]:
    """Off-policy mask: the row's mean of sampling logp - logp is above the threshold, and the token's advantage is negative."""
    sampled = row["old_logps"] if row.get("rollout_logps") is None else row["rollout_logps"]
    drift = mean([0.0 if old is None else old - logp for old, logp in zip(sampled, row["logps"], strict=True)])
    return [a < 0 and drift > spec["off_policy_mask_threshold"] for a in row["advantages"]]


def rollout_weights(
    rows: list[Row], mode: str, low: float | None, high: float | None, bound: float, normalize: bool
) -> list[list[float]]:
    """pi_old / pi_sampler of each token, or of each row for all its tokens; truncated or masked; then over their mean, if asked for."""
    level, kind = mode.split("_")
    tables = []
    for row in rows:
        pairs = zip(row["logps"], row["rollout_logps"], strict=True)
        ds = [0.0 if sampled is None else logp - sampled for logp, sampled in pairs]
        ds = [sum(ds)] * len(ds) if level == "sequence" else ds
        ws = [math.exp(clip(d, -bound, bound)) for d in ds]
        inside = [clip(w, low, high) for w in ws]
        tables.append(inside if kind == "truncate" else [w if w == x else 0.0 for w, x in zip(ws, inside, strict=True)])
    counted = [w for ws in tables for w in (ws[:1] if level == "sequence" else ws)]
    centre = mean(counted) if normalize and mean(counted) > 1e-8 else 1.0
    return [[w / centre for w in ws] for ws in tables]


def weighted(losses: list[float], row: Row, spec: Spec) -> list[float]:
    """The objective's losses without dropped tokens, times the token's weights."""
    if spec["off_policy_mask_threshold"] is not None:
        losses = [0.0 if drop else loss for loss, drop in zip(losses, drifted(row, spec), strict=True)]
    if row.get("entropy_selected") is not None:
        losses = [loss if keep else 0.0 for loss, keep in zip(losses, row["entropy_selected"], strict=True)]
    if row.get("token_weights") is not None:
        losses = [loss * w for loss, w in zip(losses, row["token_weights"], strict=True)]
    if row.get("rollout_weights") is not None and spec["policy_loss"] not in ("vespo", "rollout_is", "rollout_ppo"):
        losses = [loss * w for loss, w in zip(losses, row["rollout_weights"], strict=True)]
    return losses


# Value.


def distance(value: float, target: float, spec: Spec) -> float:
    """(v - R)^2, or twice the Huber loss."""
    gap = abs(value - target)
    if spec["value_loss"] == "mse" or gap <= spec["huber_delta"]:
        return gap * gap
    return 2 * spec["huber_delta"] * (gap - spec["huber_delta"] / 2)


def value_losses(row: Row, spec: Spec) -> list[float]:
    """0.5 max(l(v, R), l(clip(v, V - eps, V + eps), R)); 0.5 l(v, R) without clipping."""
    losses, reach = [], spec["cliprange_value"]
    for i, (value, target) in enumerate(zip(row["values"], row["returns"], strict=True)):
        loss = distance(value, target, spec)
        if reach is not None:
            old = row["old_values"][i]
            loss = max(loss, distance(clip(value, old - reach, old + reach), target, spec))
        losses.append(0.5 * loss)
    return losses


# Aggregation.


def window_counts(rows: list[Row], empty_rows: bool) -> dict[str, Any]:
    """What an optimizer step divides by: its tokens, its rows (with tokens, or all), its prompts, and each prompt's tokens."""
    groups: dict[int, int] = {}
    for row in rows:
        groups[row["group"]] = groups.get(row["group"], 0) + len(row["logps"])
    counted = [row for row in rows if (row["logps"] or empty_rows) and not row.get("dropped")]
    prompts = sum(1 for tokens in groups.values() if tokens)
    return {"tokens": sum(groups.values()), "rows": len(counted), "prompts": prompts, "group_tokens": groups}


def aggregate(
    mode: str, losses: list[list[float]], groups: list[int], counts: dict[str, Any], norm_length: float | None
) -> float:
    """These rows' share of the optimizer step's loss."""
    rows, tokens = max(counts["rows"], 1), max(counts["tokens"], 1)
    total = sum(sum(row) for row in losses)
    if mode == "token_mean":
        return total / tokens
    if mode == "token_sum":
        return total
    if mode == "seq_mean_token_mean":
        return sum(mean(row) for row in losses) / rows
    if mode == "seq_mean_token_sum":
        return total / rows
    if mode == "seq_mean_token_sum_norm":
        assert norm_length is not None
        return total / (rows * norm_length)
    shares = [sum(row) / max(counts["group_tokens"][g], 1) for row, g in zip(losses, groups, strict=True)]  # prompt_mean
    return sum(shares) / max(counts["prompts"], 1)
