"""Correction for a sampler (vLLM) whose log-probs differ from the trainer's: importance weights."""

from __future__ import annotations

import torch
from torch import Tensor

from .errors import unknown_name
from .masking import row_sums, select

CORRECTION_MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")


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
    difference = select((old_logps - rollout_logps).detach().float().nan_to_num(nan=0.0), mask)
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
