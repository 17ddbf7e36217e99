"""What a rollout stores: rewards become advantages; the KL in the reward goes in here, before any advantage."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..estimators import compute_advantages, weighted_sum
from ..functional.advantages import group_spread, reward_to_go, token_rewards
from ..functional.errors import LossPlusError
from ..functional.kl import estimate_kl
from ..functional.masking import Moments, row_moments, row_sums, select
from ..registry import ADVANTAGE_ESTIMATORS
from ..spec import LossSpec
from .normalize import sets_of_rows, whiten_rows
from .token_rewards import TokenRewards

if TYPE_CHECKING:
    from .grpo import GRPOPlusTrainer

logger = logging.getLogger(__name__)

NO_SIGNAL = (
    "No signal: in every group of this rollout all completions got the same reward, so every advantage is 0 and the weights do not "
    "move. Look at the rewards; raise num_generations or the temperature, or take other prompts."
)


@dataclass
class ScoredRollout:
    """
    The rollout's rows on all processes, in generation order: (N,) each.

    advantages: one a completion, before any token-level part; None for an estimator that works token by token. rewards: the
    summed reward, less any penalty, NaN where not scored. scored: some reward function gave a number. flat: the group has no two
    different rewards (in no column, where the estimator reads columns). mean, std: of the group's rewards before penalties.
    """

    advantages: Tensor | None
    rewards: Tensor
    group_ids: Tensor
    scored: Tensor
    flat: Tensor
    mean: Tensor
    std: Tensor


def group_statistics(spec: LossSpec, rewards: Tensor, total: Tensor, group_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """
    Mean and standard deviation of the summed rewards of each row's group, and whether the group is flat: (N,) each.

    Args:
        rewards: (N, K), one column a reward function. total: (N,) their weighted sum. group_ids: (N,).
    """
    mean, std, flat = group_spread(total, group_ids)
    if "reads_reward_columns" in ADVANTAGE_ESTIMATORS.get(spec.advantage_estimator).traits:
        flat = torch.stack([group_spread(column, group_ids)[2] for column in rewards.unbind(1)]).all(0)
    return mean, std, flat


def score_rollout(
    spec: LossSpec,
    options: dict[str, Any],
    rewards: Tensor,
    reward_weights: Tensor,
    num_generations: int,
    penalty: Tensor | None = None,
) -> ScoredRollout:
    """
    From rewards to one advantage a completion.

    Args:
        rewards: (N, K) of all processes, one column a reward function, NaN where a function does not apply. Rows of one prompt
            are the `num_generations` neighbours that the sampler laid together; from here on groups are told by id.
        reward_weights: (K,). options: of the estimator, and the tensors (N,) that it reads.
        penalty: (N,) what is taken off each completion's reward (KL, a missing end).
    """
    group_ids = torch.arange(len(rewards), device=rewards.device) // num_generations
    total = weighted_sum(rewards, reward_weights)
    scored = ~torch.isnan(total)
    mean, std, flat = group_statistics(spec, rewards, total, group_ids)
    traits = ADVANTAGE_ESTIMATORS.get(spec.advantage_estimator).traits
    if penalty is not None:
        total = total - penalty
    if "token_level" in traits:
        return ScoredRollout(None, total, group_ids, scored, flat, mean, std)
    by_column = "reads_reward_columns" in traits
    options = {**options, "reward_weights": reward_weights} if by_column else options
    one = torch.ones(len(rewards), 1, dtype=torch.bool, device=rewards.device)
    result = compute_advantages(spec.advantage_estimator, rewards if by_column else total, one, group_ids, **options)
    return ScoredRollout(result.advantages.squeeze(-1), total, group_ids, scored, flat, mean, std)


def rollout_kl(spec: LossSpec, old_logps: Tensor, ref_logps: Tensor, mask: Tensor) -> Tensor:
    """Per-token KL estimate of the policy that sampled against the reference: (B, T) nats, 0 on masked positions, no gradient."""
    clean_old, clean_ref = select(old_logps.detach().float(), mask), select(ref_logps.detach().float(), mask)
    return estimate_kl(spec.kl_estimator, clean_old, clean_ref, log_ratio_clamp=spec.log_ratio_clamp)


def token_kl_advantages(advantages: Tensor, kl: Tensor, mask: Tensor, coef: float) -> Tensor:
    """(B,) advantages less the KL from each token to the end: (B, T), A_t - coef * sum over s >= t of KL_s."""
    return select(advantages.unsqueeze(-1) - coef * reward_to_go(kl, mask), mask)


def token_reward_table(
    scores: Tensor, kl: Tensor | None, kl_coef: float, mask: Tensor, given: TokenRewards | None = None
) -> Tensor:
    """
    Token rewards (B, T): what the reward functions gave to tokens, and each row's score on its last valid token (0 if not scored),
    less coef * KL of every token.
    """
    table = token_rewards(scores.nan_to_num(nan=0.0), mask)
    if given is not None:
        table = table + select(pad(given.tokens.to(table), (0, table.shape[1] - given.tokens.shape[1])), mask)
    return table if kl is None else table - kl_coef * select(kl, mask)


class SharedRows(NamedTuple):
    """
    What every process knows of the rows on all, in generation order: (N,) each.

    kl: summed over the row's tokens. tokens: how many. penalty: taken off the row's reward. rewards: moments of its token rewards.
    """

    kl: Tensor
    tokens: Tensor
    penalty: Tensor
    rewards: Moments

    @property
    def mean_kl(self) -> float:
        """Nats a token over the whole rollout; 0 where there is none."""
        return self.kl.sum().item() / max(self.tokens.sum().item(), 1.0)

    def whitened(self, table: Tensor, mask: Tensor, process: int) -> Tensor:
        """This process's token rewards (B, T) with variance 1 over all processes' tokens, and their mean as it was."""
        sets = sets_of_rows(self.rewards, torch.zeros_like(self.tokens, dtype=torch.long), 1)
        here = slice(process * len(mask), (process + 1) * len(mask))
        return whiten_rows(table, mask, Moments(*(value[here] for value in sets)), shift_mean=False)


def share_rows(
    kl: Tensor | None, penalty: Tensor | None, rewards: Tensor | None, mask: Tensor, gather: Callable[[Tensor], Tensor]
) -> SharedRows:
    """
    Tells all processes of each other's rows, in one collective.

    Args:
        kl, rewards: (B, T) of this process's rows, penalty: (B,); None counts as 0. gather: concatenates over processes.
    """
    nothing = torch.zeros(len(mask), device=mask.device)
    columns = [nothing if kl is None else row_sums(kl, mask), mask.sum(-1), nothing if penalty is None else penalty]
    columns += row_moments(torch.zeros_like(mask, dtype=torch.float32) if rewards is None else rewards, mask)
    shared = gather(torch.stack([column.float() for column in columns], 1)).cpu().double().unbind(1)
    return SharedRows(shared[0], shared[1], shared[2], Moments(*shared[3:]))


def kl_penalty_rows(kl: Tensor, mask: Tensor, coef: float) -> Tensor:
    """coef times each row's summed KL: (B,)."""
    return coef * row_sums(kl, mask)


def group_metrics(rollout: ScoredRollout, num_generations: int) -> dict[str, float]:
    """Mean and spread of the rewards inside the groups, always by group: one value a rollout."""
    std, flat = rollout.std[::num_generations], rollout.flat[::num_generations].float()
    mean = rollout.mean[::num_generations]
    values = torch.stack([mean.amin(), mean.amax(), std.mean(), std.amin(), std.amax(), flat.mean(), (~rollout.scored).sum()])
    names = ("mean_min", "mean_max", "std", "std_min", "std_max", "frac_flat", "unscored")
    return {f"group_reward/{name}": value for name, value in zip(names, values.tolist(), strict=True)}


def refuse_infinite(rewards: Tensor, names: Sequence[str]) -> None:
    """
    Refuses a reward of plus or minus infinity.

    Args:
        rewards: (N, K) of all processes, so that every process refuses alike. names: of the K reward functions.

    Raises:
        LossPlusError: names the function, the row and the value.
    """
    bad = torch.isinf(rewards).nonzero()
    if len(bad):
        row, column = bad[0].tolist()
        raise LossPlusError(
            f"reward function {names[column]!r} returned {rewards[row, column].item()} for completion {row} of {len(rewards)}: a "
            "reward must be a finite number, or None where the completion cannot be scored."
        )


def log_groups(trainer: GRPOPlusTrainer, scored: ScoredRollout, num_generations: int) -> None:
    """Logs `group_metrics`; warns once where nothing can move the weights."""
    if num_generations == 1:
        return
    metrics = group_metrics(scored, num_generations)
    for name, value in metrics.items():
        trainer.log_value(name, value)
    trainer.replace_last("frac_reward_zero_std", metrics["group_reward/frac_flat"])
    flat, acts = metrics["group_reward/frac_flat"] == 1.0, trainer.spec.kl_in_loss or trainer.spec.kl_in_reward
    still = flat and scored.advantages is not None and not scored.advantages.any()  # (a shifted baseline moves flat groups too)
    if still and not (acts or trainer.entropy_bonus_enabled):
        trainer.warn_once(NO_SIGNAL)
