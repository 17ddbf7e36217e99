"""What a trainer read and computed, written down as plain lists while it trains: rollouts and micro-batches, in order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from ..batch import LossBatch
from ..trainers import rollout as rollout_module
from .sampler import Completion, Sampler

Lists = Any  # nested lists of floats, as Tensor.tolist() gives


@dataclass
class Draw:
    """One call of the rollout function: its completions, and their rewards, a list a completion."""

    completions: list[Completion]
    rewards: Lists


@dataclass
class Rollout:
    """
    One rollout: the tensors that TRL and the trainer put into it, and what was computed on the way.

    draws: its one call of the rollout function, or several where flat groups were replaced.
    """

    number: int
    tensors: dict[str, Lists]
    rewards: Lists
    logits: Lists
    ref_logits: Lists | None
    draws: list[Draw]
    greedy: dict[str, list[float]] = field(default_factory=dict)  # rewards of each prompt's greedy completion, by function
    steps: dict[str, Lists] = field(default_factory=dict)  # kl, total_rewards, sequence_advantages, token_rewards, ...


@dataclass
class Micro:
    """One micro-batch: what the loss read (`batch`, cleaned), and what it gave."""

    rollout: int
    rows: list[int]
    inputs: dict[str, Lists]
    window: dict[str, Lists]
    logits: Lists
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    batch: dict[str, Lists] = field(default_factory=dict)
    spec: dict[str, Any] = field(default_factory=dict)
    per_token: dict[str, Lists] = field(default_factory=dict)
    terms: dict[str, float] = field(default_factory=dict)
    statistics: dict[str, tuple[float, float]] = field(default_factory=dict)
    total: float = float("nan")
    loss: float = float("nan")
    warming_up: bool = False


def listed(value: Any) -> Any:
    """A tensor as (nested) lists of floats, whatever its type; the rest unchanged."""
    if not isinstance(value, Tensor):
        return value
    value = value.detach().cpu()
    return (value if value.dtype in (torch.bool, torch.int64) else value.double()).tolist()


class Recorder:
    """
    Watches a trainer. `events` holds its rollouts and micro-batches in the order of time.

    Args:
        trainer: not yet trained. sampler: its rollout function.
    """

    def __init__(self, trainer: Any, sampler: Sampler):
        self.trainer, self.sampler = trainer, sampler
        self.events: list[Rollout | Micro] = []
        self.rollouts = 0
        self._steps: dict[str, Lists] = {}
        self._micro: Micro | None = None
        self.kept: dict[int, list[Completion]] = {}  # by rollout, once it was gone through by hand
        self._draws: list[Draw] = []
        self._greedy: dict[str, list[float]] = {}
        for name in ("draw", "score_greedily", "make_rollout", "token_advantages", "micro_loss", "combine"):
            setattr(trainer, name, getattr(self, f"_{name}")(getattr(trainer, name)))

    @contextmanager
    def watching(self) -> Iterator[None]:
        """While it is open, the parts of the rollout that are functions are written down too."""
        names = ("rollout_kl", "score_rollout")
        before = {name: getattr(rollout_module, name) for name in names}
        try:
            for name in names:
                setattr(rollout_module, name, getattr(self, f"_{name}")(before[name]))
            yield
        finally:
            for name in names:
                setattr(rollout_module, name, before[name])

    # The rollout.

    def _draw(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        def draw(*args: Any, **kwargs: Any) -> Any:
            rows, rewards = inner(*args, **kwargs)
            self._draws.append(Draw(self.sampler.calls[-1], listed(rewards)))
            return rows, rewards

        return draw

    def _rollout_kl(self, inner: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def rollout_kl(*args: Any, **kwargs: Any) -> Tensor:
            kl = inner(*args, **kwargs)
            self._steps["kl"] = listed(kl)
            return kl

        return rollout_kl

    def _score_rollout(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        def score_rollout(*args: Any, **kwargs: Any) -> Any:
            scored = inner(*args, **kwargs)
            self._steps["total_rewards"] = listed(scored.rewards)
            self._steps["sequence_advantages"] = listed(scored.advantages)
            return scored

        return score_rollout

    def _token_advantages(self, inner: Callable[..., None]) -> Callable[..., None]:
        def token_advantages(out: Any, rewards: Tensor, mask: Tensor, **options: Any) -> None:
            self._steps["token_rewards"] = listed(rewards)
            inner(out, rewards, mask, **options)
            self._steps["token_advantages"] = listed(out["advantages"])
            self._steps["returns"] = listed(out["returns"])

        return token_advantages

    def _score_greedily(self, inner: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def score_greedily(prompts: list[str], rows: Any) -> Tensor:
            rewards = inner(prompts, rows)
            self._greedy = dict(zip(prompts, listed(rewards), strict=True))
            return rewards

        return score_greedily

    def _make_rollout(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        def make_rollout(out: Any, rewards: Tensor) -> Any:
            logits = self._logits(self.trainer.model, out)
            reference = self._reference_logits(out)
            self._steps = {}
            result = inner(out, rewards)
            tensors = {name: listed(value) for name, value in result.items() if isinstance(value, Tensor)}
            draws = self._draws or [Draw(self.sampler.calls[-1], listed(rewards))]
            self._draws = []
            self.events.append(
                Rollout(self.rollouts, tensors, listed(rewards), logits, reference, draws, self._greedy, self._steps)
            )
            self.rollouts += 1
            return result

        return make_rollout

    # The loss.

    def _micro_loss(self, inner: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def micro_loss(model: Any, inputs: Any) -> Tensor:
            window = {item.name: listed(getattr(inputs["window"], item.name)) for item in fields(inputs["window"])}
            kept = {name: listed(value) for name, value in inputs.items() if isinstance(value, Tensor)}
            rows = [int(x) for x in inputs["row"]]
            self._micro = micro = Micro(self.rollouts - 1, rows, kept, window, self._logits(self.trainer.model, inputs))
            loss = inner(model, inputs)
            micro.loss = loss.item()
            self.events.append(micro)
            return loss

        return micro_loss

    def _combine(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        def combine(batch: LossBatch, spec: Any, window: Any) -> Any:
            output = inner(batch, spec, window)
            micro, read = self._micro, output.inputs
            assert micro is not None
            micro.spec = asdict(spec)
            micro.window |= {item.name: listed(getattr(window, item.name)) for item in fields(window)}
            for item in fields(read):
                tensor = getattr(read, item.name)
                if tensor is not None:
                    micro.shapes[item.name] = tuple(tensor.shape)
                    micro.batch[item.name] = listed(tensor)
            micro.per_token = {name: listed(x) for name, x in output.per_token.items()}
            micro.terms = {name: x.item() for name, x in output.terms.items()}
            micro.statistics = {name: (s.total.item(), s.weight.item()) for name, s in output.statistics.items()}
            micro.total = output.loss.item()
            micro.warming_up = getattr(self.trainer, "in_critic_warmup", False)
            return output

        return combine

    # Logits, from which log-probs are computed by hand.

    def _logits(self, model: Any, inputs: Any) -> Lists:
        """(B, T, V) logits that predict each completion token."""
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
        mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
        with torch.no_grad():
            logits = model(input_ids=ids, attention_mask=mask).logits
        return listed(logits[:, inputs["prompt_ids"].shape[1] - 1 : -1].float())

    def _reference_logits(self, out: Any) -> Lists | None:
        """The same of the reference model; None where there is none, or it is an adapter that moves."""
        trainer = self.trainer
        if out.get("ref_per_token_logps") is None or trainer.reference_adapter is not None:
            return None
        if trainer.ref_model is not None:
            return self._logits(trainer.ref_model, out)
        with trainer.model.disable_adapter():
            return self._logits(trainer.model, out)
