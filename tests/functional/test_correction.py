"""Importance weights against the sampler, by hand: log ratios log 2, log 1/2, log 4; NaN not scored; one masked."""

import math

import pytest
import torch
from helpers import run, tensors

from trl_lossplus import LossPlusError, LossSpec
from trl_lossplus.functional.correction import CORRECTION_MODES, rollout_importance_weights
from trl_lossplus.functional.policy import off_policy_keep

NAN = float("nan")
OLD = torch.full((2, 4), -1.0)
DIFF = torch.tensor([[2.0, 0.5, 4.0, 9.0], [0.25, NAN, 0.5, NAN]])  # ratios pi_old / pi_sampler; row 0 token 3 is masked
ROLLOUT = OLD - DIFF.log()
MASK = torch.tensor([[True, True, True, False], [True, True, True, False]])


@pytest.mark.parametrize(
    ("mode", "bounds", "right"),
    [
        ("token_truncate", (None, 3.0), [[2, 0.5, 3, 1], [0.25, 1, 0.5, 1]]),
        ("token_truncate", (0.4, 3.0), [[2, 0.5, 3, 1], [0.4, 1, 0.5, 1]]),
        ("token_mask", (None, 3.0), [[2, 0.5, 0, 1], [0.25, 1, 0.5, 1]]),
        ("token_mask", (0.4, 3.0), [[2, 0.5, 0, 1], [0, 1, 0.5, 1]]),
        ("token_mask", (None, 4.5), [[2, 0.5, 4, 1], [0.25, 1, 0.5, 1]]),
        ("sequence_truncate", (None, 3.0), [[3], [0.125]]),  # products 4 and 1/8
        ("sequence_truncate", (0.5, 9.0), [[4], [0.5]]),
        ("sequence_mask", (None, 3.0), [[0], [0.125]]),
        ("sequence_mask", (0.2, 9.0), [[4], [0]]),
        ("sequence_mask", (None, None), [[4], [0.125]]),
        ("token_mask", (None, None), [[2, 0.5, 4, 1], [0.25, 1, 0.5, 1]]),
    ],
)
def test_weights_by_hand(mode, bounds, right):
    """Truncated to the bounds, or 0 outside; an unscored token counts as no difference; masked positions do not count."""
    weights = rollout_importance_weights(OLD, ROLLOUT, MASK, mode=mode, clip_min=bounds[0], clip_max=bounds[1])
    assert torch.allclose(weights, torch.tensor(right, dtype=torch.float32), rtol=1e-5)


@pytest.mark.parametrize("mode", CORRECTION_MODES)
def test_weights_are_finite_constants(mode):
    """Log ratios of +-1000 and 300 tokens of -.36 -> finite; no gradient; bf16 in, float32 out."""
    old = torch.tensor([[-1.0, -1001.0, -1.0]]).repeat(2, 100).bfloat16().requires_grad_()
    rollout = torch.tensor([[-1001.0, -1.0, -0.64]]).repeat(2, 100).bfloat16()
    weights = rollout_importance_weights(
        old, rollout, torch.ones(2, 300, dtype=torch.bool), mode=mode, clip_max=None, clip_min=0.0
    )
    assert torch.isfinite(weights).all()
    assert not weights.requires_grad
    assert weights.dtype == torch.float32
    assert torch.equal(
        rollout_importance_weights(old, old, torch.ones(2, 300, dtype=torch.bool), mode=mode),
        torch.ones(2, 300 if mode.startswith("token") else 1),
    )


@pytest.mark.parametrize("mode", CORRECTION_MODES)
def test_masked_positions_of_weights(mode):
    """Anything at masked positions -> the same bits."""
    right = rollout_importance_weights(OLD, ROLLOUT, MASK, mode=mode)
    for junk in (NAN, math.inf, -math.inf, 1e30):
        dirty = [x.masked_fill(~MASK, junk) for x in (OLD, ROLLOUT)]
        assert torch.equal(rollout_importance_weights(*dirty, MASK, mode=mode), right)


def test_unknown_mode():
    """A name that is not there lists those that are."""
    with pytest.raises(LossPlusError, match="'token_clip' is not known.*Allowed: sequence_mask"):
        rollout_importance_weights(OLD, OLD, MASK, mode="token_clip")


@pytest.mark.parametrize(("mode", "right"), [("token_truncate", DIFF), ("sequence_truncate", torch.tensor([[4.0], [0.125]]))])
def test_truncation_without_bounds(mode, right):
    """No bounds: the plain ratio of each token, or of the row."""
    weights = rollout_importance_weights(OLD, ROLLOUT, MASK, mode=mode, clip_max=None)
    right = right if right.shape[1] == 1 else right.nan_to_num(nan=1.0).masked_fill(~MASK, 1.0)
    assert torch.allclose(weights, right, rtol=1e-6)


@pytest.mark.parametrize("name", ["ppo_clip", "gspo", "cispo", "sapo", "gmpo"])
def test_weights_multiply_the_policy_term_alone(name):
    """Weight 3 everywhere triples policy term and gradient, and leaves the KL; (B, 1) weights alike."""
    batch = tensors() | {"rollout_weights": None}
    plain, gradient = run(batch, LossSpec(policy_loss=name, beta=0.0))
    with_kl = LossSpec(policy_loss=name, beta=0.1)
    for shape in ((8, 6), (8, 1)):
        out, tripled = run(batch | {"rollout_weights": torch.full(shape, 3.0)}, LossSpec(policy_loss=name))
        assert out.loss.item() == pytest.approx(3 * plain.loss.item(), rel=1e-5)
        assert torch.allclose(tripled, 3 * gradient, rtol=1e-5, atol=1e-7)
        kls = [run(batch | {"rollout_weights": w}, with_kl)[0].terms["kl"].item() for w in (None, torch.full(shape, 3.0))]
        assert kls[0] == kls[1]


@pytest.mark.parametrize(
    ("threshold", "right"),
    [(0.5, [True, True, False, True]), (0.7, [True, True, True, True]), (0.1, [True, True, False, False])],
)
def test_off_policy_rows_by_hand(threshold, right):
    """Rows (A, mean of sampler - policy): (+, 9), (0, 9), (-, .6), (-, .2 with one token not scored) -> kept or not."""
    logps = torch.full((4, 3), -1.0, requires_grad=True)
    drift = torch.tensor([[9.0, 9.0, 9.0], [9.0, 9.0, 9.0], [1.0, 0.2, 100.0], [0.4, NAN, 100.0]])
    mask = torch.tensor([[True] * 3, [True] * 3, [True, True, False], [True, True, False]])
    a = torch.tensor([[1.0], [0.0], [-1.0], [-1.0]])
    keep = off_policy_keep(a, logps, logps.detach() + drift, mask, threshold=threshold)
    assert keep.squeeze().tolist() == right
    assert not keep.requires_grad


def test_off_policy_rows_lose_their_policy_term():
    """Two rows, A=-1: drift .3 kept, drift 2 dropped: no gradient; without rollout log-probs the old ones are taken."""
    logps = torch.full((2, 2), -1.0)
    batch = {"logps": logps, "old_logps": logps, "advantages": -torch.ones(2), "mask": torch.ones(2, 2, dtype=torch.bool)}
    spec = LossSpec(off_policy_mask_threshold=0.5)
    drift = torch.tensor([[0.3], [2.0]])
    gradient = run(batch | {"rollout_logps": (logps + drift)}, spec)[1]
    assert gradient.tolist() == [[0.25, 0.25], [0.0, 0.0]]
    assert (run(batch, spec)[1] == 0.25).all()
    gradient = run(batch | {"old_logps": logps + drift}, spec)[1]
    assert gradient[1].tolist() == [0.0, 0.0]
