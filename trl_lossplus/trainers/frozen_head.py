"""
Log-probs of tokens under an LM head that is not trained, their gradient taken in the forward pass.

TRL's head computes its logits again in the backward pass. Where the head is frozen (LoRA) the gradient of a log-prob with respect to
the hidden state is known as soon as the logits are: it is kept, a vector a token, and the logits are never computed again. The tokens
are taken a few at a time, so that the logits that exist at once stay small.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

LOGITS_AT_ONCE, LEAST = 2**23, 64  # numbers: 32 MiB in float32; but as many tokens that a product stays efficient
TILE_TOKENS, TILE_VOCABULARY = 256, 4096  # of TRL's head where this one cannot stand in for it


def tokens_at_once(vocabulary: int) -> int:
    """How many tokens' logits exist at once."""
    return max(LEAST, LOGITS_AT_ONCE // vocabulary)


class FrozenHead(torch.autograd.Function):
    """Log-probs (n,) with a gradient for the hidden states alone, and entropies (n,) without any."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, targets: Tensor, logits_of: Callable[[Tensor], tuple[Tensor, Tensor | None]], weight: Tensor,
        factor: float, entropy: bool,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """
        Args:
            hidden: (n, H). targets: (n,).
            logits_of: of (m, H), the scaled and capped logits (m, V) in float32, and the derivative of the cap (m, V), or None for 1.
            weight: (V, H) in the type that the product is computed in.
            factor: the derivative of the logits by the product, without the cap.
        """
        gradient = torch.empty(hidden.shape, dtype=torch.float32, device=hidden.device) if ctx.needs_input_grad[0] else None
        logps = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
        entropies = torch.empty_like(logps) if entropy else None
        for first in range(0, len(hidden), tokens_at_once(len(weight))):
            here = slice(first, first + tokens_at_once(len(weight)))
            logits, slope = logits_of(hidden[here])
            target = targets[here].unsqueeze(1)
            largest = logits.amax(1, keepdim=True)
            powers = (logits - largest).exp_()  # probabilities times their sum
            total = powers.sum(1, keepdim=True)
            log_total = largest + total.log()
            logps[here] = (logits.gather(1, target) - log_total).squeeze(1)
            if entropies is not None:
                entropies[here] = log_total.squeeze(1) - torch.linalg.vecdot(powers, logits) / total.squeeze(1)
            if gradient is not None:
                up = weight[targets[here]].float()
                if slope is not None:
                    up, powers = up * slope.gather(1, target), powers.mul_(slope)
                gradient[here] = (up - (powers.to(weight.dtype) @ weight).float() / total) * factor
        if gradient is not None:
            ctx.save_for_backward(gradient)
        ctx.dtype = hidden.dtype
        if entropies is not None:
            ctx.mark_non_differentiable(entropies)
        ctx.set_materialize_grads(False)
        return logps, entropies

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Any, ...]:
        """(n,) gradients of the log-probs to (n, H)."""
        none = (None,) * 5
        return (None if grad is None else (ctx.saved_tensors[0] * grad.unsqueeze(1)).to(ctx.dtype), *none)


def apply(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperature: float,
    softcap: float | None,
    logit_scale: float,
    entropy: bool,
) -> tuple[Tensor, Tensor | None]:
    """
    Log-probs (n,) and entropies (n,) of `targets` (n,) from hidden states (n, H) under a frozen head of (V, H).

    Computed in the type of autocast, or of the hidden states, and in float32 from the logits on, as TRL's head does.
    """
    device = hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
    weight = weight.detach().to(dtype)

    def logits_of(states: Tensor) -> tuple[Tensor, Tensor | None]:
        product = states.to(dtype) @ weight.t()
        product = (product if bias is None else product.add_(bias.detach().to(dtype))).float()
        product = product if logit_scale == 1 else product.mul_(logit_scale)
        if softcap is None:
            return product if temperature == 1 else product.div_(temperature), None
        bent = torch.tanh(product / softcap)
        return softcap * bent / temperature, 1 - bent * bent

    with torch.autocast(device, enabled=False):
        return FrozenHead.apply(hidden, targets, logits_of, weight, logit_scale / temperature, entropy)
