"""
Policy objectives that weigh tokens by what follows them (FIPO), or completions by their group (REAL), and one with a quadratic
penalty (DRO). Notation and shapes as in policy.py.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .masking import group_rows, group_sums, row_means, select
from .policy import PolicyTerm, ppo_clip


def dro(log_ratio: Tensor, advantages: Tensor, logps: Tensor, *, beta: float = 0.1) -> PolicyTerm:
    """
    -(A logp - beta / 2 (log r)^2): the policy gradient with a quadratic pull towards the old policy, no ratio anywhere.

    Args:
        log_ratio, logps: (B, T), connected. advantages: (B, T) or (B, 1). beta: > 0.

    Source: DRO (2405.19107) and Kimi k1.5 (2501.12599) eq. 3, where logp and log r are those of whole completions; token by
    token here, as in verl's dro and ROLL's kimi15. verl has no default for beta; ROLL's is .1.
    """
    return PolicyTerm(-(advantages * logps - 0.5 * beta * log_ratio**2), {"dro_penalty": 0.5 * beta * log_ratio.detach() ** 2})


def discounted_tail(x: Tensor, mask: Tensor, gamma: float) -> Tensor:
    """
    sum over s >= t of gamma^(tokens from t to s) x_s over each row's valid tokens: (B, T); a masked position has the sum after it.

    Masked tokens are passed over: gamma counts valid tokens. By gamma^-n_t times the running sum of gamma^n_s x_s from the end, n the
    valid tokens before, in stretches so short that gamma^n stays above 2^-60 (one or two, where gamma is near 1).
    """
    x, length = select(x, mask), x.shape[-1]
    stretch = length if gamma >= 1.0 else max(1, int(60 * math.log(2) / -math.log(gamma)))
    later, parts = torch.zeros_like(x[:, :1]), []
    for start in reversed(range(0, length, stretch)):
        valid = mask[:, start : start + stretch].to(x.dtype)
        count = valid.cumsum(-1)
        weight = torch.exp((count - valid) * math.log(gamma))
        tail = (weight * x[:, start : start + stretch]).flip(-1).cumsum(-1).flip(-1)
        parts.append((tail + torch.exp(count[:, -1:] * math.log(gamma)) * later) / weight)
        later = parts[-1][:, :1]
    return parts[0] if len(parts) == 1 else torch.cat(parts[::-1], -1)


def future_weights(
    log_ratio: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    decay_rate: float = 32.0,
    clip_range: float | None = 0.2,
    clip_high_only: bool = True,
    safety_threshold: float | None = 4.0,
    delta: float | None = None,
) -> Tensor:
    """
    FIPO's weights exp(F_t), bounded; F_t = sum over s >= t of 2^(-(s - t) / decay_rate) log r_s: (B, T), no gradient.

    Args:
        log_ratio: (B, T), bounded. decay_rate: tokens after which a later token counts half.
        clip_range: bounds the weight to [1 - clip_range, 1 + clip_range], or [1, 1 + clip_range] with `clip_high_only`; None: no
            bound.
        safety_threshold: where A < 0 and the ratio is above it, the weight is bounded to [.8, 1]; None: nowhere.
        delta: tokens whose ratio is above it are left out of F; None: none.
    """
    d = log_ratio.detach()
    ratio = d.exp()
    counted = d if delta is None else select(d, ratio <= delta)
    weights = discounted_tail(counted, mask, 2.0 ** (-1.0 / decay_rate)).clamp(-20.0, 20.0).exp()
    if clip_range is not None:
        weights = weights.clamp(1.0 if clip_high_only else 1.0 - clip_range, 1.0 + clip_range)
    if safety_threshold is not None:
        weights = torch.where((advantages < 0) & (ratio > safety_threshold), weights.clamp(0.8, 1.0), weights)
    return weights


def fipo(
    log_ratio: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    epsilon_low: float = 0.2,
    epsilon_high: float = 0.2,
    delta: float | None = None,
    decay_rate: float = 32.0,
    clip_range: float | None = 0.2,
    clip_high_only: bool = True,
    safety_threshold: float | None = 4.0,
) -> PolicyTerm:
    """
    PPO's clipped loss times sg(f): a token counts more where the tokens after it are being reinforced.

    Args:
        log_ratio: (B, T), bounded, connected. The rest: see `future_weights` and `policy.ppo_clip` (delta acts in both).

    Costs about 1.35 times ppo_clip (a running sum from the end of each row, and its weights).

    Source: FIPO (2603.19835), with the names and defaults of ms-swift. There a masked token inside a row (a tool's) still ages
    the ones behind it; here only the policy's own tokens count.
    """
    options = {"clip_range": clip_range, "clip_high_only": clip_high_only, "safety_threshold": safety_threshold}
    weights = future_weights(log_ratio, advantages, mask, decay_rate=decay_rate, delta=delta, **options)  # type: ignore[arg-type]
    term = ppo_clip(log_ratio.exp(), advantages, epsilon_low=epsilon_low, epsilon_high=epsilon_high, delta=delta)
    return PolicyTerm(term.per_token * weights, {**term.stats, "fipo_weight": weights})


def real_terms(token_log_ratio: Tensor, advantages: Tensor, mask: Tensor, group_ids: Tensor, *, tau: float = 0.5) -> Tensor:
    """
    Of each row its group's two logarithms, see `real`, and the number of its rows: (B, 3), no gradient.

    Args:
        token_log_ratio: (B, T). advantages: (B, T) or (B, 1): only the sign of a row's mean is read, > 0 is good.
        mask: (B, T) bool; rows without valid tokens belong to no group. group_ids: (B,): every group must be whole.

    Returns:
        [log(1 + sum over good rows of e^(-s / tau)), log(1 + sum over the others of e^(s / tau)), rows], s a row's mean log r; zeros
        for a group without rows on both sides.
    """
    rows = mask.any(-1)
    score = row_means(token_log_ratio.detach(), mask) / tau
    good = rows & (row_means(advantages.expand(mask.shape), mask) > 0)
    bad = rows & ~good
    groups = group_rows(group_ids)

    def side(x: Tensor, members: Tensor) -> Tensor:
        """log(1 + sum of e^x over the group's members), shifted by the group's largest x: (groups,)."""
        peak = torch.zeros(groups.num, dtype=x.dtype, device=x.device)
        peak = peak.scatter_reduce(0, groups.rows, select(x, members), "amax")
        terms = select(torch.exp(torch.where(members, x - peak[groups.rows], torch.zeros_like(x))), members)
        return torch.log(torch.exp(-peak) + group_sums(terms, groups)) + peak

    counts = [group_sums(members.to(score.dtype), groups) for members in (good, bad)]
    of_group = torch.stack([side(-score, good), side(score, bad), counts[0] + counts[1]], -1)
    both = (counts[0] > 0) & (counts[1] > 0)
    return select(select(of_group, both.unsqueeze(-1))[groups.rows], rows.unsqueeze(-1))


def real(token_log_ratio: Tensor, advantages: Tensor, mask: Tensor, terms: Tensor, *, tau: float = 0.5) -> PolicyTerm:
    """
    log(1 + sum over good rows of e^(-s / tau)) + log(1 + sum over the others of e^(s / tau)) of each group, s a row's mean log r.

    Args:
        token_log_ratio: (B, T), connected. advantages, mask: see `real_terms`. terms: (B, 3) from there, over all rows of the step.

    Returns:
        `PolicyTerm` of (B, 1): its group's loss for each row, so that the mean over rows is that over groups of one size. The gradient
        of a row's value is that of all its group's rows' values by the row's own score: with equal weights the sum over rows has the
        gradient of the formula, and a row can be computed apart from its mates. A group without rows on both sides gives 0.

    Source: REAL, "Rewards as Labels" (2602.05630), as in ms-swift.
    """
    score = row_means(token_log_ratio, mask) / tau
    good = row_means(advantages.expand(mask.shape), mask) > 0
    value, still = terms[:, 0] + terms[:, 1], score.detach()
    share = torch.exp(torch.where(good, -still - terms[:, 0], still - terms[:, 1]).clamp(max=0.0))
    slope = (torch.where(good, -share, share) * terms[:, 2]).detach()
    both = (terms[:, 2] > 0).float().unsqueeze(-1)
    return PolicyTerm((value + slope * (score - still)).unsqueeze(-1), {"real_groups": both})
