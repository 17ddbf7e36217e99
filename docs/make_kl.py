"""
Makes the tables and pictures of docs/kl.md: what each KL estimator's value and gradient are, by exact expectation.

    python docs/make_kl.py [--check]

A policy p and a reference q over three tokens; an expectation is a sum over the three tokens that p may sample. --check writes
nothing and exits with 1 if the page's tables are not what it would write.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from trl_lossplus import LossBatch, LossSpec, compute_loss, estimate_kl

PAGE = Path(__file__).resolve().parent / "kl.md"
Z, REFERENCE = (0.3, -0.2, 0.1), (-0.4, 0.5, 0.2)
# Estimator, whether it is multiplied by the ratio.
IN_LOSS = (
    ("k1", False),
    ("k1", True),
    ("k2", False),
    ("k3", False),
    ("k3", True),
    ("k1+", False),
    ("k3+", False),
    ("abs", False),
    ("abs+", False),
)
COLOURS = {"k1": "#8a8a8a", "k2": "#0072b2", "k3": "#d55e00", "abs": "#009e73"}


class Exact(NamedTuple):
    """Of one estimator: mean and standard deviation of its value; mean of its gradient by the logits, and the noise around it."""

    value: float
    deviation: float
    gradient: Tensor
    noise: float


def logits(values: tuple[float, ...] = Z) -> Tensor:
    """In float64, with gradient."""
    return torch.tensor(values, dtype=torch.float64, requires_grad=True)


def moments(p: Tensor, values: Tensor, gradients: Tensor) -> Exact:
    """Means and spreads over the tokens, drawn with the probabilities p (V,): values (V,), gradients (V, V)."""
    mean, centre = (p * values).sum(), p @ gradients
    spread = (p * ((gradients - centre) ** 2).sum(-1)).sum()
    return Exact(mean.item(), ((p * (values - mean) ** 2).sum()).sqrt().item(), centre, spread.sqrt().item())


def in_loss(estimator: str, corrected: bool, z: Tensor, reference: Tensor) -> Exact:
    """The KL term of `compute_loss` with beta 1, for each token that may be sampled."""
    spec = LossSpec(beta=1.0, kl_estimator=estimator, use_bias_correction_kl=corrected)
    logp, ref = z.log_softmax(-1), reference.log_softmax(-1)
    one = torch.ones(1, 1, dtype=torch.bool)
    terms = []
    for x in range(len(z)):
        sampled = logp[x].view(1, 1)
        batch = LossBatch(sampled, sampled.detach(), torch.zeros(1), one, ref_logps=ref[x].detach().view(1, 1))
        terms.append(compute_loss(batch, spec).terms["kl"])
    gradients = torch.stack([torch.autograd.grad(term, z, retain_graph=True)[0] for term in terms])
    return moments(logp.exp().detach(), torch.stack(terms).detach().double(), gradients)


def in_reward(estimator: str, z: Tensor, reference: Tensor) -> Exact:
    """The KL as a negative reward: the policy gradient of the loss is value times the gradient of log p, the value a constant."""
    logp, ref = z.log_softmax(-1), reference.log_softmax(-1)
    values = estimate_kl(estimator, logp.detach(), ref).double()
    scores = torch.stack([torch.autograd.grad(logp[x], z, retain_graph=True)[0] for x in range(len(z))])
    return moments(logp.exp().detach(), values, values[:, None] * scores)


def true_gradients(z: Tensor, reference: Tensor) -> dict[str, Tensor]:
    """The gradients of the reverse KL(p, q), and of the forward KL(q, p), by the logits of p."""
    p, q = z.softmax(-1), reference.softmax(-1)
    kinds = {"reverse": (p * (p.log() - q.log())).sum(), "forward": (q * (q.log() - p.log())).sum()}
    return {name: torch.autograd.grad(value, z, retain_graph=True)[0] for name, value in kinds.items()}


def whose(gradient: Tensor, true: dict[str, Tensor]) -> str:
    """What the expected gradient is."""
    if gradient.abs().max() < 1e-6:
        return "0: nothing is learned from it"
    for name, right in true.items():
        if (gradient - right).abs().max() < 1e-6:
            return f"the {name} KL's"
    cosine = torch.cosine_similarity(gradient, true["reverse"], dim=0).item()
    return f"neither; cosine to the reverse KL's {cosine:.2f}"


def numbers(values: Tensor) -> str:
    return ", ".join(f"{value:.3f}".replace("-0.000", "0.000") for value in values.tolist())


def table(place: str) -> str:
    """The table for `loss` or `reward`, as Markdown."""
    z, reference = logits(), torch.tensor(REFERENCE, dtype=torch.float64)
    true = true_gradients(z, reference)
    lines = [
        "| `kl_estimator` | mean | deviation | expected gradient | its noise | whose gradient |",
        "|---|---|---|---|---|---|",
    ]
    if place == "loss":
        found = [(f"{name}{' x ratio' if ratio else ''}", in_loss(name, ratio, z, reference)) for name, ratio in IN_LOSS]
    else:
        found = [(name, in_reward(name, z, reference)) for name in ("k1", "k2", "k3", "abs")]
    for name, exact in found:
        facts = (f"{exact.value:.4f}", f"{exact.deviation:.3f}", numbers(exact.gradient), f"{exact.noise:.3f}")
        lines.append(f"| {name} | {' | '.join(facts)} | {whose(exact.gradient, true)} |")
    return "\n".join(lines)


def walk(step: Callable[[Tensor, Tensor], Tensor], steps: int = 60, rate: float = 1.0) -> list[float]:
    """The exact reverse KL while the logits follow an expected gradient."""
    z, reference, seen = logits((1.5, -1.0, -0.5)), torch.tensor((-1.0, 1.0, 0.0), dtype=torch.float64), []
    for _ in range(steps + 1):
        p, q = z.softmax(-1), reference.softmax(-1)
        seen.append((p * (p.log() - q.log())).sum().item())
        z = (z - rate * step(z, reference)).detach().requires_grad_()
    return seen


def draw() -> None:
    """values.svg: the estimators against d. distance.svg: mean and deviation as p leaves q. descent.svg: the KL under each."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    style = {"svg.fonttype": "none", "svg.hashsalt": "kl", "font.size": 8, "axes.spines.top": False, "axes.spines.right": False}
    with plt.rc_context(style):
        for name, panels in (("values", (_values,)), ("distance", (_means, _deviations)), ("descent", (_in_loss, _in_reward))):
            figure, axes = plt.subplots(1, len(panels), figsize=(3.4 * len(panels), 2.6), constrained_layout=True, squeeze=False)
            for axis, panel in zip(axes[0], panels, strict=True):
                panel(axis)
                axis.legend(frameon=False)
            path = PAGE.parent / "img" / "kl" / f"{name}.svg"
            figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None})
            plt.close(figure)


def _values(axis) -> None:
    d = torch.linspace(-3, 3, 121)
    for name, colour in COLOURS.items():
        axis.plot(d.tolist(), estimate_kl(name, d, torch.zeros(())).tolist(), color=colour, label=name, linewidth=1.3)
    axis.set(xlabel="d = logp - ref_logp of the sampled token", ylabel="value, nats", ylim=(-3.2, 6))
    axis.axhline(0, color="0.8", linewidth=0.6, zorder=0)


def _distances(axis, of: Callable[[Exact], float], what: str) -> None:
    """The logits of p from those of q (0) to Z (1) and on to four times as far."""
    reference = torch.tensor(REFERENCE, dtype=torch.float64)
    steps = [0.1 * i for i in range(1, 41)]
    points = [reference + step * (torch.tensor(Z, dtype=torch.float64) - reference) for step in steps]
    for name, colour in COLOURS.items():
        seen = [in_loss(name, False, z.requires_grad_(), reference) for z in points]
        axis.plot(steps, [of(exact) for exact in seen], color=colour, label=name, linewidth=1.3)
    axis.set(xlabel="distance of p from q", ylabel=what)


def _means(axis) -> None:
    _distances(axis, lambda exact: exact.value, "mean, nats")
    axis.set_title("k1 and k3 lie on the true KL", fontsize=8)


def _deviations(axis) -> None:
    _distances(axis, lambda exact: exact.deviation, "deviation of one sample, nats")


def _descents(axis, kinds: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], str, str]], title: str) -> None:
    for name, (step, colour, line) in kinds.items():
        axis.plot(walk(step), line, color=colour, label=name, linewidth=1.3)
    axis.set(xlabel="steps along the expected gradient", ylabel="exact KL(p, q), nats", yscale="log", ylim=(1e-3, 5))
    axis.set_title(title, fontsize=8)


def _in_loss(axis) -> None:
    kinds = {
        "k1": (lambda z, q: in_loss("k1", False, z, q).gradient, COLOURS["k1"], "-"),
        "k2, k1+, k3+, k1 or k3 x ratio": (lambda z, q: in_loss("k3+", False, z, q).gradient, COLOURS["k2"], "-"),
        "k3": (lambda z, q: in_loss("k3", False, z, q).gradient, COLOURS["k3"], "--"),
    }
    _descents(axis, kinds, "in the loss")


def _in_reward(axis) -> None:
    kinds = {name: (lambda z, q, name=name: in_reward(name, z, q).gradient, colour, "-") for name, colour in COLOURS.items()}
    _descents(axis, kinds, "in the reward")


def filled(page: str) -> str:
    """The page with its tables made anew."""
    for place in ("loss", "reward"):
        mark = f"<!-- {place}: made by docs/make_kl.py -->\n\n"
        before, after = page.split(mark)
        page = before + mark + table(place) + "\n" + re.sub(r"\A(\|[^\n]*\n)*", "", after)
    return page


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    page = PAGE.read_text()
    if parser.parse_args().check:
        print("up to date" if filled(page) == page else "not up to date: kl.md")
        return 0 if filled(page) == page else 1
    PAGE.write_text(filled(page))
    (PAGE.parent / "img" / "kl").mkdir(exist_ok=True)
    draw()
    return 0


if __name__ == "__main__":
    sys.exit(main())
