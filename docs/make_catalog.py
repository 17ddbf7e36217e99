"""
Writes docs/losses.md and docs/advantages.md from the registry, and a picture of each objective to docs/img/.

    python docs/make_catalog.py [--check]

--check writes nothing and exits with 1 if a page is not what it would write.
"""

from __future__ import annotations

import argparse
import math
import sys
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from trl_lossplus import LossBatch, LossSpec
from trl_lossplus.catalog import markdown
from trl_lossplus.over_step import over_step
from trl_lossplus.registry import POLICY_LOSSES

HERE = Path(__file__).parent
PAGES = {"losses.md": "policy", "advantages.md": "advantages"}
P_OLD = 0.25
RATIOS = torch.linspace(0.05, 3.5, 139)


def curve(name: str, advantage: float) -> tuple[Tensor, Tensor]:
    """
    Loss of one token and its gradient by the log-prob, at each of `RATIOS`.

    A token is a completion of its own; where groups are compared, it has one mate at ratio 1 with the other sign. What chooses
    tokens has chosen none for clip_cov (chosen ones give 0), and all for kl_cov.
    """
    entry, n = POLICY_LOSSES.get(name), len(RATIOS)
    old = torch.full((2 * n, 1), math.log(P_OLD))
    moved = torch.cat([RATIOS.log(), torch.zeros(n)]).unsqueeze(1)
    logps = (old + moved).requires_grad_()
    signs = torch.cat([torch.full((n, 1), advantage), torch.full((n, 1), -advantage)])
    batch = LossBatch(
        logps,
        old,
        signs,
        torch.ones(2 * n, 1, dtype=torch.bool),
        rollout_logps=old,
        group_ids=torch.arange(n).repeat(2),
        selected_tokens=torch.full((2 * n, 1), name == "kl_cov"),
    )
    spec = LossSpec(policy_loss=name)
    batch = batch.clean()
    batch = replace(batch, **({"row_terms": over_step(batch, spec)["row_terms"]} if "row_terms" in entry.requires else {}))
    loss = entry.func(batch, spec).per_token[:n, 0]
    (gradient,) = torch.autograd.grad(loss.sum(), logps)
    return loss.detach(), gradient[:n, 0]


def draw(name: str, path: Path) -> None:
    """The picture of one objective."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    with plt.rc_context({"svg.fonttype": "none", "svg.hashsalt": name, "font.size": 8}):
        figure, axes = plt.subplots(1, 2, figsize=(6.4, 2.3), constrained_layout=True)
        for advantage, style in ((1.0, "-"), (-1.0, "--")):
            for axis, values in zip(axes, curve(name, advantage), strict=True):
                axis.plot(RATIOS.tolist(), values.tolist(), style, label=f"A = {advantage:+.0f}", linewidth=1.2)
        for axis, title in zip(axes, ("loss", "gradient by the log-prob"), strict=True):
            axis.set_title(f"{name}: {title}", fontsize=8)
            axis.set_xlabel("ratio")
            axis.axvline(1.0, color="0.8", linewidth=0.6, zorder=0)
            axis.axhline(0.0, color="0.8", linewidth=0.6, zorder=0)
        axes[0].legend(frameon=False)
        figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None})
        plt.close(figure)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    stale = [page for page, kind in PAGES.items() if not (HERE / page).exists() or (HERE / page).read_text() != markdown(kind)]
    if check:
        print(f"not up to date: {', '.join(stale)}" if stale else "up to date")
        return 1 if stale else 0
    for page, kind in PAGES.items():
        (HERE / page).write_text(markdown(kind))
    (HERE / "img").mkdir(exist_ok=True)
    for name in POLICY_LOSSES.names():
        draw(name, HERE / "img" / f"{name}.svg")
    print(f"{', '.join(PAGES)} and {len(POLICY_LOSSES.names())} pictures written")
    return 0


if __name__ == "__main__":
    sys.exit(main())
