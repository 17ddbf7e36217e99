"""Writes a snapshot of an optimizer step, where the configuration asks for it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import trl
from transformers import TrainerCallback

from ..diagnostics.callback import LossDoctorCallback
from ..diagnostics.doctor import line
from ..diagnostics.rules import Finding
from ..snapshots.take import snapshot_folder, take

if TYPE_CHECKING:
    from .grpo import GRPOPlusTrainer


MOST = 8  # snapshots on findings in a run


def write_snapshot(trainer: GRPOPlusTrainer, reason: str, **facts: Any) -> None:
    """
    What this process's loss read and gave, for `reason` step (of snapshot_steps), nonfinite or finding (where snapshot_on says so).

    It is the step under way, or between two steps the last one. `facts` are kept in it.

    Raises:
        OSError: the folder cannot be written.
    """
    args, micro_batches = trainer.args, trainer.step_under_way
    step = trainer.state.global_step - trainer.guard.stopped  # in the log line of a stop it counts the step under way
    if reason == "step" and step not in (args.snapshot_steps or []):
        return
    if reason != "step" and reason not in (args.snapshot_on or []):
        return
    if not micro_batches:
        step, micro_batches = step - 1, trainer.last_step
    rows = [
        (trainer.decode(p), trainer.decode(c))
        for _, micro in micro_batches
        for p, c in zip(micro["prompt_ids"], micro["completion_ids"], strict=True)
    ]
    texts = {"prompt": [prompt for prompt, _ in rows], "completion": [completion for _, completion in rows]}
    rank = trainer.accelerator.process_index
    facts |= {"step": step, "rank": rank, "processes": trainer.accelerator.num_processes, "seed": args.seed}
    facts |= {"trl": trl.__version__, "torch": torch.__version__, "dtype": str(trainer.model.dtype).removeprefix("torch.")}
    facts |= {"reward_weights": trainer.reward_weights.tolist(), "rollout_rows": args.generation_batch_size}
    ids = {token for _, micro in micro_batches for token in micro["completion_ids"].unique().tolist()}
    tokens = {token: trainer.token_text(token) for token in sorted(ids)}
    snapshot = take(trainer.used_spec, micro_batches, facts=facts, texts=texts, max_rows=args.snapshot_rows, tokens=tokens)
    root = args.snapshot_dir or str(Path(str(args.output_dir)) / "snapshots")
    snapshot.save(snapshot_folder(root, step, reason), rank)


class SnapshotOnFinding(TrainerCallback):
    """
    Writes a snapshot when a doctor finds something new, for snapshot_on=finding.

    Every process judges the same logged numbers, so all of them write their part of the same step without a word to each other. The
    trainer's own `LossDoctorCallback`s are listened to; where there is none, one is added.
    """

    def __init__(self, trainer: GRPOPlusTrainer):
        self.trainer = trainer
        self._seen: set[str] = set()
        self._written = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Listens to the doctors."""
        if "finding" not in (args.snapshot_on or []):
            return
        doctors = [one for one in self.trainer.callback_handler.callbacks if isinstance(one, LossDoctorCallback)]
        if not doctors:
            doctors = [LossDoctorCallback()]
            self.trainer.add_callback(doctors[0])
        for doctor in doctors:
            doctor.on_findings = self._write

    def _write(self, findings: list[Finding]) -> None:
        new = [finding for finding in findings if finding.rule.id not in self._seen]
        self._seen |= {finding.rule.id for finding in new}
        if new and self._written < MOST:
            self._written += 1
            write_snapshot(self.trainer, "finding", findings=[line(finding) for finding in new])
