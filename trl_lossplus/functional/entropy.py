"""Entropy of the policy's next-token distribution: selection of high-entropy tokens."""

from __future__ import annotations

import torch
from torch import Tensor


def token_entropy(logits: Tensor) -> Tensor:
    """
    Entropy of softmax(logits) in nats.

    Args:
        logits: (..., V), computed in float32.

    Returns:
        (...,): logsumexp(z) - sum softmax(z) z.
    """
    z = logits.float()
    return torch.logsumexp(z, -1) - (torch.softmax(z, -1) * z).sum(-1)


def entropy_threshold(entropies: Tensor, mask: Tensor, top_quantile: float) -> Tensor:
    """The (1 - top_quantile) quantile of the valid entropies (a scalar, in nats); infinity when there are none."""
    values = entropies.detach()[mask].float()
    if values.numel() == 0:
        return torch.full((), float("inf"), device=entropies.device)
    return torch.quantile(values, 1 - top_quantile)


def high_entropy_mask(entropies: Tensor, mask: Tensor, top_quantile: float, threshold: Tensor | None = None) -> Tensor:
    """
    The tokens whose entropy is in the top `top_quantile`.

    Args:
        entropies: (B, T) nats. mask: (B, T) bool. top_quantile: 0.2 keeps the top fifth, 0 only the highest.
        threshold: scalar in nats, when it was taken over more tokens than this batch holds.

    Returns:
        (B, T) bool, False on masked positions.

    Source: "Beyond the 80/20 Rule" (2506.01939), as in TRL's `get_high_entropy_mask`.
    """
    if threshold is None:
        threshold = entropy_threshold(entropies, mask, top_quantile)
    return (entropies >= threshold) & mask
