"""
For a project's own tests: a loss still gives what it gave when a snapshot was taken.

    def test_my_loss(assert_loss_unchanged):
        assert_loss_unchanged("tests/data/step-00000003-step")

The fixture comes with the package (a pytest plugin); `assert_unchanged` is the same as a function.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from ..spec import LossSpec
from .diff import diff
from .replay import replay
from .store import Snapshot


def assert_unchanged(folder: str | os.PathLike[str], spec: LossSpec | None = None, rank: int = 0) -> None:
    """
    Replays a snapshot and compares every per-token tensor, term and the loss with what it holds, bit for bit.

    Args:
        folder: the snapshot's. spec: the loss as it is now; None: the snapshot's own. rank: whose part.

    Raises:
        AssertionError: something differs; the first line names it. LossPlusError: the snapshot cannot be read.
    """
    kept = Snapshot.load(folder, rank)
    now = replay(kept, spec)
    micro = [
        replace(part, per_token={name: output.per_token[name] for name in part.per_token if name in output.per_token})
        for part, output in zip(kept.micro, now.outputs, strict=True)
    ]
    found = diff(kept, Snapshot(now.spec, micro, now.loss, now.terms))
    changed = {name: (kept.terms.get(name), now.terms.get(name)) for name in {*kept.terms, *now.terms}}
    moved = {name: pair for name, pair in sorted(changed.items()) if pair[0] != pair[1]}
    if found.outputs or moved:
        first = f"{found.outputs[0].name} changed by up to {found.outputs[0].largest:.4g}" if found.outputs else "a term changed"
        numbers = ", ".join(f"{name} {old} -> {new}" for name, (old, new) in moved.items())
        raise AssertionError(f"{folder}: the loss is not what it was: {first} ({numbers or 'no term moved'}). {found.headline}")


@pytest.fixture
def assert_loss_unchanged() -> Callable[..., Any]:
    """`assert_unchanged` as a fixture."""
    return assert_unchanged
