"""
Policy objectives that treat the tokens with a high covariance of advantage and log-prob apart, because those spend the entropy.

Cov_t = (A_t - mean A)(logp_t - mean logp), means over all valid tokens of the optimizer step; tokens in the top of it are the
confident ones that are reinforced further. The references choose them anew in every micro-batch, from the global random generator;
the choice then depends on the split and on what else drew numbers. Here it is a function of the step's data and a seed:

- the k tokens are chosen over the whole optimizer step (`clip_cov_tokens`, `kl_cov_tokens`), once, and handed to each micro-batch
  as a mask; an objective that is given none takes its own batch for the whole step;
- where a random choice is asked for, each token draws the hash of (seed, its row's id, its number among its row's valid tokens);
  the k lowest hashes win. No generator, no place of a row: order of rows, padding, processes and micro-batches play no part. Rows
  without ids are told apart by their tokens' log-probs to 1/256 nat. Tokens that tie exactly are chosen together.

Source: "The Entropy Mechanism of RL for Reasoning Language Models" (2505.22617); verl's clip_cov and kl_cov.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .masking import masked_mean, select
from .policy import PolicyTerm, _clip_stats

_ODD = (-7046029254386353131, -4658895280553007687, -7723592293110705685)  # splitmix64's multipliers, as signed integers


def _mix(x: Tensor) -> Tensor:
    """splitmix64's finalizer on int64 (multiplication wraps around); shifts are made logical by masking the sign's copies."""
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * _ODD[1]
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * _ODD[2]
    return x ^ ((x >> 31) & ((1 << 33) - 1))


def token_hash(logps: Tensor, mask: Tensor, seed: int = 0, row_ids: Tensor | None = None, at: Tensor | None = None) -> Tensor:
    """
    A number in [0, 2^62) for each token, uniform over tokens: (B, T) int64; for the tokens `at` alone (B, T) bool: (how many,).

    Depends on the seed, the row's id and the token's number among the row's valid tokens, so neither padding nor the row's place plays
    a part. Without `row_ids` (B,) the token's log-prob stands for the row's id, to 1/256 nat, so that the rounding of another batch
    shape hardly ever changes it.
    """
    rank = mask.long().cumsum(-1)
    if row_ids is None:
        ids = (select(logps.detach().float(), mask).clamp(-1e6, 0.0) * 256).round().long()
    else:
        ids = row_ids.unsqueeze(-1).expand(mask.shape)
    if at is not None:
        rank, ids = rank[at], ids[at]
    return _mix(_mix(_mix(torch.full_like(rank, seed) * _ODD[0]) + ids) + rank) & ((1 << 62) - 1)


def covariance(logps: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """(A - mean A)(logp - mean logp), means over the valid tokens: (B, T), no gradient."""
    lp, a = select(logps.detach().float(), mask), select(advantages.float().expand(mask.shape), mask)
    return (a - masked_mean(a, mask)) * (lp - masked_mean(lp, mask))


def _budget(ratio: float, mask: Tensor) -> int:
    """max(1, whole part of ratio times the valid tokens); waits for the device."""
    return max(1, int(ratio * int(mask.sum())))


def _drawn(logps: Tensor, mask: Tensor, among: Tensor, k: int, seed: int, row_ids: Tensor | None) -> Tensor:
    """The k tokens of the lowest hashes among some, with all that tie with the last: (B, T) bool."""
    keys = token_hash(logps, mask, seed, row_ids, at=among)
    if k >= len(keys):
        return among
    drawn = torch.zeros_like(among)
    drawn[among] = keys <= torch.kthvalue(keys, k).values
    return drawn


def clip_cov_tokens(
    logps: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    ratio: float = 2e-4,
    low: float = 1.0,
    high: float = 5.0,
    seed: int = 0,
    exclude: Tensor | None = None,
    row_ids: Tensor | None = None,
) -> Tensor:
    """
    max(1, ratio * valid tokens) tokens drawn from those with low < Cov < high: (B, T) bool.

    Args:
        logps, advantages, mask: of the whole optimizer step. exclude: (B, T) bool, tokens that may not be drawn.
        seed, row_ids (B,): of the draw, see the head of this file.

    Costs about half of ppo_clip once an optimizer step: two means over all tokens, and the draw.
    """
    cov = covariance(logps, advantages, mask)
    among = mask & (cov > low) & (cov < high)
    among = among if exclude is None else among & ~exclude
    return _drawn(logps, mask, among, _budget(ratio, mask), seed, row_ids)


def kl_cov_tokens(
    logps: Tensor, advantages: Tensor, mask: Tensor, *, ratio: float = 2e-4, seed: int = 0, row_ids: Tensor | None = None
) -> Tensor:
    """
    The max(1, ratio * valid tokens) tokens of the highest covariance: (B, T) bool; equal ones are drawn, see the head of this file.
    """
    cov, k = covariance(logps, advantages, mask), _budget(ratio, mask)
    values = cov[mask]
    if k >= len(values):
        return mask
    least = torch.topk(values, k, sorted=True).values[-1]
    above = mask & (cov > least)
    ties = mask & (cov == least)
    return above | _drawn(logps, mask, ties, k - int(above.sum()), seed, row_ids)


def clip_cov(
    ratio: Tensor,
    advantages: Tensor,
    selected: Tensor,
    *,
    epsilon_low: float = 0.2,
    epsilon_high: float = 0.2,
) -> PolicyTerm:
    """
    max(-r A, -clip(r) A), and 0 for the selected tokens that the clip leaves alone: they lose their gradient.

    Args:
        ratio: (B, T). advantages: (B, T) or (B, 1). selected: (B, T) bool, from `clip_cov_tokens`.

    Source: Clip-Cov (2505.22617). verl does not bound the log ratio; ours is bounded by the caller.
    """
    low, high = 1 - epsilon_low, 1 + epsilon_high
    plain, clipped = -advantages * ratio, -advantages * ratio.clamp(low, high)
    dropped = selected & ~(clipped > plain).detach()
    stats = _clip_stats(ratio.detach(), advantages, low, high)
    return PolicyTerm(select(torch.maximum(plain, clipped), ~dropped), {**stats, "clip_cov_ratio": dropped})


def kl_cov(ratio: Tensor, log_ratio: Tensor, advantages: Tensor, selected: Tensor, *, coef: float = 0.1) -> PolicyTerm:
    """
    -r A, plus coef |log r| on the selected tokens: they are held back instead of cut.

    Args:
        ratio, log_ratio: (B, T) of pi / pi_old. advantages: (B, T) or (B, 1). selected: (B, T) bool, from `kl_cov_tokens`.
        coef: of the penalty; its gradient is 0 at ratio 1 and +-coef elsewhere.

    Source: KL-Cov (2505.22617). There is no clip. verl documents coef 1 and defaults to .1; .1 here.
    """
    loss = -advantages * ratio
    return PolicyTerm(torch.where(selected, loss + coef * log_ratio.abs(), loss), {"kl_cov_ratio": selected})
