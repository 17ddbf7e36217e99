"""The tensors of a snapshot under a loss: the same one (bit for bit), or another."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..functional.errors import LossPlusError
from ..functional.masking import masked_quantiles
from ..loss import LossOutput, compute_loss
from ..spec import LossSpec
from .store import Snapshot


@dataclass
class Replay:
    """
    A snapshot's optimizer step under one loss.

    Attributes:
        spec: the loss. loss, terms: over the step. outputs: by micro-batch.
        gradients: d loss / d log-probs by micro-batch, (B, T) each.
        stats: pooled by name (means over tokens).
    """

    spec: LossSpec
    loss: float
    terms: dict[str, float]
    outputs: list[LossOutput]
    gradients: list[Tensor]
    stats: dict[str, float]

    @property
    def gradient(self) -> Tensor:
        """All micro-batches' gradients in one row."""
        return torch.cat([gradient.reshape(-1) for gradient in self.gradients])

    @property
    def gradient_norm(self) -> float:
        """Norm of the gradient with respect to the log-probs."""
        return float(self.gradient.norm())

    def cosine(self, other: Replay) -> float:
        """Cosine between the two gradients; NaN where one of them is 0."""
        mine, theirs = self.gradient, other.gradient
        size = mine.norm() * theirs.norm()
        return float(mine @ theirs / size) if size > 0 else float("nan")

    def ratio_quantiles(self) -> list[float]:
        """0, 5, 25, 50, 75, 95 and 100% of the ratio over the valid tokens."""
        ratios = torch.cat([out.per_token["ratio"][out.inputs.mask] for out in self.outputs if out.inputs is not None])
        return masked_quantiles(ratios, torch.ones_like(ratios, dtype=torch.bool)).tolist()


def replay(snapshot: Snapshot, spec: LossSpec | None = None) -> Replay:
    """
    Computes a snapshot's loss again. No model is loaded.

    Args:
        spec: another loss; None: the snapshot's own, which gives its loss and per-token values bit for bit.

    Raises:
        LossPlusError: the spec reads a tensor that the snapshot does not hold, or changes what was fixed at the rollout
            (advantage estimator, scaling, normalization, KL in the reward), which log-probs alone cannot redo.
    """
    spec = snapshot.spec if spec is None else spec
    _refuse_rollout_changes(snapshot.spec, spec)
    outputs, gradients = [], []
    for part in snapshot.micro:
        logps = part.batch.logps.clone().requires_grad_()
        values = None if part.batch.values is None else part.batch.values.clone().requires_grad_()
        output = compute_loss(replace(part.batch, logps=logps, values=values), spec, part.window)
        output.loss.backward()
        outputs.append(output)
        gradients.append(torch.zeros_like(logps) if logps.grad is None else logps.grad)
    terms: dict[str, float] = {}
    for output in outputs:
        for name, value in output.terms.items():
            terms[name] = terms.get(name, 0.0) + float(value.detach())
    return Replay(spec, sum(terms.values()), terms, outputs, gradients, _pooled(outputs))


ROLLOUT_FIELDS = (
    "advantage_estimator", "scale_rewards", "advantage_normalization", "advantage_norm_scope", "kl_reward_coef", "kl_reward_level",
    "whiten_rewards", "gamma", "gae_lambda", "gae_lambda_critic", "zero_std_groups",
)  # fmt: skip


def _refuse_rollout_changes(old: LossSpec, new: LossSpec) -> None:
    for name in ROLLOUT_FIELDS:
        if getattr(old, name) != getattr(new, name):
            raise LossPlusError(
                f"{name}={getattr(new, name)!r}: it acted at the rollout (there {getattr(old, name)!r}); a replay changes the loss alone."
            )


def _pooled(outputs: list[LossOutput]) -> dict[str, float]:
    pooled = {}
    for name in sorted({name for output in outputs for name in output.statistics}):
        found = [output.statistics[name] for output in outputs if name in output.statistics]
        totals = torch.stack([statistic.total.float() for statistic in found])
        weights = torch.stack([statistic.weight.float() for statistic in found])
        if found[0].kind == "mean":
            pooled[name] = float(totals.sum() / weights.sum()) if weights.sum() > 0 else float("nan")
        else:
            pooled[name] = float(totals.amin() if found[0].kind == "min" else totals.amax())
    return pooled
