"""
Correction for a sampler (vLLM) whose log-probs differ from the trainer's: importance weights, rejection, and what they did.

One sign everywhere: the log ratio is log pi_old - log pi_sampler, and every bound on a ratio, in weights and in rejection alike,
is a bound on pi_old / pi_sampler. verl inverts it in rejection by k1 alone: its "0.5_5.0" keeps pi_old / pi_sampler from 1/5 to 2.
A token that the sampler could not score (NaN) counts as no difference.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from .errors import LossPlusError, unknown_name
from .masking import masked_mean, row_means, row_sums, select

CORRECTION_MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
REJECTIONS = (
    "token_k1", "token_k2", "token_k3", "seq_sum_k1", "seq_sum_k2", "seq_sum_k3", "seq_mean_k1", "seq_mean_k2", "seq_mean_k3",
    "seq_max_k2", "seq_max_k3",
)  # fmt: skip


def mismatch(old_logps: Tensor, rollout_logps: Tensor, mask: Tensor) -> Tensor:
    """log pi_old - log pi_sampler: (B, T) float32 without gradient, 0 where not scored or masked."""
    return select((old_logps - rollout_logps).detach().float().nan_to_num(nan=0.0), mask)


def rollout_importance_weights(
    old_logps: Tensor,
    rollout_logps: Tensor,
    mask: Tensor,
    *,
    mode: str = "sequence_mask",
    clip_min: float | None = None,
    clip_max: float | None = 3.0,
    log_ratio_clamp: float = 20.0,
) -> Tensor:
    """
    pi_old / pi_sampler, truncated to [clip_min, clip_max] or set to 0 outside of it.

    Args:
        old_logps: (B, T) the trainer's log-probs of the sampled tokens. rollout_logps: (B, T) the sampler's; a NaN (a token
            that it could not score) counts as no difference. mask: (B, T) bool.
        mode: token_truncate, token_mask (one weight a token), sequence_truncate, sequence_mask (one a row, from the sum of the
            log ratios).
        log_ratio_clamp: bound of the log ratio before exp; the bounds act far inside of it.

    Returns:
        (B, T) for token modes (1 on masked positions), (B, 1) for sequence modes. No gradient.

    Raises:
        LossPlusError: unknown mode.

    Source: TRL's `vllm_importance_sampling_mode` (truncate: TIS, mask: MIS / IcePop).
    """
    if mode not in CORRECTION_MODES:
        raise unknown_name("vllm_importance_sampling_mode", mode, CORRECTION_MODES)
    difference = mismatch(old_logps, rollout_logps, mask)
    if mode.startswith("sequence"):
        difference = row_sums(difference, mask).unsqueeze(-1)
    weights = torch.exp(difference.clamp(-log_ratio_clamp, log_ratio_clamp))
    if clip_min is None and clip_max is None:
        return weights
    if mode.endswith("truncate"):
        return weights.clamp(min=clip_min, max=clip_max)
    low = float("-inf") if clip_min is None else clip_min
    high = float("inf") if clip_max is None else clip_max
    return select(weights, (weights >= low) & (weights <= high))


def weight_totals(weights: Tensor, mask: Tensor) -> Tensor:
    """
    (sum, count) of the weights over valid tokens, or of (B, 1) weights over rows with tokens: (2,), summable over processes.

    Args:
        weights: (B, T) or (B, 1). mask: (B, T) bool.
    """
    valid = mask if weights.shape == mask.shape and mask.shape[-1] != 1 else mask.any(-1, keepdim=True)
    return torch.stack([select(weights, valid).sum(), valid.sum().to(weights)])


def normalize_weights(weights: Tensor, totals: Tensor) -> Tensor:
    """
    The weights over their mean, so that the correction does not change the size of the step.

    Args:
        weights: (B, T) or (B, 1). totals: from `weight_totals`, summed over every process and batch that counts.

    Returns:
        Shaped like `weights`; unchanged where the mean is 0. Comes after truncation, so a weight may exceed the bound (as in verl).
    """
    mean = totals[0] / totals[1].clamp(min=1)
    return weights / torch.where(mean > 1e-8, mean, torch.ones_like(mean))


class Rejection(NamedTuple):
    """One rule: a statistic by name (see `REJECTIONS`), and the bounds within which it is kept; for k1 those of the ratio."""

    name: str
    low: float | None
    high: float


def _numbers(text: str, name: str) -> list[float]:
    try:
        values = [float(word) for word in text.replace("_", " ").split()]
    except ValueError:
        values = []
    if not values or any(not 0 < value < math.inf for value in values):
        raise LossPlusError(f"rollout_rs_threshold={text!r} for {name!r} is out of range: it must be one or two numbers > 0.")
    return values


def parse_rejection(names: str, thresholds: str | float | None) -> tuple[Rejection, ...]:
    """
    Rules from text, as in verl.

    Args:
        names: of statistics, separated by commas: token_k1, seq_sum_k3, ... A token stays if it passes all of them.
        thresholds: one for each name (or one for all), separated by commas. k2, k3: the largest value kept. k1: `low_high`, the
            bounds of the ratio; or one number u, for 1/u to u.

    Returns:
        One `Rejection` a name.

    Raises:
        LossPlusError: an unknown name, a wrong count, or a bound that is no number or out of range.
    """
    if not isinstance(names, str):
        raise unknown_name("rollout_rs", names, REJECTIONS)
    wanted = list(dict.fromkeys(name.strip() for name in names.split(",") if name.strip()))
    for name in wanted:
        if name not in REJECTIONS:
            raise unknown_name("rollout_rs", name, REJECTIONS)
    if not wanted:
        raise LossPlusError(f"rollout_rs={names!r} names no statistic. Allowed: {', '.join(REJECTIONS)}.")
    if thresholds is None:
        raise LossPlusError(f"rollout_rs={names!r} needs rollout_rs_threshold, which is not set.")
    texts = [text.strip() for text in str(thresholds).split(",") if text.strip()]
    if len(texts) not in (1, len(wanted)):
        raise LossPlusError(f"rollout_rs_threshold={thresholds!r} holds {len(texts)} thresholds; rollout_rs names {len(wanted)}.")
    rules = []
    for name, text in zip(wanted, texts * len(wanted) if len(texts) == 1 else texts, strict=False):
        bounds = _numbers(text, name)
        if name.endswith("k1"):
            low, high = (1 / bounds[0], bounds[0]) if len(bounds) == 1 else (bounds[0], bounds[-1])
            if len(bounds) > 2 or low > high:
                raise LossPlusError(f"rollout_rs_threshold={text!r} for {name!r}: it must be low_high with low <= high.")
            rules.append(Rejection(name, low, high))
        elif len(bounds) == 1:
            rules.append(Rejection(name, None, bounds[0]))
        else:
            raise LossPlusError(f"rollout_rs_threshold={text!r} for {name!r}: it must be one number, the largest value kept.")
    return tuple(rules)


def _passes(rule: Rejection, d: Tensor, mask: Tensor) -> Tensor:
    """(B, T) or (B, 1) bool: where the rule keeps tokens, d the bounded log ratio."""
    kind = rule.name[-2:]
    value = {"k1": lambda: d, "k2": lambda: 0.5 * d**2, "k3": lambda: torch.expm1(d) - d}[kind]()
    if rule.name.startswith("seq_sum"):
        value = row_sums(value, mask).unsqueeze(-1)
    elif rule.name.startswith("seq_mean"):
        value = row_means(value, mask).unsqueeze(-1)
    elif rule.name.startswith("seq_max"):
        value = select(value, mask).amax(-1, keepdim=True)  # k2 and k3 are never negative
    if kind != "k1" or rule.low is None:
        return value <= rule.high
    return (value >= math.log(rule.low)) & (value <= math.log(rule.high))


def rejection_keep(
    old_logps: Tensor, rollout_logps: Tensor, mask: Tensor, rules: tuple[Rejection, ...], *, log_ratio_clamp: float = 20.0
) -> tuple[Tensor, dict[str, Tensor]]:
    """
    Which tokens stay in the loss.

    Args:
        old_logps, rollout_logps, mask: see `rollout_importance_weights`. rules: from `parse_rejection`.
        log_ratio_clamp: bound of each token's log ratio.

    Returns:
        (B, T) bool, True on masked positions; and for each rule the share of valid tokens that it rejects (scalars).

    Sources, with d = log(pi_old / pi_sampler): k1 = d, k2 = d^2 / 2, k3 = e^d - 1 - d (the KL of the sampler from the policy);
    verl's rollout_rs. `seq_mean_k1` is the geometric mean of the ratios; `seq_sum_k1` that of the whole completion.
    """
    d = mismatch(old_logps, rollout_logps, mask).clamp(-log_ratio_clamp, log_ratio_clamp)
    keep, stats = torch.ones_like(mask), {}
    for rule in rules:
        passes = _passes(rule, d, mask).expand(mask.shape)
        stats[f"rollout_rs/{rule.name}"] = masked_mean((~passes).float(), mask)
        keep = keep & (passes | ~mask)
    return keep, stats


def effective_sample_size(weights: Tensor, mask: Tensor) -> Tensor:
    """
    (sum w)^2 / (n sum w^2) over valid tokens, or rows for (B, 1): a scalar in [0, 1], 0 where every weight is 0.

    verl bounds the weights to [1 / threshold, threshold] first, and divides by zero where a mask left none.
    """
    valid = mask if weights.shape == mask.shape and mask.shape[-1] != 1 else mask.any(-1, keepdim=True)
    w = select(weights.float(), valid)
    square = valid.sum() * (w**2).sum()
    return w.sum() ** 2 / torch.where(square > 0, square, torch.ones_like(square))


def correction_statistics(
    old_logps: Tensor, rollout_logps: Tensor, mask: Tensor, weights: Tensor | None = None, *, log_ratio_clamp: float = 20.0
) -> dict[str, Tensor]:
    """
    How far sampler and policy are apart, and what the weights did: scalars by metric name, without waiting for the device.

    kl: mean of log pi_sampler - log pi_old (k1), k3_kl: its unbiased estimate that is never negative, both of KL(sampler ||
    policy) in nats a token. chi2_token, chi2_seq: mean of the squared ratio of tokens (of rows with tokens), less 1. ppl_ratio:
    mean over rows of the policy's over the sampler's perplexity. With weights: their mean, least, largest, the share at 0, and
    the effective sample size.
    """
    d = mismatch(old_logps, rollout_logps, mask).clamp(-log_ratio_clamp, log_ratio_clamp)
    rows = mask.any(-1)
    total = row_sums(d, mask).clamp(-log_ratio_clamp, log_ratio_clamp)
    stats = {
        "kl": masked_mean(-d, mask),
        "k3_kl": masked_mean(torch.expm1(d) - d, mask),
        "chi2_token": masked_mean(torch.expm1(2 * d), mask),
        "chi2_seq": masked_mean(torch.expm1((2 * total).clamp(max=log_ratio_clamp)), rows),
        "ppl_ratio": masked_mean(torch.exp(-row_means(d, mask)), rows),
    }
    if weights is not None:
        valid = mask if weights.shape == mask.shape and mask.shape[-1] != 1 else rows.unsqueeze(-1)
        w = weights.float()
        stats["is_mean"] = masked_mean(w, valid)
        stats["is_min"] = w.masked_fill(~valid, float("inf")).amin()
        stats["is_max"] = w.masked_fill(~valid, float("-inf")).amax()
        stats["is_zero"] = masked_mean((w == 0).float(), valid)
        stats["is_eff_sample_size"] = effective_sample_size(w, mask)
    return {f"rollout_corr/{name}": value for name, value in stats.items()}
