"""
What a resumed run needs beyond transformers' checkpoint: the rollout in use, how far it is used, and the order of the prompts.

transformers restores weights, optimizer, scheduler, random states and the place in the pass over the dataset. TRL keeps the rollout
that is being used, and the count that says which part of it is next, in memory; and its sampler draws the order of each pass after
that of the pass before. So each process writes its part of what is in memory beside the checkpoint's other files.
"""

from __future__ import annotations

import json
import logging
import math
import os
import pickle
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch

from ..functional.aggregation import Window
from ..functional.errors import LossPlusError
from ..kl_control import KLController
from ..spec import LossSpec
from .beside import SeesRewards
from .exchange import Exchange
from .failures import told_once
from .kl_state import load_controller, save_controller, starting_coef
from .packing import Packing
from .reference import ReferenceAdapter
from .resample import Resampler
from .segment_attention import Segment
from .step_guard import StepGuard

logger = logging.getLogger(__name__)

FILES = "lossplus_state_*.pt"
# What decides how a rollout is cut; in which form its parts lie in memory, and of which temperature its log-probs are; and which
# prompts come when.
SHAPE = (
    "per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation", "num_iterations", "num_generations",
)  # fmt: skip
FORM = ("skip_still_rows", "max_tokens_per_microbatch", "temperature")
ORDER = ("seed", "shuffle_dataset")
# Where an adaptive KL coefficient starts: not read again once it has moved.
STARTS = ("beta", "kl_reward_coef")
# What may stand in a file beside tensors and plain values: it is read without running code that it may hold.
CLASSES: list[Any] = [Window, Packing, Segment]


class Stateful(Protocol):
    """What keeps a state from step to step."""

    def state_dict(self) -> dict[str, Any]:
        """The state as plain values."""

    def load_state_dict(self, state: Any) -> None:
        """Takes it back."""


class Resumes(SeesRewards):
    """TRL's trainer whose checkpoints hold what it keeps in memory."""

    spec: LossSpec
    guard: StepGuard
    kl_controller: KLController
    kl_factor = 1.0  # the KL coefficient in use over the configured one, fixed at each rollout
    resampler: Resampler | None
    reference_adapter: ReferenceAdapter | None

    @property
    def stateful(self) -> dict[str, Stateful]:
        """What keeps a state from step to step, beside what TRL holds."""
        parts: dict[str, Stateful] = {"guard": self.guard}
        if self.resampler is not None:
            parts["resampler"] = self.resampler
        return parts | ({"kl_controller": self.kl_controller} if self.spec.kl_controller == "adaptive" else {})

    def save_plus_state(self, checkpoint: str) -> None:
        """
        Writes the controller's state beside the checkpoint's other files.

        In the middle of a rollout's use it is the coefficient of that rollout, for a run that makes and measures it again.
        """
        in_use = starting_coef(self.spec) * self.kl_factor if self.mid_rollout else self.kl_controller.coef
        save_controller(checkpoint, self.kl_controller, in_use)
        if self.resampler is not None:
            self.resampler.save(checkpoint)

    def save_process_state(self, checkpoint: str) -> None:
        """Writes this process's part of the state in memory, the rollout in use with it."""
        save(self, checkpoint)

    def load_plus_state(self, checkpoint: str) -> None:
        """
        Restores what makes the run go on as if it had not been interrupted; a warning says where that cannot be.

        Raises:
            LossPlusError: see `load`.
        """
        for part in (self.reference_adapter, self.resampler):
            if part is not None:
                part.load(checkpoint)
        load_controller(checkpoint, self.kl_controller)
        load(self, checkpoint)


def path_of(checkpoint: str, process: int) -> Path:
    """The file of one process."""
    return Path(checkpoint, FILES.replace("*", str(process)))


def save(trainer: Resumes, checkpoint: str) -> None:
    """Writes this process's part: its share of the rollout where that serves more steps, and a few kilobytes."""
    held = trainer.held()
    state = {
        "made_under": made_under(trainer) | {"inside": held["rollout"] is not None},
        "held": held,
        "kl_factor": trainer.kl_factor,
        "kl_coef": starting_coef(trainer.spec) * trainer.kl_factor,
        "parts": {name: part.state_dict() for name, part in trainer.stateful.items()},
    }
    path = path_of(checkpoint, trainer.accelerator.process_index)
    unfinished = path.with_suffix(".part")
    torch.save(state, unfinished)
    os.replace(unfinished, path)


def load(trainer: Resumes, checkpoint: str) -> None:
    """
    Puts back what `save` wrote, on every process or on none, and the sampler to the pass that the checkpoint is in.

    A warning says what will not be as it was: another order of prompts, another loss for the rest of the rollout, a rollout made anew.

    Raises:
        LossPlusError: a file that cannot be read; inside a rollout, another shape of rollouts than now, or files that some processes
            have and others have not.
    """
    passes, micro_batches = place(trainer)
    for _ in range(passes):
        next(iter(trainer.prompt_sampler), None)  # draws the order of a pass that is over
    accelerator = trainer.accelerator
    state, fault = read(path_of(checkpoint, accelerator.process_index), accelerator.device)
    exchange = Exchange(accelerator.gather, accelerator.num_processes, accelerator.device)
    everyone = exchange((fault, None if state is None else state["made_under"]))
    with told_once(accelerator.process_index):
        goes_on = compare(trainer, checkpoint, everyone, micro_batches)
    if state is None or not goes_on:
        trainer.hold_none(micro_batches)
        return
    trainer.hold(state["held"])
    # An adaptive coefficient is the controller's, whatever it started from: a changed start must not scale it.
    adaptive = trainer.spec.kl_controller == "adaptive" and "kl_coef" in state
    trainer.kl_factor = state["kl_coef"] / starting_coef(trainer.spec) if adaptive else state["kl_factor"]
    for name, part in trainer.stateful.items():
        if name in state["parts"]:
            part.load_state_dict(state["parts"][name])


def read(path: Path, device: torch.device) -> tuple[dict[str, Any] | None, str | None]:
    """What a file holds, its tensors on the kind of device they were on; (None, None) for no file, (None, why) for a broken one."""
    if not path.exists():
        return None, None
    try:
        with torch.serialization.safe_globals(CLASSES):
            state = torch.load(path, map_location=partial(_placed, device), weights_only=True)
    except (OSError, RuntimeError, EOFError, KeyError, pickle.UnpicklingError) as error:
        return None, f"{path} cannot be read ({type(error).__name__}: {(str(error).splitlines() or ['it is empty'])[0]})"
    if not isinstance(state, dict) or not {"made_under", "held", "kl_factor", "parts"} <= state.keys():
        return None, f"{path} cannot be read (it is not a state that trl-lossplus wrote)"
    return state, None


def _placed(device: torch.device, storage: Any, at: str) -> Any:
    return storage if at == "cpu" else storage.to(device=device)


def made_under(trainer: Resumes) -> dict[str, dict[str, Any]]:
    """What the state in memory depends on: fields of the configuration and facts of the run, by kind and name."""
    args, packed = trainer.args, trainer.packed
    layout = "padded" if packed is None else "shared_prefix" if packed.share_prefix else "packed"
    return {
        "shape": {name: getattr(args, name) for name in SHAPE} | {"processes": trainer.accelerator.num_processes},
        "form": {name: getattr(args, name) for name in FORM}
        | {"microbatch_layout": layout, "policy_loss": trainer.spec.policy_loss},
        "order": {name: getattr(args, name) for name in ORDER} | {"rows of train_dataset": trainer.rows_of_prompts},
        "loss": json.loads(json.dumps(asdict(trainer.spec), default=str)),
    }


def place(trainer: Resumes) -> tuple[int, int]:
    """Passes over the dataset that are done, and micro-batches taken in all, as transformers counts them for the loaded state."""
    steps, per_step = trainer.state.global_step, trainer.args.gradient_accumulation_steps
    if trainer.prompt_sampler is None:
        return 0, steps * per_step
    in_pass = len(trainer.prompt_sampler) // int(trainer.args.generation_batch_size or 1)
    passes, rest = divmod(steps, max(math.ceil(in_pass / per_step), 1))
    return passes, passes * in_pass + rest * per_step


def compare(
    trainer: Resumes,
    checkpoint: str,
    everyone: Sequence[tuple[str | None, dict[str, Any] | None]],
    micro_batches: int,
) -> bool:
    """
    Whether the state can be put back.

    Args:
        everyone: of each process, why its file cannot be read, and what it was made under (None where there is none).
        micro_batches: taken before the checkpoint.

    Raises:
        LossPlusError: see `load`.
    """
    faults = [fault for fault, _ in everyone if fault is not None]
    found = [told for _, told in everyone if told is not None]
    anew = f"or delete {FILES} there to have the rollout made anew"
    if faults:
        raise LossPlusError(f"{faults[0]}. Take another checkpoint, {anew}.")
    now, say = made_under(trainer), logger.warning if trainer.accelerator.is_main_process else logger.debug
    was: dict[str, Any] = found[0] if found else {"inside": micro_batches % trainer.micro_batches_per_generation != 0, **now}
    changed = {kind: differences(was[kind], now[kind]) for kind in now}
    if was["inside"] and trainer.args.ignore_data_skip:
        say("%s was taken inside a rollout; with ignore_data_skip=True a new one is begun.", checkpoint)
        return False
    if found and was["inside"]:
        other = changed["shape"] + changed["form"]
        if len(found) < len(everyone) and not other:
            other = [f"{FILES} of {len(everyone)} processes (here are {len(found)})"]
        if other:
            raise LossPlusError(
                f"{checkpoint} was taken inside a rollout, and what is left of it cannot be used: {'; '.join(other)}. Set that as it "
                f"was, take a checkpoint between two rollouts, {anew}."
            )
        if changed["loss"]:
            say(
                "%s was taken inside a rollout, and the loss was another: %s. The loss of the next step is the new one; what is stored of "
                "the rollout (rewards, advantages, returns, old and reference log-probs) stays until the next rollout.",
                checkpoint,
                "; ".join(changed["loss"]),
            )
    if found and was["loss"].get("kl_controller") == now["loss"]["kl_controller"] == "adaptive":
        _say_starts(checkpoint, changed["loss"], say)
    if was["inside"] and not found:
        say(
            "%s was taken inside a rollout and has no %s (an older version's checkpoint, or TRL's): the rollout is made anew from the same "
            "prompts, so the run does not go on as it would have.",
            checkpoint,
            FILES,
        )
    if trainer.prompt_sampler is None and (trainer.state.epoch or 0.0) >= 1.0:
        _say_streamed(checkpoint, int(trainer.state.epoch or 0), say)
    if others := changed["shape"] + changed["order"]:
        say("The prompts do not come in the order of the run that wrote %s: %s.", checkpoint, "; ".join(others))
    return len(found) == len(everyone) and not changed["shape"]


def _say_starts(checkpoint: str, changed: list[str], say: Callable[..., None]) -> None:
    """Where an adaptive coefficient would have started is not read again."""
    if starts := [line for line in changed if line.split(" ", 1)[0] in STARTS]:
        say(
            "%s is not used: the adaptive controller goes on with the coefficient of %s. To start anew, begin a new run from its model.",
            "; ".join(starts),
            checkpoint,
        )


def _say_streamed(checkpoint: str, passes: int, say: Callable[..., None]) -> None:
    """A stream has no place to go back to after its first pass."""
    say(
        "train_dataset is streamed, and %s is from its pass number %d: transformers cannot find the place in a later pass, so the "
        "prompts come from the beginning of a pass again.",
        checkpoint,
        passes + 1,
    )


def differences(was: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Names whose values differ, with both."""
    return [f"{name} was {was.get(name)!r} and is {value!r}" for name, value in now.items() if was.get(name) != value]
