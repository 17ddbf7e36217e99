"""KL estimators: values, gradients and names, away from the cases."""

import pytest
import torch
from helpers import difference

from trl_lossplus import GRPOPlusConfig, LossBatch, LossPlusError, LossSpec, compute_loss, estimate_kl, register_kl_estimator
from trl_lossplus.catalog import listing
from trl_lossplus.explain import explain
from trl_lossplus.functional.kl import KL_ALIASES, KL_ESTIMATORS, KL_FORMULAS, canonical_kl, kl_names

GRID = torch.cat([-torch.logspace(-3, 1.2, 40), torch.logspace(-3, 1.2, 40)]).double()
SLOPES = {
    "k1": lambda d: torch.ones_like(d),
    "k2": lambda d: d,
    "k3": lambda d: 1 - torch.exp(-d),
    "abs": torch.sign,
}


@pytest.mark.parametrize("name", kl_names())
def test_value_and_slope(name):
    """Every accepted name: the value of its estimator; its slope, or k2's (which is d) for the `+` forms."""
    plain = KL_ALIASES.get(name.rstrip("+"), name.rstrip("+"))
    d = GRID.float()[None].requires_grad_()
    kl = estimate_kl(name, d - 1, torch.full_like(d, -1.0))
    exact = {"k1": GRID, "k2": GRID**2 / 2, "k3": torch.expm1(-GRID) + GRID, "abs": GRID.abs()}[plain]
    assert (kl[0] - exact).abs().max() < 1e-6 * exact.abs().max() + 1e-6
    slope = torch.autograd.grad(kl.sum(), d)[0][0]
    assert difference(slope, SLOPES["k2" if name.endswith("+") else plain](GRID)) < 1e-5
    assert canonical_kl(canonical_kl(name)) == canonical_kl(name)


def test_signs():
    """k2, k3, abs are never negative, and all are 0 at d=0, as is every gradient but k1's."""
    d = torch.linspace(-15, 15, 3001)[None]
    for name in ("k2", "k3", "abs"):
        assert (estimate_kl(name, d, torch.zeros_like(d)) >= -1e-6).all()
    for name in KL_ESTIMATORS:
        zero = torch.zeros(1, 1, requires_grad=True)
        kl = estimate_kl(name, zero, torch.zeros(1, 1))
        assert kl.item() == 0.0
        assert torch.autograd.grad(kl.sum(), zero)[0].item() == (1.0 if name == "k1" else 0.0)


@pytest.mark.parametrize("name", ["k1", "k2", "k3", "abs", "k3+"])
def test_half_precision_is_computed_in_float32(name):
    """bf16 and fp16 log-probs: float32 out, the bits of the float32 computation on the same numbers."""
    x = -torch.rand(2, 4, 5, generator=torch.Generator().manual_seed(0))
    for dtype in (torch.bfloat16, torch.float16):
        logps, ref = x.to(dtype)
        kl = estimate_kl(name, logps, ref)
        assert kl.dtype == torch.float32
        assert torch.equal(kl, estimate_kl(name, logps.float(), ref.float()))


def test_the_reference_is_a_constant():
    """No gradient flows into the reference's log-probs."""
    logps, ref = (torch.full((2, 3), x, requires_grad=True) for x in (-1.0, -2.0))
    for name in kl_names():
        kl = estimate_kl(name, logps, ref).sum()
        assert torch.autograd.grad(kl, ref, retain_graph=True, allow_unused=True)[0] is None
        assert torch.autograd.grad(kl, logps)[0] is not None


@pytest.mark.parametrize("clamp", [1.0, 5.0, 20.0])
def test_bound(clamp):
    """Beyond d = -clamp k3 keeps the value e^clamp - clamp - 1 and has gradient 0; above it nothing changes."""
    d = torch.tensor([[-clamp - 1, -clamp * 0.99, 3 * clamp]], requires_grad=True)
    kl = estimate_kl("k3", d, torch.zeros(1, 3), log_ratio_clamp=clamp)
    right = torch.tensor([-clamp, -clamp * 0.99, 3 * clamp]).double()
    assert torch.allclose(kl[0].double(), torch.expm1(-right) + right, rtol=1e-5)
    slope = torch.autograd.grad(kl.sum(), d)[0][0]
    assert slope[0].item() == 0.0
    assert torch.allclose(slope[1:].double(), -torch.expm1(-right[1:]), rtol=1e-5)


@pytest.mark.parametrize("name", ["k2 ", "K3", "", "k3++", None, 3])
def test_unknown_names(name):
    """Anything else is a LossPlusError that lists the names."""
    with pytest.raises(LossPlusError, match="kl_estimator=.*Allowed:.*low_var_kl"):
        canonical_kl(name)


@pytest.fixture
def own():
    """A user's estimator, forgotten afterwards."""
    register_kl_estimator("test_cubic", formula="|d|^3")(lambda d, clamp: d.abs() ** 3)
    yield "test_cubic"
    for kept in (KL_ESTIMATORS, KL_FORMULAS):
        kept.pop("test_cubic")


def test_an_estimator_of_the_user_s(own):
    """Value and slope are its own (|d|^3: 8 and 12 at d = 2); with a + the slope is d. Listed and explained with its formula."""
    d = torch.tensor([[2.0]], requires_grad=True)
    for name, slope in ((own, 12.0), (f"{own}+", 2.0)):
        kl = estimate_kl(name, d, torch.zeros(1, 1))
        assert kl.item() == 8.0
        assert torch.autograd.grad(kl.sum(), d)[0].item() == slope
    spec = LossSpec(beta=0.5, kl_estimator=own)
    batch = LossBatch(d, d.detach(), torch.zeros(1), torch.ones(1, 1, dtype=torch.bool), ref_logps=torch.zeros(1, 1))
    assert compute_loss(batch, spec).terms["kl"].item() == 4.0
    assert f"{own}" in listing("kl")
    words = explain(GRPOPlusConfig(output_dir="unused", use_cpu=True, bf16=False, beta=0.1, kl_estimator=own))
    assert f"{own} = |d|^3, d = logp - ref_logp, not times the ratio; gradient: its own" in words


@pytest.mark.parametrize("name", ["k3", "mse", "test_cubic", "two words", "k9+"])
def test_names_that_are_taken_or_none(own, name):
    with pytest.raises(LossPlusError, match="kl_estimator"):
        register_kl_estimator(name)
    assert register_kl_estimator(own, replace=True)
