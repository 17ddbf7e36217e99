"""What the health rules see of a run: windows of steps, trends, settings. Every number is over a window, never one noisy step."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .runlog import Array, RunLog

WINDOWS = 20  # into which a run is divided, at most
WINDOW_LEAST = 5  # logged steps in a window, at least
ENOUGH = 8  # logged values that a state of the run is judged by, at least
NOISE = 4.0  # standard errors by which two parts of a run must differ
# What a run that replaced its flat groups logs of all that it drew, by the metric that then tells of the kept groups alone.
AS_DRAWN = {
    "reward": "resample/reward_all",
    "group_reward/frac_flat": "resample/frac_flat_all",
    "frac_reward_zero_std": "resample/frac_flat_all",
}


@dataclass(frozen=True, eq=False)
class Seen:
    """
    What a rule saw.

    text: with its numbers. first, last: steps. numbers: the evidence by name. severity: where it differs from the rule's.
    """

    text: str
    first: int
    last: int
    numbers: dict[str, float] = field(default_factory=dict)
    severity: str | None = None


class Windows(NamedTuple):
    """A metric by windows of steps: first and last step and median of each window that holds a value."""

    first: NDArray[np.int64]
    last: NDArray[np.int64]
    median: Array

    def tail(self, n: int) -> Windows:
        """The last n windows."""
        return Windows(self.first[-n:], self.last[-n:], self.median[-n:])


class Trend(NamedTuple):
    """The mean at the beginning of a run and over its last quarter, and whether they differ by more than noise and 5%."""

    start: float
    end: float
    rises: bool
    falls: bool


class View:
    """
    A run as the rules read it.

    A rule asks for windows and trends of metrics by name; what was not logged is empty or None, so that logs that hold a part of
    the metrics (plain TRL, a rank's own, logging every tenth step) are judged by what they hold.
    """

    def __init__(self, run: RunLog):
        self.run, self.steps = run, run.steps
        self._windows: dict[str, Windows] = {}
        self._trends: dict[str, Trend | None] = {}

    def has(self, *names: str) -> bool:
        """Whether each metric has at least one finite value."""
        return all(len(self.windows(name).median) for name in names)

    def enough(self, name: str) -> bool:
        """Whether a metric was logged often enough to be judged as a state of the run, not of a step."""
        return len(self.logged(name)[0]) >= ENOUGH

    def setting(self, name: str, default: Any = None) -> Any:
        """A field of the loss or the configuration; `default` where the run did not write it down."""
        value = self.run.settings.get(name)
        return default if value is None else value

    @cached_property
    def _bins(self) -> list[NDArray[np.int64]]:
        n = len(self.steps)
        return np.array_split(np.arange(n), max(1, min(WINDOWS, n // WINDOW_LEAST)))

    def _values(self, name: str) -> Array:
        """A metric's column; where flat groups were replaced, that of all draws, since what was kept says little of the policy."""
        drawn = AS_DRAWN.get(name)
        return self.run.get(drawn if drawn in self.run.columns else name)

    def logged(self, name: str) -> tuple[NDArray[np.int64], Array]:
        """(steps, finite values) of a metric."""
        values = self._values(name)
        kept = np.isfinite(values)
        return self.steps[kept], values[kept]

    def windows(self, name: str) -> Windows:
        """A metric by windows of steps."""
        if name not in self._windows:
            self._windows[name] = self.cut(self._values(name))
        return self._windows[name]

    def cut(self, values: Array) -> Windows:
        """The windows of a column (N,) that may hold NaN."""
        rows = []
        for index in self._bins:
            part = values[index]
            part = part[np.isfinite(part)]
            if len(part):
                rows.append((self.steps[index[0]], self.steps[index[-1]], float(np.median(part))))
        first, last, median = zip(*rows, strict=True) if rows else ((), (), ())
        return Windows(np.array(first, dtype=np.int64), np.array(last, dtype=np.int64), np.array(median, dtype=np.float64))

    def end(self, name: str, windows: int = 3) -> float:
        """The median over a metric's last windows; NaN where it was not logged."""
        tail = self.windows(name).tail(windows).median
        return float(np.median(tail)) if len(tail) else float("nan")

    def trend(self, name: str) -> Trend | None:
        """How a metric went from the beginning to the end; None for fewer than `ENOUGH` values."""
        if name not in self._trends:
            self._trends[name] = trend(self.logged(name)[1])
        return self._trends[name]

    @property
    def reward_rises(self) -> bool:
        """Whether the reward is clearly higher at the end than at the beginning."""
        found = self.trend("reward")
        return found is not None and found.rises

    @property
    def flat(self) -> str | None:
        """The metric that holds the fraction of groups without spread; None where a prompt has one completion, so no group."""
        if self.setting("num_generations") == 1:
            return None
        return next((name for name in ("group_reward/frac_flat", "frac_reward_zero_std") if self.has(name)), None)

    @property
    def solved(self) -> bool:
        """Whether flat groups are flat because the task is learned: all groups end at one and the same, risen reward."""
        low, high = self.end("group_reward/mean_min"), self.end("group_reward/mean_max")
        alike = not np.isfinite(low) or high - low <= 0.2 * max(abs(high), 1e-8) or self.end("reward") >= high - 0.2 * abs(high)
        return self.reward_rises and alike

    @cached_property
    def on_policy(self) -> bool | None:
        """Whether every update is on the very weights that sampled; None where the log does not tell."""
        known = self.setting("is_on_policy")
        if known is not None:
            return bool(known)
        if self.has("probe/log_ratio/q00", "probe/log_ratio/q100"):
            widest = max(np.abs(self.logged(f"probe/log_ratio/q{q}")[1]).max() for q in ("00", "100"))
            return bool(widest < 1e-6)
        clipped = self.clip()
        return None if clipped is None else bool(not clipped.any())

    def clip(self) -> Array | None:
        """The fraction of clipped tokens at each step that logged one, under whichever name it goes."""
        for name in ("clip_ratio/region_mean", "cispo_clip_ratio", "clip_ratio"):
            if self.has(name):
                return self.logged(name)[1]
        if self.has("clip_ratio/low_mean", "clip_ratio/high_mean"):
            both = self.run.get("clip_ratio/low_mean") + self.run.get("clip_ratio/high_mean")
            return both[np.isfinite(both)]
        return None


def trend(values: Array) -> Trend | None:
    """See `Trend`; the noise is measured between neighbouring steps, so that a trend does not count as noise."""
    n = len(values)
    if n < ENOUGH:
        return None
    head, tail = values[: max(2, min(n // 4, 10))], values[-max(2, n // 4) :]
    start, end = float(head.mean()), float(tail.mean())

    def variance(part: Array) -> float:
        return float((np.diff(part) ** 2).mean() / 2 / len(part))

    difference = end - start
    enough = abs(difference) > max(NOISE * np.sqrt(variance(head) + variance(tail)), 0.05 * max(abs(start), abs(end)))
    return Trend(start, end, bool(enough and difference > 0), bool(enough and difference < 0))


def number(value: float) -> str:
    """A number as people read it."""
    return f"{value:.0f}" if abs(value) >= 1000 and abs(value) < 1e6 else f"{value:.3g}"
