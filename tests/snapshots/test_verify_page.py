"""docs/verify.md from start to end, and the fixture for a project's own tests."""

import re
import shlex
from pathlib import Path

import pytest
import torch

from trl_lossplus import LossBatch, LossSpec, PolicyTerm, compute_loss, register_policy_loss
from trl_lossplus.cli import main
from trl_lossplus.registry import POLICY_LOSSES
from trl_lossplus.snapshots.take import take
from trl_lossplus.snapshots.testing import assert_unchanged

PAGE = (Path(__file__).parents[2] / "docs/verify.md").read_text()


def test_every_block_runs(tmp_path, monkeypatch, capsys, assert_loss_unchanged):
    """In the order of the page, in one folder."""
    monkeypatch.chdir(tmp_path)
    scope = {}
    ran = 0
    for language, text in re.findall(r"```(python|bash)\n(.*?)```", PAGE, re.S):
        if language == "python":
            exec(text, scope)
        else:
            for line in text.strip().splitlines():
                words = shlex.split(line.removesuffix(" || true"))
                assert words[0] == "trl-lossplus"
                assert main(words[1:]) == (1 if line.endswith("|| true") else 0)
        ran += 1
    assert ran == 7
    scope["test_my_loss"](assert_loss_unchanged)
    assert "Only the policy term changed" in capsys.readouterr().out


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
