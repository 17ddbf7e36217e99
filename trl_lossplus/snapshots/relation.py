"""How one tensor came out of another, where that is something simple: a sign, a factor, a constant, a rounding, a mask that shrank."""

from __future__ import annotations

import torch
from torch import Tensor

ALIKE = 1e-5  # factors and constants that differ by less than this, relative to their size, are one
ROUNDINGS = (torch.bfloat16, torch.float16)


def relation(a: Tensor, b: Tensor) -> str:
    """
    What turned a into b, in words.

    Args:
        a, b: values at the places that differ, in one row each.

    Returns:
        "negated", "rounded to bfloat16", "now in bfloat16" (another computation, in that precision), "times 0.5", "plus 2",
        "3 True became False, 0 False became True", or "" where it is none of these (one number alone is none).
    """
    if a.dtype == torch.bool:
        return f"{int((a & ~b).sum())} True became False, {int((b & ~a).sum())} False became True"
    a, b = a.double(), b.double()
    if len(a) < 2 or not bool(torch.isfinite(a).all() and torch.isfinite(b).all()):
        return ""
    if torch.equal(b, -a):
        return "negated"
    for dtype in ROUNDINGS:
        for one, other, words in ((a, b, "rounded to"), (b, a, "no longer rounded to")):
            if torch.equal(one.to(dtype).double(), other):
                return f"{words} {str(dtype).removeprefix('torch.')}"
    for dtype in ROUNDINGS:
        for one, other, words in ((a, b, "now in"), (b, a, "no longer in")):
            if _is_of_precision(other, dtype) and not torch.equal(one.to(dtype).double(), one):
                return f"{words} {str(dtype).removeprefix('torch.')}"
    filled = a != 0
    factors = b[filled] / a[filled]
    if filled.sum() > 1 and not bool(b[~filled].any()) and _is_one_number(factors):
        return f"times {float(factors.median()):.6g}"
    return f"plus {float((b - a).median()):.6g}" if _is_one_number(b - a) else ""


def _is_one_number(x: Tensor) -> bool:
    """Whether all values are equal up to rounding, and not 0."""
    middle = x.median()
    return bool(middle != 0) and bool((x - middle).abs().amax() <= ALIKE * middle.abs())


def _is_of_precision(x: Tensor, dtype: torch.dtype) -> bool:
    """Whether all values are numbers of this type, and enough of them too fine to be so by chance (as 0, 1 and 0.5 are)."""
    mantissas = torch.frexp(x).mantissa * 16
    fine = x[mantissas != mantissas.round()].unique()
    return torch.equal(x.to(dtype).double(), x) and len(fine) >= 8
