"""Statistics of one optimizer step: kept on the device, fetched once, in one collective, on every rank alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from ..loss import LossOutput, Statistic

Gather = Callable[[list[dict[str, tuple[str, float, float]]]], list[dict[str, tuple[str, float, float]]]]

_EXTREME = {"min": torch.minimum, "max": torch.maximum}


class StepStatistics:
    """
    Pools the statistics of an optimizer step's micro-batches.

    A mean is the sum of its totals over the sum of its weights, over all micro-batches and processes, so it does not depend
    on the split; a name that only some ranks have is pooled over those.
    """

    def __init__(self) -> None:
        self._pooled: dict[str, Statistic] = {}

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

    def fetch(self, gather: Gather | None = None) -> dict[str, float]:
        """
        The step's values over all processes, and an empty pool for the next step.

        Args:
            gather: a collective that concatenates lists of objects over processes; None on one process.

        Returns:
            {metric name: value}, NaN where nothing was counted.
        """
        names = list(self._pooled)
        if names:
            totals = torch.stack([self._pooled[name].total.float() for name in names])
            weights = torch.stack([self._pooled[name].weight.float() for name in names])
            rows = torch.stack([totals, weights], 1).tolist()
        else:
            rows = []
        local = {name: (self._pooled[name].kind, row[0], row[1]) for name, row in zip(names, rows, strict=True)}
        self._pooled = {}
        parts = [local] if gather is None else gather([local])
        values = {name: _pool(name, parts) for name in sorted({name for part in parts for name in part})}
        return with_explained_variance(values)


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


def _pool(name: str, parts: list[dict[str, tuple[str, float, float]]]) -> float:
    found = [part[name] for part in parts if name in part and part[name][2] > 0]
    if not found:
        return float("nan")
    kind = found[0][0]
    if kind == "mean":
        return sum(total for _, total, _ in found) / sum(weight for _, _, weight in found)
    totals = [total for _, total, _ in found]
    return min(totals) if kind == "min" else max(totals)
