"""Value losses: how far the critic is from its target, per token."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import huber_loss

from .errors import unknown_name

VALUE_LOSSES = ("mse", "huber")


def value_loss(
    values: Tensor,
    returns: Tensor,
    old_values: Tensor | None = None,
    *,
    cliprange: float | None = None,
    kind: str = "mse",
    huber_delta: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """
    0.5 max(l(v, R), l(clip(v, V - eps, V + eps), R)), or 0.5 l(v, R) without clipping.

    Args:
        values: (B, T) of the critic, with gradient. returns: (B, T) its target R. old_values: (B, T) V at the rollout;
            needed with `cliprange`. Both are constants.
        cliprange: eps, how far the value may move from the rollout's before its gradient stops; None: no clipping.
        kind: mse, l = (v - R)^2; or huber, l = twice torch's Huber loss, so that it equals mse within `huber_delta`.

    Returns:
        per-token loss (B, T), connected to `values`, and whether the clipped form was the larger (B, T) bool.

    Raises:
        LossPlusError: unknown kind. ValueError: `cliprange` without `old_values`.

    Source: PPO's reference implementation (openai/baselines, ppo2); verl's and OpenRLHF's value losses agree.
    """
    if kind not in VALUE_LOSSES:
        raise unknown_name("value_loss", kind, VALUE_LOSSES)
    returns = returns.detach()

    def distance(v: Tensor) -> Tensor:
        if kind == "mse":
            return (v - returns) ** 2
        return 2 * huber_loss(v, returns, reduction="none", delta=huber_delta)

    plain = distance(values)
    if cliprange is None:
        return 0.5 * plain, torch.zeros_like(plain, dtype=torch.bool)
    if old_values is None:
        raise ValueError("a clipped value loss needs old_values.")
    old_values = old_values.detach()
    clipped = distance(values.clamp(old_values - cliprange, old_values + cliprange))
    return 0.5 * torch.maximum(plain, clipped), (clipped > plain).detach()
