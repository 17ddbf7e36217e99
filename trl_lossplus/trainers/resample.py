"""
zero_std_groups=resample: groups of a rollout whose rewards are all equal give way to groups of further prompts.

DAPO's dynamic sampling (arXiv 2503.14476, section 3.2). Every decision is taken from the gathered rewards, so all processes take the
same one and call the generation equally often, wherever the flat groups lie. Groups are told by their place in the whole rollout,
and a group that is taken over goes to the processes that hold its place: it may lie across two of them.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from tqdm import tqdm

from ..estimators import weighted_sum
from ..functional.errors import LossPlusError
from .drawn import DrawnRow
from .exchange import Exchange
from .files import broken, read_json
from .minibatch import MicroBatch
from .rollout import group_statistics

if TYPE_CHECKING:
    from .grpo import GRPOPlusTrainer

logger = logging.getLogger(__name__)

FILE = "resample.json"
FRUITLESS = 3  # rollouts in a row without any group with spread, after which training ends


@dataclass
class Draw:
    """One draw: the local rows, and of all processes the rewards (N, K), their sums (N,), and by group whether it is flat."""

    rows: list[DrawnRow]
    rewards: Tensor
    totals: Tensor
    flat: list[bool]


def fill(flat: Sequence[Sequence[bool]]) -> list[tuple[int, int]]:
    """
    Which group each place of the rollout gets, as (draw, number of the group in it).

    Args:
        flat: by draw, whether each of its groups is flat. Draw 0 holds the rollout's own prompts, one group a place.

    Returns:
        A place whose own group is flat gets the first group with spread of the further draws that no place before it got; its own
        where there is none left.
    """
    spare = ((i, j) for i, draw in enumerate(flat) if i > 0 for j, is_flat in enumerate(draw) if not is_flat)
    return [next(spare, (0, j)) if is_flat else (0, j) for j, is_flat in enumerate(flat[0])]


def left(flat: Sequence[Sequence[bool]]) -> int:
    """How many places of the rollout still have a flat group after these draws (see `fill`)."""
    return sum(flat[i][j] for i, j in fill(flat))


def draw_size(flat: Sequence[Sequence[bool]], unit: int) -> int:
    """
    How many prompts the next draw takes: as many as fill the missing places if the share of groups with spread stays what it was.

    At most a rollout, and a multiple of `unit`, the number of groups that processes can share evenly.
    """
    groups = [is_flat for draw in flat for is_flat in draw]
    good = groups.count(False)
    wanted = math.ceil(left(flat) * len(groups) / good) if good else len(flat[0])
    return min(math.ceil(wanted / unit) * unit, len(flat[0]))


class PromptStream:
    """
    Further prompts without end: the dataset's rows in an order drawn from the seed, another order each time they are used up.

    Args:
        dataset: with a length, and rows by number. seed: of the run; the order is not the main dataloader's.
    """

    def __init__(self, dataset: Any, seed: int):
        self.dataset, self.seed = dataset, seed
        self._round, self._order = -1, torch.empty(0, dtype=torch.long)

    def row(self, position: int) -> dict[str, Any]:
        """The row at a position of the stream, a copy."""
        number, place = divmod(position, len(self.dataset))
        if number != self._round:
            generator = torch.Generator().manual_seed((self.seed + 1) * 1_000_003 + number)
            self._round, self._order = number, torch.randperm(len(self.dataset), generator=generator)
        return dict(self.dataset[int(self._order[place])])


class Resampler:
    """
    Makes the training rollouts of a trainer.

    Raises:
        LossPlusError: at construction for a dataset without a length or with images, and for environments; in training as
            `resample_exhausted` says.
    """

    def __init__(self, trainer: GRPOPlusTrainer, dataset: Any, environments: bool):
        if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
            raise LossPlusError(
                f"zero_std_groups='resample' draws further prompts by number, and train_dataset ({type(dataset).__name__}) has no "
                "length: load it without streaming, or set zero_std_groups to keep or drop."
            )
        images = {"image", "images"} & set(getattr(dataset, "column_names", None) or ())
        if images or environments:
            what = f"prompts with images (column {min(images)!r})" if images else "environment_factory"
            raise LossPlusError(f"zero_std_groups='resample' does not take {what}. Set zero_std_groups to keep or drop.")
        self.trainer, self.args = trainer, trainer.args
        accelerator = trainer.accelerator
        self._exchange = Exchange(accelerator.gather, accelerator.num_processes, accelerator.device)
        self.stream = PromptStream(dataset, trainer.args.seed)
        self.position, self.before = 0, 0  # in the stream: after the last rollout, and before it
        self.fruitless = 0

    # The rollout.

    def collect(self, examples: list[dict[str, Any]]) -> tuple[MicroBatch, Tensor]:
        """The rollout of the local examples, its flat groups replaced as far as the draws go, and the gathered (N, K) rewards."""
        columns = list(examples[0])
        draws = [self._draw(examples, measured=True)]
        self.before, drawn = self.position, 0
        while len(draws) <= self.args.resample_max_tries and left(flat := [draw.flat for draw in draws]):
            size = draw_size(flat, self._unit)
            self._say(flat, size)
            prompts = [self.stream.row(self.position + drawn + i) for i in range(size)]
            drawn += size
            local = self._local([{name: prompt[name] for name in columns} for prompt in prompts])
            draws.append(self._draw(local, measured=False))
        sources = fill([draw.flat for draw in draws])
        self.position += self._used(draws, sources, drawn)
        self._log(draws, sources)
        self._judge(draws, sources)
        return self.trainer.rollout_of(*self._kept(draws, sources))

    @property
    def _unit(self) -> int:
        """The smallest number of groups that all processes can share evenly."""
        world = self.trainer.accelerator.num_processes
        return world // math.gcd(world, self.trainer.num_generations)

    def _local(self, prompts: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """This process's rows of the draw of these prompts, each `num_generations` times."""
        accelerator, group = self.trainer.accelerator, self.trainer.num_generations
        rows = len(prompts) * group // accelerator.num_processes
        first = accelerator.process_index * rows
        return [dict(prompts[i // group]) for i in range(first, first + rows)]

    def _draw(self, examples: list[dict[str, Any]], *, measured: bool) -> Draw:
        rows, rewards = self.trainer.draw(examples, measured=measured)
        here = rewards.cpu()  # decided on the CPU, where equal rewards give equal decisions on all processes
        total = weighted_sum(here, self.trainer.reward_weights.to(here))
        group_ids = torch.arange(len(here)) // self.trainer.num_generations
        flat = group_statistics(self.trainer.spec, here, total, group_ids)[2]
        return Draw(rows, rewards, total, flat[:: self.trainer.num_generations].tolist())

    @staticmethod
    def _used(draws: list[Draw], sources: list[tuple[int, int]], drawn: int) -> int:
        """How far the stream moves on: prompts drawn beyond the last one that was needed come again."""
        if any(draws[i].flat[j] for i, j in sources):
            return drawn
        last, group = max(sources)
        return sum(len(draw.flat) for draw in draws[1:last]) + group + 1 if last else 0

    def _kept(self, draws: list[Draw], sources: list[tuple[int, int]]) -> tuple[list[DrawnRow], Tensor]:
        """The local rows of the finished rollout, and the gathered rewards of all."""
        accelerator, group = self.trainer.accelerator, self.trainer.num_generations
        rows = len(draws[0].rows)
        first = accelerator.process_index * rows
        whole = [(i, j * group + k) for i, j in sources for k in range(group)]  # (draw, row in it) of every row of the rollout
        kept: dict[int, DrawnRow] = {}
        for place, (i, row) in enumerate(whole):
            owner, local = divmod(row, len(draws[i].rows))
            if owner == accelerator.process_index:
                kept[place] = draws[i].rows[local]
        if any(i for i, _ in sources):
            mine = range(first, first + rows)
            for part in self._exchange({place: row for place, row in kept.items() if place not in mine}):
                kept |= part
        starts = [0]
        for draw in draws:
            starts.append(starts[-1] + len(draw.rewards))
        rewards = torch.cat([draw.rewards for draw in draws])
        chosen = torch.tensor([starts[i] + row for i, row in whole], device=rewards.device)
        return [kept[place] for place in range(first, first + rows)], rewards[chosen]

    # What is said of it.

    def _say(self, flat: list[list[bool]], size: int) -> None:
        """One line before each further draw, above the progress bar."""
        if self.trainer.accelerator.is_main_process:
            places = len(flat[0])
            tqdm.write(
                f"resample: step {self.trainer.state.global_step + 1}, {places - left(flat)} of {places} groups have spread; "
                f"further draw {len(flat)} of at most {self.args.resample_max_tries}: {size} prompts"
            )

    def _log(self, draws: list[Draw], sources: list[tuple[int, int]]) -> None:
        group = self.trainer.num_generations
        flat = [is_flat for draw in draws for is_flat in draw.flat]
        kept = torch.cat([draws[i].totals[j * group : (j + 1) * group] for i, j in sources])
        values = {
            "draws": float(len(draws)),
            "prompts": float(len(flat)),
            "frac_flat_all": sum(flat) / len(flat),
            "reward_all": torch.cat([draw.totals for draw in draws]).nanmean().item(),
            "reward_kept": kept.nanmean().item(),
        }
        for name, value in values.items():
            self.trainer.log_value(f"resample/{name}", value)

    def _judge(self, draws: list[Draw], sources: list[tuple[int, int]]) -> None:
        """Where flat groups are left: goes on, ends training, or raises LossPlusError, alike on every process."""
        missing, places, args = left([draw.flat for draw in draws]), len(sources), self.args
        found = sum(not is_flat for draw in draws for is_flat in draw.flat)
        self.fruitless = 0 if found else self.fruitless + 1
        if not missing:
            return
        prompts, mean = sum(len(draw.flat) for draw in draws), torch.cat([draw.totals for draw in draws]).nanmean().item()
        text = (
            f"zero_std_groups='resample', step {self.trainer.state.global_step + 1}: {missing} of {places} groups of the rollout have no "
            f"spread after {len(draws)} draws ({prompts} prompts, of which {found} had spread; mean reward {mean:.4g})."
        )
        remedy = (
            "Take prompts that are neither always nor never solved, look at the reward functions, raise num_generations "
            f"({self.trainer.num_generations}) or temperature ({args.temperature:g})"
        )
        if args.resample_exhausted == "raise":
            raise LossPlusError(
                f"{text} {remedy} or resample_max_tries ({args.resample_max_tries}); or set resample_exhausted='keep'."
            )
        if self.fruitless >= FRUITLESS:
            self.trainer.control.should_training_stop = True
            text = f"{text} In {self.fruitless} rollouts in a row no group had any, so training ends after this step."
        else:
            text = f"{text} They stay, as with zero_std_groups='keep'."
        if self.trainer.accelerator.is_main_process:
            logger.warning("%s %s.", text, remedy)

    # The stream's position in checkpoints.

    def state_dict(self) -> dict[str, int]:
        """{"position", "before", "fruitless"}."""
        return {"position": self.position, "before": self.before, "fruitless": self.fruitless}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Takes what `state_dict` gave."""
        self.position, self.before, self.fruitless = state["position"], state["before"], state["fruitless"]

    def save(self, checkpoint: str) -> None:
        """Writes the position; in the middle of a rollout's use that from before it, for a run that makes the rollout again."""
        position = self.before if self.trainer.mid_rollout else self.position
        Path(checkpoint, FILE).write_text(json.dumps({"position": position}))

    def load(self, checkpoint: str) -> None:
        """Restores the position; without its file the stream starts anew, with a warning. Raises LossPlusError for a broken one."""
        path = Path(checkpoint, FILE)
        if path.exists():
            self.position = _position(path)
        else:
            logger.warning("%s has no %s: the stream of further prompts starts anew.", checkpoint, FILE)


def _position(path: Path) -> int:
    found = read_json(path).get("position")
    if not isinstance(found, int):
        raise broken(path, "it holds no position")
    return found
