"""Plain versions against the package's functions on random tensors: also what no trainer of the toy can reach."""

from dataclasses import asdict

import pytest
import torch

from trl_lossplus import LossBatch, LossSpec, compute_advantages, compute_loss
from trl_lossplus.check import plain, plain_batch, plain_terms
from trl_lossplus.check import plain_advantages as adv
from trl_lossplus.registry import POLICY_LOSSES

B, T = 8, 7
GROUPS = [5, 5, 5, 5, 2, 2, 2, 9]


@pytest.fixture
def mask():
    torch.manual_seed(1)
    mask = torch.rand(B, T) < 0.7
    mask[3] = False
    mask[5, 1:] = False
    return mask


def columns(mask):
    return [row.nonzero().flatten().tolist() for row in mask]


def batch_of(mask, seed=0):
    torch.manual_seed(seed)
    noise = lambda scale: scale * torch.randn(B, T)  # noqa: E731
    logps = -(3 * torch.rand(B, T) + 0.2)
    sampled = logps + noise(0.3)
    sampled[1, 2] = float("nan")
    advantages = torch.randn(B, 1)
    return LossBatch(
        logps=logps,
        old_logps=logps + noise(0.4),
        advantages=advantages + (noise(0.5) if seed % 2 else 0),
        mask=mask,
        ref_logps=logps + noise(0.4),
        entropies=3 * torch.rand(B, T),
        values=noise(1),
        old_values=noise(1),
        returns=noise(1),
        token_weights=torch.rand(B, T),
        rollout_weights=torch.rand(B, T) + 0.5,
        rollout_logps=sampled,
        group_ids=torch.tensor(GROUPS),
        row_ids=torch.arange(B) * 7 + 3 if seed % 2 else None,
    )


def rows_of(batch):
    rows = []
    for i, own in enumerate(columns(batch.mask)):
        row = {"group": GROUPS[i], "id": None if batch.row_ids is None else batch.row_ids[i].item()}
        for name in (
            "logps", "old_logps", "advantages", "ref_logps", "entropies", "values", "old_values", "returns", "token_weights",
            "rollout_weights", "rollout_logps",
        ):  # fmt: skip
            values = getattr(batch, name).double().expand(B, T)[i].tolist()
            row[name] = [None if values[c] != values[c] else values[c] for c in own]
        rows.append(row)
    return rows


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("name", [n for n in POLICY_LOSSES.names() if n in plain.OBJECTIVES or n in plain_batch.BATCH_OBJECTIVES])
def test_loss(name, level, mask):
    """Every term, for every aggregation."""
    for seed, mode in enumerate(("token_mean", "token_sum", "seq_mean_token_mean", "seq_mean_token_sum", "prompt_mean")):
        spec = LossSpec(
            policy_loss=name,
            loss_aggregation=mode,
            importance_sampling_level=level,
            beta=0.1,
            use_bias_correction_kl=True,
            entropy_coef=0.01,
            vf_coef=0.5,
            clip_cov_ratio=0.3,
            clip_cov_min=0.05,
            kl_cov_ratio=0.2,
            is_ratio_min=0.7,
            is_ratio_max=1.4,
            epsilon=0.1,
            clip_ratio_c=1.2,
            off_policy_mask_threshold=0.1,
            cov_seed=7,
        )
        batch = batch_of(mask, seed)
        output, rows, values = compute_loss(batch, spec), rows_of(batch), asdict(spec)
        batched = plain_batch.BATCH_OBJECTIVES.get(name)
        raw = batched(rows, values) if batched else [plain.OBJECTIVES[name](row, values) for row in rows]
        policy = [plain_terms.weighted(losses, row, values) for losses, row in zip(raw, rows, strict=True)]
        for own, mine, theirs in zip(columns(mask), policy, output.per_token["policy"], strict=True):
            assert mine == pytest.approx(theirs[own].tolist(), rel=2e-5, abs=2e-5)
        counts = plain_terms.window_counts(rows, False)
        by_hand = {
            "policy": plain_terms.aggregate(mode, policy, GROUPS, counts, None),
            "kl": 0.1 * plain_terms.aggregate(mode, [plain_terms.kl_in_loss(row, values) for row in rows], GROUPS, counts, None),
            "entropy": plain_terms.entropy_term(rows, counts["tokens"], 0.01),
            "value": 0.5
            * plain_terms.aggregate(mode, [plain_terms.value_losses(row, values) for row in rows], GROUPS, counts, None),
        }
        assert by_hand == pytest.approx({key: x.item() for key, x in output.terms.items()}, rel=2e-5, abs=2e-5)


@pytest.mark.parametrize(
    "fields",
    [
        *({"policy_loss": "rec", "rec_clip": clip, "rec_weight": "importance"} for clip in ("none", "two_side")),
        {"policy_loss": "rec", "rec_clip": "ring", "rec_ring_low": 0.3, "rec_ring_high": 0.4},
        {"policy_loss": "rec", "rec_weight": "advantage", "rec_temperature": 0.5},
        {"policy_loss": "ipo", "ipo_by_sign": True, "ipo_threshold": 0.05},
        {"policy_loss": "m2po", "m2_threshold": 0.1},
    ],
    ids=str,
)
def test_settings_of_one_objective(fields, mask):
    """The policy's per-token losses under settings that the test above does not reach."""
    for seed in (0, 1):
        spec, batch = LossSpec(**fields), batch_of(mask, seed)
        theirs, rows, values = compute_loss(batch, spec).per_token["policy"], rows_of(batch), asdict(spec)
        batched = plain_batch.BATCH_OBJECTIVES.get(spec.policy_loss)
        raw = batched(rows, values) if batched else [plain.OBJECTIVES[spec.policy_loss](row, values) for row in rows]
        for own, losses, row, tensor in zip(columns(mask), raw, rows, theirs, strict=True):
            assert plain_terms.weighted(losses, row, values) == pytest.approx(tensor[own].tolist(), rel=2e-5, abs=2e-5)


REWARDS = [1.0, 0.0, 0.5, float("nan"), 0.25, 0.25, 0.25, 2.0]


def numbers(values):
    return [None if x != x else x for x in values]


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("name", sorted(adv.SEQUENCE_ESTIMATORS))
def test_sequence_estimators(name, scale, mask):
    options = {"scale_rewards": scale} if name in ("grpo", "grpo_passk") else {}
    lengths = [len(own) for own in columns(mask)]
    if name == "gdpo":
        rewards = torch.tensor([REWARDS, REWARDS[::-1]]).T
        theirs = compute_advantages(name, rewards, mask, torch.tensor(GROUPS), reward_weights=[1.0, 0.5])
        mine = adv.gdpo([numbers(row) for row in rewards.tolist()], GROUPS, {"reward_weights": [1.0, 0.5]})
    else:
        theirs = compute_advantages(name, torch.tensor(REWARDS), mask, torch.tensor(GROUPS), **options)
        mine = adv.SEQUENCE_ESTIMATORS[name](numbers(REWARDS), GROUPS, {"scale_rewards": scale, "lengths": lengths})
    for own, value, row in zip(columns(mask), mine, theirs.advantages, strict=True):
        assert row[own].tolist() == pytest.approx([value] * len(own), rel=2e-5, abs=2e-5)


@pytest.mark.parametrize("zero_tail", [False, True])
@pytest.mark.parametrize("name", sorted({**adv.TOKEN_ESTIMATORS, **adv.GROUP_TOKEN_ESTIMATORS}))
def test_token_estimators(name, zero_tail, mask):
    torch.manual_seed(2)
    rewards, values, squares = torch.randn(B, T), torch.randn(B, T), torch.rand(B, T)
    old = -torch.rand(B, T) - 0.5
    base = torch.tensor([float("nan"), *torch.randn(B - 1).tolist()])
    scored = [i != 1 for i in range(B)]
    grouped = name in adv.GROUP_TOKEN_ESTIMATORS
    if grouped:
        rewards[1] = float("nan")
    more = {
        "gae": {"values": values, "gamma": 0.9, "gae_lambda": 0.8, "gae_lambda_critic": 0.6, "bootstrap": torch.arange(B) / 10},
        "reinforce_plus_plus": {"gamma": 0.9},
        "remax": {"reward_baselines": base, "gamma": 0.9},
    }.get(name, {"old_logps": old, "sum_pi_squared": squares, "handle_zero_tail": zero_tail})
    theirs = compute_advantages(name, rewards, mask, torch.tensor(GROUPS), **more)
    rows = []
    for i, own in enumerate(columns(mask)):
        row = {"rewards": [0.0 if rewards[i, c] != rewards[i, c] else rewards[i, c].item() for c in own], "places": own}
        row |= {"values": values[i, own].tolist(), "old_logps": old[i, own].tolist(), "sum_pi_squared": squares[i, own].tolist()}
        row |= {"scored": scored[i], "reward_baseline": numbers([base[i].item()])[0], "next_value": i / 10}
        rows.append(row)
    options = {"gamma": 0.9, "gae_lambda": 0.8, "gae_lambda_critic": 0.6, "handle_zero_tail": zero_tail}
    estimate = adv.GROUP_TOKEN_ESTIMATORS.get(name) or (
        lambda all_rows, _, o: [adv.TOKEN_ESTIMATORS[name](r, o) for r in all_rows]
    )
    pairs = estimate(rows, GROUPS, options)
    for i, (own, (advantages, returns)) in enumerate(zip(columns(mask), pairs, strict=True)):
        assert theirs.advantages[i, own].tolist() == pytest.approx(advantages, rel=2e-5, abs=2e-5)
        if scored[i]:
            assert theirs.returns[i, own].tolist() == pytest.approx(returns, rel=2e-5, abs=2e-5)
