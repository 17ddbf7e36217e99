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
    """In the order of the page, in one folder; a block that begins with a file's name becomes that file."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    scope, ran, printed = {}, 0, ""
    for language, text in re.findall(r"```(python|bash)\n(.*?)```", PAGE, re.S):
        name = re.match(r"# (\w+\.py)\n", text)
        if name:
            Path(name[1]).write_text(text)
        elif language == "python":
            exec(text, scope)
        else:
            for line in text.strip().splitlines():
                words = shlex.split(line.removesuffix(" || true"))
                assert words[0] == "trl-lossplus"
                assert main(words[1:]) == (1 if line.endswith("|| true") else 0)
        ran += 1
        printed += capsys.readouterr().out
    assert ran == 9
    scope["test_my_loss"](assert_loss_unchanged)
    assert "Only the policy term changed: epsilon 0.2 -> 0.05." in printed
    assert Path("diff.html").read_text().startswith("<!DOCTYPE html>")
    for line in re.search(r"```text\n(.*?)```", PAGE, re.S)[1].splitlines():
        assert re.sub(r"[\d.]+", "#", line) in re.sub(r"[\d.]+", "#", printed)


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
