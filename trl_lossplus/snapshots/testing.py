"""
For a project's own tests: a loss still gives what it gave when a snapshot was taken.

    def test_my_loss(assert_loss_unchanged):
        assert_loss_unchanged("tests/data/step-00000003-step")

The fixture comes with the package (a pytest plugin); `assert_unchanged` is the same as a function.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest

from ..spec import LossSpec
from .diff import Change, diff
from .replay import replay
from .store import Snapshot


def assert_unchanged(
    folder: str | os.PathLike[str], spec: LossSpec | None = None, rank: int | None = None, rtol: float = 0.0
) -> None:
    """
    Replays a snapshot and compares per-token tensors, terms and gradient with what it holds: bit for bit, or up to `rtol`.

    Args:
        folder: the snapshot's. spec: the loss as it is now; None: the snapshot's own. rank: whose part; None: all processes'.
        rtol: how far numbers may be apart, relative to the largest of their tensor. 0 holds on the kind of device, with the number
            of threads and the version of torch that the snapshot was taken with; 1e-5 holds elsewhere too.

    Raises:
        AssertionError: something differs; the first line names it. LossPlusError: the snapshot cannot be read.
    """
    kept = Snapshot.load(folder, rank)
    now = replay(kept, spec)
    found = diff(kept, now.as_snapshot(kept))
    terms = {name: (kept.terms.get(name), now.terms.get(name)) for name in {*kept.terms, *now.terms}}
    moved = {name: pair for name, pair in sorted(terms.items()) if _apart(*pair, rtol)}
    changed = [change for change in (*found.outputs, *found.gradient) if _matters(change, kept, rtol)]
    if not changed and not moved:
        return
    first = f"{changed[0].words} by up to {changed[0].largest:.4g}" if changed else "a term changed"
    numbers = ", ".join(f"{name} {old} -> {new}" for name, (old, new) in moved.items())
    taken = ", ".join(f"{name} {kept.facts[name]}" for name in ("torch", "device", "threads") if name in kept.facts)
    raise AssertionError(
        f"{folder}: the loss is not what it was: {first} ({numbers or 'no term moved'}). {found.headline}"
        + (f" Taken with {taken}; where only these differ, pass rtol=1e-5." if taken and not rtol else "")
    )


def _apart(old: float | None, new: float | None, rtol: float) -> bool:
    """Whether two numbers differ by more than `rtol` of the larger one; NaN is equal to NaN."""
    if old is None or new is None:
        return True
    return not (old == new or (old != old and new != new) or abs(old - new) <= rtol * max(abs(old), abs(new)))


def _matters(change: Change, kept: Snapshot, rtol: float) -> bool:
    """Whether a tensor's change is more than `rtol` of its largest value."""
    if change.how != "values" or not rtol:
        return True
    tensors = [part.gradient if change.name == "gradient" else part.per_token[change.name] for part in kept.micro]
    return not change.largest <= rtol * max(float(tensor.abs().amax()) for tensor in tensors)


@pytest.fixture
def assert_loss_unchanged() -> Callable[..., Any]:
    """`assert_unchanged` as a fixture."""
    return assert_unchanged
