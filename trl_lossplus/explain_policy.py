"""What a policy objective does with the settings that it reads, in words."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .explain_warnings import Facts
from .resolve import PLAIN_FIELDS


def interval(low: float | None, high: float | None) -> str:
    """A range as text."""
    return f"[{'none' if low is None else f'{low:g}'}, {'none' if high is None else f'{high:g}'}]"


def policy_numbers(facts: Facts) -> Iterator[str]:
    """The objective's ratio, its clip, and the other settings that it reads, one after the other."""
    spec, options = facts.spec, facts.options
    if facts.by_row:
        yield "one ratio a row, exp of its mean log ratio"
    elif "importance_sampling_level" in options:
        yield "one ratio a token"
    yield from _clip(facts)
    if spec.delta is not None:
        yield f"unclipped ratio at most {spec.delta:g} (delta)"
    if spec.clip_ratio_c is not None:
        yield f"for A < 0 at most {spec.clip_ratio_c:g} |A| (dual clip)"
    own = [name for name in options if name.startswith(("sapo_", "vespo_")) or name in PLAIN_FIELDS]
    yield from (f"{name} {_text(getattr(spec, name))}" for name in sorted(own))


def _clip(facts: Facts) -> Iterator[str]:
    """What the clip range is the range of."""
    spec, options, name = facts.spec, facts.options, facts.spec.policy_loss
    inside = interval(1 - spec.epsilon, 1 + spec.clip_high)
    if name == "cispo":
        yield f"ratio clipped to {interval(spec.cispo_ratio_min or 0.0, facts.ratio_max)}"
    elif name == "gmpo":
        yield f"log ratio clipped to {interval(-spec.epsilon, spec.clip_high)}, one-sided by the sign of A"
    elif name in ("dppo_tv", "dppo_kl"):
        yield f"thresholds {spec.epsilon:g} for A < 0 and {spec.clip_high:g} for A > 0"
    elif name == "sppo":
        yield f"trained on where the ratio is in {interval(1 / (1 + spec.epsilon), 1 + spec.clip_high)}"
    elif name == "rec" and spec.rec_clip == "one_side":
        yield f"trained on but for A > 0 with a ratio over {1 + spec.clip_high:g} and A < 0 with one under {1 - spec.epsilon:g}"
    elif name == "rec" and spec.rec_clip != "none":
        ring = f", or A > 0 and it is at most {1 - spec.rec_ring_low:g}, or A < 0 and it is at least {1 + spec.rec_ring_high:g}"
        yield f"trained on where the ratio is in {inside}{ring if spec.rec_clip == 'ring' else ''}"
    elif "clip_objective" in options:
        yield f"ratio clipped to {inside}, clip_objective {spec.clip_objective}"
    elif "epsilon" in options:
        yield f"ratio clipped to {inside}"


def _text(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
