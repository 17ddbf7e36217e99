"""Callbacks of ours: which there are, and what describes a run on disk."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import accelerate
import torch
import transformers
import trl
from transformers import Trainer, TrainerCallback

from .. import __version__
from .checks import active_dropout
from .loss_table import LogLossTable
from .step_snapshot import SnapshotOnFinding

if TYPE_CHECKING:
    from .grpo import GRPOPlusTrainer

DESCRIPTION = "lossplus.json"
STOPPED = "stopped.json"
STATE = "trainer_state.json"


def log_stop(trainer: GRPOPlusTrainer, counts: dict[str, float]) -> None:
    """The last line of a run that the guard stops: `counts` reach the trackers and callbacks, and the log so far lies beside them."""
    trainer.state.global_step += 1  # a step's log line comes after it was taken
    try:
        Trainer.log(trainer, {**counts})  # not TRL's, which would log what the step has gathered so far as a whole step's
    finally:
        trainer.state.global_step -= 1
    if trainer.args.should_save:
        trainer.state.save_to_json(str(Path(str(trainer.args.output_dir)) / STATE))


class DescribeRun(TrainerCallback):
    """Writes `lossplus.json` into the output folder when training starts: the loss, the settings that changed, the versions."""

    def __init__(self, trainer: GRPOPlusTrainer):
        self.trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not args.should_save:
            return
        folder = Path(args.output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        config = {
            name: value for name, value in args.to_dict().items() if isinstance(value, str | int | float | bool | list | None)
        }
        versions = {"trl_lossplus": __version__, "trl": trl.__version__, "transformers": transformers.__version__}
        versions |= {"accelerate": accelerate.__version__, "torch": torch.__version__}
        description = {
            "spec": asdict(self.trainer.spec),
            "config": config,
            "versions": versions,
            "processes": self.trainer.accelerator.num_processes,
            "optimizer_steps_per_rollout": args.optimizer_steps_per_rollout,
            "is_on_policy": args.is_on_policy,
            "active_dropout": active_dropout(self.trainer.model),
        }
        if (folder / STOPPED).exists():
            for name in (STOPPED, STATE):  # of the run that is begun again
                (folder / name).unlink(missing_ok=True)
        (folder / DESCRIPTION).write_text(json.dumps(description, indent=1))


def add_own(trainer: GRPOPlusTrainer) -> None:
    """Gives a trainer the callbacks that come with it."""
    for callback in (DescribeRun(trainer), SnapshotOnFinding(trainer), LogLossTable(trainer)):
        trainer.add_callback(callback)
