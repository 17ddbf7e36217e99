"""Snapshots of a loss of one's own, read by commands in processes of their own: in this one its module would be imported already."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

OWN = """
from trl_lossplus import PolicyTerm, register_policy_loss
from trl_lossplus.functional.kl import register_kl_estimator


@register_policy_loss("own_bounded", requires={"old_logps", "advantages"})
def bounded(batch, spec):
    return PolicyTerm(per_token=-batch.advantages * batch.ratio(spec.log_ratio_clamp).clamp(0.5, 1.5))


@register_kl_estimator("own_halved")
def halved(d, clamp):
    return d**2 / 4
"""
OWN_STEP = """
from made import step
from trl_lossplus import LossSpec
import own_losses

step(LossSpec(beta=0.1, policy_loss="own_bounded", kl_estimator="own_halved"))[0].save("kept")
step(LossSpec(policy_loss="own_bounded"))[0].save("bare")
step(LossSpec(beta=0.1, kl_estimator="own_halved"))[0].save("halved")
"""


# As the installed command: the folder that it is run in is on the path at its end.
COMMAND = "import sys; sys.path[:1] = []; from trl_lossplus.cli import main; sys.exit(main())"
PLACES = [str(Path(__file__).parents[2]), str(Path(__file__).parent)]


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    """Runs the command in a new process, in a folder with a module that registers a loss and a KL estimator, and snapshots of them."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "own_losses.py").write_text(OWN)
    (folder / "own.yaml").write_text("policy_loss: own_losses:bounded\n")

    def fresh(code, *words):
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(PLACES)}
        return subprocess.run(
            [sys.executable, "-c", code, *words], capture_output=True, text=True, env=env, cwd=folder, timeout=120
        )

    assert fresh(OWN_STEP).returncode == 0
    return lambda *words: fresh(COMMAND, *words)


@pytest.mark.parametrize(
    "words",
    [
        ["replay", "bare", "--policy_loss", "own_losses:bounded,ppo_clip"],
        ["replay", "bare", "--config", "own.yaml"],
        ["replay", "kept", "--import", "own_losses", "--epsilon", "0.1"],
        ["snapshot", "show", "kept", "--import", "own_losses"],
        ["snapshot", "diff", "kept", "kept", "--import", "own_losses"],
    ],
    ids=" ".join,
)
def test_a_loss_of_ones_own_in_a_process_of_its_own(own, words):
    """A snapshot keeps the bare name of a registered function: the module that the command line names is imported before it is read."""
    done = own(*words)
    assert (done.returncode, done.stderr) == (0, "")
    if words[0] == "replay":
        rows = [line.split() for line in done.stdout.splitlines()[1:]]
        assert rows[0][:3] == ["as", "it", "was"]
        assert rows[0][-3] == "-", "a loss without a clip statistic has no clip fraction"
        if "own_losses:bounded,ppo_clip" in words:
            assert rows[1][-1] == "+1.0000", "the same loss, so the same gradient"
            assert rows[2][-3].endswith("%")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["replay", "bare"], ["policy_loss='own_bounded' is not known", "--import MODULE", "--policy_loss MODULE:own_bounded"]),
        (["replay", "kept", "--policy_loss", "own_losses:boundless"], ["function='boundless' is not known", "bounded"]),
        (["snapshot", "show", "bare"], ["policy_loss='own_bounded' is not known", "--import MODULE on the command line"]),
        (["replay", "bare", "--import", "own_loss"], ["--import own_loss: module 'own_loss' cannot be imported"]),
    ],
    ids=str,
)
def test_an_unknown_loss_of_ones_own_is_told_how_to_name_it(own, words, told):
    done = own(*words)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    for word in told:
        assert word in done.stderr


def test_an_unknown_kl_estimator_of_a_snapshot(own):
    """Of a KL estimator the module alone can be named."""
    done = own("replay", "kept", "--policy_loss", "own_losses:bounded", "--import", "json")
    assert done.returncode == 0, "the module registers both"
    done = own("replay", "halved")
    assert "kl_estimator='own_halved' is not known" in done.stderr
    assert "--import MODULE on the command line; import MODULE in Python." in done.stderr
