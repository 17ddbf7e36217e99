"""
Advantage estimators that compare the completions of one prompt.

Rewards are (B,) float, one a completion, NaN where a completion could not be scored: such a row has no advantage and stays out of
its group's statistics. Groups are told by id, never by position. Each function returns (B,) float32.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .errors import LossPlusError
from .masking import Moments, group_moments, group_rows, moments, select


class Advantages(NamedTuple):
    """advantages and returns, both (B, T); without a critic the returns are the advantages."""

    advantages: Tensor
    returns: Tensor


SCALES = ("group", "batch", "none")


def _deviation(stats: Moments, ddof: int) -> Tensor:
    return stats.variance(ddof).sqrt()


def grpo(rewards: Tensor, group_ids: Tensor, *, scale_rewards: str = "group", eps: float = 1e-6, ddof: int = 1) -> Tensor:
    """
    (s - mean of the group) / (std + eps).

    Args:
        rewards: (B,). group_ids: (B,) integers.
        scale_rewards: whose std divides: the group's, the batch's (of the rewards), or none.
        eps: added to the std (TRL 1e-4, verl 1e-6). ddof: degrees of freedom taken off the variance.

    Returns:
        (B,). A group of one, or with equal rewards, gives exactly 0 (references divide rounding dust by eps, and verl gives a
        group of one its raw reward).

    Raises:
        LossPlusError: scale_rewards is not group, batch or none.

    Source: DeepSeekMath (2402.03300); none: Dr. GRPO (2503.20783).
    """
    if scale_rewards not in SCALES:
        raise LossPlusError(f"scale_rewards={scale_rewards!r} is not known. Allowed: {', '.join(SCALES)}.")
    valid = ~torch.isnan(rewards)
    groups = group_rows(group_ids)
    stats = group_moments(rewards, valid, groups)
    centred = select(rewards - stats.mean[groups.rows], valid)
    if scale_rewards == "none":
        return centred
    std = _deviation(stats, ddof)[groups.rows] if scale_rewards == "group" else _deviation(moments(rewards, valid), ddof)
    return centred / (std + eps)


def gdpo(
    rewards: Tensor,
    group_ids: Tensor,
    *,
    reward_weights: Tensor | None = None,
    eps: float = 1e-6,
    ddof: int = 1,
) -> Tensor:
    """
    Each reward function normalized within the group, weighted, summed, and normalized over the batch.

    Args:
        rewards: (B, K), one column a reward function; NaN where a function does not apply.
        reward_weights: (K,), default 1 each.

    Returns:
        (B,). A row that no function scored gets 0.

    Source: GDPO (2601.05242); as TRL's `multi_objective_aggregation="normalize_then_sum"` (eps 1e-4 there).
    """
    weights = torch.ones(rewards.shape[1]) if reward_weights is None else reward_weights
    parts = torch.stack([grpo(column, group_ids, eps=eps, ddof=ddof) for column in rewards.unbind(1)], 1)
    valid = ~torch.isnan(rewards).all(1)
    total = (parts * weights.to(parts)).sum(1)
    stats = moments(total, valid)
    return select((total - stats.mean) / (_deviation(stats, ddof) + eps), valid)


def rloo(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """
    s - mean of the group's other rewards = n / (n - 1) (s - mean).

    Returns:
        (B,); a group with one scored completion has no baseline and gets 0.

    Source: RLOO (2402.14740).
    """
    valid = ~torch.isnan(rewards)
    groups = group_rows(group_ids)
    stats = group_moments(rewards, valid, groups)
    n = stats.n[groups.rows]
    return select((rewards - stats.mean[groups.rows]) * n / (n - 1).clamp(min=1), valid & (n > 1))


def maxrl(rewards: Tensor, group_ids: Tensor, *, eps: float = 1e-6) -> Tensor:
    """
    (s - mean) / (|mean| + eps): the group's mean in place of its standard deviation.

    The absolute value keeps the sign of the advantage that of s - mean when rewards are negative.

    Source: MaxRL (2602.02710), stated there for rewards in {0, 1}.
    """
    valid = ~torch.isnan(rewards)
    groups = group_rows(group_ids)
    mean = group_moments(rewards, valid, groups).mean[groups.rows]
    return select((rewards - mean) / (mean.abs() + eps), valid)


def reward_to_go(rewards: Tensor, mask: Tensor, *, gamma: float = 1.0) -> Tensor:
    """
    G_t = r_t + gamma G_{t+1} over the valid tokens of each row; masked tokens are passed over and get 0: (B, T).

    `gamma` discounts once a valid token.
    """
    r = select(rewards, mask)
    if gamma == 1.0:
        return select(r.flip(-1).cumsum(-1).flip(-1), mask)
    out = torch.zeros_like(r)
    carry = torch.zeros_like(r[:, 0])
    for t in range(r.shape[1] - 1, -1, -1):
        carry = torch.where(mask[:, t], r[:, t] + gamma * carry, carry)
        out[:, t] = carry
    return select(out, mask)


def token_rewards(scores: Tensor, mask: Tensor) -> Tensor:
    """
    Scores (B,) as token rewards (B, T): each on its row's last valid token, 0 elsewhere.

    A row without valid tokens has nowhere to put its score and gets none.
    """
    columns = torch.arange(mask.shape[1], device=mask.device)
    last = torch.where(mask, columns, torch.full_like(columns, -1)).amax(-1, keepdim=True)
    return torch.where((columns == last) & mask, scores.unsqueeze(-1), torch.zeros((), device=scores.device))


def gae(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    *,
    gamma: float = 1.0,
    gae_lambda: float = 0.95,
    gae_lambda_critic: float | None = None,
    bootstrap: Tensor | None = None,
) -> Advantages:
    """
    A_t = delta_t + gamma lambda A_{t+1}, delta_t = r_t + gamma V_{t+1} - V_t, over the valid tokens of each row.

    Args:
        rewards, values: (B, T); values are of the state before each token. mask: (B, T) bool; masked tokens (tools, padding) are
            passed over: the next token is the next valid one, and nothing is bootstrapped from a masked value.
        gamma: discount a valid token. gae_lambda: of the advantages. gae_lambda_critic: of the returns; None: the same.
        bootstrap: (B,) value of the state after the last token, for rows that were cut off; None: every row ends there (0).

    Returns:
        `Advantages`: advantages, and returns = advantages (under the critic's lambda) + values; (B, T), 0 on masked positions.

    Source: GAE (1506.02438) eq. 16; a decoupled lambda for the critic: VAPO (2504.05118).
    """
    rewards, values = select(rewards.float(), mask), select(values.detach().float(), mask)
    after = torch.zeros_like(rewards[:, 0]) if bootstrap is None else bootstrap.detach().float()

    def backward(lam: float) -> Tensor:
        carry, next_value = torch.zeros_like(after), after
        steps = []
        for t in range(mask.shape[1] - 1, -1, -1):
            valid = mask[:, t]
            delta = rewards[:, t] + gamma * next_value - values[:, t]
            carry = torch.where(valid, delta + gamma * lam * carry, carry)
            next_value = torch.where(valid, values[:, t], next_value)
            steps.append(carry)
        return select(torch.stack(steps[::-1], 1), mask)

    advantages = backward(gae_lambda)
    target = advantages if gae_lambda_critic in (None, gae_lambda) else backward(gae_lambda_critic)
    return Advantages(advantages, target + values)


def group_spread(rewards: Tensor, group_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """
    Mean and standard deviation (ddof 1) of the rewards of each row's group, and whether the group is flat.

    Args:
        rewards: (B,), NaN where not scored. group_ids: (B,).

    Returns:
        mean (B,), std (B,), flat (B,) bool: fewer than two different scored rewards, so nothing to compare.
    """
    groups = group_rows(group_ids)
    stats = group_moments(rewards, ~torch.isnan(rewards), groups)
    return stats.mean[groups.rows], _deviation(stats, 1)[groups.rows], (stats.m2 == 0)[groups.rows]
