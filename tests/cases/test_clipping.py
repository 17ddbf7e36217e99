"""Cases B: what is clipped, by how much, and how it is counted."""

import math

import pytest
import torch
from helpers import OBJECTIVES, difference, run, tensors

from trl_lossplus import LossPlusError, LossSpec


def batch_of(ratios, advantages) -> dict:
    """One row whose tokens have these ratios to an old log-prob of -2."""
    logps = torch.tensor([ratios], dtype=torch.float64).log() - 2
    return {
        "logps": logps.float(),
        "old_logps": torch.full((1, len(ratios)), -2.0),
        "advantages": torch.tensor([advantages], dtype=torch.float32),
        "mask": torch.ones(1, len(ratios), dtype=torch.bool),
    }


B1 = batch_of([0.5, 0.5, 1.5, 1.5, 1.0, 1.0], [1.0, -1.0, 1.0, -1.0, 1.0, -1.0])


def test_b1_losses_gradient_and_clip_fractions():
    """Ratios .5,.5,1.5,1.5,1,1, A +-1 -> losses -.5,.8,-1.2,1.5,-1,1; clipped low 1/6, high 1/6, either 1/3."""
    out, gradient = run(B1, LossSpec(epsilon=0.2))
    assert out.per_token["policy"].squeeze().tolist() == pytest.approx([-0.5, 0.8, -1.2, 1.5, -1.0, 1.0], rel=1e-6)
    assert (gradient * 6).squeeze().tolist() == pytest.approx(
        [-0.5, 0.0, 0.0, 1.5, -1.0, 1.0], rel=1e-6
    )  # -A r, or 0 where clipped
    assert out.loss.item() == pytest.approx((-0.5 + 0.8 - 1.2 + 1.5 - 1 + 1) / 6, rel=1e-5)
    right = {"low_mean": 1 / 6, "low_min": 1 / 6, "high_mean": 1 / 6, "high_max": 1 / 6, "region_mean": 1 / 3}
    for name, value in right.items():
        assert out.stats[f"clip_ratio/{name}"].item() == pytest.approx(value, rel=1e-6)


def test_b1_max_removes_the_clip_where_it_should_act():
    """The same with clip_objective=max: the clip acts on the other two tokens, so losses are -.8,.5,-1.5,1.2,-1,1."""
    out, gradient = run(B1, LossSpec(epsilon=0.2, clip_objective="max"))
    assert out.per_token["policy"].squeeze().tolist() == pytest.approx([-0.8, 0.5, -1.5, 1.2, -1.0, 1.0], rel=1e-6)
    assert (gradient * 6).squeeze().tolist() == pytest.approx([0.0, 0.5, -1.5, 0.0, -1.0, 1.0], rel=1e-6)


@pytest.mark.parametrize(
    ("options", "ratio", "advantage", "loss", "slope"),
    [
        ({"epsilon": 0.1, "epsilon_high": 0.3}, 1.25, 1.0, -1.25, -1.25),
        ({"epsilon": 0.1, "epsilon_high": 0.3}, 1.5, 1.0, -1.3, 0.0),
        ({"epsilon": 0.1, "epsilon_high": 0.3}, 0.85, -1.0, 0.9, 0.0),
        ({"delta": 4.0}, 3.0, -1.0, 3.0, 3.0),  # two-sided: beyond delta the unclipped ratio stops too
        ({"delta": 4.0}, 6.0, -1.0, 4.0, 0.0),
        ({"delta": 4.0}, 6.0, 1.0, -1.2, 0.0),
    ],
)
def test_b1_asymmetric_and_two_sided(options, ratio, advantage, loss, slope):
    """Clip ranges below and above 1 are separate; delta bounds the unclipped ratio."""
    out, gradient = run(batch_of([ratio], [advantage]), LossSpec(**options))
    assert out.loss.item() == pytest.approx(loss, rel=1e-6)
    assert gradient.item() == pytest.approx(slope, rel=1e-6)


@pytest.mark.parametrize(("advantage", "loss", "clipped"), [(-1.0, 3.0, 1.0), (1.0, -1.2, 0.0)])
def test_b2_dual_clip(advantage, loss, clipped):
    """Ratio 10, c=3: A=-1 -> 3.0, A=+1 -> -1.2; no gradient either way. Without the dual clip A=-1 gives 10."""
    batch = batch_of([10.0], [advantage])
    out, gradient = run(batch, LossSpec(clip_ratio_c=3.0))
    assert out.loss.item() == pytest.approx(loss, rel=1e-6)
    assert gradient.item() == 0.0
    assert out.stats["clip_ratio/dual_mean"].item() == clipped
    assert run(batch, LossSpec())[0].loss.item() == pytest.approx(10.0 if advantage < 0 else -1.2, rel=1e-6)


@pytest.mark.parametrize("c", [1.0, 0.5, 0.0, -3.0, math.nan])
def test_b2_dual_clip_must_be_above_one(c):
    """c <= 1 is an error that says so."""
    with pytest.raises(LossPlusError, match="clip_ratio_c=.*must be > 1"):
        LossSpec(clip_ratio_c=c)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_b4_on_policy_nothing_is_clipped(name):
    """One update a rollout: the ratio is exactly 1, every clip fraction 0."""
    batch = tensors() | {"old_logps": None}
    out, gradient = run(batch | {"rollout_weights": None}, LossSpec(policy_loss=name))
    assert torch.equal(out.per_token["ratio"], torch.ones_like(out.per_token["ratio"]))
    assert all(value.item() == 0 for key, value in out.stats.items() if "clip" in key)
    assert gradient.abs().sum() > 0


B5 = {
    "logps": torch.tensor([[1.0, -5.0, -1.4, 5.0, -11.0]]),  # log-ratios 3, -3, .6, and 7, -9 where masked
    "old_logps": torch.full((1, 5), -2.0),
    "mask": torch.tensor([[True, True, True, False, False]]),
}


@pytest.mark.parametrize("name", ["gspo", "gspo_token", "luspo"])
@pytest.mark.parametrize(("advantage", "loss"), [(1.0, -1.2), (-1.0, 1.221403)])
def test_b5_gspo_ratio_leaves_masked_tokens_out(name, advantage, loss):
    """Log-ratios 3,-3,.6 (mean .2), masked 7,-9: ratio 1.221403; A=1 -> loss -1.2; masked gradient exactly 0."""
    spec = LossSpec(policy_loss=name, loss_aggregation="seq_mean_token_mean")
    out, gradient = run(B5 | {"advantages": torch.tensor([advantage])}, spec)
    assert out.loss.item() == pytest.approx(loss, rel=1e-6)
    assert gradient[0, 3:].tolist() == [0.0, 0.0]
    slope = 0.0 if advantage > 0 else 1.221403 / 3  # clipped for A=1; else r / 3 at each token
    assert gradient[0, :3].tolist() == pytest.approx([slope] * 3, rel=1e-6)


def test_b5_gspo_and_gspo_token():
    """One value; one gradient too where A is constant along a row; another where it varies (the row's A, or the token's)."""
    batch, specs = (
        tensors(),
        [LossSpec(policy_loss=n, epsilon=9.0, loss_aggregation="seq_mean_token_mean") for n in ("gspo", "gspo_token")],
    )
    (row, row_grad), (token, token_grad) = (run(batch, spec) for spec in specs)
    assert difference(token.loss, row.loss) < 1e-6
    assert difference(token_grad, row_grad) > 0.1
    constant = batch | {"advantages": batch["advantages"][:, :1], "token_weights": None, "rollout_weights": None}
    (row, row_grad), (token, token_grad) = (run(constant, spec) for spec in specs)
    assert difference(token.loss, row.loss) < 1e-6
    assert difference(token_grad, row_grad) < 1e-6


@pytest.mark.parametrize(
    ("options", "ratio", "weight", "clipped"),
    [
        ({}, 10.0, 5.0, 1.0),  # 5 is the bound if none is set
        ({"epsilon_high": 5.0}, 10.0, 5.0, 1.0),
        ({"epsilon_high": 2.0}, 10.0, 2.0, 1.0),
        ({"epsilon_high": 5.0}, 0.1, 0.1, 0.0),  # no lower bound by default
        ({"epsilon_high": 1.2, "cispo_ratio_min": 0.8}, 0.1, 0.8, 0.0),
    ],
)
def test_b7_cispo_detaches_the_clipped_weight(options, ratio, weight, clipped):
    """CISPO, ratio 10, bound 5, A=1 -> d loss / d logp = -5, clip fraction 1."""
    batch = batch_of([ratio], [1.0])
    out, gradient = run(batch, LossSpec(policy_loss="cispo", **options))
    assert gradient.item() == pytest.approx(-weight, rel=1e-6)
    assert out.loss.item() == pytest.approx(-weight * batch["logps"].item(), rel=1e-6)
    assert out.stats["cispo_clip_ratio"].item() == clipped


@pytest.mark.parametrize(
    ("advantage", "log_ratio", "kept"),
    [(-1.0, 3.0, 3.0), (1.0, 3.0, 0.2), (1.0, -3.0, -3.0), (-1.0, -3.0, -0.2), (1.0, 0.1, 0.1)],
)
def test_b8_gmpo_clips_one_side_in_log_space(advantage, log_ratio, kept):
    """A<0 and log-ratio +3: not clipped; A>0: capped at +eps; and the mirror image below."""
    batch = batch_of([math.exp(log_ratio)] * 2, [advantage] * 2)
    out, gradient = run(batch, LossSpec(policy_loss="gmpo", epsilon=0.2, loss_aggregation="seq_mean_token_mean"))
    assert out.loss.item() == pytest.approx(-advantage * math.exp(kept), rel=1e-5)
    slope = -advantage * math.exp(kept) / 2 if kept == log_ratio else 0.0
    assert gradient.squeeze().tolist() == pytest.approx([slope, slope], rel=1e-5)
    assert out.stats["clip_ratio/region_mean"].item() == float(kept != log_ratio)
