"""Cases G1, H4, L1: masked positions change no bit, long rows stay finite, an on-policy loss of 0 has its gradient."""

import pytest
import torch
from helpers import LENGTHS, MODES, OBJECTIVES, full_spec, length_mask, run, tensors

from trl_lossplus import LossSpec, Window

POISON = [float("nan"), float("inf"), float("-inf")]
PER_TOKEN = ["logps", "old_logps", "ref_logps", "advantages", "entropies", "token_weights", "rollout_weights", "rollout_logps"]
OPTIONS = {"off_policy_mask_threshold": 0.1, "top_entropy_quantile": 0.5}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", OBJECTIVES)
def test_g1_nothing_leaks_from_masked_positions(name, mode):
    """NaN, +-inf at masked positions of logp, old, ref, A, entropies, weights (row 4 fully masked) -> bitwise the clean loss."""
    holes = length_mask(LENGTHS)
    holes[0, 2], holes[4] = False, False
    batch, spec = tensors(1, holes), full_spec(name, mode, **OPTIONS)
    clean, gradient = run(batch, spec)
    assert torch.isfinite(clean.loss)
    assert gradient[holes].abs().sum() > 0
    for tensor in [*PER_TOKEN, "all"]:
        for value in POISON:
            dirty = {
                k: x.masked_fill(~holes, value) if k == tensor or (tensor == "all" and k in PER_TOKEN) else x
                for k, x in batch.items()
            }
            out, dirty_gradient = run(dirty, spec)
            assert torch.equal(out.loss, clean.loss), (tensor, value)
            assert torch.equal(dirty_gradient, gradient), (tensor, value)
            assert all(torch.equal(out.terms[k], clean.terms[k]) for k in clean.terms), (tensor, value)
            assert all(torch.equal(out.stats[k], clean.stats[k]) for k in clean.stats), (tensor, value)
    assert torch.equal(gradient[~holes], torch.zeros(int((~holes).sum())))


@pytest.mark.parametrize("tensor", ["advantages", "rollout_weights"])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_g1_per_row_tensors_of_fully_masked_rows(name, tensor):
    """(B, 1) advantages and rollout weights: NaN in a fully masked row -> bitwise the clean loss and gradient."""
    mask = length_mask(LENGTHS) & (torch.arange(8) != 4)[:, None]
    batch = tensors(2, mask)
    batch |= {k: batch[k][:, :1].clone() for k in ("advantages", "rollout_weights")}
    clean, gradient = run(batch, full_spec(name))
    for value in POISON:
        dirty = batch[tensor].clone()
        dirty[4] = value
        out, dirty_gradient = run(batch | {tensor: dirty}, full_spec(name))
        assert torch.equal(out.loss, clean.loss)
        assert torch.equal(dirty_gradient, gradient)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", OBJECTIVES)
def test_g1_fully_masked_batch(name, mode):
    """No valid token, NaN everywhere -> loss and every term 0, connected to the log-probs, gradient exactly 0."""
    mask = torch.zeros(3, 5, dtype=torch.bool)
    batch = {k: torch.full_like(x, float("nan")) if x.is_floating_point() else x for k, x in tensors(0, mask).items()}
    for window in (None, Window(17, 6, 2, world_size=2, group_tokens=torch.tensor([3, 3, 4]))):
        out, gradient = run(batch, full_spec(name, mode, **OPTIONS), window)
        assert out.loss.requires_grad
        assert out.loss.item() == 0.0
        assert [term.item() for term in out.terms.values()] == [0.0] * 3
        assert torch.equal(gradient, torch.zeros(3, 5))


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("log_ratio", [-0.36, 0.36])
def test_h4_long_rows_stay_finite(name, log_ratio):
    """300 tokens x log-ratio -.36 (a product of e^-108, and the mirror e^108) -> finite loss and gradient, either sign of A."""
    logps = torch.full((2, 300), -1.0)
    batch = {"logps": logps, "old_logps": logps - log_ratio, "mask": torch.ones(2, 300, dtype=torch.bool)}
    out, gradient = run(batch | {"advantages": torch.tensor([1.0, -1.0])}, LossSpec(policy_loss=name))
    assert torch.isfinite(out.loss)
    assert torch.isfinite(gradient).all()
    assert torch.isfinite(out.per_token["ratio"]).all()


H4 = {  # one row, A=1, token mean; r = e^-.36 = .697676
    "ppo_clip": -0.697676,
    "gspo": -0.697676,
    "cispo": 0.697676,  # -r A logp
    "gmpo": -0.697676,
    "sapo": -4 / (1 + 2.718281828 ** (1 - 0.697676)),
    "vespo": 0.0,  # phi(1e-8) = 1e-16 e^3 (1 - 1e-8)
}


@pytest.mark.parametrize("name", H4)
def test_h4_values(name):
    """The mean log-ratio of the row is the token's, so its ratio is .697676, not e^-108."""
    logps = torch.full((1, 300), -1.0)
    batch = {"logps": logps, "old_logps": logps + 0.36, "advantages": torch.ones(1), "mask": torch.ones(1, 300, dtype=torch.bool)}
    out, _ = run(batch, LossSpec(policy_loss=name, sapo_temperature_pos=1.0))
    assert out.loss.item() == pytest.approx(H4[name], rel=1e-5, abs=1e-14)


@pytest.mark.parametrize("name", sorted(set(OBJECTIVES) - {"cispo", "vespo"}))
def test_l1_on_policy_loss_is_zero_and_its_gradient_is_not(name):
    """A=+-.7071, ratio 1 -> loss 0.0 and gradient -+.35355; a group without spread (A=0) -> gradient 0: no signal."""
    batch = {"logps": torch.tensor([[-1.0], [-2.0]]), "mask": torch.ones(2, 1, dtype=torch.bool)}
    a = torch.tensor([0.5**0.5, -(0.5**0.5)])
    out, gradient = run(batch | {"advantages": a}, LossSpec(policy_loss=name, sapo_temperature_neg=1.0))
    assert out.loss.item() == pytest.approx(0.0, abs=1e-7)
    assert gradient.squeeze().tolist() == pytest.approx([-0.35355, 0.35355], abs=1e-5)
    out, gradient = run(batch | {"advantages": torch.zeros(2)}, LossSpec(policy_loss=name))
    assert (out.loss.item(), gradient.abs().max().item()) == (0.0, 0.0)


@pytest.mark.parametrize("name", ["cispo", "vespo"])
def test_l1_objectives_whose_loss_is_a_log_prob(name):
    """cispo and vespo: loss -mean(A logp) = -(.7071*-1 -.7071*-2)/2 = -.35355, the same gradient -+.35355."""
    batch = {"logps": torch.tensor([[-1.0], [-2.0]]), "mask": torch.ones(2, 1, dtype=torch.bool)}
    out, gradient = run(batch | {"advantages": torch.tensor([0.5**0.5, -(0.5**0.5)])}, LossSpec(policy_loss=name))
    assert out.loss.item() == pytest.approx(-0.35355, abs=1e-5)
    assert gradient.squeeze().tolist() == pytest.approx([-0.35355, 0.35355], abs=1e-5)
