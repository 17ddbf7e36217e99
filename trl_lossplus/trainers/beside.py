"""What a rollout is given beside one reward a completion: token rewards, token weights, the rewards of greedy completions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from torch import Tensor

from ..registry import ADVANTAGE_ESTIMATORS
from . import token_rewards, token_weights
from .estimator_inputs import greedy_baselines
from .minibatch import MicroBatch
from .reward_functions import Parts, RewardBook
from .trl_seam import TRLSeam

if TYPE_CHECKING:
    from .grpo import GRPOPlusTrainer


class Beside:
    """
    Asked for when completions are there, used when the rollout is made.

    Attributes:
        book: where the reward functions leave what they say of single tokens.
        rewards: token rewards of the local rows, None where no function speaks of tokens.
        weights: the user's token weights, a list a local row. baselines: (P,) reward of each prompt's greedy completion.
    """

    def __init__(self, token_weight_func: token_weights.TokenWeightFunc | None):
        self.token_weight_func = token_weight_func
        self.book = RewardBook()
        self.rewards: token_rewards.TokenRewards | None = None
        self.weights: list[list[float]] | None = None
        self.baselines: Tensor | None = None

    def attach(self, trainer: GRPOPlusTrainer) -> None:
        """From here on what a reward function says of tokens is tried on the completions while the function is called."""

        def try_out(name: str, parts: list[Parts | None], ids: list[list[int]]) -> None:
            for i, said in enumerate(parts):
                if said is not None and not trainer.greedy:
                    own = [1] * len(ids[i]) if trainer.own_tokens is None else trainer.own_tokens[i]
                    token_rewards.spread(name, i, said, ids[i], own, trainer.decode)

        self.book.try_out = try_out

    def see(
        self,
        trainer: GRPOPlusTrainer,
        prompts: list[Any],
        completions: list[Any],
        ids: list[list[int]],
        columns: dict[str, list[Any]],
    ) -> None:
        """Before the rewards: the user's token weights; arguments of the seam's `see_completions`."""
        if self.token_weight_func is not None:
            self.weights = token_weights.evaluate(self.token_weight_func, prompts, completions, ids, columns, trainer.decode)

    def see_rewards(
        self, trainer: GRPOPlusTrainer, prompts: list[Any], ids: list[list[int]], columns: dict[str, list[Any]]
    ) -> None:
        """When there are rewards: those by token, and those of greedy completions; arguments of the seam's `see_rewards`."""
        given, names = self.book.take(len(ids)), trainer.reward_func_names
        self.rewards = token_rewards.table(given, ids, trainer.own_tokens, trainer.decode, names, trainer.reward_weights)
        if "reward_baselines" in ADVANTAGE_ESTIMATORS.get(trainer.spec.advantage_estimator).requires:
            self.baselines = greedy_baselines(trainer, prompts, columns)
            self.book.take(0)

    def fill(self, out: MicroBatch, group_ids: Tensor, here: slice) -> Tensor | None:
        """
        Puts token weights and the prompts' baselines into the rollout's local rows.

        Args:
            out: with `loss_mask`. group_ids: (N,) of all processes, numbers of prompts. here: the local rows among them.

        Returns:
            (N,) baselines of the rows of all processes, None where there are none.
        """
        mask = out["loss_mask"]
        if self.weights is not None:
            out["token_weights"] = token_weights.as_tensor(self.weights, mask.shape[1], mask.device)
        if self.baselines is None:
            return None
        baselines = self.baselines[group_ids]
        out["reward_baselines"] = baselines[here]
        return baselines


class SeesRewards(TRLSeam):
    """TRL's trainer that asks for what it is given beside one reward a completion."""

    beside: Beside

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.beside.attach(cast("GRPOPlusTrainer", self))

    def take_beside(self, rows: int) -> list[Any]:
        """What the reward functions said of single tokens."""
        return self.beside.book.take(rows)

    def put_beside(self, values: list[Any]) -> None:
        """The same again, of rows that were drawn earlier."""
        self.beside.book.put_back(values)

    def see_completions(self, *seen: Any) -> None:
        """Asks the user's function for token weights."""
        self.beside.see(cast("GRPOPlusTrainer", self), *seen)

    def see_rewards(self, *seen: Any) -> None:
        """Asks for rewards by token and of greedy completions."""
        self.beside.see_rewards(cast("GRPOPlusTrainer", self), *seen)
