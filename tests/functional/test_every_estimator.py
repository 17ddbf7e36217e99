"""Every registered advantage estimator, by what its entry declares: a newcomer is tested here without a test of its own."""

import math

import pytest
import torch
from helpers import difference, length_mask

from trl_lossplus import LossPlusError, compute_advantages
from trl_lossplus.functional import advantages_baseline as base
from trl_lossplus.registry import ADVANTAGE_ESTIMATORS, TENSORS, TRAITS

NAMES = [name for name in ADVANTAGE_ESTIMATORS.names() if not name.startswith("test_")]  # other tests register their own
MASK = length_mask((4, 2, 3, 4, 1, 3, 2, 4))
MASK[3, 1] = False  # a hole
IDS = torch.tensor([9, 2, 9, 2, 9, 2, 9, 5])  # groups of 4, 3 and 1
REWARDS = torch.tensor([1.0, 0.25, 0.0, 2.5, -1.0, 0.5, 3.0, 7.0])
# Rewards + c leaves the advantages as they are (not: a mean of the group in the denominator, no baseline, a critic).
SHIFTED = {name for name in NAMES if name not in {"maxrl", "gae", "reinforce_plus_plus", "remax"}}
BATCH_STEP = {"gdpo", "asymre"}  # normalized over the batch in the end, or shifted, so a flat group is not at 0
# Rewards * c gives the advantages times: 1 (divided by a spread), or c.
HOMOGENEOUS = {"grpo": 0, "gdpo": 0, "grpo_passk": 0, "maxrl": 0}
NO_BASELINE = {"gae", "reinforce_plus_plus", "remax"}  # each row stands alone


def tensors_of(name: str, seed: int = 0) -> dict:
    """What the estimator reads beside rewards, mask and group ids."""
    g = torch.Generator().manual_seed(seed)
    every = {
        "old_values": torch.randn(8, 4, generator=g),
        "lengths": MASK.sum(-1),
        "reward_baselines": torch.randn(8, generator=g),
        "old_logps": -torch.rand(8, 4, generator=g) - 0.1,
        "sum_pi_squared": torch.rand(8, 4, generator=g),
        "rollout_weights": torch.rand(8, 4, generator=g) + 0.5,
    }
    entry = ADVANTAGE_ESTIMATORS.get(name)
    given = {key: every[key] for key in entry.requires | entry.optional if key != "group_ids"}
    return {"values" if key == "old_values" else key: value for key, value in given.items()}


def advantages(name: str, rewards=REWARDS, mask=MASK, ids=IDS, order=None, **changes) -> torch.Tensor:
    more = tensors_of(name) | changes
    if order is not None:
        rewards, mask, ids = rewards[order], mask[order], ids[order]
        more = {k: x[order] if isinstance(x, torch.Tensor) else x for k, x in more.items()}
    return compute_advantages(name, rewards, mask, ids, **more).advantages


@pytest.mark.parametrize("name", NAMES)
def test_entry(name):
    """Its tensors and traits exist; it reads no tensor that it does not declare, and needs those that it does."""
    entry = ADVANTAGE_ESTIMATORS.get(name)
    assert entry.requires | entry.optional <= TENSORS.keys()
    assert entry.traits <= TRAITS.keys()
    assert entry.traits & {"constant_over_sequence", "token_level"}
    assert advantages(name).abs().sum() > 0
    for tensor in entry.requires - {"group_ids", "lengths"}:
        key = "values" if tensor == "old_values" else tensor
        with pytest.raises(LossPlusError, match=f"advantage_estimator '{name}'.*{key}"):
            advantages(name, **{key: None})
    if "lengths" in entry.requires:
        assert torch.equal(advantages(name, lengths=None), advantages(name)), "counted from the mask"
    stranger = next(tensor for tensor in ("lengths", "sum_pi_squared") if tensor not in entry.requires)
    with pytest.raises(LossPlusError, match=f"{stranger} was given, and it does not read it"):
        advantages(name, **{stranger: torch.ones(8)})
    for tensor in sorted((entry.requires | entry.optional) - {"group_ids", "old_values"}):
        with pytest.raises(LossPlusError, match=f"{tensor} has shape"):
            advantages(name, **{tensor: torch.ones(3)})


@pytest.mark.parametrize("name", NAMES)
def test_rows_and_labels(name):
    """Rows in another order: advantages in that order (E6); other ids for the same groups: the same; masked positions 0."""
    right = advantages(name)
    order = torch.tensor([6, 3, 0, 7, 2, 5, 1, 4])
    assert difference(advantages(name, order=order), right[order]) < 1e-5
    relabelled = torch.tensor([{9: 0, 2: 1000, 5: -3}[i] for i in IDS.tolist()])
    assert difference(advantages(name, ids=relabelled), right) < 1e-5
    assert torch.equal(right[~MASK], torch.zeros(int((~MASK).sum())))
    assert right.dtype == torch.float32


@pytest.mark.parametrize("name", NAMES)
def test_one_value_a_row(name):
    """`constant_over_sequence` is true where it is said."""
    spread = torch.stack([row[m].max() - row[m].min() for row, m in zip(advantages(name), MASK, strict=True)])
    if "constant_over_sequence" in ADVANTAGE_ESTIMATORS.get(name).traits:
        assert (spread == 0).all()


@pytest.mark.parametrize("name", NAMES)
def test_shift_and_scale(name):
    """Rewards + 2.5, rewards * 4."""
    right = advantages(name)
    if name in SHIFTED:
        compared = IDS != 5
        assert difference(advantages(name, REWARDS + 2.5)[compared], right[compared]) < 1e-4
    factor = 4.0 ** HOMOGENEOUS.get(name, 1)
    scaled = {"values": 4 * tensors_of(name)["values"]} if "values" in tensors_of(name) else {}
    scaled |= {"reward_baselines": 4 * tensors_of(name)["reward_baselines"]} if name == "remax" else {}
    scaled |= {"opmd": {"opmd_tau": 4.0}, "asymre": {"asymre_shift": -0.4}}.get(name, {})  # settings in units of the reward
    assert difference(advantages(name, 4 * REWARDS, **scaled), factor * right) < 1e-4


@pytest.mark.parametrize("name", [name for name in NAMES if name not in NO_BASELINE | BATCH_STEP])
@pytest.mark.parametrize("value", [0.35, 0.1, -2.7])
def test_no_signal(name, value):
    """A group of one: exactly 0. A group of equal rewards: exactly 0 (E2), or the rounding of a mean of returns."""
    rewards = torch.where(IDS == 9, torch.full_like(REWARDS, value), REWARDS)
    got = advantages(name, rewards)
    flat = got[IDS == 9]
    assert (flat.abs().max() <= 1e-6) if name.endswith("token_baseline") else (flat == 0).all()
    assert (got[IDS == 5] == 0).all()


@pytest.mark.parametrize("name", [n for n in NAMES if "group_ids" in ADVANTAGE_ESTIMATORS.get(n).requires])
def test_mean_of_a_group(name):
    """0, or the trait `uncentred` says that it is not."""
    by_row = advantages(name).sum(-1) / MASK.sum(-1)
    means = torch.stack([by_row[group == IDS].mean() for group in (9, 2)])
    assert (means.abs().max() > 1e-3) == ("uncentred" in ADVANTAGE_ESTIMATORS.get(name).traits)


@pytest.mark.parametrize("name", NAMES)
def test_none_rewards(name):
    """An unscored row: 0, and the others as if it were not there; all unscored: 0."""
    missing = REWARDS.clone()
    missing[[2, 5]] = math.nan
    got = advantages(name, missing)
    assert torch.isfinite(got).all()
    assert (got[[2, 5]] == 0).all()
    rest = torch.tensor([0, 1, 3, 4, 6, 7])
    if name != "gdpo":  # (its last step is over the batch, of which unscored rows are no part)
        assert difference(got[rest], advantages(name, order=rest)) < 1e-5
    assert (advantages(name, torch.full((8,), math.nan)) == 0).all()


@pytest.mark.parametrize("name", NAMES)
def test_rows_without_tokens_and_far_rewards(name):
    """A fully masked row: 0 and finite elsewhere, junk in its tensors changes nothing; rewards of 1e6 and of the bound of E2 are finite."""
    mask = MASK.clone()
    mask[0] = False
    got = advantages(name, mask=mask)
    assert (got[0] == 0).all()
    assert torch.isfinite(got).all()
    more = {k: torch.where(mask, x, math.nan) for k, x in tensors_of(name).items() if x.shape == mask.shape}
    assert torch.equal(advantages(name, mask=mask, **more), got)
    assert torch.isfinite(advantages(name, REWARDS * 1e6)).all()
    near = torch.full((8,), 0.35)
    near[6] = 0.95
    if name not in NO_BASELINE:
        assert advantages(name, near, ids=IDS * 0).abs().max() < 10


def test_passk_by_hand():
    """[1, 3, 2]: the best gets (3 - 2) / std 1; a tie at the top: 0; unscaled 1."""
    ids = torch.tensor([0, 0, 0])
    assert base.grpo_passk(torch.tensor([1.0, 3.0, 2.0]), ids).tolist() == pytest.approx([0, 1, 0], abs=1e-5)
    assert base.grpo_passk(torch.tensor([3.0, 3.0, 2.0]), ids).tolist() == [0, 0, 0]
    assert base.grpo_passk(torch.tensor([1.0, 5.0, 2.0]), ids, scale_rewards="none").tolist() == [0, 3, 0]
    with pytest.raises(LossPlusError, match="scale_rewards='std' is not known"):
        base.grpo_passk(torch.zeros(3), ids, scale_rewards="std")


def test_opo_by_hand():
    """Rewards 1 and 0 of 1 and 3 tokens: baseline 1/4."""
    got = base.opo(torch.tensor([1.0, 0.0]), torch.tensor([0, 0]), lengths=torch.tensor([1, 3]))
    assert got.tolist() == pytest.approx([0.75, -0.25])


def test_gpg_by_hand():
    """Groups [1, 0] and [1, 1]: 2 of 4 rows carry a gradient, so alpha is 2 (and 4/3 by the nonzero rewards)."""
    rewards, ids = torch.tensor([1.0, 0.0, 1.0, 1.0]), torch.tensor([0, 0, 1, 1])
    assert base.gpg(rewards, ids).tolist() == [1.0, -1.0, 0.0, 0.0]
    assert base.gpg(rewards, ids, alpha_from="nonzero", f_norm=2.0).tolist() == pytest.approx([1 / 3, -1 / 3, 0, 0])
    with pytest.raises(LossPlusError, match="alpha_from='all' is not known"):
        base.gpg(rewards, ids, alpha_from="all")


def test_opmd_of_a_large_tau_is_the_mean():
    """Rewards 1, 0, .5, .5: their mean is .5; the soft maximum is over it by the variance .125 over 2 tau."""
    for tau in (1e4, 1e6, 1e8):
        got = base.opmd(torch.tensor([1.0, 0.0, 0.5, 0.5]), torch.zeros(4, dtype=torch.long), opmd_tau=tau)
        assert got.tolist() == pytest.approx([0.5, -0.5, -0.125 / 2 / tau, -0.125 / 2 / tau], rel=1e-4, abs=1e-7)


def test_opmd_by_hand():
    """
    Rewards 0 and log 3 at temperature 1: baseline log((1 + 3) / 2) = log 2. At temperature 1e4 it is the mean, at .01 the largest less
    .01 log 2.
    """
    rewards, ids = torch.tensor([0.0, math.log(3.0), math.nan]), torch.tensor([4, 4, 4])
    assert base.opmd(rewards, ids).tolist() == pytest.approx([-math.log(2), math.log(1.5), 0.0])
    half = math.log(3.0) / 2
    assert base.opmd(rewards, ids, opmd_tau=1e4).tolist() == pytest.approx([-half, half, 0.0], abs=1e-3)
    sharp = base.opmd(rewards, ids, opmd_tau=0.01).tolist()
    assert sharp == pytest.approx([-2 * half + 0.01 * math.log(2), 0.01 * math.log(2), 0.0], abs=1e-5)


def test_asymre_by_hand():
    """[1, 0], baseline .5 - .1: .6 and -.4. A flat group [1, 1]: .1 each. A group of one: 0. Not scored: 0."""
    rewards, ids = torch.tensor([1.0, 0.0, 1.0, 1.0, 5.0, math.nan]), torch.tensor([0, 0, 1, 1, 2, 1])
    assert base.asymre(rewards, ids).tolist() == pytest.approx([0.6, -0.4, 0.1, 0.1, 0.0, 0.0])
    assert base.asymre(rewards, ids, asymre_shift=0.0).tolist() == [0.5, -0.5, 0.0, 0.0, 0.0, 0.0]


def test_remax_by_hand():
    """Token rewards 1, 2 with a hole between, greedy 1.5: [3 - 1.5, 0, 2 - 1.5]; discount .5: [2 - 1.5, 0, .5]; NaN greedy: 0."""
    rewards, mask = torch.tensor([[1.0, 9.0, 2.0]]), torch.tensor([[True, False, True]])
    one = torch.tensor([1.5])
    assert base.remax(rewards, mask, reward_baselines=one).advantages.tolist() == [[1.5, 0.0, 0.5]]
    assert base.remax(rewards, mask, reward_baselines=one, gamma=0.5).advantages.tolist() == [[0.5, 0.0, 0.5]]
    assert base.remax(rewards, mask, reward_baselines=one * math.nan).advantages.tolist() == [[0.0, 0.0, 0.0]]
