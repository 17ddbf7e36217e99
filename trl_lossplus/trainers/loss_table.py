"""Which rows of an optimizer step have the largest and the smallest policy loss, for `loss_table_rows`."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import TrainerCallback

from ..loss import LossOutput
from .exchange import Exchange
from .minibatch import MicroBatch

if TYPE_CHECKING:
    from .grpo import GRPOPlusTrainer

FILE = "loss_table.jsonl"


def ends(table: list[dict[str, Any]], rows: int) -> list[dict[str, Any]]:
    """The `rows` first and last of a table by falling policy loss; what is not finite stands first."""
    ordered = sorted(table, key=lambda entry: -entry["policy"] if math.isfinite(entry["policy"]) else -math.inf)
    return ordered if len(ordered) <= 2 * rows else ordered[:rows] + ordered[-rows:]


def loss_table(
    step: Sequence[tuple[LossOutput, MicroBatch]], decode: Callable[[Tensor], str], rows: int = 5
) -> list[dict[str, Any]]:
    """
    The rows of an optimizer step on this process with the largest and the smallest policy loss.

    Args:
        step: what the loss gave and read, by micro-batch. rows: how many of each.

    Returns:
        One dictionary a row: the mean over its tokens of each per-token term (policy, kl, entropy, value, log_ratio, ...) and of the
        advantage, tokens, prompt, completion. Worst first. Rows without a valid token are left out.
    """
    table: list[dict[str, Any]] = []
    for output, inputs in step:
        assert output.inputs is not None
        mask = output.inputs.mask
        lengths = mask.sum(1).clamp(min=1)
        terms = {**output.per_token, "advantage": output.inputs.advantages}
        means = {name: (torch.where(mask, x.expand(mask.shape), 0).sum(1) / lengths).tolist() for name, x in terms.items()}
        for i, tokens in enumerate(mask.sum(1).tolist()):
            if tokens:
                table.append({name: mean[i] for name, mean in means.items()} | {"tokens": tokens, "_from": (inputs, i)})
    found = ends(table, rows)
    for entry in found:
        inputs, i = entry.pop("_from")
        entry |= {"prompt": decode(inputs["prompt_ids"][i]), "completion": decode(inputs["completion_ids"][i])}
    return found


class LogLossTable(TrainerCallback):
    """Adds the rows of all processes to `loss_table.jsonl` in the output folder, one row a line, at every logged step."""

    def __init__(self, trainer: GRPOPlusTrainer):
        self.trainer = trainer
        accelerator = trainer.accelerator
        self._exchange = Exchange(accelerator.gather, accelerator.num_processes, accelerator.device)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """A run that is begun again begins its table again; one that is resumed goes on with it."""
        if args.loss_table_rows and args.should_save and state.global_step == 0:
            (Path(args.output_dir) / FILE).unlink(missing_ok=True)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """One collective, on every process alike: training logs only."""
        if not args.loss_table_rows or "loss" not in (logs or {}):
            return
        everyone = self._exchange(self.trainer.loss_table(args.loss_table_rows))
        if args.should_save:
            rows = [{"step": state.global_step, "process": rank, **row} for rank, mine in enumerate(everyone) for row in mine]
            with (Path(args.output_dir) / FILE).open("a", encoding="utf-8") as file:
                for row in ends(rows, args.loss_table_rows):
                    finite = {key: None if isinstance(x, float) and not math.isfinite(x) else x for key, x in row.items()}
                    file.write(json.dumps(finite, ensure_ascii=False) + "\n")
