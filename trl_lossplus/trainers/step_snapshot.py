"""Writes a snapshot of the optimizer step under way, where the configuration asks for it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
import trl

from ..snapshots.take import snapshot_folder, take

if TYPE_CHECKING:
    from .grpo import GRPOPlusTrainer


def write_snapshot(trainer: GRPOPlusTrainer, reason: str) -> None:
    """
    What this process's loss read and gave, for `reason` step (of snapshot_steps) or nonfinite (where snapshot_on says so).

    Raises:
        OSError: the folder cannot be written.
    """
    args, step = trainer.args, trainer.state.global_step
    if reason == "step" and step not in (args.snapshot_steps or []):
        return
    if reason == "nonfinite" and args.snapshot_on != "nonfinite":
        return
    micro_batches = trainer.step_under_way
    rows = [
        (trainer.decode(p), trainer.decode(c))
        for _, micro in micro_batches
        for p, c in zip(micro["prompt_ids"], micro["completion_ids"], strict=True)
    ]
    texts = {"prompt": [prompt for prompt, _ in rows], "completion": [completion for _, completion in rows]}
    rank = trainer.accelerator.process_index
    facts = {"step": step, "rank": rank, "processes": trainer.accelerator.num_processes, "seed": args.seed}
    facts |= {"trl": trl.__version__, "torch": torch.__version__, "dtype": str(trainer.model.dtype).removeprefix("torch.")}
    ids = {token for _, micro in micro_batches for token in micro["completion_ids"].unique().tolist()}
    tokens = {token: trainer.token_text(token) for token in sorted(ids)}
    snapshot = take(trainer.used_spec, micro_batches, facts=facts, texts=texts, max_rows=args.snapshot_rows, tokens=tokens)
    root = args.snapshot_dir or str(Path(str(args.output_dir)) / "snapshots")
    snapshot.save(snapshot_folder(root, step, reason), rank)
