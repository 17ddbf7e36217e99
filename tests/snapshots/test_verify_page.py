"""docs/verify.md from start to end, and the fixture for a project's own tests."""

from pathlib import Path

import pytest
import torch
from docpages import blocks
from docrun import PageRun

from trl_lossplus import LossBatch, LossSpec, PolicyTerm, compute_loss, register_policy_loss
from trl_lossplus.registry import POLICY_LOSSES
from trl_lossplus.snapshots.take import take
from trl_lossplus.snapshots.testing import assert_unchanged


def test_every_block_runs(tmp_path, monkeypatch, assert_loss_unchanged):
    """In the order of the page; and the project's own test, which the last block defines, passes."""
    run = PageRun("docs/verify.md", tmp_path, monkeypatch).run()
    assert run.ran == len(blocks("docs/verify.md"))
    run.scope["test_my_loss"](assert_loss_unchanged)
    assert "Only the policy term changed: epsilon 0.2 -> 0.05." in run.printed
    assert Path("diff.html").read_text().startswith("<!DOCTYPE html>")


def test_the_fixture_catches_a_changed_loss(tmp_path):
    """A user's loss is registered, kept, then changed: the assertion names what moved."""

    def keep(factor):
        @register_policy_loss("test_kept", requires={"old_logps", "advantages"}, replace=True)
        def kept(batch, spec):
            return PolicyTerm(-factor * batch.advantages * batch.ratio(spec.log_ratio_clamp))

    keep(1.0)
    spec = LossSpec(policy_loss="test_kept")
    batch = LossBatch(-torch.rand(2, 3), -torch.rand(2, 3), torch.ones(2), torch.ones(2, 3, dtype=torch.bool))
    take(spec, [(compute_loss(batch, spec), {"window": None})], facts={}, texts={}, max_rows=9).save(tmp_path)
    assert_unchanged(tmp_path)
    keep(1.5)
    with pytest.raises(AssertionError, match="the loss is not what it was: policy changed"):
        assert_unchanged(tmp_path)
    POLICY_LOSSES.entries.pop("test_kept")
