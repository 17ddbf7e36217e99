"""
Functions of a (B, T) tensor, token by token, whose derivative is worked out by hand: on a CPU PyTorch's own for clamp and minimum, through
torch.where, take most of a loss's time. They are differentiated once; a second time raises.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import hardtanh

from .errors import LossPlusError

threshold_backward = torch.ops.aten.threshold_backward  # its first argument where the second is over the third, else 0


TINY = torch.finfo(torch.float32).tiny


def _once() -> None:
    if torch.is_grad_enabled():  # so it is in a backward pass with create_graph alone
        raise LossPlusError("create_graph=True: k3 and the clipped objective are differentiated once only.")


def bounded_exp(d: Tensor, bound: float) -> Tensor:
    """exp(clip(d, -bound, bound)), whose gradient is 0 beyond the bound."""
    return hardtanh(d, -bound, bound).exp()


class _K3(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, d: Tensor, bound: float) -> Tensor:
        value = d.clamp(min=-bound)
        power = value.neg().exp_()
        value.add_(power).sub_(1)
        if ctx.needs_input_grad[0]:
            ctx.save_for_backward(threshold_backward.grad_input(power.neg_().add_(1), d, -bound, grad_input=power))
        return value

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        _once()
        return ctx.saved_tensors[0] * grads[0], None


def k3(d: Tensor, bound: float) -> Tensor:
    """exp(-d) + d - 1, d bounded below by -bound, beyond which the gradient is 0."""
    return _K3.apply(d, bound)


class _Surrogate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ratio: Tensor, advantages: Tensor, low: float, high: float, pessimistic: bool) -> Tensor:
        free, clipped = ratio * advantages, ratio.clamp(low, high) * advantages
        pick, behind = (torch.minimum, clipped - free) if pessimistic else (torch.maximum, free - clipped)
        if ctx.needs_input_grad[0]:
            ctx.save_for_backward(threshold_backward(-advantages.expand_as(behind), behind, -TINY))
        ctx.shape = ratio.shape
        return pick(free, clipped, out=free).neg_()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        _once()
        return (ctx.saved_tensors[0] * grads[0]).sum_to_size(ctx.shape), None, None, None, None


def clipped_surrogate(ratio: Tensor, advantages: Tensor, low: float, high: float, *, pessimistic: bool = True) -> Tensor:
    """-min(r A, clip(r, low, high) A), or with max where not `pessimistic`; `advantages` are constants."""
    return _Surrogate.apply(ratio, advantages, low, high, pessimistic)
