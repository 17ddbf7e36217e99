"""Statistics of one optimizer step: kept on the device, fetched once, and pooled over all processes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..loss import LossOutput, Statistic
from .quantiles import Sample, Spread, merge, sample, spread

OVERFLOWS = math.log(torch.finfo(torch.float32).max)  # nats; the loss takes exp in float32
_EXTREME = {"min": torch.minimum, "max": torch.maximum}


class Local(NamedTuple):
    """
    One process's share of a step: (kind, total, weight) by name, its values, the clamp of the log ratio where no update came before it
    since the rollout (else None), and the squared norms of the terms' gradients in the step before.
    """

    statistics: dict[str, tuple[str, float, float]]
    spread: Spread | None
    first_pass: float | None
    squares: dict[str, float]


class StepStatistics:
    """
    Pools the statistics of an optimizer step's micro-batches.

    What the loss read and gave is taken and pooled before the step's last backward pass (`take`, `pooled`), since it decides about the
    step. The norms of the terms' gradients are there after it (`close`): one process has them at once, of several each tells the others
    when it tells about the next step, so that they cost no collective.

    A mean is the sum of its totals over the sum of its weights, over all micro-batches and processes, so it does not depend
    on the split; a name that only some ranks have is pooled over those.
    """

    def __init__(self, level: str = "off") -> None:
        self.level = level
        self._pooled: dict[str, Statistic] = {}
        self._samples: list[Sample] = []
        self._norms: list[tuple[str, Tensor]] = []  # of the step under way
        self._done: list[tuple[str, Tensor]] = []  # of the step before, where it is not told yet
        self._first_pass: float | None = None

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

    def probe(self, output: LossOutput, first_pass: float | None = None) -> None:
        """
        Takes in what `level` asks for beyond the statistics: quantiles, effective sample size, the terms' gradients.

        The gradients with respect to the log-probs are seen by hooks while the backward pass goes by. Waits for no device.

        Args:
            first_pass: the log_ratio_clamp of the loss where no weight has changed since the rollout, else None.
        """
        if self.level == "off":
            return
        self._samples.append(sample(output, self.level))
        self._first_pass = first_pass
        for name, source in output.sources.items():
            if source.requires_grad:
                source.register_hook(partial(self._saw_gradient, name))

    def _saw_gradient(self, name: str, gradient: Tensor) -> None:
        self._norms.append((name, torch.linalg.vector_norm(gradient)))

    def take(self, processes: int = 1) -> Local:
        """This process's share of the step, for `pooled`, and an empty pool for the next step. Waits for the device once."""
        pooled, samples, norms = self._pooled, self._samples, self._done
        single = [x.float() for one in pooled.values() for x in (one.total, one.weight)]
        single += [norm for _, norm in norms] + [end for one in samples for end in one.ends]
        rows = [*([torch.stack(single)] if single else []), *(row for one in samples for row in one.rows)]
        numbers = torch.cat(rows).cpu().numpy() if rows else np.zeros(0, dtype=np.float32)
        values, n = numbers[: len(single)].tolist(), 2 * len(pooled)
        local = {name: (one.kind, values[2 * i], values[2 * i + 1]) for i, (name, one) in enumerate(pooled.items())}
        squares = _squares(norms, values[n : n + len(norms)])
        mine = Local(
            local, spread(samples, values[n + len(norms) :], numbers[len(single) :], processes), self._first_pass, squares
        )
        self._pooled, self._samples, self._done, self._first_pass = {}, [], [], None
        return mine

    def close(self, processes: int = 1) -> dict[str, float]:
        """After the step's last backward pass: `gradient_shares` on one process; on several nothing, they come with the next step."""
        norms, self._norms = self._norms, []
        if processes > 1:
            self._done = norms
            return {}
        return gradient_shares([_squares(norms, torch.stack([norm for _, norm in norms]).tolist())]) if norms else {}

    def state_dict(self) -> dict[str, Any]:
        """The norms of the step before, where they are not told yet."""
        return {"done": list(self._done)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes what `state_dict` gave."""
        self._done = [tuple(one) for one in state["done"]] if self.level != "off" else []

    def pooled(self, everyone: Sequence[Local]) -> dict[str, float]:
        """
        The step's values over all processes, from what each of them took.

        Returns:
            {metric name: value}, NaN where nothing was counted.
        """
        parts = [one.statistics for one in everyone]
        found = pooled(parts)
        spreads = [one.spread for one in everyone if one.spread is not None]
        found |= merge(spreads, self.level) | gradient_shares([one.squares for one in everyone])
        clamp = next((one.first_pass for one in everyone if one.first_pass is not None), None)
        if spreads and clamp is not None:
            found |= first_pass_deviation(found, clamp)
        return with_loss_shares(with_explained_variance(found))


def _squares(norms: list[tuple[str, Tensor]], values: list[float]) -> dict[str, float]:
    squares: dict[str, float] = {}
    for (name, _), value in zip(norms, values, strict=True):
        squares[name] = squares.get(name, 0.0) + value**2
    return squares


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


def first_pass_deviation(values: dict[str, float], clamp: float) -> dict[str, float]:
    """
    `ratio/first_pass_deviation`: max |ratio - 1| over valid tokens. 0, up to rounding, before the first update after a rollout.

    Args:
        values: with the least and the largest log ratio. clamp: of the log ratio, in nats, as the loss bounds it before exp.
    """
    low, high = (max(-clamp, min(values[f"probe/log_ratio/q{q}"], clamp)) for q in ("00", "100"))
    over = math.inf if high > OVERFLOWS else math.expm1(high)
    return {"ratio/first_pass_deviation": max(over, -math.expm1(low))}
