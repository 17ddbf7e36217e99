"""The public cases of advantages, E1, E2, E5, E6 and E8, through the trainer: what the loss reads, and what it gives."""

import pytest
import torch
from toyrun import SeeLoss, fixed_rollout, logged, trainer

COMPARING = ("grpo", "rloo", "maxrl")


def advantages_of(toy, out, rewards, **fields):
    """Advantage by reward of one rollout of 8 rows whose rewards repeat `rewards` (group by group); rows come shuffled."""

    def reward(prompts, **kwargs):
        return rewards * (len(prompts) // len(rewards))

    fields = {"num_generations": len(rewards), "max_steps": 1, "probes": "off", **fields}
    run = trainer(toy, out, reward=reward, rollout=fixed_rollout, **fields)
    seen = SeeLoss(run)
    run.train()
    micro = seen.inputs[0]
    values = micro["advantages"].reshape(len(micro["row"]), -1)[:, 0]
    return [values[micro["row"] == row].item() for row in range(len(values))], run


@pytest.mark.parametrize(
    ("fields", "right"),
    [
        ({}, [0.75 / 0.5001, *[-0.25 / 0.5001] * 3]),  # mean .25, std .5 with ddof 1, TRL's eps 1e-4
        ({"scale_rewards": "none"}, [0.75, -0.25, -0.25, -0.25]),
        ({"advantage_estimator": "rloo", "scale_rewards": "none"}, [1.0, -1 / 3, -1 / 3, -1 / 3]),
    ],
)
def test_e1_one_right_of_four(toy, tmp_path, fields, right):
    """Rewards [1,0,0,0] in each of two groups."""
    found, _ = advantages_of(toy, tmp_path, [1.0, 0.0, 0.0, 0.0], **fields)
    assert found == pytest.approx(right * 2, abs=1e-5)


@pytest.mark.parametrize("name", COMPARING)
def test_e2_a_constant_group_is_exactly_zero(toy, tmp_path, name):
    """All .35: no dust over eps, a loss of exactly 0 and weights that stay."""
    found, run = advantages_of(toy, tmp_path, [0.35] * 4, advantage_estimator=name)
    assert found == [0.0] * 8
    assert logged(run, "loss/policy") == [0.0]
    assert logged(run, "grad_norm") == [0.0]


def test_e2_a_nearly_constant_group_stays_small(toy, tmp_path):
    """7 x .35 and .95: (r - .425) / (.212132 + 1e-4)."""
    rewards = [0.35] * 7 + [0.95]
    found, _ = advantages_of(toy, tmp_path, rewards)
    assert found == pytest.approx([(r - 0.425) / (0.045**0.5 + 1e-4) for r in rewards], rel=1e-5)
    assert max(map(abs, found)) < 10


@pytest.mark.parametrize("name", COMPARING)
def test_e5_sign_follows_the_mean_where_all_are_negative(toy, tmp_path, name):
    """Mean -2.125: above it -1 and -1.5 and -2, below it -4."""
    found, _ = advantages_of(toy, tmp_path, [-1.0, -2.0, -4.0, -1.5], advantage_estimator=name)
    assert [value > 0 for value in found] == [True, True, False, True] * 2


def test_e6_a_row_keeps_its_advantage_where_rows_are_shuffled(toy, tmp_path):
    """Distinct rewards: TRL shuffles the rollout, and each row still has that of its own group and reward."""
    found, _ = advantages_of(toy, tmp_path, [0.0, 1.0, 3.0, 8.0, 1.0, 1.5, 2.5, 3.0], num_generations=4, scale_rewards="none")
    assert found == pytest.approx([-3.0, -2.0, 0.0, 5.0, -1.0, -0.5, 0.5, 1.0])


@pytest.mark.parametrize("outside", [10.0, float("nan")])
def test_e8_advantages_outside_the_mask_do_not_count(toy, tmp_path, outside):
    """Advantage 1 in the mask and 10, or NaN, outside of it, ratio 1: the loss is -1."""
    run = trainer(toy, tmp_path, rollout=fixed_rollout, max_steps=1)
    inner = run.make_rollout

    def make_rollout(out, rewards):
        made = inner(out, rewards)
        made["advantages"] = torch.where(made["loss_mask"], 1.0, outside)
        assert not made["loss_mask"].all()
        return made

    run.make_rollout = make_rollout
    run.train()
    assert logged(run, "loss/policy") == pytest.approx([-1.0], abs=1e-6)
    assert logged(run, "grad_norm")[0] > 0
