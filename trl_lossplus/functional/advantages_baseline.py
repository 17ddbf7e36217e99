"""
Advantage estimators with another baseline than the group's mean, or none: what REINFORCE's variants subtract.

Conventions as in advantages.py: rewards (B,), NaN where not scored; groups by id; a row that cannot be compared with another one
(a group of one, no spread, nothing scored) gets 0, where references leave its raw reward standing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .advantages import SCALES, Advantages, _deviation, reward_to_go
from .errors import LossPlusError
from .masking import Groups, group_moments, group_rows, group_sums, moments, select


def grpo_passk(rewards: Tensor, group_ids: Tensor, *, scale_rewards: str = "group", eps: float = 1e-6, ddof: int = 1) -> Tensor:
    """
    The best completion of a group gets (its reward - the second best) / (std + eps), the others 0.

    Args:
        rewards: (B,). group_ids: (B,). scale_rewards, eps, ddof: see `advantages.grpo`.

    Returns:
        (B,). A tie at the top, or a group with one scored completion, gives 0 (verl raises for the latter).

    Raises:
        LossPlusError: scale_rewards is not group, batch or none.

    Source: 2503.19595 (optimizing the best of k), as verl's grpo_passk.
    """
    if scale_rewards not in SCALES:
        raise LossPlusError(f"scale_rewards={scale_rewards!r} is not known. Allowed: {', '.join(SCALES)}.")
    valid, groups = ~torch.isnan(rewards), group_rows(group_ids)
    low = rewards.masked_fill(~valid, float("-inf"))
    empty = torch.full((groups.num,), float("-inf"), dtype=rewards.dtype, device=rewards.device)
    best = empty.scatter_reduce(0, groups.rows, low, "amax")
    at_top = valid & (low == best[groups.rows])
    second = empty.scatter_reduce(0, groups.rows, low.masked_fill(at_top, float("-inf")), "amax")
    alone = (group_sums(at_top.long(), groups) == 1) & torch.isfinite(second)
    margin = select((best - second)[groups.rows], at_top & alone[groups.rows])
    if scale_rewards == "none":
        return margin
    stats = group_moments(rewards, valid, groups)
    own = scale_rewards == "group"
    std = _deviation(stats, ddof)[groups.rows] if own else _deviation(moments(rewards, valid), ddof)
    return margin / (std + eps)


def opo(rewards: Tensor, group_ids: Tensor, *, lengths: Tensor) -> Tensor:
    """
    s - (sum of length * s) / (sum of lengths) of the group: the mean reward of its tokens, not of its completions.

    Args:
        rewards, group_ids: (B,). lengths: (B,) valid tokens of each completion.

    Returns:
        (B,); 0 in a group of one and in one without tokens (verl: the raw reward, and NaN).

    Source: OPO (2505.23585): the baseline of least variance where a completion's gradient grows with its length.
    """
    valid, groups = ~torch.isnan(rewards) & (lengths > 0), group_rows(group_ids)
    stats = group_moments(rewards, valid, groups)
    weight = select(lengths.to(rewards), valid)
    offset = select(rewards - stats.mean[groups.rows], valid)  # from the mean, so that equal rewards give exactly 0
    shift = group_sums(weight * offset, groups) / group_sums(weight, groups).clamp(min=1)
    return select(offset - shift[groups.rows], valid)


def gpg(rewards: Tensor, group_ids: Tensor, *, f_norm: float = 1.0, alpha_from: str = "spread") -> Tensor:
    """
    alpha (s - mean of the group) / f_norm, alpha = rows / rows that carry a gradient.

    Args:
        f_norm: a constant divisor.
        alpha_from: which rows carry a gradient: spread, those of groups with two different rewards, whose gradient is not 0;
            nonzero, those with a reward other than 0 (verl).

    Returns:
        (B,).

    Raises:
        LossPlusError: alpha_from is neither.

    Source: GPG (2504.02546): alpha makes up for the groups without spread, whose gradient is 0.
    """
    if alpha_from not in ("spread", "nonzero"):
        raise LossPlusError(f"alpha_from={alpha_from!r} is not known. Allowed: nonzero, spread.")
    valid, groups = ~torch.isnan(rewards), group_rows(group_ids)
    stats = group_moments(rewards, valid, groups)
    carrying = valid & ((stats.m2 > 0)[groups.rows] if alpha_from == "spread" else rewards != 0)
    alpha = valid.sum() / carrying.sum().clamp(min=1)
    return select(alpha * (rewards - stats.mean[groups.rows]) / f_norm, valid)


def opmd(rewards: Tensor, group_ids: Tensor, *, opmd_tau: float = 1.0) -> Tensor:
    """
    s - tau log(mean of exp(s / tau)) of the group: the soft maximum of the group's rewards as baseline.

    Args:
        rewards, group_ids: (B,). opmd_tau: > 0; towards infinity the baseline is the group's mean, towards 0 its largest reward.

    Returns:
        (B,); the mean over the group is negative, since a soft maximum is above the mean.

    Source: online policy mirror descent, Kimi k1.5 (2501.12599) section 2.3.2, whose normalizer tau log Z this estimates (it is then
    replaced by the group's mean there: `grpo` with scale_rewards none); Trinity-RFT's opmd with its baseline "logavgexp".
    """
    valid, groups = ~torch.isnan(rewards), group_rows(group_ids)
    lowest = torch.full((groups.num,), float("-inf"), dtype=rewards.dtype, device=rewards.device)
    best = lowest.scatter_reduce(0, groups.rows, rewards.masked_fill(~valid, float("-inf")), "amax")
    offset = select(rewards - best[groups.rows], valid)
    # expm1 and log1p: with a large tau the soft maximum differs from 0 by less than exp and log could tell.
    mean = group_sums(select(torch.expm1(offset / opmd_tau), valid), groups) / group_sums(valid.to(rewards), groups).clamp(min=1)
    return select(offset - opmd_tau * torch.log1p(mean)[groups.rows], valid)


def asymre(rewards: Tensor, group_ids: Tensor, *, asymre_shift: float = -0.1) -> Tensor:
    """
    s - (mean of the group + shift): a baseline below the mean leans on what was good, one above it on what was bad.

    Args:
        rewards, group_ids: (B,). asymre_shift: in units of the reward.

    Returns:
        (B,). Every scored row of a group of two or more is shifted, so a group whose rewards are all equal gets -shift, not 0: it is
        imitated with a negative shift, also where all of it is wrong (zero_std_groups=drop leaves it out). A group of one gets 0
        (Trinity-RFT: its raw reward).

    Source: AsymRE (2506.20520); Trinity-RFT's shift -.1. The same as REINFORCE plus the forward KL to the data times -shift (2509.24203).
    """
    valid, groups = ~torch.isnan(rewards), group_rows(group_ids)
    stats = group_moments(rewards, valid, groups)
    return select(rewards - stats.mean[groups.rows] - asymre_shift, valid & (stats.n[groups.rows] > 1))


def reinforce_plus_plus_baseline(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """
    s - mean of the group, to be whitened over all tokens of the rollout (advantage_normalization: rollout).

    Source: REINFORCE++ with baseline (2501.03262 v3): no group std, the batch's instead. Not whitened here, for that needs the
    tokens of all processes.
    """
    valid, groups = ~torch.isnan(rewards), group_rows(group_ids)
    return select(rewards - group_moments(rewards, valid, groups).mean[groups.rows], valid)


def reinforce_plus_plus(rewards: Tensor, mask: Tensor, *, gamma: float = 1.0) -> Advantages:
    """
    The discounted reward from each token on, to be whitened over all tokens of the rollout (advantage_normalization: rollout).

    Args:
        rewards: (B, T) token rewards. mask: (B, T) bool. gamma: discount a valid token.

    Source: REINFORCE++ (2501.03262). verl drops what follows a masked token; here it is passed over.
    """
    returns = reward_to_go(rewards, mask, gamma=gamma)
    return Advantages(returns, returns)


def remax(rewards: Tensor, mask: Tensor, *, reward_baselines: Tensor, gamma: float = 1.0) -> Advantages:
    """
    The reward from each token on, less the reward of the greedy completion of the same prompt.

    Args:
        rewards: (B, T) token rewards. mask: (B, T) bool.
        reward_baselines: (B,) reward of the prompt's greedy completion; NaN: it could not be scored, so the row gets 0.
        gamma: discount a valid token (verl ignores it); the baseline is not discounted.

    Source: ReMax (2310.10505). verl leaves the rewards to come on masked positions inside a row; they are 0 here.
    """
    returns = reward_to_go(rewards, mask, gamma=gamma)
    known = mask & ~torch.isnan(reward_baselines).unsqueeze(-1)
    return Advantages(select(returns - reward_baselines.nan_to_num(nan=0.0).to(returns).unsqueeze(-1), known), returns)


def score_norms(old_logps: Tensor, sum_pi_squared: Tensor, rollout_weights: Tensor | None = None) -> Tensor:
    """
    1 - 2 pi + sum of pi^2 over the vocabulary, the squared norm of the gradient of logp by the logits: (B, T), >= 0.

    Args:
        old_logps: (B, T). sum_pi_squared: (B, T). rollout_weights: (B, T) or (B, 1), squared into it.
    """
    norms = (1 - 2 * old_logps.exp() + sum_pi_squared).clamp(min=0.0)
    return norms if rollout_weights is None else norms * rollout_weights**2


def _baseline(returns: Tensor, weight: Tensor, mask: Tensor, groups: Groups, handle_zero_tail: bool, eps: float) -> Tensor:
    """The weighted mean return of the group in each column: (B, T), 0 where only one row of the group still has tokens."""
    zeros = torch.zeros(groups.num, mask.shape[1], dtype=returns.dtype, device=returns.device)
    total = zeros.index_add(0, groups.rows, select(weight * returns, mask))
    base = (total / (zeros.index_add(0, groups.rows, select(weight, mask)) + eps))[groups.rows]
    if not handle_zero_tail:
        return base
    alive = mask.flip(-1).cummax(-1).values.flip(-1) if mask.shape[1] else mask  # the row still has a token at or after t
    rows = zeros.index_add(0, groups.rows, alive.to(returns.dtype))[groups.rows]
    return select(base, rows > 1)


def optimal_token_baseline(
    rewards: Tensor,
    mask: Tensor,
    *,
    group_ids: Tensor,
    old_logps: Tensor,
    sum_pi_squared: Tensor,
    rollout_weights: Tensor | None = None,
    handle_zero_tail: bool = False,
    eps: float = 1e-8,
) -> Advantages:
    """
    G_t - B_t: the reward from each token on, less the group's mean of it at the same position, weighted by W_t.

    W_t = sum over j <= t of |grad logp_j|^2 = sum of 1 - 2 pi_j + sum pi^2: completions whose gradient has grown large so far
    decide the baseline.

    Args:
        rewards: (B, T) token rewards, NaN where the row is not scored. mask: (B, T) bool. group_ids: (B,).
        old_logps: (B, T). sum_pi_squared: (B, T) sum over the vocabulary of the squared probabilities.
        rollout_weights: (B, T) or (B, 1) importance weights, None: 1.
        handle_zero_tail: where the longest completion of a group goes on alone, the baseline is its own return and the advantage
            0; True makes the baseline 0 there and the advantage the return itself, so that it depends on the rewards' zero point
            and is not 0 for equal rewards (verl's code says True, its documentation False). eps: added to the sum of weights.

    Returns:
        `Advantages`; 0 in a group with one scored completion (verl: its return).

    Source: "The Optimal Token Baseline: Variance Reduction for Long-Horizon LLM-RL" (Li et al., 2026), as in verl 0.9, except that the tail starts where no other
    row has tokens any more; verl compares lengths with positions, which are not the same where masked tokens lie inside a row.
    """
    scored = ~(torch.isnan(rewards) & mask).any(-1)
    groups, own = group_rows(group_ids), mask & scored.unsqueeze(-1)
    returns = reward_to_go(rewards.nan_to_num(nan=0.0), own)
    norms = select(score_norms(old_logps.float(), sum_pi_squared.float(), rollout_weights), own)
    base = _baseline(returns, norms.cumsum(-1), own, groups, handle_zero_tail, eps)
    compared = group_sums(own.any(-1).long(), groups)[groups.rows] > 1
    return Advantages(select(returns - base, own & compared.unsqueeze(-1)), returns)


def tir_optimal_token_baseline(
    rewards: Tensor,
    mask: Tensor,
    *,
    group_ids: Tensor,
    old_logps: Tensor,
    sum_pi_squared: Tensor,
    rollout_weights: Tensor | None = None,
    handle_zero_tail: bool = False,
    eps: float = 1e-8,
) -> Advantages:
    """
    `optimal_token_baseline` with tokens told by their number among the row's own, so that a tool's output does not shift them.

    Args, returns: see `optimal_token_baseline`, which it equals where no row has masked tokens inside.

    Source: verl's tir_optimal_token_baseline (tool-integrated reasoning).
    """
    order = torch.argsort(~mask, dim=-1, stable=True)  # each row's valid tokens first, in their order

    def pack(x: Tensor) -> Tensor:
        return torch.gather(x.expand(mask.shape), 1, order)

    packed = optimal_token_baseline(
        pack(rewards),
        pack(mask),
        group_ids=group_ids,
        old_logps=pack(old_logps),
        sum_pi_squared=pack(sum_pi_squared),
        rollout_weights=None if rollout_weights is None else pack(rollout_weights),
        handle_zero_tail=handle_zero_tail,
        eps=eps,
    )
    return Advantages(*(torch.zeros_like(x).scatter(1, order, x) for x in packed))
