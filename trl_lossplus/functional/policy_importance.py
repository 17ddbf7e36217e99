"""
Policy objectives that weight the log-prob: -w A logp with an importance weight w that carries no gradient.

Notation and shapes as in policy.py. The gradient of such a loss is -w A at each token, whatever w is made of; where the ratio of
w is pi / pi_old and is not bounded, that is PPO's gradient without the clip.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .masking import row_sums, select
from .policy import PolicyTerm


def weighted_logp(logps: Tensor, advantages: Tensor, weights: Tensor | None = None) -> PolicyTerm:
    """
    -w A logp, w constant (1 if None): REINFORCE.

    Args:
        logps: (B, T). advantages, weights: (B, T) or (B, 1).

    Source: Williams (1992); GPG (2504.02546) is the same loss with w = 1, its own part are its advantages.
    """
    loss = -advantages * logps
    return PolicyTerm(loss if weights is None else loss * weights.detach())


def bounded_weights(
    log_ratio: Tensor, *, mode: str, low: float | None, high: float | None, log_ratio_clamp: float = 20.0
) -> tuple[Tensor, Tensor]:
    """
    Importance weights from log ratios, and where a bound acted.

    Args:
        log_ratio: log pi / mu, (B, T) or (B, 1).
        mode: truncate (weights are moved to the nearest bound) or mask (weights outside of the bounds become 0).
        low, high: bounds of the ratio itself; None: no bound.

    Returns:
        weights without gradient, and bool, both shaped like `log_ratio`. A ratio that equals a bound is inside.
    """
    ratio = log_ratio.detach().clamp(-log_ratio_clamp, log_ratio_clamp).exp()
    outside = torch.zeros_like(ratio, dtype=torch.bool)
    if low is not None:
        outside = outside | (ratio < low)
    if high is not None:
        outside = outside | (ratio > high)
    if mode == "mask":
        return select(ratio, ~outside), outside
    return (ratio if low is None and high is None else ratio.clamp(min=low, max=high)), outside


def importance_weighted(
    log_ratio: Tensor,
    advantages: Tensor,
    logps: Tensor,
    *,
    mode: str = "truncate",
    low: float | None = None,
    high: float | None = 2.0,
    log_ratio_clamp: float = 20.0,
) -> PolicyTerm:
    """
    -sg(w) A logp, w = the ratio pi / mu truncated to [low, high], or 0 outside of it (mode mask).

    Args:
        log_ratio: log pi / mu, (B, T), or (B, 1) for one weight a row; mu the old policy or the sampler.
        mode, low, high: see `bounded_weights`.

    Returns:
        `PolicyTerm` with the share of tokens where a bound acted.

    Sources: truncation as in IMPALA (1802.01561); "TIS": Yao et al., "Your efficient RL framework secretly brings you off-policy RL
    training" (2025); masking: IcePop (Ling team, Ring-1T, 2025). ROLL's `tis` truncates to [0, 1], verl's bypass mode at 2, SkyRL's
    `rollout_is` masks outside of (1 - lo, 1 + hi): all of them by `low` and `high`.
    """
    weights, outside = bounded_weights(log_ratio, mode=mode, low=low, high=high, log_ratio_clamp=log_ratio_clamp)
    return PolicyTerm(-weights * advantages * logps, {"is_clip_ratio": outside.expand(logps.shape)})


def topr(ratio: Tensor, advantages: Tensor, logps: Tensor) -> PolicyTerm:
    """
    -sg(w) A logp, w = 1 for A > 0 and min(r, 1) for the others: what was good is imitated, what was bad fades out as it gets rare.

    Args:
        ratio: (B, T) pi / pi_old. advantages: (B, T) or (B, 1). logps: (B, T).

    Returns:
        `PolicyTerm` with the share of tokens whose weight is below 1.

    Source: TOPR (2503.14286) eq. 8, which uses the whole row's ratio (a product) and rewards; the token's ratio and advantages
    here, as in ROLL and Trinity-RFT. Because of the unweighted positive side this is biased off-policy, on purpose.
    """
    tapered = ratio.detach().clamp(max=1.0)
    weights = torch.where(advantages > 0, torch.ones_like(tapered), tapered)
    return PolicyTerm(-weights * advantages * logps, {"topr_tapered": weights < 1})


def sampler_log_ratio(logps: Tensor, rollout_logps: Tensor, mask: Tensor, *, level: str = "token") -> Tensor:
    """
    log pi / mu against the policy that sampled, connected to `logps`; a token that the sampler could not score (NaN) counts as
    no difference.

    Args:
        level: token: (B, T). sequence: (B, 1), the sum over the row (the ratio of the whole completions).
    """
    difference = logps - torch.where(torch.isnan(rollout_logps), logps.detach(), rollout_logps)
    return difference if level == "token" else row_sums(difference, mask).unsqueeze(-1)
