"""
Objectives by hand that compare the tokens or the rows of an optimizer step: Clip-Cov, KL-Cov, REAL, M2PO.

Rows and spec as in plain.py, and also `group` (the prompt's id) and `id` (the row's own, None where there is none) in each row. Each
takes all rows of the step and returns a list for each row.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from .plain import Row, Spec, bounded, clip, clip_flags, clipped_loss, mean, token_ratios

MANY = 1 << 64


def covariances(rows: list[Row]) -> list[list[float]]:
    """(A - mean A)(logp - mean logp), means over all tokens."""
    a_mean = mean([a for row in rows for a in row["advantages"]])
    logp_mean = mean([logp for row in rows for logp in row["logps"]])
    return [[(a - a_mean) * (logp - logp_mean) for a, logp in zip(row["advantages"], row["logps"], strict=True)] for row in rows]


def mixed(x: int) -> int:
    """The finalizer of splitmix64, on 64-bit words."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % MANY
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % MANY
    return x ^ (x >> 31)


def token_hash(logp: float, row: int | None, number: int, seed: int) -> int:
    """What a token draws: a hash of the seed, its row's id (or its log-prob in steps of 1/256 nat), and its number from 1 in its row."""
    told_by = round(clip(logp, -1e6, 0.0) * 256) if row is None else row
    start = mixed(seed * 0x9E3779B97F4A7C15 % MANY)
    return mixed((mixed((start + told_by) % MANY) + number) % MANY) % (1 << 62)


def hashes(rows: list[Row], seed: int) -> list[list[int]]:
    """`token_hash` of every token."""
    return [[token_hash(logp, row.get("id"), i + 1, seed) for i, logp in enumerate(row["logps"])] for row in rows]


def lowest(keys: list[list[int]], among: list[list[bool]], k: int) -> list[list[bool]]:
    """The k lowest keys of those among which is chosen, and all that tie with the last."""
    candidates = sorted(key for ks, inside in zip(keys, among, strict=True) for key, here in zip(ks, inside, strict=True) if here)
    if k >= len(candidates):
        return among
    bound = candidates[k - 1]
    return [[here and key <= bound for key, here in zip(ks, inside, strict=True)] for ks, inside in zip(keys, among, strict=True)]


def budget(rows: list[Row], share: float) -> int:
    """How many tokens are chosen: at least one."""
    return max(1, int(share * sum(len(row["logps"]) for row in rows)))


def clip_cov_selection(rows: list[Row], spec: Spec) -> list[list[bool]]:
    """clip_cov_ratio of the tokens, drawn from the unclipped ones with clip_cov_min < Cov < clip_cov_max."""
    among = []
    for row, cov in zip(rows, covariances(rows), strict=True):
        low, high = clip_flags(row, spec)
        inside = [spec["clip_cov_min"] < x < spec["clip_cov_max"] for x in cov]
        among.append([x and not (a or b) for x, a, b in zip(inside, low, high, strict=True)])
    return lowest(hashes(rows, spec["cov_seed"]), among, budget(rows, spec["clip_cov_ratio"]))


def clip_cov(rows: list[Row], spec: Spec) -> list[list[float]]:
    """PPO's clipped loss, and 0 on the chosen tokens that the clip leaves alone."""
    chosen, losses = clip_cov_selection(rows, spec), []
    plain = {**spec, "clip_objective": "min", "delta": None, "clip_ratio_c": None}
    for row, selected in zip(rows, chosen, strict=True):
        here = []
        for r, a, drop in zip(token_ratios(row, spec), row["advantages"], selected, strict=True):
            loss = clipped_loss(r, a, plain)
            acts = loss > -r * a
            here.append(0.0 if drop and not acts else loss)
        losses.append(here)
    return losses


def kl_cov_selection(rows: list[Row], spec: Spec) -> list[list[bool]]:
    """kl_cov_ratio of the tokens, those of the highest covariance; among equal ones at the edge it is drawn."""
    cov, k = covariances(rows), budget(rows, spec["kl_cov_ratio"])
    ordered = sorted((x for xs in cov for x in xs), reverse=True)
    if k >= len(ordered):
        return [[True] * len(xs) for xs in cov]
    edge = ordered[k - 1]
    above = sum(x > edge for x in ordered)
    ties = lowest(hashes(rows, spec["cov_seed"]), [[x == edge for x in xs] for xs in cov], k - above)
    return [[x > edge or tie for x, tie in zip(xs, ts, strict=True)] for xs, ts in zip(cov, ties, strict=True)]


def kl_cov(rows: list[Row], spec: Spec) -> list[list[float]]:
    """-r A, plus kl_cov_coef |d| on the chosen tokens."""
    chosen, losses = kl_cov_selection(rows, spec), []
    for row, selected in zip(rows, chosen, strict=True):
        tokens = zip(bounded(row, spec), row["advantages"], selected, strict=True)
        losses.append([-math.exp(d) * a + (spec["kl_cov_coef"] * abs(d) if here else 0.0) for d, a, here in tokens])
    return losses


def real(rows: list[Row], spec: Spec) -> list[list[float]]:
    """log(1 + sum over good rows of e^(-s / tau)) + log(1 + sum over bad rows of e^(s / tau)) of each prompt, s the mean of d."""
    tau, losses = spec["real_tau"], []
    for row in rows:
        same = [other for other in rows if other["group"] == row["group"] and other["logps"]]
        good = [mean(bounded(other, spec)) for other in same if mean(other["advantages"]) > 0]
        bad = [mean(bounded(other, spec)) for other in same if not mean(other["advantages"]) > 0]
        both = math.log1p(sum(math.exp(-s / tau) for s in good)) + math.log1p(sum(math.exp(s / tau) for s in bad))
        losses.append([both if good and bad else 0.0] * len(row["logps"]))
    return losses


def m2po(rows: list[Row], spec: Spec) -> list[list[float]]:
    """-r A; the tokens that moved furthest along A are left out, one size after the other, until the mean d^2 of the rest is small."""

    def along(d: float, a: float) -> bool:
        return (a > 0 and d > 0) or (a < 0 and d < 0)

    tokens = [list(zip(bounded(row, spec), row["advantages"], strict=True)) for row in rows]
    left = sorted(d * d for row in tokens for d, a in row if along(d, a))
    bound = math.inf
    while left and mean(left) > spec["m2_threshold"]:
        bound = left[-1]
        left = [x for x in left if x < bound]
    return [[0.0 if along(d, a) and d * d >= bound else -math.exp(d) * a for d, a in row] for row in tokens]


BATCH_OBJECTIVES: dict[str, Callable[[list[Row], Spec], list[list[float]]]] = {
    "clip_cov": clip_cov,
    "kl_cov": kl_cov,
    "real": real,
    "m2po": m2po,
}
