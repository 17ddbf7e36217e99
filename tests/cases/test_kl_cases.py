"""Cases C: what a KL estimator's value and gradient are, by exact expectation, and that it stays finite."""

import math

import pytest
import torch
from helpers import difference, run

from trl_lossplus import LossBatch, LossPlusError, LossSpec, compute_loss, estimate_kl

Z, REF = [0.3, -0.2, 0.1], [-0.4, 0.5, 0.2]
KL, REVERSE = 0.158121, [0.255722, -0.195021, -0.060700]
ZERO, FORWARD = [0.0, 0.0, 0.0], [0.222994, -0.215593, -0.007401]
# E[|d|] and E[sign(d) grad log p]: p = (.412327, .250089, .337585), d = (.778313, -.621687, -.021687)
ABS, ABS_GRADIENT = 0.483717, [0.484627, -0.206237, -0.278390]


def expected_kl_loss(z: torch.Tensor, estimator: str, bias_correction: bool = False) -> torch.Tensor:
    """sum over x of p(x) (not differentiated: the sampler) times the loss of the sampled token x, through compute_loss."""
    logp, ref = z.log_softmax(-1), torch.tensor(REF).log_softmax(-1)
    spec = LossSpec(beta=1.0, kl_estimator=estimator, use_bias_correction_kl=bias_correction)
    total = torch.zeros(())
    for x in range(3):
        one = torch.ones(1, 1, dtype=torch.bool)
        batch = LossBatch(logp[x].view(1, 1), logp[x].detach().view(1, 1), torch.zeros(1), one, ref_logps=ref[x].view(1, 1))
        total = total + logp[x].exp().detach() * compute_loss(batch, spec).terms["kl"]
    return total


@pytest.mark.parametrize(
    ("estimator", "bias_correction", "value", "gradient"),
    [
        ("k1", False, KL, ZERO),
        ("k1", True, KL, REVERSE),
        ("k2", False, 0.173296, REVERSE),
        ("k3", False, KL, FORWARD),
        ("k3", True, KL, REVERSE),
        ("abs", False, ABS, ABS_GRADIENT),
        ("k1+", False, KL, REVERSE),
        ("k2+", False, 0.173296, REVERSE),
        ("k3+", False, KL, REVERSE),
        ("abs+", False, ABS, REVERSE),
    ],
)
def test_c1_exact_expectation(estimator, bias_correction, value, gradient):
    """z=[.3,-.2,.1], ref [-.4,.5,.2] -> KL .158121; gradient of k1 0, of k3 the forward KL's, of k2 and `+` the reverse's."""
    z = torch.tensor(Z, requires_grad=True)
    loss = expected_kl_loss(z, estimator, bias_correction)
    (ours,) = torch.autograd.grad(loss, z)
    assert loss.item() == pytest.approx(value, abs=2e-6)
    assert ours.tolist() == pytest.approx(gradient, abs=2e-6)


def test_c1_the_numbers_are_the_kl_and_its_gradients():
    """KL .158121, reverse [.255722,-.195021,-.060700], forward KL's gradient: by autograd on the definitions."""
    z, q = torch.tensor(Z, requires_grad=True), torch.tensor(REF).softmax(-1)
    p = z.softmax(-1)
    reverse, forward = (p * (p.log() - q.log())).sum(), (q * (q.log() - p.log())).sum()
    assert reverse.item() == pytest.approx(KL, abs=1e-6)
    assert torch.autograd.grad(reverse, z, retain_graph=True)[0].tolist() == pytest.approx(REVERSE, abs=1e-6)
    assert torch.autograd.grad(forward, z)[0].tolist() == pytest.approx(FORWARD, abs=1e-6)


@pytest.mark.parametrize("estimator", ["k2", "mse", "biased_kl", "k2+", "k1+", "k3+", "abs+", "low_var_kl+"])
def test_c1_bias_correction_of_k2_is_refused(estimator):
    """k2*ratio has the gradient [.309155,-.190032,-.119123], wrong: refused; so are the `+` forms, whose gradient is k2's."""
    with pytest.raises(LossPlusError, match="use_bias_correction_kl.*kl_estimator"):
        LossSpec(beta=0.1, kl_estimator=estimator, use_bias_correction_kl=True)
    z = torch.tensor(Z, requires_grad=True)
    logp, ref = z.log_softmax(-1), torch.tensor(REF).log_softmax(-1)
    wrong = (logp.exp() * estimate_kl("k2", logp, ref)).sum()
    assert torch.autograd.grad(wrong, z)[0].tolist() == pytest.approx([0.309155, -0.190032, -0.119123], abs=1e-6)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("k1", [1.0, -1.0]),
        ("kl", [1.0, -1.0]),
        ("kl_div", [1.0, -1.0]),
        ("k1+", [1.0, -1.0]),
        ("abs", [1.0, 1.0]),
        ("abs+", [1.0, 1.0]),
        ("k2", [0.5, 0.5]),
        ("mse", [0.5, 0.5]),
        ("biased_kl", [0.5, 0.5]),
        ("k3", [0.367879, 0.718282]),
        ("low_var_kl", [0.367879, 0.718282]),
        ("low_var_kl+", [0.367879, 0.718282]),
    ],
)
def test_c2_values(name, values):
    """d=+1, d=-1 -> k1 1,-1; abs 1,1; k2 .5,.5; k3 .367879,.718282."""
    assert estimate_kl(name, torch.tensor([[-1.0, -2.0]]), torch.tensor([[-2.0, -1.0]]))[0].tolist() == pytest.approx(
        values, abs=1e-6
    )


@pytest.mark.parametrize(
    ("name", "hint"), [("k4", "Did you mean"), ("low_var", "Did you mean 'low_var_kl'"), ("full", "Allowed"), ("+", "Allowed")]
)
def test_c2_unknown_estimator(name, hint):
    """An unknown name is an error that lists the names, here and in the spec."""
    for make in (lambda: estimate_kl(name, torch.zeros(1, 1), torch.zeros(1, 1)), lambda: LossSpec(kl_estimator=name)):
        with pytest.raises(LossPlusError, match=f"kl_estimator=.*{hint}.*low_var_kl"):
            make()


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "abs", "k1+", "k3+", "abs+"])
@pytest.mark.parametrize("d", [-100.0, 100.0, -3e4, 3e4])
def test_c5_far_reference_stays_finite(estimator, d):
    """ref - logp = +100 -> finite loss and gradient (TRL: inf)."""
    batch = {
        "logps": torch.tensor([[d - 1.0, -1.0]]),
        "ref_logps": torch.full((1, 2), -1.0),
        "advantages": torch.zeros(1),
        "mask": torch.ones(1, 2, dtype=torch.bool),
    }
    out, gradient = run(batch, LossSpec(beta=0.1, kl_estimator=estimator))
    assert torch.isfinite(out.loss)
    assert torch.isfinite(gradient).all()
    if estimator == "k3" and d < 0:  # constant beyond the bound: e^20 - 20 - 1, no gradient
        assert out.terms["kl"].item() == pytest.approx(0.1 * (math.exp(20) - 21) / 2, rel=1e-6)
        assert gradient.tolist() == [[0.0, 0.0]]


def test_c5_bit_identical_inside_the_bound():
    """abs(d) < 10 -> the bits of exp(-d) + d - 1, value and gradient."""
    logps = torch.linspace(-9.99, 9.99, 4001)[None].requires_grad_()
    ours = estimate_kl("k3", logps, torch.zeros_like(logps))
    plain = torch.exp(-logps) + logps - 1
    assert torch.equal(ours, plain)
    assert torch.equal(torch.autograd.grad(ours.sum(), logps)[0], torch.autograd.grad(plain.sum(), logps)[0])


@pytest.mark.parametrize("estimator", ["k2", "k3", "k3+", "k1+", "abs+"])
def test_c6_exact_kl_falls_at_every_step(estimator):
    """SGD on the expected KL term alone, 30 steps of .5 -> the exact KL falls at each, from .158 to below 1e-3 of it."""
    z, q = torch.tensor(Z, requires_grad=True), torch.tensor(REF).softmax(-1)
    history = []
    for _ in range(31):
        p = z.detach().double().softmax(-1)
        history.append((p * (p.log() - q.double().log())).sum().item())
        (gradient,) = torch.autograd.grad(expected_kl_loss(z, estimator), z)
        z = (z - 0.5 * gradient).detach().requires_grad_()
    assert all(later < earlier for earlier, later in zip(history, history[1:], strict=False))
    assert history[0] == pytest.approx(KL, abs=1e-6)
    assert history[-1] < 1e-3 * KL


def test_c6_k1_alone_does_not_move():
    """k1 in the loss: its expected gradient is 0, so SGD stays where it is."""
    z = torch.tensor(Z, requires_grad=True)
    assert difference(torch.autograd.grad(expected_kl_loss(z, "k1"), z)[0] + 1, torch.ones(3)) < 1e-7


def test_c8_groups_without_spread_in_the_kl():
    """Group with zero reward spread (A=0), beta .1, d=[1,-1] -> KL gradient kept; with kl_mask the group has none."""
    batch = {
        "logps": torch.tensor([[-1.0], [-2.0], [-1.0]]),
        "ref_logps": torch.tensor([[-2.0], [-1.0], [-1.5]]),
        "advantages": torch.zeros(3),
        "mask": torch.ones(3, 1, dtype=torch.bool),
    }
    spec = LossSpec(beta=0.1)
    out, gradient = run(batch, spec)
    slopes = [0.1 / 3 * (1 - math.exp(-d)) for d in (1.0, -1.0, 0.5)]
    assert gradient.squeeze().tolist() == pytest.approx(slopes, rel=1e-5)
    assert out.terms["kl"].item() == pytest.approx(0.1 / 3 * (0.367879 + 0.718282 + 0.106531), rel=1e-5)
    for kl_mask in (torch.tensor([[False], [False], [True]]), torch.tensor([[False], [False], [True]]).expand(3, 1).clone()):
        out, gradient = run(batch | {"kl_mask": kl_mask}, spec)
        assert gradient.squeeze().tolist() == pytest.approx([0.0, 0.0, slopes[2]], rel=1e-5)
        assert out.terms["kl"].item() == pytest.approx(0.1 / 3 * 0.106531, rel=1e-5)
        assert out.stats["kl"].item() == pytest.approx((0.367879 + 0.718282 + 0.106531) / 3, rel=1e-5)  # still reported whole
