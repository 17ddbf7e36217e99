"""
Policy objectives with a trust region on the probability itself: a token leaves the loss once its probability moved too far.

Notation and shapes as in policy.py; p = exp(logp) and p_old = exp(old_logp). A ratio treats a token of probability 1e-4 that
doubles like one of .4 that doubles; the difference p - p_old (half the total variation of "this token or another") does not.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .masking import select
from .policy import PolicyTerm


def binary_kl(old_logps: Tensor, logps: Tensor, eps: float = 1e-8) -> Tensor:
    """
    KL(old || new) of "this token, or another one": p_old (old_logp - logp) + (1 - p_old) log((1 - p_old) / (1 - p)).

    Args:
        old_logps, logps: (B, T) nats. eps: added to both complements, which bounds the value where p is near 1.

    Returns:
        (B, T) nats, without gradient; 1 - p is taken as -expm1(logp), which keeps its digits for p near 1.
    """
    old, new = old_logps.detach().clamp(max=0.0), logps.detach().clamp(max=0.0)
    rest_old, rest = -torch.expm1(old), -torch.expm1(new)
    return old.exp() * (old - new) + rest_old * torch.log((rest_old + eps) / (rest + eps))


def _dppo(log_ratio: Tensor, advantages: Tensor, logps: Tensor, keep: Tensor, ratio_max: float) -> PolicyTerm:
    weights = select(log_ratio.detach().exp().clamp(max=ratio_max), keep)
    dropped = ~keep
    stats = {"dppo/drop_low": dropped & (advantages < 0), "dppo/drop_high": dropped & (advantages > 0)}
    return PolicyTerm(-weights * advantages * logps, stats)


def dppo_tv(
    log_ratio: Tensor,
    advantages: Tensor,
    logps: Tensor,
    old_logps: Tensor,
    *,
    threshold_low: float = 0.2,
    threshold_high: float = 0.2,
    ratio_max: float = 20.0,
) -> PolicyTerm:
    """
    -A sg(min(r, c)) logp on the tokens kept: A > 0 keeps p - p_old <= high, A < 0 keeps p - p_old >= -low.

    Args:
        log_ratio, logps, old_logps: (B, T). advantages: (B, T) or (B, 1).
        threshold_low, threshold_high: of the probability's move, in [0, 1].
        ratio_max: c, the bound of the ratio.

    Returns:
        `PolicyTerm` with the shares of tokens dropped with A < 0 and with A > 0.

    Source: DPPO, binary total variation (2602.04879) eq. 13. verl documents c = 20 and reads 3; 20 here. SkyRL and prime-rl
    differentiate r A itself, without c: the same gradient where r < c. The paper measures from the sampler, verl and we from the
    old policy (they are one where `rollout_logps` equal `old_logps`).
    """
    move = logps.detach().exp() - old_logps.exp()
    keep = torch.where(advantages > 0, move <= threshold_high, move >= -threshold_low)
    return _dppo(log_ratio, advantages, logps, keep, ratio_max)


def dppo_kl(
    log_ratio: Tensor,
    advantages: Tensor,
    logps: Tensor,
    old_logps: Tensor,
    *,
    threshold_low: float = 0.2,
    threshold_high: float = 0.2,
    ratio_max: float = 20.0,
) -> PolicyTerm:
    """
    -A sg(min(r, c)) logp on the tokens kept: those whose binary KL is within the threshold, or that moved against A.

    Args, returns: see `dppo_tv`; the thresholds are in nats.

    Source: DPPO, binary KL (2602.04879) eq. 14.
    """
    divergence, old = binary_kl(old_logps, logps), old_logps.detach()
    up = (divergence <= threshold_high) | (logps.detach() <= old)
    down = (divergence <= threshold_low) | (logps.detach() >= old)
    return _dppo(log_ratio, advantages, logps, torch.where(advantages > 0, up, down), ratio_max)


def ipo(
    log_ratio: Tensor,
    advantages: Tensor,
    logps: Tensor,
    old_logps: Tensor,
    *,
    threshold: float = 0.3,
    kl_coef: float = 1e-3,
    by_sign: bool = False,
) -> PolicyTerm:
    """
    -r A 1[|p - p_old| <= threshold] + kl_coef d^2, d = log r: a two-sided trust region, blind to the sign of A.

    Args:
        log_ratio: (B, T), connected. logps, old_logps: (B, T). threshold: in [0, 1]. kl_coef: of the squared log ratio, which acts
            on dropped tokens too and pulls them back.
        by_sign: only moves along the sign of A leave the loss: up for A > 0, down for the others (as `dppo_tv`).

    Returns:
        `PolicyTerm` with the share of tokens dropped.

    Source: prime-rl's IPO loss (INTELLECT policy optimization, its documentation of 2026; not identity preference optimization);
    the trust region is DPPO's (2602.04879) without the sign, the penalty Kimi K2.5's (2602.02276). The threshold was .1 in its
    release of August 2026, .3 in its later documentation. By sign, with a threshold of .2, it is prime-rl's default loss. prime-rl
    measures from the sampler, we from the old policy.
    """
    move = logps.detach().exp() - old_logps.exp()
    dropped = torch.where(advantages > 0, move, -move) > threshold if by_sign else move.abs() > threshold
    loss = select(-log_ratio.exp() * advantages, ~dropped) + kl_coef * log_ratio**2
    return PolicyTerm(loss, {"ipo_drop": dropped})
