"""
Masked reductions. Every sum, mean, variance and quantile of the project goes through this file.

Shapes: `x` is (B, T) float, `mask` is (B, T) bool, True where the token counts. Masked positions are selected away with
`where` before any arithmetic, so a NaN or an infinity there changes neither a value nor a gradient.
"""

from __future__ import annotations

from typing import Any, NamedTuple
from weakref import ReferenceType, ref

import torch
from torch import Tensor

QUANTILES = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)


class _Known(NamedTuple):
    """
    What is found of a mask once: its version then; int32, -1 where it is True, else 0; valid tokens a row (B,) and in all; rows with
    any (B,).
    """

    mask: ReferenceType[Tensor]
    version: int
    bits: Tensor
    counts: Tensor
    total: Tensor
    rows: Tensor


_KNOWN: dict[int, _Known] = {}  # by id, which another tensor may take once a mask is gone


def _known(mask: Tensor) -> _Known:
    found = _KNOWN.get(id(mask))
    if found is not None and found.mask() is mask and found.version == mask._version:
        return found
    inference = mask.is_inference()  # has no version
    key, counts = id(mask), mask.sum(-1)
    reference = ref(mask, lambda gone: _forget(key, gone))
    found = _Known(reference, 0 if inference else mask._version, mask.int().neg_(), counts, counts.sum(), counts > 0)
    if not inference:
        _KNOWN[key] = found
    return found


def _forget(key: int, gone: ReferenceType[Tensor]) -> None:
    if key in _KNOWN and _KNOWN[key].mask is gone:
        del _KNOWN[key]


def row_counts(mask: Tensor) -> Tensor:
    """Valid tokens of each row: (B,)."""
    return _known(mask).counts


def count(mask: Tensor) -> Tensor:
    """Valid tokens: a scalar."""
    return _known(mask).total


def _keep(x: Tensor, bits: Tensor) -> Tensor:
    """float32 values whose bits are all kept or all cleared: on a CPU a tenth of the time of torch.where, and as deaf to NaN."""
    if torch.is_grad_enabled() and x.requires_grad:
        return _Kept.apply(x, bits)
    return (x.view(torch.int32) & bits).view(torch.float32)


class _Kept(torch.autograd.Function):
    """`_keep` and its gradient, which is kept and cleared alike."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bits: Tensor) -> Tensor:
        ctx.save_for_backward(bits)
        return _keep(x, bits)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _keep(grads[0], *ctx.saved_tensors), None


def select(x: Tensor, mask: Tensor) -> Tensor:
    """`x` where `mask`, else 0. Shapes broadcast; the gradient at masked positions is exactly 0."""
    if x.dtype == torch.bool:
        return x & mask
    if x.dtype == torch.float32 and x.shape == mask.shape and x.device == mask.device:
        return _keep(x, _known(mask).bits)
    return torch.where(mask, x, torch.zeros((), dtype=x.dtype, device=x.device))


def _counted(x: Tensor) -> torch.dtype | None:
    """What a sum is taken in: bools in 32 bits, where PyTorch would write them out in 64."""
    return torch.int32 if x.dtype == torch.bool else None


def nonempty(mask: Tensor, keepdim: bool = False) -> Tensor:
    """Rows with a valid token: (B,), or (B, 1)."""
    rows = _known(mask).rows
    return rows.unsqueeze(-1) if keepdim else rows


def masked_sum(x: Tensor, mask: Tensor) -> Tensor:
    """Sum of `x` over `mask`: a scalar, 0 for an empty mask."""
    return select(x, mask).sum(dtype=_counted(x))


def masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    """Mean of `x` over `mask`: a scalar, 0 for an empty mask."""
    return masked_sum(x, mask) / count(mask).clamp(min=1)


def row_sums(x: Tensor, mask: Tensor) -> Tensor:
    """Sum of each row over its mask: (B,)."""
    return select(x, mask).sum(-1, dtype=_counted(x))


def row_means(x: Tensor, mask: Tensor) -> Tensor:
    """Mean of each row over its mask: (B,), 0 for a row without valid tokens."""
    return row_sums(x, mask) / row_counts(mask).clamp(min=1)


def masked_quantiles(x: Tensor, mask: Tensor, q: tuple[float, ...] = QUANTILES) -> Tensor:
    """Quantiles of the valid values: (len(q),), linear interpolation, NaN for an empty mask."""
    values = x.detach()[mask].float()
    if values.numel() == 0:
        return torch.full((len(q),), float("nan"), device=x.device)
    return torch.quantile(values, torch.tensor(q, device=x.device))


class Moments(NamedTuple):
    """Count, mean and sum of squared deviations. Tensors of one shape, so that several sets merge at once."""

    n: Tensor
    mean: Tensor
    m2: Tensor

    def variance(self, ddof: int = 1) -> Tensor:
        """Variance with `ddof` degrees of freedom taken off; 0 where there are not more than `ddof` values."""
        return torch.where(self.n > ddof, self.m2 / (self.n - ddof).clamp(min=1), torch.zeros_like(self.m2))


def moments(x: Tensor, mask: Tensor) -> Moments:
    """Two-pass moments of the valid values (scalars). Exactly zero spread for equal values."""
    count = mask.sum().to(x.dtype)
    x = select(x, mask)
    mean = x.sum() / count.clamp(min=1)
    low, high = x.masked_fill(~mask, float("inf")).amin(), x.masked_fill(~mask, float("-inf")).amax()
    mean = torch.where(low == high, low, mean)
    return Moments(count, mean, (select(x - mean, mask) ** 2).sum())


def _exact_mean(mean: Tensor, values: Tensor, counts: Tensor, dim: int) -> Tensor:
    """`mean`, or where all counted values along `dim` are equal that value, which a rounded mean would miss."""
    low = values.masked_fill(~counts, float("inf")).amin(dim)
    high = values.masked_fill(~counts, float("-inf")).amax(dim)
    return torch.where(low == high, low, mean)


def row_moments(x: Tensor, mask: Tensor) -> Moments:
    """Moments of each row's valid tokens: (B,) tensors. Exactly zero spread for equal values."""
    x = select(x, mask)
    mean = _exact_mean(row_means(x, mask), x, mask, -1)
    return Moments(mask.sum(-1).to(x.dtype), mean, (select(x - mean.unsqueeze(-1), mask) ** 2).sum(-1))


def keyed_moments(rows: Moments, keys: Tensor, num_keys: int) -> Moments:
    """Moments of the rows of each key 0..num_keys-1: (num_keys,) tensors. Exactly zero spread for equal values."""

    def sums(x: Tensor) -> Tensor:
        return torch.zeros(num_keys, dtype=x.dtype, device=x.device).index_add_(0, keys, x)

    def extreme(fill: float, kind: str) -> Tensor:
        start = torch.full((num_keys,), fill, dtype=rows.mean.dtype, device=rows.mean.device)
        return start.scatter_reduce_(0, keys, rows.mean.masked_fill(rows.n == 0, fill), kind)

    n = sums(rows.n)
    mean = sums(rows.n * rows.mean) / n.clamp(min=1)
    low, high = extreme(float("inf"), "amin"), extreme(float("-inf"), "amax")
    mean = torch.where(low == high, low, mean)
    return Moments(n, mean, sums(rows.m2 + rows.n * (rows.mean - mean[keys]) ** 2))


def merge_moments(parts: Moments, dim: int = 0) -> Moments:
    """
    Moments of the union of disjoint sets, without the cancellation of E[x^2] - E[x]^2.

    Args:
        parts: moments whose tensors hold the sets along `dim`.

    Returns:
        `Moments` with `dim` reduced. Source: Chan, Golub and LeVeque (1979), pairwise update of sums of squares.
    """
    count = parts.n.sum(dim)
    mean = (parts.n * parts.mean).sum(dim) / count.clamp(min=1)
    mean = _exact_mean(mean, parts.mean, parts.n > 0, dim)
    shift = parts.mean - mean.unsqueeze(dim)
    return Moments(count, mean, (parts.m2 + parts.n * shift**2).sum(dim))


def whiten(
    x: Tensor,
    mask: Tensor,
    *,
    shift_mean: bool = True,
    eps: float = 1e-8,
    mean: Tensor | None = None,
    variance: Tensor | None = None,
) -> Tensor:
    """
    (x - mean) / sqrt(variance + eps) over the valid tokens; masked positions become 0.

    Args:
        x: (B, T). mask: (B, T) bool.
        shift_mean: False adds the mean back, so that only the scale changes.
        eps: added to the variance.
        mean, variance: statistics over a larger set than this batch (broadcastable to x); None takes this batch's
            own, with ddof 1.

    Returns:
        (B, T). With fewer than two valid tokens the variance is 0 and the result is 0 (plus the mean, if kept).

    Source: advantage whitening as in verl's `masked_whiten`, which raises for fewer than two tokens and leaves values on
    masked positions.
    """
    x = select(x, mask)
    if mean is None or variance is None:
        own = moments(x, mask)
        mean = own.mean if mean is None else mean
        variance = own.variance() if variance is None else variance
    white = (x - mean) * torch.rsqrt(variance + eps)
    return select(white if shift_mean else white + mean, mask)


class Groups(NamedTuple):
    """Rows by group: `rows` (B,) numbers the groups 0..num-1, whatever the ids were."""

    rows: Tensor
    num: int


def group_rows(group_ids: Tensor) -> Groups:
    """Numbers the groups of (B,) integer ids by value; row order plays no part."""
    ids, index = torch.unique(group_ids, return_inverse=True)
    return Groups(index, ids.numel())


def group_sums(x: Tensor, groups: Groups) -> Tensor:
    """Sum of (B,) values by group: (num,)."""
    return torch.zeros(groups.num, dtype=x.dtype, device=x.device).index_add_(0, groups.rows, x)


def group_moments(x: Tensor, valid: Tensor, groups: Groups) -> Moments:
    """
    Two-pass moments of (B,) values by group, over the rows where `valid`.

    Returns:
        `Moments` of (num,) tensors. A group whose valid values are all equal has that value as its mean and exactly 0
        spread, which a rounded mean would not give.
    """
    value = select(x, valid)
    count = group_sums(valid.to(x.dtype), groups)
    mean = group_sums(value, groups) / count.clamp(min=1)
    low = torch.full_like(mean, float("inf")).scatter_reduce_(0, groups.rows, x.masked_fill(~valid, float("inf")), "amin")
    high = torch.full_like(mean, float("-inf")).scatter_reduce_(0, groups.rows, x.masked_fill(~valid, float("-inf")), "amax")
    mean = torch.where(low == high, low, mean)
    deviation = select((x - mean[groups.rows]) ** 2, valid)
    return Moments(count, mean, group_sums(deviation, groups))
