"""compute_loss: the only place where the terms of a loss are put together."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from .batch import DeclaredView, LossBatch
from .functional.aggregation import Window, aggregate
from .functional.entropy import high_entropy_mask
from .functional.errors import LossPlusError
from .functional.kl import estimate_kl
from .functional.masking import count, masked_mean, masked_sum, nonempty, row_counts, row_sums, select
from .functional.policy import PolicyTerm, off_policy_keep
from .functional.value import value_loss
from .objectives import importance_ratio
from .over_step import completed
from .registry import POLICY_LOSSES
from .spec import LossSpec

# Metrics that an objective's own statistics may not shadow.
RESERVED = frozenset(
    {"kl", "kl_penalty", "kl_coef", "kl_rollout", "entropy", "loss", "reward", "reward_std", "grad_norm", "policy_loss"}
)
RESERVED_PREFIXES = (
    "loss/",
    "share/",
    "probe/",
    "grad_logp/",
    "rewards/",
    "completions/",
    "group_reward/",
    "value/",
    "mask/",
    "_",
)


class Statistic(NamedTuple):
    """A statistic that pools over micro-batches and processes: "mean" is total / weight, "min" and "max" are total."""

    kind: str
    total: Tensor
    weight: Tensor

    @property
    def value(self) -> Tensor:
        """Its value over this batch; NaN where there was nothing to count."""
        value = self.total / self.weight if self.kind == "mean" else self.total
        return torch.where(self.weight > 0, value, torch.full_like(value, float("nan")))


@dataclass(frozen=True, eq=False)
class LossOutput:
    """
    What `compute_loss` returns.

    loss: scalar for backward. terms: scalars with their coefficients in them, which sum to `loss`.
    per_token: detached (B, T) tensors: policy, log_ratio (raw), ratio (bounded), and kl, entropy and value where they were read.
    statistics: by metric name. inputs: the cleaned batch, without gradient. sources: the log-probs as each term reads them, connected;
        a hook on one sees that term's gradient in the backward pass, at no cost.
    """

    loss: Tensor
    terms: dict[str, Tensor]
    per_token: dict[str, Tensor]
    statistics: dict[str, Statistic] = field(default_factory=dict)
    inputs: LossBatch | None = None
    sources: dict[str, Tensor] = field(default_factory=dict)

    @property
    def stats(self) -> dict[str, Tensor]:
        """The statistics' values over this batch, by metric name."""
        return {name: statistic.value for name, statistic in self.statistics.items()}

    def with_term(self, name: str, value: Tensor) -> LossOutput:
        """The output with one more term (its coefficient in it)."""
        return replace(self, loss=self.loss + value, terms={**self.terms, name: value})


def pool(name: str, x: Tensor, mask: Tensor) -> Statistic:
    """
    A (B, T) or (B, 1) tensor as a statistic: by the suffix of its name the least (`_min`) or largest (`_max`) row mean, else the
    mean over valid tokens, or over rows with valid tokens for (B, 1).
    """
    return pool_all({name: x}, mask)[name]


def pool_all(named: Mapping[str, Tensor], mask: Tensor) -> dict[str, Statistic]:
    """Several tensors as `pool` takes them. A tensor that stands under several names is summed once."""
    sums: dict[int, Tensor] = {}
    found = {}
    for name, x in named.items():
        per_row = x.shape[-1] == 1 and mask.shape[-1] != 1
        if not per_row and id(x) not in sums:
            sums[id(x)] = row_sums(x.detach(), mask)
        found[name] = _per_row(name, x.detach().squeeze(-1), mask) if per_row else _per_token(name, sums[id(x)], mask)
    return found


def _per_row(name: str, x: Tensor, mask: Tensor) -> Statistic:
    rows = nonempty(mask)
    if name.endswith(("_min", "_max")):
        return _extreme(name, x.float(), rows)
    return Statistic("mean", masked_sum(x, rows).float(), rows.sum())


def _per_token(name: str, sums: Tensor, mask: Tensor) -> Statistic:
    if name.endswith(("_min", "_max")):
        return _extreme(name, sums / row_counts(mask).clamp(min=1), nonempty(mask))
    return Statistic("mean", sums.sum().float(), count(mask))


def _extreme(name: str, means: Tensor, rows: Tensor) -> Statistic:
    kind, worst = ("min", float("inf")) if name.endswith("_min") else ("max", float("-inf"))
    kept = torch.where(rows, means, torch.full_like(means, worst))
    return Statistic(kind, kept.amin() if kind == "min" else kept.amax(), rows.sum())


def _policy(batch: LossBatch, spec: LossSpec) -> tuple[PolicyTerm, Tensor, Tensor]:
    """The objective's term; log ratios, raw, and ratios, bounded: (B, T) without gradient."""
    entry = POLICY_LOSSES.get(spec.policy_loss)
    view: Any = DeclaredView(batch, spec.policy_loss, entry.requires)
    term = entry.func(view, spec)
    seen = view if "old_logps" in entry.requires else batch  # what the objective computed is not computed again
    log_ratio, ratio = (take.detach() for take in (seen.log_ratio(math.inf), seen.ratio(spec.log_ratio_clamp)))
    if not isinstance(term, PolicyTerm):
        raise LossPlusError(f"policy_loss {spec.policy_loss!r} returned {type(term).__name__}; it must return a PolicyTerm.")
    rows, length = batch.mask.shape
    if tuple(term.per_token.shape) not in ((rows, length), (rows, 1)):
        raise LossPlusError(
            f"policy_loss {spec.policy_loss!r} returned per_token of shape {tuple(term.per_token.shape)}; it must be "
            f"{(rows, length)} or {(rows, 1)}: per-token losses are not reduced."
        )
    if torch.is_grad_enabled() and batch.logps.requires_grad and not term.per_token.requires_grad:
        raise LossPlusError(
            f"policy_loss {spec.policy_loss!r} returned per_token without a gradient: it must be connected to the log-probs, or the policy "
            "would not be trained (look for detach(), .item() or torch.no_grad())."
        )
    for name, stat in term.stats.items():
        if not isinstance(stat, Tensor) or tuple(stat.shape) not in ((rows, length), (rows, 1)):
            what = f"of shape {tuple(stat.shape)}" if isinstance(stat, Tensor) else f"a {type(stat).__name__}"
            raise LossPlusError(
                f"policy_loss {spec.policy_loss!r} returned the statistic {name!r}, {what}; it must be a tensor {(rows, length)} or "
                f"{(rows, 1)}."
            )
        if name in RESERVED or name.startswith(RESERVED_PREFIXES):
            raise LossPlusError(
                f"policy_loss {spec.policy_loss!r}: the statistic {name!r} has the name of a metric of the run. Rename it."
            )
    return term, log_ratio, ratio


def _weighted(per_token: Tensor, batch: LossBatch, spec: LossSpec, entropy_mask: Tensor | None) -> Tensor:
    """The policy's per-token losses with everything that weights or drops tokens: (B, T)."""
    loss = per_token.expand(batch.mask.shape)
    if spec.off_policy_mask_threshold is not None:
        sampling = batch.old_logps if batch.rollout_logps is None else batch.rollout_logps
        keep = off_policy_keep(
            cast(Tensor, batch.advantages),
            batch.logps,
            cast(Tensor, sampling),
            batch.mask,
            threshold=spec.off_policy_mask_threshold,
        )
        loss = loss * keep
    if entropy_mask is not None:
        loss = loss * entropy_mask
    if batch.token_weights is not None:
        loss = loss * batch.token_weights
    reads_itself = "reads_rollout_weights" in POLICY_LOSSES.get(spec.policy_loss).traits
    if batch.rollout_weights is not None and not reads_itself:
        loss = loss * batch.rollout_weights
    return loss


def _kl(batch: LossBatch, spec: LossSpec) -> Tensor:
    """The KL estimate of each token in nats, bias-corrected where the spec says so: (B, T), connected."""
    ref = cast(Tensor, batch.ref_logps)
    kl = estimate_kl(spec.kl_estimator, batch.logps, ref, log_ratio_clamp=spec.log_ratio_clamp)
    return kl * importance_ratio(batch, spec) if spec.use_bias_correction_kl else kl


def entropy_share(entropies: Tensor, mask: Tensor, selected: Tensor | None, window: Window | None) -> Tensor:
    """
    This micro-batch's share of the optimizer step's mean entropy: a scalar in nats.

    Over all valid tokens that mean is exact for every split. Over a high-entropy selection, whose size is known only after each
    forward, the micro-batch's mean over its selected tokens is weighted by its share of the step's valid tokens.
    """
    if selected is None:
        return aggregate("token_mean", entropies, mask, window)
    token_share = aggregate("token_mean", torch.ones_like(entropies), mask, window)
    return masked_mean(entropies, selected) * token_share


def value_statistics(values: Tensor, returns: Tensor, clipped: Tensor, mask: Tensor) -> dict[str, Statistic]:
    """Mean value and return, clip fraction, and the four means from which the explained variance is pooled (see probes)."""
    error = returns - values
    tensors = {
        "value/mean": values,
        "value/clip_ratio": clipped,
        "value/return_mean": returns,
        "value/return_square": returns**2,
        "value/error_mean": error,
        "value/error_square": error**2,
    }
    return pool_all(tensors, mask)


def compute_loss(batch: LossBatch, spec: LossSpec, window: Window | None = None) -> LossOutput:
    """
    The loss of one micro-batch: its share of the optimizer step's loss.

    Args:
        batch: see `LossBatch`; computed in float32, masked positions selected away.
        spec: see `LossSpec`.
        window: the optimizer step's global counts; None: the batch is the whole step on one process.

    Returns:
        `LossOutput`. `loss` is connected to the log-probs even for an empty mask (then 0).

    Raises:
        LossPlusError: a tensor that the spec reads is missing or has the wrong shape; a user's loss that breaks its contract.
    """
    batch.validate(spec.required())
    batch = completed(batch.clean(), spec)
    mask = batch.mask
    entropy_mask = None if batch.entropy_mask is None else batch.entropy_mask & mask
    if spec.top_entropy_quantile < 1.0 and entropy_mask is None:
        entropy_mask = high_entropy_mask(cast(Tensor, batch.entropies).detach(), mask, spec.top_entropy_quantile)

    def reduce(per_token: Tensor, where: Tensor) -> Tensor:
        return aggregate(spec.loss_aggregation, per_token, where, window, norm_length=spec.norm_length, group_ids=batch.group_ids)

    sources = {"policy": batch.logps.view_as(batch.logps)}
    term, log_ratio, ratio = _policy(replace(batch, logps=sources["policy"]), spec)
    policy = select(_weighted(term.per_token, batch, spec, entropy_mask), mask)
    terms = {"policy": reduce(policy, mask)}
    per_token = {"policy": policy.detach(), "log_ratio": log_ratio, "ratio": ratio}
    statistics = pool_all(term.stats, mask)
    del term  # not held beside what the other terms need
    if spec.kl_in_loss:
        sources["kl"] = batch.logps.view_as(batch.logps)
        kl = _kl(replace(batch, logps=sources["kl"]), spec)
        acting = kl if batch.kl_mask is None else torch.where(batch.kl_mask, kl, torch.zeros_like(kl))
        terms["kl"] = spec.beta * reduce(acting, mask)
        per_token["kl"] = kl.detach()
        statistics["kl"] = pool("kl", kl, mask)
        statistics["kl_penalty"] = Statistic("mean", spec.beta * statistics["kl"].total, nonempty(mask).sum())
    if batch.entropies is not None:
        per_token["entropy"] = batch.entropies.detach()
        statistics["entropy"] = pool("entropy", batch.entropies, mask)
        if entropy_mask is not None:
            statistics["entropy_selected"] = pool("entropy_selected", batch.entropies, entropy_mask)
        if spec.entropy_coef != 0.0:
            terms["entropy"] = -spec.entropy_coef * entropy_share(batch.entropies, mask, entropy_mask, window)
    if spec.vf_coef != 0.0:
        values, returns = cast(Tensor, batch.values), cast(Tensor, batch.returns)
        error, clipped = value_loss(
            values, returns, batch.old_values, cliprange=spec.cliprange_value, kind=spec.value_loss, huber_delta=spec.huber_delta
        )
        terms["value"] = spec.vf_coef * reduce(error, mask)
        per_token["value"] = error.detach()
        statistics.update(value_statistics(values.detach(), returns, clipped, mask))
    total = torch.stack(list(terms.values())).sum()
    return LossOutput(total, terms, per_token, statistics, batch.detached(), sources)
