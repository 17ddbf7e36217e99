"""The report's charts: matplotlib figures of one run or two, as SVG that stands inside an HTML page."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from .runlog import Array, RunLog

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

POINTS = 300  # a line is drawn through at most this many points; each is the mean of the steps behind it
SMOOTH = 60  # a line of more points is shown smoothed, with its points faintly behind it
WIDTH = 4.8  # inches; with 9 pt letters that can be read on a phone
COLORS = ("#0072b2", "#d55e00")  # told apart by people who see no red or green, and in grey
PARTS = {"policy": "#0072b2", "kl": "#d55e00", "entropy": "#009e73", "value": "#cc79a7", "aux": "#7f7f7f"}
STYLE: Any = {
    "font.family": "sans-serif", "font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True,
    "grid.color": "#e4e4e4", "axes.titlesize": 9, "axes.titlelocation": "left", "legend.framealpha": 0.75,
    "legend.edgecolor": "none", "legend.fontsize": 8,
    "svg.fonttype": "none", "text.parse_math": False, "axes.axisbelow": True, "lines.linewidth": 1.4,
}  # fmt: skip
LEVELS = ("00", "05", "25", "50", "75", "95", "100")


class Line(NamedTuple):
    """A metric's steps and values, thinned."""

    steps: Array
    values: Array


def thin(run: RunLog, name: str) -> Line | None:
    """A metric as at most `POINTS` points; None where it was not logged."""
    values = run.get(name)
    kept = np.isfinite(values)
    if not kept.any():
        return None
    steps, values = run.steps[kept].astype(float), values[kept]
    if len(steps) <= POINTS:
        return Line(steps, values)
    parts = zip(np.array_split(steps, POINTS), np.array_split(values, POINTS), strict=True)
    means = [(float(a.mean()), float(b.mean())) for a, b in parts]
    return Line(*(np.array(column) for column in zip(*means, strict=True)))


def smooth(line: Line) -> Line:
    """A running mean over a 15th of the line, so that what alternates (first pass, second pass) reads as one level."""
    width = len(line.steps) // 15
    if len(line.steps) <= SMOOTH or width < 2:
        return line
    sums = np.cumsum(np.insert(line.values, 0, 0.0))
    centres = np.cumsum(np.insert(line.steps, 0, 0.0))
    return Line((centres[width:] - centres[:-width]) / width, (sums[width:] - sums[:-width]) / width)


@dataclass(frozen=True)
class Chart:
    """
    One chart.

    id: of its element. title, note: what it shows and how to read it. draw: into a figure, True if anything was logged for it.
    """

    id: str
    title: str
    note: str
    draw: Callable[[Figure, Sequence[RunLog]], bool]


def _lines(ax: Axes, runs: Sequence[RunLog], names: dict[str, str], labels: bool = True, floor: float = -np.inf) -> int:
    """Draws metrics as lines: by colour where there is one run, by dashes within each run's colour where there are two."""
    dashes = ("-", "--", ":", "-.")
    drawn = 0
    for i, run in enumerate(runs):
        for j, (name, label) in enumerate(names.items()):
            line = thin(run, name)
            if line is None:
                continue
            line = Line(line.steps, np.maximum(line.values, floor))
            color = COLORS[i] if len(runs) > 1 else list(PARTS.values())[j % len(PARTS)]
            text = " ".join(part for part in (f"{'AB'[i]}" if len(runs) > 1 else "", label) if part) if labels else None
            mark = "o" if len(line.steps) == 1 else None
            if len(runs) == 1 and len(line.steps) > SMOOTH:
                ax.plot(line.steps, line.values, color=color, alpha=0.3, linewidth=0.7)
            line, style = smooth(line), dashes[j % 4] if len(runs) > 1 else "-"
            ax.plot(line.steps, line.values, color=color, linestyle=style, label=text, marker=mark)
            drawn += 1
    if drawn and labels and (drawn > 1 or len(names) > 1):
        ax.legend(loc="best", ncols=2, borderaxespad=0.1, framealpha=0.6)
    return drawn


def _of_all(names: dict[str, str], name: str, runs: Sequence[RunLog]) -> dict[str, str]:
    """Beside what was kept, the same of all draws, where flat groups were replaced."""
    return {**names, name: "of all draws"} if any(name in run.columns for run in runs) else names


def _band(ax: Axes, run: RunLog, low: str, high: str, color: str, alpha: float = 0.15) -> bool:
    a, b = thin(run, low), thin(run, high)
    if a is None or b is None or len(a.steps) != len(b.steps):
        return False
    ax.fill_between(a.steps, a.values, b.values, color=color, alpha=alpha, linewidth=0)
    return True


def _rows(figure: Figure, n: int, height: float = 1.5) -> list[Any]:
    """n panels above each other that share their steps."""
    figure.set_size_inches(WIDTH, 0.5 + 0.85 * height * n)
    axes = np.atleast_1d(figure.subplots(n, 1, sharex=True))
    axes[-1].set_xlabel("optimizer step")
    return list(axes)


def reward(figure: Figure, runs: Sequence[RunLog]) -> bool:
    """Mean reward with one standard deviation, and each function's."""
    columns = dict.fromkeys(
        name for run in runs for name in run.columns if name.startswith("rewards/") and name.endswith("/mean")
    )
    several = {name: name.split("/")[1] for name in columns} if len(columns) > 1 else {}
    axes = _rows(figure, 1 + bool(several), 2.0)
    for i, run in enumerate(runs):
        mean, spread = thin(run, "reward"), thin(run, "reward_std")
        if mean is not None and spread is not None and len(mean.steps) == len(spread.steps):
            low, high = mean.values - spread.values, mean.values + spread.values
            axes[0].fill_between(mean.steps, low, high, color=COLORS[i], alpha=0.12, linewidth=0)
    drawn = _lines(axes[0], runs, _of_all({"reward": "reward"}, "resample/reward_all", runs))
    axes[0].set_title("reward, and one standard deviation")
    if several:
        drawn += _lines(axes[1], runs, several)
        axes[1].set_title("by reward function")
    return bool(drawn)


def loss_parts(figure: Figure, runs: Sequence[RunLog]) -> bool:
    """Each term of the loss, with the quantiles of its tokens behind it."""
    parts = [part for part in PARTS if any(np.isfinite(run.get(f"loss/{part}")).any() for run in runs)]
    rows: list[tuple[str, str]] = [(f"loss/{part}", f"probe/{'value_error' if part == 'value' else part}") for part in parts]
    rows = rows or [("loss", "")]
    axes = _rows(figure, len(rows))
    drawn = 0
    for ax, (name, probe) in zip(axes, rows, strict=True):
        drawn += _lines(ax, runs, {name: name})
        ax.set_title(name)
        if len(runs) == 1 and probe == "probe/policy":
            limits = ax.get_ylim()
            outer = _band(ax, runs[0], f"{probe}/q05", f"{probe}/q95", PARTS[probe.split("/")[1]])
            _band(ax, runs[0], f"{probe}/q25", f"{probe}/q75", PARTS[probe.split("/")[1]], 0.25)
            if outer:
                ax.set_title(f"{name}; bands: middle 50%, 90% of tokens")
            else:
                ax.set_ylim(limits)
    return bool(drawn)


def kl(figure: Figure, runs: Sequence[RunLog]) -> bool:
    """KL and its coefficient, each on its own axis."""
    coef = any(np.isfinite(run.get("kl_coef")).any() for run in runs)
    axes = _rows(figure, 1 + coef, 1.8)
    drawn = _lines(axes[0], runs, {"kl": "of the step", "kl_rollout": "of the rollout"})
    axes[0].set_title("KL from the reference, nats a token")
    if len(runs) == 1 and _band(axes[0], runs[0], "probe/kl/q05", "probe/kl/q95", COLORS[0]):
        _band(axes[0], runs[0], "probe/kl/q25", "probe/kl/q75", COLORS[0], 0.25)
        axes[0].set_title("KL, nats a token; bands: middle 50%, 90% of tokens")
    if coef:
        drawn += _lines(axes[1], runs, {"kl_coef": "coefficient"})
        axes[1].set_title("its coefficient")
    return bool(drawn)


def clip(figure: Figure, runs: Sequence[RunLog]) -> bool:
    """Clip fractions, with the healthy band drawn."""
    (ax,) = _rows(figure, 1, 2.2)
    names = {
        "clip_ratio/region_mean": "all", "clip_ratio/low_mean": "below", "clip_ratio/high_mean": "above",
        "clip_ratio/dual_mean": "dual", "cispo_clip_ratio": "cispo",
    }  # fmt: skip
    drawn = _lines(ax, runs, names)
    ax.axhspan(0.1, 0.3, color="#009e73", alpha=0.15, linewidth=0).set_gid("healthy-band")
    ax.set_ylim(0, max(0.42, ax.get_ylim()[1]))
    ax.set_title("fraction of clipped tokens")
    return bool(drawn)


def density(run: RunLog, probe: str) -> tuple[Array, Array, Array] | None:
    """
    A distribution over time from its quantiles.

    Returns:
        (steps, edges, share): share[i, j] of the tokens at steps[j] lies between edges[i] and edges[i + 1]; None if not logged.
    """
    lines = [(int(level) / 100, thin(run, f"probe/{probe}/q{level}")) for level in LEVELS]
    known = [(level, line) for level, line in lines if line is not None]
    if len(known) < 3 or len({len(line.steps) for _, line in known}) > 1:
        return None
    table = np.stack([line.values for _, line in known])
    # Outliers of single steps are not to squeeze everything else: the edge of the picture holds them.
    low, high = float(np.quantile(table[0], 0.02)), float(np.quantile(table[-1], 0.98))
    if high - low < 1e-6:
        low, high = low - 0.5, high + 0.5
    edges = np.linspace(low, high, 41)
    levels = np.array([level for level, _ in known])
    columns = []
    for values in table.T:
        values = np.maximum.accumulate(values) + np.arange(len(values)) * 1e-9
        below = np.interp(edges, values, levels, left=0.0, right=1.0)
        below[0], below[-1] = 0.0, 1.0
        columns.append(np.diff(below))
    return known[0][1].steps, edges, np.stack(columns, 1)


def _heat(figure: Figure, runs: Sequence[RunLog], probe: str, title: str) -> bool:
    found = [(i, grid) for i, run in enumerate(runs) if (grid := density(run, probe)) is not None]
    if not found:
        return False
    axes = _rows(figure, len(found), 2.0)
    for ax, (i, (steps, edges, share)) in zip(axes, found, strict=True):
        extent = (float(steps[0]), float(max(steps[-1], steps[0] + 1)), float(edges[0]), float(edges[-1]))
        shade = np.sqrt(share)  # few tokens are to be seen beside many
        ax.imshow(shade, aspect="auto", origin="lower", extent=extent, cmap="Blues", interpolation="nearest", vmin=0)
        median = thin(runs[i], f"probe/{probe}/q50")
        if median is not None:
            ax.plot(median.steps, median.values, color="#222222", linewidth=0.9)
        ax.set_ylim(edges[0], edges[-1])
        ax.grid(False)
        ax.set_title(title + (f" ({'AB'[i]})" if len(runs) > 1 else ""))
    return True


def ratio(figure: Figure, runs: Sequence[RunLog]) -> bool:
    """The raw log ratio over time."""
    return _heat(figure, runs, "log_ratio", "log ratio of the tokens (line: median)")


def advantage(figure: Figure, runs: Sequence[RunLog]) -> bool:
    """The advantages over time."""
    return _heat(figure, runs, "advantage", "advantages of the tokens (line: median)")


def groups(figure: Figure, runs: Sequence[RunLog]) -> bool:
    """Spread inside the groups, and the fraction of groups without any; nothing where a prompt has one completion."""
    if all(run.settings.get("num_generations") == 1 for run in runs):
        return False
    axes = _rows(figure, 2, 1.7)
    for i, run in enumerate(runs):
        _band(axes[0], run, "group_reward/std_min", "group_reward/std_max", COLORS[i])
    drawn = _lines(axes[0], runs, {"group_reward/std": "mean"}, labels=len(runs) > 1)
    axes[0].set_title("std of rewards in a group: mean, least to largest")
    flat = "group_reward/frac_flat" if any("group_reward/frac_flat" in run.columns for run in runs) else "frac_reward_zero_std"
    lines = _of_all({flat: "flat"}, "resample/frac_flat_all", runs)
    drawn += _lines(axes[1], runs, lines, labels=len(runs) > 1 or len(lines) > 1)
    axes[1].set_ylim(-0.03, 1.03)
    axes[1].set_title("fraction of groups with equal rewards")
    return bool(drawn)


def shares(figure: Figure, runs: Sequence[RunLog]) -> bool:
    """Each term's share of the gradient with respect to the log-probs, and of the loss."""
    kinds = [kind for kind in ("grad", "loss") if any(f"share/{kind}/{part}" in run.columns for run in runs for part in PARTS)]
    if not kinds:
        return False
    axes = _rows(figure, len(kinds), 1.7)
    for ax, kind in zip(axes, kinds, strict=True):
        _lines(ax, runs, {f"share/{kind}/{part}": part for part in PARTS})
        ax.set_ylim(-0.03, 1.03)
        ax.set_title({"grad": "share of the gradient", "loss": "share of the loss (sizes)"}[kind])
    return True


def lengths(figure: Figure, runs: Sequence[RunLog]) -> bool:
    """Lengths of the completions, and how many are cut off."""
    axes = _rows(figure, 2, 1.7)
    for i, run in enumerate(runs):
        _band(axes[0], run, "completions/min_length", "completions/max_length", COLORS[i])
    drawn = _lines(axes[0], runs, {"completions/mean_length": "mean"}, labels=len(runs) > 1)
    axes[0].set_title("tokens a completion: mean, shortest to longest")
    drawn += _lines(axes[1], runs, {"completions/clipped_ratio": "cut off"}, labels=len(runs) > 1)
    axes[1].set_ylim(-0.03, 1.03)
    axes[1].set_title("fraction cut off at max_completion_length")
    return bool(drawn)


def entropy(figure: Figure, runs: Sequence[RunLog]) -> bool:
    """Entropy and the norm of the gradient."""
    axes = _rows(figure, 2, 1.7)
    drawn = _lines(axes[0], runs, {"entropy": "entropy"}, labels=len(runs) > 1)
    axes[0].set_title("entropy, nats a token")
    drawn += _lines(axes[1], runs, {"grad_norm": "grad_norm"}, labels=len(runs) > 1)
    axes[1].set_title("norm of the gradient before clipping")
    return bool(drawn)


def critic(figure: Figure, runs: Sequence[RunLog]) -> bool:
    """What the critic explains."""
    if not any("value/explained_variance" in run.columns for run in runs):
        return False
    axes = _rows(figure, 2, 1.7)
    _lines(axes[0], runs, {"value/explained_variance": "explained"}, labels=len(runs) > 1, floor=-1.0)
    axes[0].set_ylim(-1.05, 1.05)
    axes[0].set_title("explained share of the returns' variance")
    _lines(axes[1], runs, {"value/mean": "values", "value/return_mean": "returns"})
    axes[1].set_title("mean value and return")
    return True


CHARTS = (
    Chart("reward", "Reward", "What training is for. Everything below explains it.", reward),
    Chart("loss", "Loss, term by term", "Coefficients are in them; they sum to the loss. On-policy the policy term is near 0.", loss_parts),
    Chart("kl", "KL and its coefficient", "Distance from the reference, as the estimator sees it.", kl),
    Chart("clip", "Clip fractions", "Green: the usual 10% to 30% where rollouts are reused. On-policy they are 0, whatever epsilon is.", clip),
    Chart("ratio", "Importance ratio", "Before any clamp. Darker: more tokens.", ratio),
    Chart("advantage", "Advantages", "Both signs should be there. Darker: more tokens.", advantage),
    Chart("groups", "Spread inside the groups", "A group without spread teaches nothing.", groups),
    Chart("shares", "Who moves the weights", "Shares of the gradient count; shares of the loss can mislead.", shares),
    Chart("lengths", "Lengths", "", lengths),
    Chart("entropy", "Entropy and gradient", "", entropy),
    Chart("critic", "Critic", "1 is perfect, 0 a constant; what is below -1 is drawn at -1.", critic),
)  # fmt: skip


def inline(figure: Figure, prefix: str, label: str) -> str:
    """A figure as an <svg> element: as wide as its place, its ids its own, read aloud as `label` (escaped already)."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r'\bid="([^"]+)"', rf'id="{prefix}-\1"', text)
    text = text.replace("url(#", f"url(#{prefix}-").replace('href="#', f'href="#{prefix}-')
    head, _, rest = text.partition(">")
    box = re.search(r'viewBox="[^"]+"', head)
    assert box is not None
    return f'<svg {box[0]} role="img" aria-label="{label}">{rest}'


def draw_all(runs: Sequence[RunLog]) -> Iterator[tuple[Chart, str | None]]:
    """Each chart with its <svg>, or None where nothing was logged for it."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        for chart in CHARTS:
            figure = Figure(layout="constrained")
            yield chart, inline(figure, f"svg-{chart.id}", chart.title) if chart.draw(figure, runs) else None
