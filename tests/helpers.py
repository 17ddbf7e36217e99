"""Small things that several test files share: batches, losses with their gradients, comparisons."""

from __future__ import annotations

import torch
from torch import Tensor

from trl_lossplus import LossBatch, LossSpec, Window, compute_loss
from trl_lossplus.functional.aggregation import AGGREGATIONS
from trl_lossplus.registry import POLICY_LOSSES

# The first ones; functional/test_every_objective.py goes through the whole registry.
OBJECTIVES = ["cispo", "gmpo", "gspo", "gspo_token", "luspo", "ppo_clip", "sapo", "vespo"]
# Other tests register losses of their own; these are the package's.
EVERY_OBJECTIVE = [n for n in POLICY_LOSSES.names() if POLICY_LOSSES.get(n).func.__module__.startswith("trl_lossplus")]
MODES = list(AGGREGATIONS)
LENGTHS = (6, 3, 1, 5, 2, 6, 4, 3)  # 8 rows of unequal length
GROUPS = (7, 7, 3, 3, 7, 9, 9, 3)  # ids of their prompts, not in order


def length_mask(lengths: tuple[int, ...], width: int | None = None) -> Tensor:
    """(B, T) bool, True for the first `lengths[i]` tokens of row i."""
    return torch.arange(width or max(lengths)) < torch.tensor(lengths)[:, None]


def tensors(
    seed: int = 0, mask: Tensor | None = None, dtype: torch.dtype = torch.float32, spread: float = 0.4
) -> dict[str, Tensor]:
    """Random tensors for a LossBatch with everything that our losses read; log ratios have a standard deviation of `spread`."""
    g = torch.Generator().manual_seed(seed)
    mask = length_mask(LENGTHS) if mask is None else mask

    def normal(scale: float) -> Tensor:
        return scale * torch.randn(mask.shape, generator=g, dtype=torch.float64)

    logps = -1.5 + normal(0.5)
    full = {
        "logps": logps,
        "old_logps": logps + normal(spread),
        "advantages": normal(1.0),
        "ref_logps": logps + normal(spread),
        "entropies": 1 + normal(0.2).abs(),
        "token_weights": 1 + normal(0.1),
        "rollout_weights": normal(0.1).exp(),
        "rollout_logps": logps + normal(spread),
    }
    return {name: x.to(dtype) for name, x in full.items()} | {"mask": mask, "group_ids": torch.tensor(GROUPS[: len(mask)])}


def rows(batch: dict[str, Tensor], index: Tensor | list[int]) -> dict[str, Tensor]:
    """Some rows of a batch of tensors."""
    return {name: x[torch.as_tensor(index)] for name, x in batch.items()}


def step_window(mask: Tensor, group_ids: Tensor, index: Tensor | list[int], world_size: int = 1) -> Window:
    """The window of an optimizer step over all rows of `mask`, as the micro-batch of the rows `index` sees it."""
    lengths = mask.sum(-1)
    group_tokens = torch.stack([lengths[group_ids == i].sum() for i in group_ids])
    return Window(int(lengths.sum()), len(mask), len(set(group_ids.tolist())), world_size, group_tokens[torch.as_tensor(index)])


def run(batch: dict[str, Tensor], spec: LossSpec, window: Window | None = None):
    """(LossOutput, gradient for `logps`): the gradient is that of the whole loss."""
    logps = batch["logps"].detach().clone().requires_grad_()
    out = compute_loss(LossBatch(**{"old_logps": None, "advantages": None} | batch | {"logps": logps}), spec, window)
    (gradient,) = torch.autograd.grad(out.loss, logps)
    return out, gradient


def full_spec(policy_loss: str = "ppo_clip", aggregation: str = "token_mean", **options) -> LossSpec:
    """A spec in which every term of the loss is on."""
    fields = {"beta": 0.1, "entropy_coef": 0.01, "norm_length": 16.0, "loss_aggregation": aggregation}
    return LossSpec(policy_loss=policy_loss, **(fields | options))


def difference(ours: Tensor, right: Tensor) -> float:
    """
    Largest difference relative to the largest entry of `right`; infinite where ours is not finite.

    Not entry by entry: an entry much smaller than the largest is what is left when large numbers cancel, so its own relative
    error is the rounding of those, and says nothing.
    """
    ours, right = torch.as_tensor(ours).detach().double(), torch.as_tensor(right).detach().double()
    assert ours.shape == right.shape, (ours.shape, right.shape)
    if not torch.isfinite(ours).all():
        return float("inf")
    scale = right.abs().max().clamp(min=1e-12) if right.numel() else torch.ones(())
    return float((ours - right).abs().max() / scale) if right.numel() else 0.0
