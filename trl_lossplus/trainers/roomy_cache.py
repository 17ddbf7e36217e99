"""A cache layer with room for the tokens to come, so that a new token is written to it and what is there is not copied."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

ROOM = 64  # tokens that are made room for at a time


class RoomyLayer(DynamicLayer):
    """
    transformers' DynamicLayer, whose `update` copies all keys and values for each new token, without that copy.

    `keys` and `values` are (B, heads, T, size) views of buffers that are longer than T. Not differentiable: for generation alone.
    """

    _buffers: tuple[Tensor, Tensor] | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Adds (B, heads, n, size) states; gives all of them, (B, heads, T + n, size)."""
        old, length = self.get_seq_length(), self.get_seq_length() + key_states.shape[-2]
        if self._buffers is None or length > self._buffers[0].shape[-2]:
            self._buffers = tuple(  # type: ignore[assignment]
                _with_room(kept, new, old, length + ROOM) for kept, new in ((self.keys, key_states), (self.values, value_states))
            )
        for buffer, new in zip(self._buffers, (key_states, value_states), strict=True):  # type: ignore[arg-type]
            buffer[:, :, old:length] = new
        return self._show(length)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps these rows, in this order."""
        length = self.get_seq_length()
        if self._buffers is None:
            return super().batch_select_indices(indices)
        self._buffers = tuple(buffer.index_select(0, indices) for buffer in self._buffers)  # type: ignore[assignment]
        self._show(length)

    def _show(self, length: int) -> tuple[Tensor, Tensor]:
        self.keys, self.values = (buffer[:, :, :length] for buffer in self._buffers)  # type: ignore[union-attr]
        return self.keys, self.values


def _with_room(kept: Tensor | None, new: Tensor, old: int, capacity: int) -> Tensor:
    rows, heads, _, size = new.shape
    buffer = torch.empty((rows, heads, capacity, size), dtype=new.dtype, device=new.device)
    if kept is not None and old:
        buffer[:, :, :old] = kept
    return buffer


def make_room(cache: Cache) -> None:
    """Puts a `RoomyLayer` with the same content in the place of each DynamicLayer of a cache; other layers stay."""
    for number, layer in enumerate(cache.layers):
        if type(layer) is DynamicLayer and layer.is_initialized:
            roomy = RoomyLayer()
            vars(roomy).update(vars(layer))
            cache.layers[number] = roomy
