"""
The references' cases, and the formulas written out once more: float64, one row at a time, over the valid tokens alone.

Independent of the package on purpose. A masked position does not exist here, so it can leak nothing; no fast path, no clamp but
the one that the formula has.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import Tensor

DATA = torch.load(Path(__file__).parent / "reference_values.pt", weights_only=True)
BATCHES, CASES = DATA["batches"], DATA["cases"]
MODES = {
    "token-mean": "token_mean",
    "token-sum": "token_sum",
    "seq-mean-token-sum": "seq_mean_token_sum",
    "seq-mean-token-sum-norm": "seq_mean_token_sum_norm",
    "seq-mean-token-mean": "seq_mean_token_mean",
}
TOLERANCE = 1e-5


def leaf(x: Tensor, dtype: torch.dtype) -> Tensor:
    """A copy of the data that takes a gradient."""
    return x.clone().to(dtype).requires_grad_()


def cases_of(oracles: str, ids: str = "") -> list[dict]:
    """The cases whose oracle matches the pattern, and whose id holds the other one."""
    return [case for case in CASES if re.fullmatch(oracles, case["oracle"]) and re.search(ids, case["id"])]


def reason(table: dict[str, str], case: dict) -> str | None:
    """The reason of the first pattern that finds the case's id, or None."""
    return next((why for pattern, why in table.items() if re.search(pattern, case["id"])), None)


def params(oracles: str, ids: str = "") -> list:
    """One pytest parameter a case."""
    return [pytest.param(case, id=case["id"]) for case in cases_of(oracles, ids)]


def census(oracles: str, differs: dict[str, str], ids: str = "") -> dict[str, tuple[int, int, int]]:
    """{oracle: (cases that match, that differ, that the reference refuses)}."""
    count: dict[str, Counter] = {}
    for case in cases_of(oracles, ids):
        kind = 2 if case["error"] else 1 if reason(differs, case) else 0
        count.setdefault(case["oracle"], Counter())[kind] += 1
    return {oracle: (kinds[0], kinds[1], kinds[2]) for oracle, kinds in count.items()}


def _row_losses(name: str, d: Tensor, lp: Tensor, a: Tensor, w: Tensor, o: dict) -> Tensor:
    """Losses of one row's valid tokens (or one value for all of them); d the raw log ratios, w the rollout weights."""
    lo, hi, c = o.get("lo", 0.2), o.get("hi", 0.2), o.get("c")
    if name == "geo_mean":
        kept = torch.where(a > 0, torch.minimum(d, d.clamp(-lo, hi)), torch.maximum(d, d.clamp(-lo, hi)))
        kept = torch.where(a == 0, torch.zeros_like(d), kept)
        return (-a.mean() * kept.mean().exp()).expand(len(d)) * w
    if name == "cispo":
        return -d.clamp(-20, 20).exp().clamp(1 - lo, 1 + hi).detach() * a * lp * w
    if name == "sapo":
        tau = torch.where(a > 0, torch.tensor(o["tau_pos"]).double(), torch.tensor(o["tau_neg"]).double())
        return -a * 4 / tau * torch.sigmoid(tau * (d.clamp(-20, 20).exp() - 1)) * w
    r = d.clamp(-20, 20).exp()
    if name == "gspo":
        r = d.mean().exp().expand(len(d))
    elif name == "gspo_token":
        r = d.mean().exp().detach() * (lp - lp.detach()).exp()
    loss = torch.maximum(-a * r, -a * r.clamp(1 - lo, 1 + hi))
    if c is not None:
        loss = torch.where(a < 0, torch.minimum(loss, -a * c), loss)
    return loss * w


def policy(name: str, lp: Tensor, old: Tensor, adv: Tensor, mask: Tensor, weights: Tensor | None, mode: str, **o) -> Tensor:
    """Loss of a whole batch, connected to `lp` (float64). `o`: lo, hi, c, tau_*, and num_tokens, num_rows, world_size."""
    old, adv = old.double(), adv.double()
    weights = torch.ones_like(adv) if weights is None else weights.double()
    losses = []
    for i, m in enumerate(mask):
        if m.any():
            losses.append(_row_losses(name, lp[i, m] - old[i, m], lp[i, m], adv[i, m], weights[i, m], o))
    return reduce(losses, mode, mask.shape[1], **{k: o[k] for k in ("num_tokens", "num_rows", "world_size") if k in o})


def reduce(losses: list[Tensor], mode: str, norm: float, num_tokens=None, num_rows=None, world_size: int = 1) -> Tensor:
    """The aggregation `mode` over rows of valid tokens' losses."""
    num_tokens = num_tokens or sum(len(x) for x in losses)
    num_rows = num_rows or len(losses)
    total = sum(x.sum() for x in losses)
    return (
        world_size
        * {
            "token_mean": total / num_tokens,
            "token_sum": total,
            "seq_mean_token_sum": total / num_rows,
            "seq_mean_token_sum_norm": total / num_rows / norm,
            "seq_mean_token_mean": sum(x.mean() for x in losses) / num_rows,
        }[mode]
    )


def gae(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Advantages and returns of all valid tokens, one row after the other (float64): the double sum that defines them."""
    advantages, returns = [], []
    for i, m in enumerate(mask):
        r, v = rewards[i, m].double(), values[i, m].double()
        after = torch.cat([v[1:], v.new_zeros(1)])[: len(v)]
        delta = r + gamma * after - v
        row = [sum((gamma * lam) ** k * delta[t + k] for k in range(len(v) - t)) for t in range(len(v))]
        advantages += row
        returns += [a + x for a, x in zip(row, v, strict=True)]
    return torch.stack(advantages), torch.stack(returns)


def value_rows(v: Tensor, old: Tensor, target: Tensor, mask: Tensor, clip: float | None) -> tuple[list[Tensor], float]:
    """Value losses of each row's valid tokens, connected to `v` (float64), and the share of tokens that the clip decides."""
    losses, clipped = [], []
    for i, m in enumerate(mask):
        if m.any():
            x, o, r = v[i, m], old[i, m].double(), target[i, m].double()
            inside = torch.ones_like(m[m]) if clip is None else (x - o).abs() <= clip
            plain = (x - r) ** 2
            other = (torch.where(inside, x, o + (clip or 0) * (x - o).sign().detach()) - r) ** 2
            losses.append(torch.maximum(plain, other) / 2)
            clipped.append((other > plain).double())
    return losses, float(torch.cat(clipped).mean())
