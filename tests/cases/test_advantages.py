"""Cases E: advantages compare the completions of one prompt, told by id, without rounding dust."""

import pytest
import torch
from helpers import LENGTHS, length_mask, run

from trl_lossplus import LossPlusError, LossSpec, compute_advantages
from trl_lossplus.trainers.rollout import score_rollout

ONE = torch.ones(1, 1, dtype=torch.bool)
COMPARING = ["grpo", "rloo", "maxrl", "gdpo"]  # compare the completions of one prompt; each row one value


def advantages(name: str, rewards: list | torch.Tensor, groups: list, **options) -> torch.Tensor:
    """(B,) advantages of completions of one token."""
    rewards = torch.as_tensor(rewards, dtype=torch.float32)
    return compute_advantages(name, rewards, ONE.expand(len(groups), 1), torch.tensor(groups), **options).advantages[:, 0]


@pytest.mark.parametrize(
    ("name", "options", "right"),
    [
        ("grpo", {"eps": 1e-6}, [1.5, -0.5, -0.5, -0.5]),  # mean .25, std .5 (ddof 1)
        ("grpo", {"eps": 1e-6, "ddof": 0}, [1.732051, -0.577350, -0.577350, -0.577350]),  # std .433013
        ("grpo", {"scale_rewards": "none"}, [0.75, -0.25, -0.25, -0.25]),
        ("rloo", {}, [1.0, -1 / 3, -1 / 3, -1 / 3]),
        ("maxrl", {"eps": 0.0}, [3.0, -1.0, -1.0, -1.0]),
    ],
)
def test_e1_one_right_of_four(name, options, right):
    """Rewards [1,0,0,0] -> GRPO [1.5,-.5,-.5,-.5], RLOO [1,-.3333,...], MaxRL (divides by the mean .25) [3,-1,...]."""
    assert advantages(name, [1, 0, 0, 0], [4, 4, 4, 4], **options).tolist() == pytest.approx(right, abs=1e-5)


@pytest.mark.parametrize("name", COMPARING)
@pytest.mark.parametrize("reward", [0.0, 0.7, -3.0])
def test_e1_group_of_one_is_finite(name, reward):
    """A group of one has nothing to compare with: 0 (verl's grpo and rloo give the raw reward)."""
    ours = advantages(name, [reward, 1.0, 0.0], [5, 2, 2])
    assert torch.isfinite(ours).all()
    assert ours[0] == 0.0


def test_e1_gdpo_normalizes_each_reward_function():
    """Two functions, weights 1 and 2: columns [1,0] and [0,1] give z = -+.707107 each, sums -+.707107, whitened -+.707106."""
    rewards = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    ours = compute_advantages("gdpo", rewards, ONE.expand(2, 1), torch.tensor([1, 1]), reward_weights=torch.tensor([1.0, 2.0]))
    assert ours.advantages[:, 0].tolist() == pytest.approx([-0.707106, 0.707106], abs=2e-6)
    summed = compute_advantages("rloo", rewards, ONE.expand(2, 1), torch.tensor([1, 1]), reward_weights=torch.tensor([1.0, 2.0]))
    assert summed.advantages[:, 0].tolist() == [-1.0, 1.0]


@pytest.mark.parametrize("name", COMPARING)
@pytest.mark.parametrize("constant", [0.35, 0.1, 0.7, 1.3, 2.7, 1e6 + 0.1])
@pytest.mark.parametrize("n", [3, 7, 8, 31])
def test_e2_constant_groups_are_exactly_zero(name, constant, n):
    """A constant .35 group (and others whose mean rounds) beside an ordinary one -> exactly 0, not dust over eps."""
    ours = advantages(name, [constant] * n + [0.0, 1.0, 1.0], [1] * n + [2, 2, 2])
    # gdpo whitens over the batch, and takes off a batch mean that is 0 but for rounding
    assert ours[:n].abs().max() <= (1e-7 if name == "gdpo" else 0.0)
    assert ours[n:].abs().min() > 0.1
    assert advantages(name, [constant] * n, [1] * n).tolist() == [0.0] * n


@pytest.mark.parametrize("eps", [1e-6, 1e-4])
def test_e2_nearly_constant_groups_stay_small(eps):
    """7 x .35 and .95 -> all |A| < 10: (s - .425) / (.212132 + eps), as in exact arithmetic."""
    ours = advantages("grpo", [0.35] * 7 + [0.95], [3] * 8, eps=eps)
    right = [(r - 0.425) / (0.045**0.5 + eps) for r in [0.35] * 7 + [0.95]]
    assert ours.abs().max() < 10
    assert ours.tolist() == pytest.approx(right, rel=1e-5)


@pytest.mark.parametrize("name", COMPARING)
@pytest.mark.parametrize("rewards", [[-1.0, -2.0, -4.0, -1.5], [-0.1, -0.9, -0.2, -0.3], [3.0, 1.0, 2.5, 0.0]])
def test_e5_sign_follows_the_mean(name, rewards):
    """All rewards negative -> sign(A) = sign(r - mean); MaxRL divided by a negative mean turns it around."""
    ours, mean = advantages(name, rewards, [6] * 4), sum(rewards) / 4
    assert ours.sign().tolist() == [1.0 if r > mean else -1.0 for r in rewards]


@pytest.mark.parametrize("name", COMPARING)
def test_e6_permuted_rows(name):
    """Permute the rows (ids interleaved, unsorted, negative, huge) -> the advantages permute alike."""
    g = torch.Generator().manual_seed(0)
    ids = torch.tensor([2**40, -5, 2**40, 0, -5, 0, -5, 2**40])
    rewards, mask = torch.randn(8, generator=g), length_mask(LENGTHS)
    ours = compute_advantages(name, rewards, mask, ids).advantages
    for _ in range(5):
        order = torch.randperm(8, generator=g)
        permuted = compute_advantages(name, rewards[order], mask[order], ids[order]).advantages
        assert torch.allclose(permuted, ours[order], rtol=1e-5, atol=1e-6)
    sort = torch.argsort(ids, stable=True)
    by_group = compute_advantages(name, rewards[sort], mask[sort], torch.tensor([0, 0, 0, 1, 1, 2, 2, 2])).advantages
    assert torch.allclose(by_group, ours[sort], rtol=1e-5, atol=1e-6)


def test_e8_masked_advantages_do_not_count():
    """Mask [1,1,0,0], A [1,1,10,10], ratio 1 -> loss -1."""
    batch = {"logps": torch.full((1, 4), -1.0), "advantages": torch.tensor([[1.0, 1.0, 10.0, 10.0]])}
    out, gradient = run(batch | {"mask": torch.tensor([[True, True, False, False]])}, LossSpec())
    assert out.loss.item() == -1.0
    assert gradient.tolist() == [[-0.5, -0.5, 0.0, 0.0]]


@pytest.mark.parametrize("name", COMPARING)
def test_unscored_rows_have_no_part(name):
    """A NaN reward (not scored): advantage 0, and the group's others as if the row were not there; masked tokens 0."""
    mask = length_mask((3, 1, 2, 3))
    ours = compute_advantages(name, torch.tensor([1.0, float("nan"), 0.0, 0.5]), mask, torch.tensor([1, 1, 1, 1]))
    alone = compute_advantages(name, torch.tensor([1.0, 0.0, 0.5]), mask[[0, 2, 3]], torch.tensor([1, 1, 1]))
    assert torch.equal(ours.advantages[[0, 2, 3]], alone.advantages)
    assert ours.advantages[1].tolist() == [0.0] * 3
    assert torch.equal(ours.advantages[~mask], torch.zeros(int((~mask).sum())))
    assert torch.equal(ours.returns, ours.advantages)


@pytest.mark.parametrize("estimator", ["grpo", "gdpo", "gae"])
def test_flat_groups_are_told_by_the_rewards_alone(estimator):
    """
    Groups [1,1], [1,0], [.35 x 2]: flat, not, flat, whatever is taken off for the KL; with two reward functions gdpo's group is flat
    where both columns are, the others' where their sum is.
    """
    spec = LossSpec(advantage_estimator=estimator)
    penalty = torch.tensor([0.3, 0.1, 1.0, 0.0, 0.2, 0.1])
    rewards = torch.tensor([1.0, 1.0, 1.0, 0.0, 0.35, 0.35])[:, None]
    for off in (None, penalty):
        if off is None or estimator != "gdpo":
            scored = score_rollout(spec, {}, rewards, torch.ones(1), 2, off)
            assert scored.flat.tolist() == [True, True, False, False, True, True]
            assert scored.rewards.tolist() == pytest.approx((rewards[:, 0] - (0 if off is None else off)).tolist())
    two = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.5], [1.0, 0.5]])
    flat = score_rollout(spec, {}, two, torch.ones(2), 2).flat
    assert flat.tolist() == ([False, False, True, True] if estimator == "gdpo" else [True] * 4)


def test_token_rewards_are_summed_over_the_mask():
    """(B, T) rewards: row sums over the mask [1, 0] against [3, 4] where the masked token holds 100 or NaN."""
    mask = length_mask((2, 1))
    for junk in (100.0, float("nan")):
        ours = compute_advantages("rloo", torch.tensor([[1.0, 0.0], [7.0, junk]]), mask, torch.tensor([1, 1])).advantages
        assert ours.tolist() == [[-6.0, -6.0], [6.0, 0.0]]


BAD = [
    ("grpo", {"epsilon": 1e-4}, "option='epsilon' is not known.*Did you mean 'eps'"),
    ("rloo", {"eps": 1e-4}, "'rloo' has no option 'eps'"),
    ("grppo", {}, "advantage_estimator='grppo' is not known.*Did you mean 'grpo'.*Allowed: .*rloo"),
    ("grpo", {"scale_rewards": "std"}, "scale_rewards='std' is not known.*group, batch, none"),
    ("grpo", {"values": torch.zeros(2, 1)}, "'grpo'.*does not read"),
]


@pytest.mark.parametrize(("name", "options", "message"), BAD)
def test_bad_names_and_options(name, options, message):
    """Unknown estimators and options are errors that say what is allowed."""
    with pytest.raises(LossPlusError, match=message):
        compute_advantages(name, torch.zeros(2), ONE.expand(2, 1), torch.tensor([1, 1]), **options)


@pytest.mark.parametrize(
    ("rewards", "mask", "ids", "options", "message"),
    [
        (torch.zeros(3), ONE.expand(2, 1), torch.zeros(2).long(), {}, r"rewards has shape \(3,\)"),
        (torch.zeros(2, 3), ONE.expand(2, 1), torch.zeros(2).long(), {}, r"\(2, 3\).*reward_weights="),
        (torch.zeros(2), ONE.expand(2, 1), torch.zeros(3).long(), {}, "group_ids has shape"),
        (torch.zeros(2), torch.ones(2, 1), torch.zeros(2).long(), {}, "mask has dtype torch.float32"),
        (torch.zeros(2), ONE.expand(2, 1), torch.zeros(2).long(), {"reward_weights": torch.ones(2)}, r"\(B, K\)"),
    ],
)
def test_bad_shapes(rewards, mask, ids, options, message):
    """Shapes that do not fit are errors that name the tensor."""
    with pytest.raises(LossPlusError, match=message):
        compute_advantages("grpo", rewards, mask, ids, **options)
