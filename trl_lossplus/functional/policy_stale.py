"""
Policy objectives for data that an older policy sampled: tokens whose ratio moved out of a range leave the loss, with or without an
importance weight on the others.

Notation and shapes as in policy.py. A token that leaves the loss stays in the normalizer. None of the bounds carries a gradient.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .masking import select
from .policy import PolicyTerm


def rec_keep(
    ratio: Tensor,
    advantages: Tensor,
    *,
    clip: str = "one_side",
    epsilon_low: float = 0.2,
    epsilon_high: float = 0.2,
    ring_low: float = 0.6,
    ring_high: float = 2.0,
) -> Tensor:
    """
    Which tokens REC trains on: (B, T) or (B, 1) bool; a ratio on a bound is inside.

    Args:
        ratio: (B, T) or (B, 1). advantages: (B, T) or (B, 1).
        clip: none: all. one_side: r <= 1 + hi where A > 0, r >= 1 - lo where A < 0 (where PPO's clip has a gradient). two_side:
            1 - lo <= r <= 1 + hi. ring: those, and what moved far against its advantage: r <= 1 - ring_low where A > 0,
            r >= 1 + ring_high where A < 0; with ring_low <= lo and ring_high <= hi nothing lies between, and it is one_side.
    """
    above, below = ratio > 1 + epsilon_high, ratio < 1 - epsilon_low
    if clip == "none":
        return torch.ones_like(above)
    if clip == "one_side":
        return ~((above & (advantages > 0)) | (below & (advantages < 0)))
    inside = ~(above | below)
    if clip == "two_side":
        return inside
    return inside | ((ratio <= 1 - ring_low) & (advantages > 0)) | ((ratio >= 1 + ring_high) & (advantages < 0))


def rec(
    ratio: Tensor, advantages: Tensor, logps: Tensor, keep: Tensor, *, weight: str = "none", temperature: float = 1.0
) -> PolicyTerm:
    """
    -w A logp on the tokens kept, w without gradient.

    Args:
        ratio: (B, T) or (B, 1). advantages: (B, T) or (B, 1). logps: (B, T). keep: bool, from `rec_keep`.
        weight: none: 1. importance: the ratio. advantage: exp(A / temperature), at most e^20, so that good completions count more.

    Returns:
        `PolicyTerm` with the share of tokens dropped.

    Source: REC and RED-Weight, "Group-Relative REINFORCE Is Secretly an Off-Policy Algorithm" (2509.24203), with Trinity-RFT's ranges
    (.2, .2 and for the ring .6, 2). With importance weights one_side has the gradient of PPO's clip and two_side that of `mis`; clip
    none is `reinforce`, or `tis` without bounds. Its regularizers are losses of their own: k2 with coefficient c is `dro` with
    dro_beta = 2 c, the forward KL is a shift of the advantage (advantage_estimator asymre).
    """
    if weight == "importance":
        advantages = advantages * ratio.detach()
    elif weight == "advantage":
        advantages = advantages * torch.exp((advantages / temperature).clamp(max=20.0))
    keep = keep.expand(logps.shape)
    return PolicyTerm(select(-advantages * logps, keep), {"rec_dropped": ~keep})


def sppo(log_ratio: Tensor, advantages: Tensor, *, epsilon_low: float = 0.2, epsilon_high: float = 0.2) -> PolicyTerm:
    """
    -A log(clip(r, 1 / (1 + lo), 1 + hi)): the gradient is -A inside of the range, 0 outside of it on either side.

    Args:
        log_ratio: (B, T), connected. advantages: (B, T) or (B, 1).

    Returns:
        `PolicyTerm` with the share of tokens outside of the range.

    Source: sPPO, the softmax variant of PPO in "A general class of surrogate functions for stable and efficient reinforcement learning"
    (2108.05828), with one epsilon. Trinity-RFT (epsilon .3) gives 0 outside of the range where the formula gives the bound's
    logarithm: another value, the same gradient.
    """
    low, high = -math.log1p(epsilon_low), math.log1p(epsilon_high)
    outside = (log_ratio.detach() < low) | (log_ratio.detach() > high)
    return PolicyTerm(-advantages * log_ratio.clamp(low, high), {"sppo_outside": outside})


def m2po_dropped(log_ratio: Tensor, advantages: Tensor, mask: Tensor, *, threshold: float = 0.04) -> Tensor:
    """
    The tokens that M2PO leaves out of an optimizer step: (B, T) bool.

    Of the tokens that have moved with their advantage (A > 0 and r > 1, or A < 0 and r < 1: where PPO's clip could act) those with the
    largest (log r)^2, until the mean of the rest is at most the threshold. Tokens that tie exactly stay or leave together.

    Args:
        log_ratio, mask: (B, T), of the whole optimizer step. advantages: (B, T) or (B, 1). threshold: nats squared.
    """
    d, advantages = log_ratio.detach(), advantages.expand(mask.shape)
    among = mask & (((advantages > 0) & (d > 0)) | ((advantages < 0) & (d < 0)))
    ordered = d[among].abs().sort().values
    means = (ordered.double() ** 2).cumsum(0) / torch.arange(1, len(ordered) + 1, device=ordered.device)
    kept = int((means <= threshold).sum())  # the means of a sorted list rise
    if kept == len(ordered):
        return torch.zeros_like(mask)
    return among & (d.abs() >= ordered[kept])


def m2po(ratio: Tensor, advantages: Tensor, dropped: Tensor) -> PolicyTerm:
    """
    -r A without the tokens dropped: no clip, but a bound on the second moment of the log ratio over the step.

    Args:
        ratio: (B, T), connected. advantages: (B, T) or (B, 1). dropped: (B, T) bool, from `m2po_dropped`.

    Returns:
        `PolicyTerm` with the share of tokens dropped.

    Source: M2PO, "Prosperity before collapse" (2510.01161), as in Trinity-RFT, whose reading of the final paper this is: only tokens that
    moved with their advantage are bounded, and those dropped stay in the normalizer. AReaL bounds the moment over all tokens, of
    sampler against policy, and keeps at least one.
    """
    return PolicyTerm(select(-advantages * ratio, ~dropped), {"m2po_dropped": dropped})
