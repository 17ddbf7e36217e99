"""
Where values stand in a critic's forward pass, and what it leaves out: checkpoints that save no memory.

The critic's forward pass is the last before the backward pass, which begins with the critic's last layer. Recomputing that
layer would make again what was thrown away a moment before, at the same peak; so it keeps what it saved. No number changes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from .minibatch import MicroBatch
from .packing import Packing


def values_at_tokens(values: Tensor, prompt_length: int) -> Tensor:
    """
    From values at every position to one a completion token, and one after the last.

    Args:
        values: (B, P + C).

    Returns:
        (B, C + 1): column t is the value of the state before token t, read at position P - 1 + t; the last column that of the
        state after the last token.
    """
    return values[:, prompt_length - 1 :]


def at_tokens(values: Tensor, rows: MicroBatch) -> Tensor:
    """Values (b, t + 1) as `values_at_tokens`, from those at every position of the rows: (b, p + c) padded, (1, N) packed."""
    packing: Packing | None = rows.get("packing")
    return values_at_tokens(values, rows["prompt_ids"].shape[1]) if packing is None else packing.at_tokens(values)


def whole(rows: MicroBatch) -> tuple[Tensor, Tensor]:
    """Token ids and attention mask of prompt and completion: (B, P + C) each."""
    ids = torch.cat([rows["prompt_ids"], rows["completion_ids"]], 1)
    return ids, torch.cat([rows["prompt_mask"], rows["completion_mask"]], 1)


def checkpointed_layers(model: nn.Module) -> list[GradientCheckpointingLayer]:
    """The layers that gradient checkpointing recomputes one by one, in order."""
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


@contextmanager
def keeping(layers: Sequence[GradientCheckpointingLayer]) -> Iterator[None]:
    """While it is open, these layers keep what they save for the backward pass, whatever gradient checkpointing says."""
    before = [layer.gradient_checkpointing for layer in layers]
    for layer in layers:
        layer.gradient_checkpointing = False
    try:
        yield
    finally:
        for layer, on in zip(layers, before, strict=True):
            layer.gradient_checkpointing = on
