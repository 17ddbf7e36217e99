"""Rows that cannot move the weights: whether there are any under a loss."""

from __future__ import annotations

from dataclasses import replace

import torch

from .batch import LossBatch
from .loss import compute_loss
from .registry import POLICY_LOSSES
from .spec import LossSpec


def what_moves_still_rows(spec: LossSpec) -> str | None:
    """
    Why a row with advantage 0 may move the weights under a loss, or None where its gradient is exactly 0.

    Tried, not declared: the loss of a small batch whose advantages are 0, differentiated, so that it holds for a user's own loss.
    """
    entry = POLICY_LOSSES.get(spec.policy_loss)
    if entry.over_step is not None or "whole_groups" in entry.traits:
        return f"{spec.policy_loss} compares the rows of an optimizer step with each other"
    draw = torch.Generator().manual_seed(0)

    def tensor(shift: float = 0.0) -> torch.Tensor:
        return (torch.randn(4, 3, generator=draw) - shift).requires_grad_()

    batch = LossBatch(
        logps=tensor(2.0),
        old_logps=tensor(2.0).detach(),
        advantages=torch.zeros(4, 3),
        mask=torch.ones(4, 3, dtype=torch.bool),
        ref_logps=tensor(2.0).detach(),
        entropies=tensor().detach().abs().requires_grad_(),
        values=tensor(),
        old_values=tensor().detach(),
        returns=tensor().detach(),
        token_weights=torch.ones(4, 3),
        rollout_weights=torch.ones(4, 3),
        rollout_logps=tensor(2.0).detach(),
        group_ids=torch.tensor([0, 0, 1, 1]),
    )
    output = compute_loss(batch, replace(spec, top_entropy_quantile=1.0))
    inputs = [batch.logps, batch.entropies, batch.values]
    for name, term in output.terms.items():
        gradients = torch.autograd.grad(term, inputs, retain_graph=True, allow_unused=True) if term.requires_grad else ()  # type: ignore[arg-type]
        if any(gradient is not None and bool((gradient != 0).any()) for gradient in gradients):
            return f"the {name} term acts on rows whose advantage is 0"
    return None
