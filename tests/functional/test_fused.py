"""Derivatives worked out by hand against PyTorch's own, at and around every edge; selection by bits; what compute_loss holds."""

import math

import pytest
import torch

from benchmarks import loss as benchmark
from trl_lossplus import LossPlusError
from trl_lossplus.functional import fused, masking

EDGES = [-30.0, -2.0, -1.0, -0.5, 0.0, 0.5, 1.0, 2.0, 30.0]


def gradients(function, *inputs):
    """Value and gradient of each function's sum, weighted by token."""
    x = inputs[0].clone().requires_grad_()
    out = function(x, *inputs[1:])
    (out * torch.linspace(-1, 2, out.numel()).view(out.shape)).sum().backward()
    return out.detach(), x.grad


@pytest.mark.parametrize("bound", [0.7, 20.0])
def test_bounded_exp(bound):
    d = torch.tensor([EDGES])
    ours = gradients(lambda x: fused.bounded_exp(x, bound), d)
    theirs = gradients(lambda x: x.clamp(-bound, bound).exp(), d)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("bound", [0.7, 20.0])
def test_k3(bound):
    """At d = 1: e^-1 + 1 - 1 = .3679, derivative 1 - e^-1 = .6321."""
    d = torch.tensor([EDGES])

    def plain(x):
        low = x.clamp(min=-bound)
        return torch.exp(-low) + low - 1

    ours, theirs = gradients(lambda x: fused.k3(x, bound), d), gradients(plain, d)
    assert torch.equal(ours[0], theirs[0])
    torch.testing.assert_close(ours[1], theirs[1], rtol=1e-6, atol=0)
    assert ours[0][0, 6].item() == pytest.approx(math.exp(-1))


@pytest.mark.parametrize("pessimistic", [True, False])
@pytest.mark.parametrize("shape", ["token", "row", "sequence ratio"])
def test_clipped_surrogate(pessimistic, shape):
    """Ratios below, at, within and above the range, advantages of either sign and 0, by token or row; a ratio a row too."""
    ratio = torch.tensor([[0.5, 0.8, 0.9, 1.0, 1.1, 1.2, 1.5]]).repeat(3, 1)
    advantages = torch.tensor([[2.0], [-3.0], [0.0]])
    if shape == "token":
        advantages = advantages.expand(3, 7).contiguous()
    if shape == "sequence ratio":
        ratio, advantages = ratio[:, :1].clone(), advantages.expand(3, 7).contiguous()
    pick = torch.minimum if pessimistic else torch.maximum
    theirs = gradients(lambda r: -pick(r * advantages, r.clamp(0.8, 1.2) * advantages), ratio)
    ours = gradients(lambda r: fused.clipped_surrogate(r, advantages, 0.8, 1.2, pessimistic=pessimistic), ratio)
    assert torch.equal(ours[0], theirs[0])
    within = (ratio != 0.8) & (ratio != 1.2)  # on an edge itself PyTorch takes half of both sides
    torch.testing.assert_close(ours[1][within], theirs[1][within], rtol=1e-6, atol=1e-7)


def test_a_second_derivative_is_refused():
    x = torch.tensor([[0.5]], requires_grad=True)
    for value in (fused.k3(x, 20.0), fused.clipped_surrogate(x, torch.ones(1, 1), 0.8, 1.2)):
        with pytest.raises(LossPlusError, match="create_graph=True"):
            torch.autograd.grad(value.sum(), x, create_graph=True)


def test_selection_by_bits_is_where():
    """NaN and infinity at masked places, a mask changed in place, another shape, and the gradient."""
    mask = torch.tensor([[True, False, True]])
    x = torch.tensor([[1.0, float("nan"), float("inf")]], requires_grad=True)
    out = masking.select(x, mask)
    assert out.tolist() == [[1.0, 0.0, float("inf")]]
    out[0, 0].backward()
    assert x.grad.tolist() == [[1.0, 0.0, 0.0]]
    assert masking.count(mask).item() == 2
    mask[0, 0] = False
    assert masking.select(x, mask).tolist() == [[0.0, 0.0, float("inf")]]
    assert (masking.count(mask).item(), masking.nonempty(mask).tolist()) == (1, [True])
    assert masking.select(torch.ones(1, 1), mask).tolist() == [[0.0, 0.0, 1.0]]
    assert masking.select(mask, ~mask).tolist() == [[False, False, False]]


def test_the_buffers_that_a_loss_holds():
    """Beyond its inputs, of (64, 512) float32, forward and backward: no more than this, and the plain expression 9 without statistics."""
    torch.set_num_threads(1)
    given = benchmark.tensors(64, 512)
    forms = benchmark.forms(given["mask"])
    assert benchmark.buffers(forms["ours"], given) < 11.1
    assert benchmark.buffers(forms["plain"], given) == pytest.approx(9, abs=0.1)


def test_the_forms_that_are_compared_are_one_loss():
    given = benchmark.tensors(4, 32)
    forms = benchmark.forms(given["mask"])
    ours = forms["ours"](given).loss
    gradient, given["logps"].grad = given["logps"].grad, None
    assert forms["plain"](given).item() == pytest.approx(ours.item(), rel=1e-5)
    torch.testing.assert_close(given["logps"].grad, gradient, rtol=1e-5, atol=1e-8)
