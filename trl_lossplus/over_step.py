"""What an objective computes over a whole optimizer step, and the step's rows put together and taken apart again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields, replace
from typing import Any, cast

import torch
from torch import Tensor

from .batch import DeclaredView, LossBatch
from .functional.errors import LossPlusError
from .registry import POLICY_LOSSES, STEP_TENSORS
from .spec import LossSpec


def over_step(batch: LossBatch, spec: LossSpec) -> dict[str, Tensor]:
    """
    What the spec's objective computes over an optimizer step, without gradient: {} for one that computes nothing over it.

    Args:
        batch: all rows of the step, of all micro-batches and processes, cleaned.

    Raises:
        LossPlusError: the objective's `over_step` gives something else than tensors by row under names of `STEP_TENSORS`.
    """
    entry = POLICY_LOSSES.get(spec.policy_loss)
    if entry.over_step is None:
        return {}
    with torch.no_grad():
        made = entry.over_step(cast(LossBatch, DeclaredView(batch, spec.policy_loss, entry.requires)), spec)
    rows = len(batch.mask)
    for name, tensor in made.items() if isinstance(made, dict) else [("", made)]:
        if name not in STEP_TENSORS or not isinstance(tensor, Tensor) or tensor.shape[:1] != (rows,):
            what = f"{tuple(tensor.shape)}" if isinstance(tensor, Tensor) else f"a {type(tensor).__name__}"
            raise LossPlusError(
                f"policy_loss {spec.policy_loss!r}: over_step gave {name or 'no dictionary, but'} {what}; it must give a dictionary of "
                f"tensors with {rows} rows under the names {', '.join(STEP_TENSORS)}."
            )
    return made


def completed(batch: LossBatch, spec: LossSpec) -> LossBatch:
    """The batch with what its objective computes over a step, this batch being one; unchanged where that was handed to it."""
    if any(getattr(batch, name) is not None for name in STEP_TENSORS):
        return batch
    made: dict[str, Any] = over_step(batch, spec)
    return replace(batch, **made) if made else batch


def join(batches: Sequence[LossBatch], names: Iterable[str] | None = None, width: int = 1) -> LossBatch:
    """
    The rows of several batches as one, each padded on the right with masked tokens to the widest of them, or to `width`.

    Args:
        batches: all with the same tensors. names: the tensors that are taken, `logps`, `mask` and `advantages` always and `STEP_TENSORS`
            never; None: all. Tensors (B,) stay so, (B, 1) are repeated over the tokens.
    """
    width = max(width, *(batch.mask.shape[1] for batch in batches))
    wanted = {item.name for item in fields(LossBatch)} if names is None else set(names)
    joined: dict[str, Any] = {"old_logps": None}
    for name in (wanted | {"logps", "mask", "advantages"}) - set(STEP_TENSORS):
        parts = [getattr(batch, name) for batch in batches]
        if parts[0] is not None:
            joined[name] = torch.cat([_padded(part, batch.mask, width) for part, batch in zip(parts, batches, strict=True)])
    return LossBatch(**joined)


def _padded(tensor: Tensor, mask: Tensor, width: int) -> Tensor:
    return tensor if tensor.dim() == 1 else torch.nn.functional.pad(tensor.expand(mask.shape), (0, width - mask.shape[1]))


def apart(tensors: dict[str, Tensor], masks: Sequence[Tensor]) -> Iterator[dict[str, Tensor]]:
    """Rows of tensors over a step as batches with these masks (B, T), in order; those by token cut to each one's width."""
    start = 0
    for mask in masks:
        stop = start + len(mask)
        yield {
            name: x[start:stop, : mask.shape[1]] if name == "selected_tokens" else x[start:stop] for name, x in tensors.items()
        }
        start = stop
