"""
What a resumed run needs beyond transformers' checkpoint: the rollout in use, how far it is used, and the order of the prompts.

transformers restores weights, optimizer, scheduler, random states and the place in the pass over the dataset. TRL keeps the rollout
that is being used, and the count that says which part of it is next, in memory; and its sampler draws the order of each pass after
that of the pass before. So each process writes its part of what is in memory beside the checkpoint's other files.
"""

from __future__ import annotations

import logging
import math
import os
import pickle
from collections.abc import Sequence, Set
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError
from transformers.trainer import TRAINER_STATE_NAME

from ..diagnostics.probes import StepStatistics
from ..functional.aggregation import Window
from ..functional.errors import LossPlusError
from ..kl_control import KLController
from ..spec import LossSpec
from .beside import SeesRewards
from .critic import kind_in
from .exchange import Exchange
from .failures import told_once
from .files import broken, broken_tensors, read_json
from .kl_state import load_controller, save_controller, starting_coef
from .packing import Packing
from .reference import ReferenceAdapter
from .resample import Resampler
from .resume_fields import ANEW, FILES, changes, made_under, refuse, told
from .segment_attention import Segment
from .step_guard import StepGuard

logger = logging.getLogger(__name__)

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
    step_statistics: StepStatistics  # of training
    kl_controller: KLController
    kl_factor = 1.0  # the KL coefficient in use over the configured one, fixed at each rollout
    resampler: Resampler | None
    reference_adapter: ReferenceAdapter | None
    critic_kind: str | None = None

    @property
    def stateful(self) -> dict[str, Stateful]:
        """What keeps a state from step to step, beside what TRL holds."""
        parts: dict[str, Stateful] = {"guard": self.guard, "probes": self.step_statistics}
        if self.resampler is not None:
            parts["resampler"] = self.resampler
        return parts | ({"kl_controller": self.kl_controller} if self.spec.kl_controller == "adaptive" else {})

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """As transformers. Raises LossPlusError for another kind of critic, or one where none is trained, and for a file cut off."""
        with told_once(self.accelerator.process_index):
            refuse_critic(resume_from_checkpoint, self.critic_kind)
            try:
                super()._load_from_checkpoint(resume_from_checkpoint, model)
            except SafetensorError as error:
                raise broken_tensors(Path(resume_from_checkpoint), error) from None
            except RuntimeError as error:  # torch's, of all weights that do not fit
                unfit = [line.strip() for line in str(error).splitlines() if "size mismatch for" in line]
                if not unfit:
                    raise
                raise broken(Path(resume_from_checkpoint), unfit[0].rstrip(".")) from None

    def save_plus_state(self, checkpoint: str) -> None:
        """
        Writes the controller's state beside the checkpoint's other files.

        In the middle of a rollout's use it is the coefficient of that rollout, for a run that makes and measures it again.
        """
        in_use = starting_coef(self.spec) * self.kl_factor if self.mid_rollout else self.kl_controller.coef
        save_controller(checkpoint, self.kl_controller, in_use, starting_coef(self.spec))
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
        if "kl_controller" not in load(self, checkpoint):
            load_controller(checkpoint, self.kl_controller)


def refuse_critic(checkpoint: str, kind: str | None) -> None:
    """Raises LossPlusError where a checkpoint's critic is not of the kind that is trained, None where none is."""
    found = kind_in(Path(checkpoint) / "critic")
    if found == kind:
        return
    holds = "holds no critic" if found is None else f"holds a critic of kind {found!r}"
    asked = (
        f"critic is {kind!r}" if kind is not None else "GRPOPlusTrainer trains none: take PPOPlusTrainer, or its policy as model"
    )
    raise LossPlusError(f"resume_from_checkpoint={checkpoint!r} {holds}, and {asked}.")


def path_of(checkpoint: str, process: int) -> Path:
    """The file of one process."""
    return Path(checkpoint, FILES.replace("*", str(process)))


def step_of(checkpoint: str) -> int | None:
    """The optimizer step at which a checkpoint was taken, None where it does not say."""
    path = Path(checkpoint, TRAINER_STATE_NAME)
    return read_json(path).get("global_step") if path.exists() else None


def save(trainer: Resumes, checkpoint: str) -> None:
    """Writes this process's part: its share of the rollout where that serves more steps, and a few kilobytes."""
    held = trainer.held()
    state = {
        "step": trainer.state.global_step,
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


def load(trainer: Resumes, checkpoint: str) -> Set[str]:
    """
    Puts back what `save` wrote, on every process or on none, and the sampler to the pass that the checkpoint is in.

    A warning says what will not be as it was: another order of prompts, another loss for the rest of the rollout, a rollout made anew.

    Returns:
        The names among `stateful` that were put back.

    Raises:
        LossPlusError: a file that cannot be read, or is of another step; inside a rollout, another shape of rollouts than now, or files that some processes
            have and others have not.
    """
    passes, micro_batches = place(trainer)
    for _ in range(passes):
        next(iter(trainer.prompt_sampler), None)  # draws the order of a pass that is over
    accelerator = trainer.accelerator
    path = path_of(checkpoint, accelerator.process_index)
    state, fault = read(path, accelerator.device)
    at = step_of(checkpoint)
    if state is not None and at is not None and state.get("step", at) != at:
        fault = f"{path} is of step {state['step']}, and the checkpoint of step {at}"
    exchange = Exchange(accelerator.gather, accelerator.num_processes, accelerator.device)
    everyone = exchange((fault, None if state is None else state["made_under"]))
    with told_once(accelerator.process_index):
        goes_on = compare(trainer, checkpoint, everyone, micro_batches)
    if state is None or not goes_on:
        trainer.hold_none(micro_batches)
        return set()
    trainer.hold(state["held"])
    trainer.kl_factor = factor_in_use(trainer.spec, state)
    restored = trainer.stateful.keys() & state["parts"].keys()
    for name in restored:
        trainer.stateful[name].load_state_dict(state["parts"][name])
    return restored


def factor_in_use(spec: LossSpec, state: dict[str, Any]) -> float:
    """The KL coefficient of the rollout in use over the configured one: under adaptive control another start does not scale it."""
    factor, start = float(state["kl_factor"]), starting_coef(spec)
    in_use = state.get("kl_coef", start * factor)
    adaptive = "adaptive" in (spec.kl_controller, state["made_under"]["loss"].get("kl_controller"))
    return in_use / start if adaptive and in_use != start * factor else factor


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
        everyone: of each process, why its file cannot be used, and what it was made under (None where there is none).
        micro_batches: taken before the checkpoint.

    Raises:
        LossPlusError: see `load`.
    """
    faults = [fault for fault, _ in everyone if fault is not None]
    found = [told for _, told in everyone if told is not None]
    if faults:
        raise LossPlusError(f"{faults[0]}. Take another checkpoint, or {ANEW}.")
    now, say = made_under(trainer), logger.warning if trainer.accelerator.is_main_process else logger.debug
    was: dict[str, Any] = found[0] if found else {"inside": micro_batches % trainer.micro_batches_per_generation != 0, **now}
    changed = changes(was, now)
    left_out = was["inside"] and trainer.args.ignore_data_skip
    if found and was["inside"] and not left_out:
        missing = f"{FILES} of {len(everyone)} processes (here are {len(found)})" if len(found) < len(everyone) else None
        refuse(checkpoint, changed, missing)
    goes_on = len(found) == len(everyone) and not changed["shape"] and not left_out
    for sentence in told(checkpoint, was, now, changed, goes_on=goes_on, adapts_entropy=trainer.use_adaptive_entropy):
        say("%s", sentence)
    if left_out:
        say("%s was taken inside a rollout; with ignore_data_skip=True a new one is begun.", checkpoint)
        return False
    if was["inside"] and not found:
        say(
            "%s was taken inside a rollout and has no %s (an older version's checkpoint, or TRL's): the rollout is made anew from the same "
            "prompts, so the run does not go on as it would have.",
            checkpoint,
            FILES,
        )
    if trainer.prompt_sampler is None and (trainer.state.epoch or 0.0) >= 1.0:
        say(
            "train_dataset is streamed, and %s is from its pass number %d: transformers cannot find the place in a later pass, so the "
            "prompts come from the beginning of a pass again.",
            checkpoint,
            int(trainer.state.epoch or 0) + 1,
        )
    if others := [*changed["shape"].values(), *changed["order"].values()]:
        say("The prompts do not come in the order of the run that wrote %s: %s.", checkpoint, "; ".join(others))
    return goes_on
