"""
Per-token policy objectives: the loss to minimise at each token, before any reduction.

Notation: d = logp - old_logp bounded by the clamp, r = exp(d), A = advantage, lo and hi = clip range below and above 1, sg = stop
gradient. Shapes: (B, T); a sequence-level ratio is (B, 1) and gives a (B, 1) loss, one value a row. Advantages are (B, 1) or
(B, T). Inputs hold no NaN on masked positions (`LossBatch.clean` has selected them away). All of it float32.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from .fused import clipped_surrogate
from .masking import row_means, row_sums, select


class PolicyTerm(NamedTuple):
    """
    What a policy objective returns.

    per_token: (B, T) or (B, 1) losses to minimise, connected to the log-probs, not reduced.
    stats: named (B, T) or (B, 1) tensors. The suffix says how they are reduced: `_min` and `_max` take the extreme over rows
        of the row means, anything else the mean over valid tokens (over rows for (B, 1)).
    """

    per_token: Tensor
    stats: Mapping[str, Tensor] = {}


def log_ratio(logps: Tensor, old_logps: Tensor, clamp: float) -> Tensor:
    """log pi / pi_old of each token, bounded to [-clamp, clamp] before anything is exponentiated: (B, T)."""
    difference = logps - old_logps
    return difference if clamp == math.inf else difference.clamp(-clamp, clamp)


def sequence_log_ratio(token_log_ratio: Tensor, mask: Tensor) -> Tensor:
    """Mean log ratio of each row: (B, 1), 0 for a row without valid tokens. Source: GSPO (2507.18071), eq. 7."""
    return row_means(token_log_ratio, mask).unsqueeze(-1)


def sequence_token_log_ratio(token_log_ratio: Tensor, mask: Tensor) -> Tensor:
    """The row's mean log ratio as value, each token's own gradient: (B, T). Source: GSPO-token (2507.18071), eq. 14."""
    mean = sequence_log_ratio(token_log_ratio, mask).detach()
    return mean + (token_log_ratio - token_log_ratio.detach())


def _clip_stats(ratio: Tensor, advantages: Tensor, low: float, high: float) -> dict[str, Tensor]:
    is_low = (ratio < low) & (advantages < 0)
    is_high = (ratio > high) & (advantages > 0)
    return {
        "clip_ratio/low_mean": is_low,
        "clip_ratio/low_min": is_low,
        "clip_ratio/high_mean": is_high,
        "clip_ratio/high_max": is_high,
        "clip_ratio/region_mean": is_low | is_high,
    }


def ppo_clip(
    ratio: Tensor,
    advantages: Tensor,
    *,
    epsilon_low: float = 0.2,
    epsilon_high: float = 0.2,
    clip_objective: str = "min",
    delta: float | None = None,
    clip_ratio_c: float | None = None,
) -> PolicyTerm:
    """
    -min(r A, clip(r, 1 - lo, 1 + hi) A): PPO's pessimistic bound.

    Args:
        ratio: (B, T) or (B, 1). advantages: (B, T) or (B, 1).
        epsilon_low, epsilon_high: clip range below and above 1.
        clip_objective: "min", or "max" for the form -max(r A, clip(r) A), which removes the clip where it should act.
        delta: upper bound on the unclipped ratio (TRL's two-sided clipping).
        clip_ratio_c: c > 1: for A < 0 the loss is at most -c A (dual clip).

    Returns:
        `PolicyTerm` with the share of tokens clipped low (A < 0), high (A > 0) and either way.

    Sources: PPO (1707.06347) eq. 7; asymmetric range: DAPO (2503.14476); delta: INTELLECT-2 (2505.07291); dual clip: 1912.09729.
    """
    if delta is None:
        loss = clipped_surrogate(ratio, advantages, 1 - epsilon_low, 1 + epsilon_high, pessimistic=clip_objective == "min")
    else:
        pick = torch.minimum if clip_objective == "min" else torch.maximum
        loss = -pick(ratio.clamp(max=delta) * advantages, ratio.clamp(1 - epsilon_low, 1 + epsilon_high) * advantages)
    stats = _clip_stats(ratio.detach(), advantages, 1 - epsilon_low, 1 + epsilon_high)
    if clip_ratio_c is not None:
        bound = -clip_ratio_c * advantages
        stats["clip_ratio/dual_mean"] = (advantages < 0) & (loss.detach() > bound)
        loss = torch.where(advantages < 0, torch.minimum(loss, bound), loss)
    return PolicyTerm(loss, stats)


def cispo(
    ratio: Tensor, advantages: Tensor, logps: Tensor, *, ratio_max: float = 5.0, ratio_min: float | None = None
) -> PolicyTerm:
    """
    -sg(clip(r, ratio_min, ratio_max)) A logp: the importance weight is clipped and detached, every token keeps a gradient.

    `ratio_max` and `ratio_min` bound the ratio itself, not its distance from 1; no lower bound by default.

    Sources: MiniMax-M1 (2506.13585) eq. 4; ratio_max 5: ScaleRL (2510.13786). verl clips to [1 - lo, 1 + hi].
    """
    weight = ratio.detach().clamp(min=ratio_min, max=ratio_max)
    clipped = (ratio.detach() > ratio_max) & (advantages > 0)
    return PolicyTerm(-weight * advantages * logps, {"cispo_clip_ratio": clipped})


def sapo(ratio: Tensor, advantages: Tensor, *, temperature_pos: float = 1.0, temperature_neg: float = 1.05) -> PolicyTerm:
    """
    -(4 / tau) sigmoid(tau (r - 1)) A, tau by the sign of A: a smooth gate in place of the clip.

    Source: SAPO (2511.20347); A = 0 takes `temperature_neg`, which changes nothing.
    """
    tau = torch.where(advantages > 0, temperature_pos, temperature_neg)
    return PolicyTerm(-torch.sigmoid(tau * (ratio - 1)) * 4 / tau * advantages)


def gmpo(
    token_log_ratio: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    epsilon_low: float = 0.2,
    epsilon_high: float = 0.2,
    log_ratio_clamp: float = 20.0,
) -> PolicyTerm:
    """
    -mean_t(A) exp(mean_t m), m = sign(A) min(sign(A) d, sign(A) clip(d, -lo, hi)): a geometric mean of clipped ratios.

    The clip range is in log space and one-sided: a token whose ratio already moved against its advantage is left alone.

    Returns:
        `PolicyTerm` of (B, 1).

    Source: GMPO (2507.20673) eq. 4; for token-varying advantages the row's mean advantage, as in verl's `geo_mean`.
    """
    advantages = advantages.expand(mask.shape)
    sign = advantages.sign()
    clipped = token_log_ratio.clamp(-epsilon_low, epsilon_high)
    kept = sign * torch.minimum(sign * token_log_ratio, sign * clipped)
    ratio = torch.exp(row_means(kept, mask).clamp(-log_ratio_clamp, log_ratio_clamp)).unsqueeze(-1)
    loss = -row_means(advantages, mask).unsqueeze(-1) * ratio
    d = token_log_ratio.detach()
    return PolicyTerm(loss, _clip_stats(d, advantages, -epsilon_low, epsilon_high))


def vespo(
    token_log_ratio: Tensor,
    advantages: Tensor,
    logps: Tensor,
    mask: Tensor,
    *,
    rollout_weights: Tensor | None = None,
    k_pos: float = 2.0,
    lambda_pos: float = 3.0,
    k_neg: float = 3.0,
    lambda_neg: float = 2.0,
) -> PolicyTerm:
    """
    -phi(w) A logp with phi(w) = w^k exp(lambda (1 - w)), detached; w is the whole row's ratio (a product, not a mean).

    Args:
        token_log_ratio, logps: (B, T). rollout_weights: (B, T) or (B, 1) pi_old / pi_sampler, multiplied into w.
        k, lambda: exponent and decay, by the sign of A (A = 0 counts as positive).

    Returns:
        `PolicyTerm` of (B, T), with phi's mean over rows as a statistic.

    Source: VESPO (2602.10693); bounds of log w [log 1e-8, 20] as in TRL.
    """
    floor = math.log(1e-8)
    with torch.no_grad():
        log_w = row_sums(token_log_ratio.detach().clamp(-20, 20), mask).unsqueeze(-1)
        if rollout_weights is not None:
            log_weights = torch.log(rollout_weights).clamp(floor, 20)
            log_w = log_w + (log_weights if log_weights.shape[-1] == 1 else row_sums(log_weights, mask).unsqueeze(-1))
        log_w = log_w.clamp(floor, 20)
        positive = advantages >= 0
        k = torch.where(positive, k_pos, k_neg)
        decay = torch.where(positive, lambda_pos, lambda_neg).clamp(min=1e-4)
        phi = torch.exp(decay + k * log_w - decay * torch.exp(log_w)).nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    return PolicyTerm(-phi * advantages * logps, {"vespo/phi_seq_mean": phi})


def off_policy_keep(advantages: Tensor, logps: Tensor, sampling_logps: Tensor, mask: Tensor, *, threshold: float) -> Tensor:
    """
    False for the tokens of a row that drifted too far from the policy that sampled it and has a negative advantage.

    The drift is the row's mean of sampling_logp - logp over its valid tokens, in nats; a token whose sampling log-prob is NaN
    gives no evidence.

    Returns:
        bool, shaped like `advantages`.

    Source: DeepSeek-V3.2 (2512.02556) eq. 9, as in TRL.
    """
    drift = (sampling_logps - logps.detach()).nan_to_num(nan=0.0)
    mean = row_means(select(drift, mask), mask).unsqueeze(-1)
    return (advantages >= 0) | (mean <= threshold)
