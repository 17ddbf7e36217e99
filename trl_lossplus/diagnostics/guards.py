"""
The first value that is not finite: which tensor, where, with what around it, and what it suggests.

Looked for before the backward pass of an optimizer step's last micro-batch, on every process alike, so that no process takes the step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..functional.masking import select
from ..loss import LossOutput

# In the order of the data flow: the first bad one is named.
ORDER = ("logps", "old_logps", "ref_logps", "ratio", "advantages", "values", "loss")


class NonFiniteError(RuntimeError):
    """A tensor of the loss holds a value that is not finite."""


@dataclass(frozen=True)
class BadValue:
    """Where a value that is not finite was found. `row` and `token` count within the micro-batch of the process."""

    tensor: str
    rank: int
    micro_batch: int
    row: int
    token: int
    value: float
    around: list[float]
    cause: str
    prompt: str = ""
    completion: str = ""

    def sentence(self, step: int) -> str:
        """One line for the user; `step` as the log counts, from 1."""
        neighbours = ", ".join(f"{x:.4g}" for x in self.around)
        text = f" Prompt {self.prompt[-120:]!r}, completion {self.completion[:120]!r}." if self.prompt or self.completion else ""
        return (
            f"step {step}: {self.tensor} is {self.value} on rank {self.rank}, micro-batch {self.micro_batch}, row {self.row}, token "
            f"{self.token} (around it: {neighbours}). Likely: {self.cause}.{text}"
        )


def tensors_of(output: LossOutput) -> dict[str, Tensor]:
    """The tensors that are checked, in `ORDER`, on valid tokens (0 elsewhere)."""
    batch = output.inputs
    assert batch is not None
    found: dict[str, Tensor | None] = {
        "logps": batch.logps,
        "old_logps": batch.old_logps,
        "ref_logps": batch.ref_logps,
        "ratio": output.per_token["ratio"],
        "advantages": batch.advantages,
        "values": batch.values,
        "loss": output.loss.detach(),
    }
    return {name: found[name] for name in ORDER if found[name] is not None}  # type: ignore[misc]


def bad_flags(output: LossOutput) -> Tensor:
    """(len(ORDER),) float: 1 where a tensor of this micro-batch holds a value that is not finite. Waits for no device."""
    found = tensors_of(output)
    zero = torch.zeros((), device=output.loss.device)
    sums = torch.stack([found[name].sum() if name in found else zero for name in ORDER])
    return (~torch.isfinite(sums)).float()


def bad_counts(outputs: Sequence[LossOutput]) -> dict[str, int]:
    """How many values of each tensor that there is are not finite, over a process's micro-batches (of `loss`: how many of these)."""
    counts: dict[str, int] = {}
    for output in outputs:
        for name, tensor in tensors_of(output).items():
            counts[name] = counts.get(name, 0) + int((~torch.isfinite(tensor)).sum())
    return counts


def _cause(name: str, value: float, output: LossOutput, row: int, token: int) -> str:
    batch = output.inputs
    assert batch is not None
    if not bool(batch.mask.any()):
        return "a micro-batch without a valid token"
    if name.endswith("logps"):
        if value == -math.inf:
            return "a token of probability 0: sampled outside of top_k, top_p or min_p of the scoring pass, or logits of -inf"
        return "the model gave NaN: weights broken by an earlier step, or a range that float16 or bfloat16 cannot hold"
    if name == "ratio":
        return "the log ratio overflowed: old and new log-probs belong to different tokens or weights"
    if name == "advantages":
        return "a reward that is not a number, or a division by the spread of a group that has hardly any"
    if name == "values":
        return "the critic diverged: lower critic_learning_rate, or clip with cliprange_value"
    return "a term overflowed although what it read is finite: an unbounded objective, or a very large advantage"


def locate(output: LossOutput, rank: int, micro_batch: int) -> BadValue | None:
    """The first bad value of one micro-batch, or None. Waits for the device: called after something was found."""
    batch = output.inputs
    assert batch is not None
    for name, tensor in tensors_of(output).items():
        if tensor.dim() == 0:
            tensor = output.per_token["policy"]
            if bool(torch.isfinite(output.loss)):
                return None
        wide = select(tensor.expand(batch.mask.shape), batch.mask)
        bad = (~torch.isfinite(wide)).nonzero()
        if len(bad):
            row, token = bad[0].tolist()
            value = float(wide[row, token])
            around = wide[row, max(token - 2, 0) : token + 3].tolist()
            return BadValue(name, rank, micro_batch, row, token, value, around, _cause(name, value, output, row, token))
    if bool(torch.isfinite(output.loss)):
        return None
    return BadValue("loss", rank, micro_batch, 0, 0, float(output.loss), [], _cause("loss", math.nan, output, 0, 0))


def first_bad(outputs: Sequence[LossOutput], rank: int) -> BadValue | None:
    """The first bad value of a process's micro-batches: by tensor in `ORDER`, then by micro-batch."""
    found = [bad for i, output in enumerate(outputs) if (bad := locate(output, rank, i)) is not None]
    return min(found, key=lambda bad: (ORDER.index(bad.tensor), bad.micro_batch), default=None)


def agree(everyone: Sequence[BadValue | None]) -> BadValue | None:
    """The first bad value over all processes: by tensor in `ORDER`, then by rank; None where no process found one."""
    present = [bad for bad in everyone if bad is not None]
    return min(present, key=lambda bad: (ORDER.index(bad.tensor), bad.rank), default=None)
