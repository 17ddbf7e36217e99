"""A replay under another advantage estimator: the advantages are made anew from the rewards that the snapshot holds."""

import pytest
import torch
from toyrun import fixed_rollout, letter_reward, trainer

from trl_lossplus import LossPlusError, Snapshot
from trl_lossplus.cli import main

STEP = "snapshots/step-00000000-step"


def other_reward(completions, **kwargs):
    """None for every fifth completion."""
    return [None if i % 5 == 2 else float(len(text) % 3) for i, text in enumerate(completions)]


def run(toy, out, **fields):
    given = {
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "beta": 0.1,
        "snapshot_steps": [0],
        "max_steps": 1,
    }
    rewards = [letter_reward, other_reward]
    trainer(toy, out, reward=rewards, rollout=fixed_rollout, **{"reward_weights": [1.0, 0.5], **given, **fields}).train()
    return Snapshot.load(next((out / "snapshots").iterdir()))


@pytest.fixture(scope="module")
def snapshot(toy, tmp_path_factory):
    out = tmp_path_factory.mktemp("as_it_was")
    return run(toy, out), out


@pytest.mark.parametrize(
    "changes",
    [{"advantage_estimator": "rloo"}, {"scale_rewards": "none"}, {"scale_rewards": "batch"}, {"advantage_estimator": "gdpo"},
     {"advantage_estimator": "maxrl"}],
)  # fmt: skip
def test_it_is_what_a_run_under_the_other_estimator_gives(toy, tmp_path, snapshot, changes):
    """Same completions and weights: loss, terms and gradient of the run that was made with it."""
    there = run(toy, tmp_path, **changes)
    again = snapshot[0].replay(**{name: getattr(there.spec, name) for name in ("advantage_estimator", "scale_rewards")})
    assert again.loss == pytest.approx(there.loss, rel=1e-5, abs=1e-6)
    assert again.terms == pytest.approx(there.terms, rel=1e-5, abs=1e-6)
    for mine, part in zip(again.gradients, there.micro, strict=True):
        assert torch.allclose(mine, part.gradient, rtol=1e-4, atol=1e-7)
    assert not torch.allclose(again.gradient, snapshot[0].replay().gradient, rtol=1e-2)


def test_by_hand(snapshot):
    """RLOO: each completion's reward less the mean of the other three of its group."""
    one = snapshot[0]
    rewards = torch.cat([part.beside["rewards"] for part in one.micro]).tolist()
    groups = torch.cat([part.batch.group_ids for part in one.micro]).tolist()
    total = [a + 0.5 * (b if b == b else 0.0) for a, b in rewards]
    expected = [
        r - (sum(x for x, g in zip(total, groups, strict=True) if g == group) - r) / 3
        for r, group in zip(total, groups, strict=True)
    ]
    outputs = one.replay(advantage_estimator="rloo", scale_rewards="none").outputs
    found = [row for output in outputs for row in output.inputs.advantages.reshape(len(output.inputs.mask), -1)[:, 0].tolist()]
    assert found == pytest.approx(expected, abs=1e-5)


def test_command(snapshot, capsys):
    folder = str(snapshot[1] / STEP)
    assert main(["replay", folder, "--advantage_estimator", "grpo,rloo"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].split()[-1] == "+1.0000"
    assert lines[3].split()[-1] != "+1.0000"
    for estimator, why in (("reinforce_plus_plus", "not made of rewards and groups alone"), ("rlo", "Did you mean 'rloo'")):
        assert main(["replay", folder, "--advantage_estimator", estimator]) == 2
        assert why in capsys.readouterr().err


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"advantage_normalization": "learner"}, "are not what grpo gives from its rewards"),
        (
            {"kl_placement": "reward", "kl_reward_coef": 5.0, "beta": 0.0, "snapshot_steps": [1], "max_steps": 2},
            "are not what grpo gives",
        ),
        ({"steps_per_generation": 4}, "the snapshot holds 8 of its 16"),
        ({"snapshot_rows": 5}, "the snapshot holds 5 of its 8"),
    ],
)
def test_what_cannot_be_made_anew_is_said(toy, tmp_path, fields, why):
    one = run(toy, tmp_path, **fields)
    with pytest.raises(LossPlusError, match=why):
        one.replay(advantage_estimator="rloo")
