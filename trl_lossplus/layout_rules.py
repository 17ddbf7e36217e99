"""
What keeps a micro-batch's rows from being packed, or cut by tokens.

As far as the settings tell it, it is refused when a configuration is built; of the model itself the trainer asks the same functions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from transformers.training_args import OptimizerNames
from transformers.utils.generic import is_flash_attention_requested

from .functional.errors import LossPlusError

if TYPE_CHECKING:
    from .config import GRPOPlusConfig

REPLACED, OURS = "sdpa", "lossplus_segments"  # attn_implementation: what packed rows take the place of, and as what
AUXILIARY = "the router's auxiliary loss depends on how rows are split"
IMAGES = "a vision-language model's rows carry images"
# auto takes what the model allows, and padded needs nothing.
BY_NAME = ("packed", "shared_prefix")


def has_router_loss(args: GRPOPlusConfig) -> bool:
    """Whether the settings alone say that a router's auxiliary loss is part of the loss: TRL refuses the coefficient for other models."""
    return bool(args.router_aux_loss_coef)


def is_flash_name(name: str | None) -> bool:
    """Whether an attn_implementation is some version of flash attention, a package's or a kernel's from the hub."""
    return name not in (None, REPLACED, OURS) and is_flash_attention_requested(requested_attention_implementation=name)


def attention_fault(name: str | None) -> str | None:
    """Why rows cannot be packed under an attn_implementation, or None where they can."""
    if name in (REPLACED, OURS) or is_flash_name(name):
        return None
    return f"attn_implementation is {name!r}; packed rows are computed with {REPLACED!r} or flash attention"


def layout_fault(asked: str, reason: str | None, flash: bool) -> str | None:
    """
    Why a layout cannot be had, or None where it can.

    Args:
        asked: microbatch_layout. reason: why rows cannot be packed at all, or None. flash: whether the model attends by flash attention,
            which computes no prompt once for several rows.
    """
    if reason is None and flash and asked == "shared_prefix":
        return "flash attention has no rows that share a prompt, so packed or attn_implementation='sdpa' it must be"
    return reason


def inexact(asked: str, reason: str) -> LossPlusError:
    """The error for a layout that is asked for by its name and cannot be had."""
    return LossPlusError(f"microbatch_layout={asked!r} is not exact here: {reason}. Take padded, or auto.")


def check_layout(args: GRPOPlusConfig) -> None:
    """A layout that the settings rule out, whatever the model. Raises LossPlusError."""
    asked, kwargs = args.microbatch_layout, args.model_init_kwargs
    if asked not in BY_NAME:
        return
    attention = kwargs.get("attn_implementation") if isinstance(kwargs, dict) else None
    reason = AUXILIARY if has_router_loss(args) else attention_fault(attention) if isinstance(attention, str) else None
    reason = layout_fault(asked, reason, isinstance(attention, str) and is_flash_name(attention))
    if reason is not None:
        raise inexact(asked, reason)


def check_budget(args: GRPOPlusConfig, *, auxiliary: bool, is_vision: bool = False) -> None:
    """
    A budget of tokens that is none, or beside what is taken over a whole micro-batch.

    Args:
        auxiliary: whether a router's auxiliary loss is part of the loss. is_vision: of the model.

    Raises:
        LossPlusError: names the budget and why not.
    """
    budget = args.max_tokens_per_microbatch
    if budget is None:
        return
    reason = None
    if budget < 1:
        reason = "it must be >= 1, or None"
    elif args.top_entropy_quantile < 1.0:
        reason = f"top_entropy_quantile={args.top_entropy_quantile:g} is taken over a whole micro-batch. Remove one"
    elif args.optim in (OptimizerNames.LOMO, OptimizerNames.ADALOMO):
        reason = f"optim={OptimizerNames(args.optim).value!r} updates the weights in each backward pass. Remove one"
    elif is_vision or auxiliary:
        reason = f"{IMAGES if is_vision else AUXILIARY}. Leave it unset"
    if reason is not None:
        raise LossPlusError(f"max_tokens_per_microbatch={budget}: {reason}.")
