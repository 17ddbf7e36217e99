"""
What an objective needs of a whole optimizer step: at the step's first micro-batch the log-probs of all its rows are put together,
the objective computes over them once, on every process alike, and each micro-batch gets its rows of the result.

The log-probs come from one pass without gradient over the step's micro-batches, or from the rollout where nothing has changed since.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from ..batch import IDS, LossBatch
from ..over_step import apart, join, over_step
from ..registry import POLICY_LOSSES
from ..spec import LossSpec
from .minibatch import MicroBatch, loss_batch, parts_of

if TYPE_CHECKING:
    from .grpo import GRPOPlusTrainer

LATER = "step_micro_batches"  # key of a step's first micro-batch: those after it
WIDTH = "step_width"  # and the columns that hold every completion of all processes


def mark_steps(micro_batches: Sequence[MicroBatch], per_window: int, processes: int, spec: LossSpec, width: int) -> None:
    """
    Tells the first micro-batch of each optimizer step what the step consists of, where the objective asks for it.

    Args:
        micro_batches: one process's, trimmed, in the order of use. width: columns of the longest completion of all processes.
    """
    if POLICY_LOSSES.get(spec.policy_loss).over_step is None:
        return
    for i in range(0, len(micro_batches), per_window):
        first, *later = [part for micro in micro_batches[i : i + per_window] for part in parts_of(micro)]
        if later or processes > 1:  # else the step needs nothing from elsewhere
            first |= {LATER: later, WIDTH: width}


def take_step(trainer: GRPOPlusTrainer, inputs: MicroBatch, spec: LossSpec) -> None:
    """At a step's first micro-batch: gives all of them what the objective computes over the step (one collective)."""
    if LATER not in inputs:
        return
    micro_batches: list[MicroBatch] = [inputs, *inputs[LATER]]
    entry = POLICY_LOSSES.get(spec.policy_loss)
    logps = current_logps(trainer, micro_batches, ratio_alone="ratio_alone" in entry.traits)
    read = [replace(loss_batch(micro, spec, lp), row_ids=micro["row"]) for micro, lp in zip(micro_batches, logps, strict=True)]
    whole = gathered(once(join(read, {*entry.requires, "row_ids"}, inputs[WIDTH])), trainer.accelerator.gather)
    rows: Any = whole.row_ids
    whole = replace(whole, row_ids=step_ids(trainer, rows))
    made = over_step(whole.clean(), spec)
    places = torch.searchsorted(rows, torch.cat([micro["row"] for micro in micro_batches]))
    own = {name: tensor[places] for name, tensor in made.items()}
    for micro, part in zip(micro_batches, apart(own, [micro["loss_mask"] for micro in micro_batches]), strict=True):
        micro |= part


def step_ids(trainer: GRPOPlusTrainer, rows: Tensor) -> Tensor:
    """(B,) ids of rows by their number in the rollout: each row of each optimizer step has another."""
    return rows + trainer.state.global_step * cast(int, trainer.args.generation_batch_size)


def current_logps(trainer: GRPOPlusTrainer, micro_batches: Sequence[MicroBatch], ratio_alone: bool) -> list[Tensor]:
    """
    Log-probs (B, T) of each micro-batch under the policy as it is, without gradient: those of the rollout where no update came since.

    `ratio_alone`: where there are no old log-probs to differ from, any will do.
    """
    first, old = micro_batches[0], "old_per_token_logps"
    known = next((name for name in (old, "logps_at_rollout") if first.get(name) is not None), None)
    if "logps" in first:  # of the loss's own pass, taken already
        return [micro["logps"].detach() for micro in micro_batches]
    if known is not None and (trainer.mode == "eval" or trainer.in_first_pass):
        return [micro[known] for micro in micro_batches]
    if ratio_alone and first.get(old) is None:
        return [torch.zeros(micro["loss_mask"].shape, device=micro["loss_mask"].device) for micro in micro_batches]
    with trainer.for_rollout_pass():
        return [trainer.policy_forward(trainer.model, micro)[0] for micro in micro_batches]


def once(batch: LossBatch) -> LossBatch:
    """Each row once, as many on every process: a layout fills a micro-batch that would be empty with a row of another, masked."""
    ids: Any = batch.row_ids
    order = (2 * ids + ~batch.mask.any(1)).argsort()
    ids = ids[order]
    order = order[torch.cat([torch.ones_like(ids[:1]), ids[1:] != ids[:-1]]).bool()]
    return _rows(batch, order)


def _rows(batch: LossBatch, order: Tensor) -> LossBatch:
    given: dict[str, Any] = {item.name: getattr(batch, item.name) for item in fields(batch)}
    return replace(batch, **{name: x[order] for name, x in given.items() if x is not None})


def gathered(batch: LossBatch, gather: Callable[[Tensor], Tensor]) -> LossBatch:
    """
    The rows of all processes, ordered by `row_ids`.

    Args:
        batch: of one width on every process; ids below 2^24. gather: stacks a tensor over processes (one collective).
    """
    given: dict[str, Tensor] = {item.name: x for item in fields(batch) if (x := getattr(batch, item.name)) is not None}
    columns = [x.float().unsqueeze(-1) if x.dim() == 1 else x.float() for x in given.values()]
    table = gather(torch.cat(columns, -1))
    whole: dict[str, Any] = {"old_logps": None}
    for (name, own), part in zip(given.items(), table.split([x.shape[1] for x in columns], -1), strict=True):
        part = part.squeeze(-1) if own.dim() == 1 else part
        whole[name] = part.round().long() if name in IDS else part.to(own.dtype)
    return _rows(LossBatch(**whole), whole["row_ids"].argsort())
