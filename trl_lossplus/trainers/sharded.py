"""Reading and writing whole parameters that ZeRO-3 or FSDP2 has split over processes. Every process must call these alike."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from .files import broken


def in_zero3(parameter: nn.Parameter) -> bool:
    """Whether ZeRO-3 holds the parameter, split over processes."""
    return hasattr(parameter, "ds_id")


@contextmanager
def modified(parameters: Sequence[nn.Parameter]) -> Iterator[bool]:
    """
    ZeRO-3's parameters whole inside, what the first process wrote into them split again after; the others as they are.

    Gives whether this process is to write: under ZeRO-3 the first alone, else each.
    """
    split = [parameter for parameter in parameters if in_zero3(parameter)]
    if not split:
        yield True
        return
    import deepspeed

    with deepspeed.zero.GatheredParameters(split, modifier_rank=0):
        yield torch.distributed.get_rank() == 0


def whole(parameter: nn.Parameter) -> Tensor:
    """A copy of the whole parameter, on every process."""
    if isinstance(parameter, DTensor):
        return parameter.full_tensor().detach().clone()
    if not in_zero3(parameter):
        return parameter.detach().clone()
    import deepspeed

    with deepspeed.zero.GatheredParameters([parameter]):
        return parameter.detach().clone()


def write(parameter: nn.Parameter, value: Tensor) -> None:
    """Sets a parameter to a whole tensor, equal on every process."""
    with modified([parameter]) as mine, torch.no_grad():
        if isinstance(parameter, DTensor):
            local: Any = value.to(parameter.device, parameter.dtype)
            parameter.copy_(distribute_tensor(local, parameter.device_mesh, parameter.placements))
        elif mine:
            parameter.copy_(value)


def restore(parameter: nn.Parameter, saved: Mapping[str, Tensor], name: str, path: Path) -> None:
    """`write` of a tensor of a file. Raises LossPlusError, on every process alike, where the file has none of that name and shape."""
    if name not in saved:
        raise broken(path, f"it holds no {name}")
    shape = tuple(getattr(parameter, "ds_shape", parameter.shape))  # ZeRO-3's: of the whole
    if tuple(saved[name].shape) != shape:
        raise broken(path, f"its {name} has the shape {tuple(saved[name].shape)}, and {shape} is needed")
    write(parameter, saved[name])
