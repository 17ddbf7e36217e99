"""Statistics of one optimizer step: kept on the device, fetched once, and pooled over all processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..functional.masking import select
from ..loss import LossOutput, Statistic
from .quantiles import Sample, merge, sample, summarize

# One process's totals and weights by name, squares of the terms' gradients, quantiles by quantity.
Local = tuple[dict[str, tuple[str, float, float]], dict[str, float], dict[str, list[float]]]
_EXTREME = {"min": torch.minimum, "max": torch.maximum}


class StepStatistics:
    """
    Pools the statistics of an optimizer step's micro-batches.

    A mean is the sum of its totals over the sum of its weights, over all micro-batches and processes, so it does not depend
    on the split; a name that only some ranks have is pooled over those.
    """

    def __init__(self, level: str = "off") -> None:
        self.level = level
        self._pooled: dict[str, Statistic] = {}
        self._samples: list[Sample] = []
        self._gradients: dict[str, Tensor] = {}

    def add(self, statistics: Mapping[str, Statistic]) -> None:
        """Takes in one micro-batch. Waits for no device."""
        for name, new in statistics.items():
            old = self._pooled.get(name)
            if old is not None and new.kind == "mean":
                new = Statistic("mean", old.total + new.total, old.weight + new.weight)
            elif old is not None:
                new = Statistic(new.kind, _EXTREME[new.kind](old.total, new.total), old.weight + new.weight)
            self._pooled[name] = new

    def add_terms(self, output: LossOutput, micro_batches: int) -> None:
        """
        Takes in the terms of the loss as `loss/NAME`.

        `micro_batches` is their number in the optimizer step, so that the pooled value is the term's sum over the step and
        its mean over processes: what the backward pass of the whole step sees.
        """
        weight = torch.full((), 1.0 / micro_batches, device=output.loss.device)
        self.add({f"loss/{name}": Statistic("mean", term.detach(), weight) for name, term in output.terms.items()})

    def probe(self, output: LossOutput) -> None:
        """
        Takes in what `level` asks for beyond the statistics: quantiles, effective sample size, the terms' gradients.

        The gradients with respect to the log-probs are taken here, through the loss alone and not the model. Waits for no device.
        """
        if self.level == "off":
            return
        assert output.inputs is not None
        self._samples.append(sample(output))
        ratio, mask = output.per_token["ratio"], output.inputs.mask
        n = mask.sum()
        valid = select(ratio, mask)
        self.add({"_ratio_sum": Statistic("mean", valid.sum(), n), "_ratio_square": Statistic("mean", (valid**2).sum(), n)})
        sources = {name: source for name, source in output.sources.items() if source.requires_grad}
        if not sources:
            return
        gradients = torch.autograd.grad(output.loss, list(sources.values()), retain_graph=True)
        for name, gradient in zip(sources, gradients, strict=True):
            square = (gradient**2).sum()
            self._gradients[name] = self._gradients[name] + square if name in self._gradients else square

    def take(self) -> Local:
        """This process's share of the step, for `pooled`, and an empty pool for the next step. Waits for the device."""
        names = list(self._pooled)
        numbers = [x.float() for name in names for x in self._pooled[name][1:]] + list(self._gradients.values())
        flat = torch.stack(numbers).tolist() if numbers else []
        pairs = zip(flat[0 : 2 * len(names) : 2], flat[1 : 2 * len(names) : 2], strict=True)
        local = {name: (self._pooled[name].kind, *pair) for name, pair in zip(names, pairs, strict=True)}
        squares = dict(zip(self._gradients, flat[2 * len(names) :], strict=True))
        quantiles = summarize(self._samples, self.level) if self.level != "off" else {}
        self._pooled, self._samples, self._gradients = {}, [], {}
        return local, squares, quantiles

    def pooled(self, everyone: Sequence[Local]) -> dict[str, float]:
        """
        The step's values over all processes, from what each of them took.

        Returns:
            {metric name: value}, NaN where nothing was counted.
        """
        parts = [part for part, _, _ in everyone]
        values = pooled(parts)
        if self.level != "off":
            values |= merge([part for _, _, part in everyone], self.level) | gradient_shares([part for _, part, _ in everyone])
        return with_loss_shares(with_sample_size(with_explained_variance(values)))


def with_explained_variance(values: dict[str, float]) -> dict[str, float]:
    """
    Replaces the pooled means of squares by `value/explained_variance` = 1 - Var(return - value) / Var(return).

    1 is a perfect critic, 0 one that knows the mean, below 0 one that is worse than it. NaN where the returns do not vary.
    """
    if "value/return_square" not in values:
        return values
    values = dict(values)
    error = values.pop("value/error_square") - values["value/error_mean"] ** 2
    spread = values.pop("value/return_square") - values["value/return_mean"] ** 2
    values["value/explained_variance"] = 1 - error / spread if spread > 1e-8 else float("nan")
    return values


def with_sample_size(values: dict[str, float]) -> dict[str, float]:
    """
    Replaces the pooled means of the ratio and its square by `ratio/ess` = mean(r)^2 / mean(r^2).

    1: every token counts alike; near 0: a few tokens carry the update. Source: Kish's effective sample size over the sample size.
    """
    if "_ratio_square" not in values:
        return values
    values = dict(values)
    mean, square = values.pop("_ratio_sum"), values.pop("_ratio_square")
    values["ratio/ess"] = mean**2 / square if square > 0 else float("nan")
    return values


def with_loss_shares(values: dict[str, float]) -> dict[str, float]:
    """Adds `share/loss/NAME` = |term| / sum of the terms' sizes, where there is more than one term."""
    terms = {name.removeprefix("loss/"): abs(value) for name, value in values.items() if name.startswith("loss/")}
    total = sum(terms.values())
    if len(terms) < 2 or not total > 0:
        return values
    return values | {f"share/loss/{name}": size / total for name, size in terms.items()}


def gradient_shares(parts: list[dict[str, float]]) -> dict[str, float]:
    """
    `grad_logp/NAME`: norm over all processes of a term's gradient with respect to the log-probs; `share/grad/NAME`: over their sum.

    Each process's gradient is of the loss times the number of processes, by which the norm is divided.
    """
    names = sorted({name for part in parts for name in part})
    norms = {name: sum(part.get(name, 0.0) for part in parts) ** 0.5 / len(parts) for name in names}
    total = sum(norms.values())
    shares = {f"share/grad/{name}": norm / total for name, norm in norms.items()} if total > 0 else {}
    return {f"grad_logp/{name}": norm for name, norm in norms.items()} | shares


def pooled(parts: Sequence[dict[str, tuple[str, float, float]]]) -> dict[str, float]:
    """Statistics (kind, total, weight) of micro-batches or processes as one value by name; NaN where nothing was counted."""
    return {name: _pool(name, parts) for name in sorted({name for part in parts for name in part})}


def _pool(name: str, parts: Sequence[dict[str, tuple[str, float, float]]]) -> float:
    found = [part[name] for part in parts if name in part and part[name][2] > 0]
    if not found:
        return float("nan")
    kind = found[0][0]
    if kind == "mean":
        return sum(total for _, total, _ in found) / sum(weight for _, _, weight in found)
    totals = [total for _, total, _ in found]
    return min(totals) if kind == "min" else max(totals)


def mask_statistics(loss_mask: Tensor, completion_mask: Tensor, ended: Tensor) -> dict[str, Statistic]:
    """
    `mask/outside_completion`: loss tokens outside of what was generated (0 unless a mask is wrong). `mask/eos_in_loss`: the share
    of ended completions whose end token is a loss token.

    Args:
        loss_mask, completion_mask: (B, T). ended: (B,) bool.
    """
    outside = (loss_mask & ~completion_mask.bool()).sum().float()
    last = (completion_mask.sum(1, keepdim=True) - 1).clamp(min=0)
    hit = loss_mask.gather(1, last).squeeze(1) & ended
    one = torch.ones_like(outside)
    return {
        "mask/outside_completion": Statistic("max", outside, one),
        "mask/eos_in_loss": Statistic("mean", hit.sum().float(), ended.sum().float()),
    }


def first_pass_deviation(output: LossOutput) -> Statistic:
    """max |ratio - 1| over valid tokens: 0, up to rounding, before the first update after a rollout."""
    assert output.inputs is not None
    deviation = select(output.per_token["ratio"] - 1, output.inputs.mask).abs().amax()
    return Statistic("max", deviation, torch.ones_like(deviation))
