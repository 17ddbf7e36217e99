"""What a recipe that ends before its time says: one line for what the user can mend, a traceback for a bug, once over all processes."""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from tqdm import tqdm

from trl_lossplus import LossPlusError
from trl_lossplus.diagnostics.guards import NonFiniteError
from trl_lossplus.trainers.failures import told_elsewhere, told_here

# Libraries whose own `raise` is about what they were given: anywhere while the trainer is built, in the trainer's files afterwards.
LIBRARIES = ("trl", "transformers", "accelerate", "peft", "datasets", "huggingface_hub")
TRAINERS = ("trl/trainer", "transformers/trainer", "transformers/integrations", "accelerate")
KINDS = (ValueError, ImportError, OSError, NotImplementedError)
# Seconds that a process waits before it speaks or goes, so that the one that knows more is heard: the launcher ends the others when one
# has gone. First the main process; then those on which something happened; last those that only heard of it.
WAIT, LAST = 10.0, 30.0
LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")


def rank() -> int:
    """This process's number, before anything is set up."""
    return int(os.environ.get("RANK", "0"))


def raised_by(error: BaseException) -> str | None:
    """Where in a library an error was raised by a `raise` of its own: "package/file.py:line"; None where it was not."""
    frames = traceback.extract_tb(error.__traceback__)
    parts = Path(frames[-1].filename).parts if frames else ()
    roots = [i for i, part in enumerate(parts) if part in ("site-packages", "dist-packages")]
    if not roots or not (frames[-1].line or "").startswith("raise"):
        return None
    return f"{'/'.join(parts[roots[-1] + 1 :])}:{frames[-1].lineno}"


@contextmanager
def refusals(where: Sequence[str]) -> Iterator[None]:
    """
    What the libraries refuse becomes a LossPlusError that says where; all else passes.

    Args:
        where: beginnings of the paths, from the package on, in which a `raise` is about what the user gave.
    """
    try:
        yield
    except LossPlusError:
        raise
    except KINDS as error:
        place = raised_by(error)
        if place is None or not place.startswith(tuple(f"{folder}/" if "/" not in folder else folder for folder in where)):
            raise
        raise LossPlusError(f"{error} ({type(error).__name__} in {place})") from error


def lost_another(error: Exception) -> bool:
    """Whether a process noticed only that another one had gone."""
    dist = torch.distributed
    return isinstance(error, dist.DistBackendError | dist.DistNetworkError) or any(words in str(error) for words in LOST)


def give_way(seconds: float) -> None:
    """Waits for the launcher to end this process, where there is more than one."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        time.sleep(seconds)


def say_why(line: str) -> None:
    """Prints to stderr, on a line of its own where a progress bar is drawn."""
    tqdm.write(line, file=sys.stderr)
    sys.stderr.flush()


def end(error: Exception) -> int:
    """
    Says what ended the run, where no other process does.

    Returns:
        The exit status: 2 for wrong input, 1 for a run that was stopped.

    Raises:
        Exception: the error itself, where it is a bug.
    """
    if told_elsewhere(error):
        give_way(LAST)
        return 1
    together = int(os.environ.get("WORLD_SIZE", "1")) > 1
    if together and lost_another(error):
        give_way(LAST)
        say_why(f"process {rank()}: another process has gone; what it printed says why.")
        return 1
    if rank() and not told_here(error):
        give_way(WAIT)
    if not isinstance(error, LossPlusError | NonFiniteError):
        raise error
    where = f" (process {rank()})" if rank() else ""
    say_why(f"error{where}: {' '.join(str(error).split())}")
    return 2 if isinstance(error, LossPlusError) else 1
