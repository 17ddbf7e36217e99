"""
Attention that never crosses rows, for rows that are laid one after the other without padding.

`install` gives a transformers model an attention function of ours in place of sdpa. Called with `segments` (a keyword that
transformers hands down to each layer, also when gradient checkpointing runs a layer again), it attends segment by segment;
called without, as in generation, it is the function that was there. Flash attention stays transformers' own: it is told where rows
begin and end, and runs its kernel for rows of many lengths. It has no segment that sees another one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import repeat_kv

from ..functional.errors import LossPlusError
from ..layout_rules import OURS, REPLACED, is_flash_name

_packed: ContextVar[bool] = ContextVar("packed", default=False)


class Segment(NamedTuple):
    """Tokens start..stop of the packed row; they see themselves causally, and all of the tokens prefix..prefix_stop before them."""

    start: int
    stop: int
    prefix: int
    prefix_stop: int


class UnsupportedAttention(LossPlusError):
    """A layer asks for a kind of attention that is not computed segment by segment."""


def is_flash(model: nn.Module) -> bool:
    """Whether a transformers model attends by some version of flash attention, a package's or a kernel's from the hub."""
    config: Any = model.config
    return is_flash_name(config._attn_implementation)


def by_lengths(segments: Sequence[Segment], device: torch.device) -> dict[str, Any]:
    """
    Segments as transformers' FlashAttentionKwargs.

    Raises:
        UnsupportedAttention: one of them sees another.
    """
    if any(s.prefix_stop > s.prefix for s in segments):
        raise UnsupportedAttention("flash attention has no rows that share a prompt: take microbatch_layout='packed'.")
    starts = torch.tensor([0, *(s.stop for s in segments)], dtype=torch.int32, device=device)
    longest = max(s.stop - s.start for s in segments)
    return {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts, "max_length_q": longest, "max_length_k": longest}


def _told_by_lengths(trunk: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    segments = kwargs.pop("segments", None)
    return args, kwargs if segments is None else kwargs | by_lengths(segments, kwargs["input_ids"].device)


def install(model: nn.Module) -> None:
    """
    Makes a transformers model take `segments`. Does nothing where it was done.

    Raises:
        UnsupportedAttention: the model's attention implementation is neither sdpa nor flash attention.
    """
    name = model.config._attn_implementation  # type: ignore[union-attr]
    if name == OURS:
        return
    if is_flash(model):
        trunk: Any = model.base_model
        if _told_by_lengths not in trunk._forward_pre_hooks.values():
            trunk.register_forward_pre_hook(_told_by_lengths, with_kwargs=True)
        return
    if name != REPLACED:
        raise UnsupportedAttention(f"attn_implementation={name!r}: rows are packed with {REPLACED!r} or flash attention.")
    AttentionInterface.register(OURS, _attention)
    AttentionMaskInterface.register(OURS, _mask)
    for part in model.modules():
        config: Any = getattr(part, "config", None)
        if getattr(config, "_attn_implementation", None) == name:
            config._attn_implementation = OURS


@contextmanager
def packed_rows() -> Iterator[None]:
    """Within it no attention mask is made: segments say who sees whom."""
    token = _packed.set(True)
    try:
        yield
    finally:
        _packed.reset(token)


def _mask(*args: Any, **kwargs: Any) -> Any:
    return None if _packed.get() else AttentionMaskInterface()[REPLACED](*args, **kwargs)


def _attention(module: nn.Module, *args: Any, segments: Sequence[Segment] | None = None, **kwargs: Any) -> Any:
    if segments is None:
        return AttentionInterface()[REPLACED](module, *args, **kwargs)
    query, key, value, _ = args
    return segment_attention(query, key, value, segments, **kwargs), None


def segment_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: Sequence[Segment],
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **others: Any,
) -> Tensor:
    """
    Attention of one packed row.

    Args:
        query: (1, heads, N, D).
        key: (1, key heads, N, D).
        value: (1, key heads, N, D).
        segments: they cover 0..N in order.
        scaling: factor of the products, None for 1 / sqrt(D).
        sliding_window: how far a layer sees, None for all of it.

    Returns:
        (1, N, heads, D).

    Raises:
        UnsupportedAttention: dropout, soft-capped scores, attention sinks or a position bias, or a row longer than the window.
    """
    for name in ("softcap", "s_aux", "position_bias"):
        if others.get(name) is not None:
            raise UnsupportedAttention(f"this model's attention has {name}, which packed rows do not compute.")
    if dropout:
        raise UnsupportedAttention(f"attention_dropout={dropout:g}: packed rows are computed without dropout. Set it to 0.")
    longest = max(s.stop - s.start + s.prefix_stop - s.prefix for s in segments)
    if sliding_window is not None and longest > sliding_window:
        raise UnsupportedAttention(f"a row of {longest} tokens is longer than the model's sliding window of {sliding_window}.")
    groups = query.shape[1] // key.shape[1]
    key, value = repeat_kv(key, groups), repeat_kv(value, groups)
    out = []
    for start, stop, prefix, prefix_stop in segments:
        q, k, v = query[:, :, start:stop], key[:, :, start:stop], value[:, :, start:stop]
        if prefix_stop == prefix:
            out.append(scaled_dot_product_attention(q, k, v, is_causal=stop - start > 1, scale=scaling))
            continue
        k, v = torch.cat([key[:, :, prefix:prefix_stop], k], 2), torch.cat([value[:, :, prefix:prefix_stop], v], 2)
        mask = torch.ones(stop - start, k.shape[2], dtype=torch.bool, device=q.device).tril(prefix_stop - prefix)
        out.append(scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scaling))
    return torch.cat(out, 2).transpose(1, 2)
