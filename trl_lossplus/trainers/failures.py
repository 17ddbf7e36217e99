"""What ends a run ends it on every process, and is told by one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import torch
from accelerate import Accelerator
from torch import Tensor

from ..diagnostics.guards import NonFiniteError
from ..functional.errors import LossPlusError

# Stands in the gathered rewards for those of a process that could not give any. No reward: a sum with it would overflow.
FAILED = torch.finfo(torch.float32).min


class StoppedElsewhere(RuntimeError):
    """Another process ends the run, and says why."""


def told_elsewhere(error: BaseException) -> bool:
    """Whether another process tells what this error is about."""
    return isinstance(error, StoppedElsewhere) or getattr(error, "told_elsewhere", False)


def told_here(error: BaseException) -> bool:
    """Whether all other processes know that this one tells what its error is about."""
    return getattr(error, "told_here", False)


@contextmanager
def told_once(process: int) -> Iterator[None]:
    """
    For what every process finds alike: the first raises it, the others an error of the same type that only points there.

    Args:
        process: this one's number.
    """
    try:
        yield
    except (LossPlusError, NonFiniteError) as error:
        if process == 0 or told_elsewhere(error):
            raise
        short = type(error)("the run ends on every process; process 0 says why.")
        short.told_elsewhere = True  # type: ignore[union-attr]
        raise short from None


def rewards_of_all(own: Callable[[], Tensor], accelerator: Accelerator, shape: tuple[int, int]) -> Tensor:
    """
    What `own` returns: every process's rewards, gathered as the last thing it does.

    An error before that reaches all through the same gathering, so that no process waits for one that is gone.

    Args:
        shape: of one process's rewards.

    Raises:
        Exception: what was raised here, on the first process on which anything was; StoppedElsewhere on every other.
    """
    failure = None
    try:
        rewards = own()
    except Exception as error:
        failure = error
        rewards = accelerator.gather(torch.full(shape, FAILED, device=accelerator.device))
    failed = (rewards == FAILED).all(1).nonzero().flatten()
    if not len(failed):
        return rewards
    first = int(failed[0]) // shape[0]
    if first == accelerator.process_index and failure is not None:
        with suppress(AttributeError):  # some types of errors take no attribute
            failure.told_here = True  # type: ignore[attr-defined]
        raise failure
    raise StoppedElsewhere(f"process {first} ends the run while rewards are computed, and says why.") from None
