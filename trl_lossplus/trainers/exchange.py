"""Small facts from every process to every process, in one collective."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_LENGTH = 8  # bytes that say how long what follows is


class Exchange:
    """
    Gives every process one object of each, in the order of their numbers.

    One collective: objects are pickled into a buffer of bytes, whose size all processes know. Where one does not fit, all see by how
    much, and go again with a larger buffer, which stays: after a run's first steps that is over. One process gathers nothing.

    Args:
        gather: stacks a tensor over processes along dim 0. size: bytes of the first buffer.
    """

    def __init__(self, gather: Callable[[Tensor], Tensor], processes: int, device: torch.device, size: int = 4096):
        self.gather, self.processes, self.device, self.size = gather, processes, device, size

    def __call__(self, mine: Any) -> list[Any]:
        """Must be called by every process, as any collective."""
        if self.processes == 1:
            return [mine]
        data = pickle.dumps(mine)
        while True:
            packed = (len(data).to_bytes(_LENGTH, "little") + data[: self.size]).ljust(_LENGTH + self.size, b"\0")
            row = torch.frombuffer(bytearray(packed), dtype=torch.uint8).to(self.device)
            rows = [part.tobytes() for part in self.gather(row.unsqueeze(0)).cpu().numpy()]
            lengths = [int.from_bytes(part[:_LENGTH], "little") for part in rows]
            if max(lengths) <= self.size:
                return [pickle.loads(part[_LENGTH : _LENGTH + n]) for part, n in zip(rows, lengths, strict=True)]
            self.size = max(lengths) * 5 // 4
