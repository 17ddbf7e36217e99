"""What advantage estimators read beside rewards and mask: where each tensor comes from, and all processes' rows where groups are compared."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..estimators import compute_advantages, weighted_sum
from ..functional.advantages import Advantages
from ..functional.errors import LossPlusError
from ..functional.masking import Moments, select
from ..registry import ADVANTAGE_ESTIMATORS
from .exchange import Exchange
from .minibatch import MicroBatch

if TYPE_CHECKING:
    from .grpo import GRPOPlusTrainer

# Tensors under the names that TRL's rollout has for them.
THEIRS = {
    "old_logps": "old_per_token_logps",
    "ref_logps": "ref_per_token_logps",
    "rollout_logps": "sampling_per_token_logps",
    "rollout_weights": "importance_sampling_ratio",
}


def check_greedy(estimator: str, arguments: dict[str, Any]) -> None:
    """Raises LossPlusError where greedy completions are needed and what generates, by the trainer's arguments, cannot be told to be greedy."""
    if "reward_baselines" not in ADVANTAGE_ESTIMATORS.get(estimator).requires:
        return
    rollout_func = arguments.get("rollout_func")
    if arguments.get("environment_factory") is not None:
        raise LossPlusError(
            f"advantage_estimator={estimator!r} scores one greedy completion a prompt, and an environment_factory plays only the sampled "
            "ones. Take an estimator with a baseline from the group (rloo, grpo), or a rollout_func that can be greedy."
        )
    if rollout_func is not None and not getattr(rollout_func, "supports_greedy", False):
        raise LossPlusError(
            f"advantage_estimator={estimator!r} scores one greedy completion a prompt, so the rollout_func must be able to make them: "
            "where trainer.greedy is True let it return one completion a prompt at temperature 0, and set its attribute "
            "supports_greedy = True."
        )


def greedy_baselines(trainer: GRPOPlusTrainer, prompts: list[Any], columns: dict[str, list[Any]]) -> Tensor:
    """
    The reward of one greedy completion of each prompt of the rollout: (P,), alike on every process, NaN where not scored.

    Each prompt is generated and scored once, whichever process its group's rows are on; the last ones again where the number of
    prompts is no multiple of the number of processes.

    Args:
        prompts: of the local rows, as they were generated from. columns: the dataset's, of the same rows.
    """
    accelerator, rows = trainer.accelerator, len(prompts)
    first = accelerator.process_index * rows
    heads = [i for i in range(rows) if (first + i) % trainer.group_size == 0]
    exchange = Exchange(accelerator.gather, accelerator.num_processes, accelerator.device)
    local = [(prompts[i], {name: values[i] for name, values in columns.items()}) for i in heads]
    everyone = [row for part in exchange(local) for row in part]
    share = -(-len(everyone) // accelerator.num_processes)
    mine = [min(accelerator.process_index * share + j, len(everyone) - 1) for j in range(share)]
    rewards = trainer.score_greedily([everyone[i][0] for i in mine], [everyone[i][1] for i in mine])[: len(everyone)]
    trainer.check_rewards(rewards)
    baselines = weighted_sum(rewards, trainer.reward_weights)
    trainer.log_value("reward_baseline", baselines.nanmean().item())
    return baselines


def supply(trainer: GRPOPlusTrainer, out: MicroBatch, mask: Tensor) -> dict[str, Tensor]:
    """
    What an estimator that works by token reads beside rewards, values and group ids, of the local rows: {name: tensor}.

    Args:
        out: the rollout; sum_pi_squared is put into it. mask: (B, T).
    """
    entry = ADVANTAGE_ESTIMATORS.get(trainer.spec.advantage_estimator)
    reads, made = entry.requires | entry.optional, {"lengths": mask.sum(-1)}
    if "sum_pi_squared" in reads:
        made["old_logps"], out["sum_pi_squared"] = trainer.rollout_squares(out)
    elif "old_logps" in entry.requires:
        made["old_logps"] = trainer.rollout_logps(out)
    there = {name: out[THEIRS.get(name, name)] for name in reads if out.get(THEIRS.get(name, name)) is not None}
    found = {**made, **there}
    return {name: found[name] for name in sorted(reads & found.keys() - {"group_ids", "old_values"})}


def supply_rows(estimator: str, lengths: Tensor | None, baselines: Tensor | None) -> dict[str, Tensor]:
    """What an estimator that works by completion reads beside rewards and group ids, of the rows (N,) of all processes."""
    entry = ADVANTAGE_ESTIMATORS.get(estimator)
    given = {"lengths": lengths, "reward_baselines": baselines}
    by_row = {} if "token_level" in entry.traits else given
    return {name: tensor for name, tensor in by_row.items() if tensor is not None and name in entry.requires}


def token_advantages(
    trainer: GRPOPlusTrainer, out: MicroBatch, rewards: Tensor, mask: Tensor, options: dict[str, Any]
) -> Advantages:
    """
    Advantages and returns (B, T) of the local rows by an estimator that works token by token; 0 and old values where not scored.

    One that compares the rows of a group is given the rows of all processes, for a group may be spread over them.

    Args:
        rewards: (B, T) token rewards. options: the estimator's, and the tensors that it reads, of the local rows.
    """
    name, values, scored = trainer.spec.advantage_estimator, out.get("old_values"), out["scored"].unsqueeze(-1)
    if "group_ids" not in ADVANTAGE_ESTIMATORS.get(name).requires:
        result = compute_advantages(name, rewards, mask, out["group_ids"], values, **options)
    else:
        tensors = {key: x for key, x in options.items() if isinstance(x, Tensor)}
        scored_rewards = rewards.masked_fill(~scored, float("nan"))
        given = {"rewards": scored_rewards, "mask": mask, **({} if values is None else {"values": values}), **tensors}
        whole, ids = _everyone(trainer, given), _all_group_ids(trainer, len(mask), mask.device)
        first, (rows, width) = trainer.accelerator.process_index * len(mask), mask.shape
        result = compute_advantages(name, group_ids=ids, **{**options, **whole, "mask": whole["mask"] > 0})
        result = Advantages(*(x[first : first + rows, :width] for x in result))
    returns = result.returns if values is None else torch.where(scored, result.returns, values)
    return Advantages(select(result.advantages, scored), returns)


def refuse_constant_rows(trainer: GRPOPlusTrainer, rows: Moments) -> None:
    """
    Raises LossPlusError at the first rollout where whitening each row alone would leave no advantage: rewards to go, by completion only.

    Args:
        rows: moments of each row's advantages, (N,), of all processes, so that every process refuses alike.
    """
    spec = trainer.spec
    token_kl = spec.kl_in_reward and spec.kl_reward_level == "token"
    whitened = spec.advantage_normalization != "none" and spec.advantage_norm_scope == "sequence"
    to_go = "reward_to_go" in ADVANTAGE_ESTIMATORS.get(spec.advantage_estimator).traits
    if not (whitened and to_go) or spec.gamma != 1.0 or token_kl or trainer.state.global_step > 0:
        return
    long = rows.n > 1
    if bool(long.any()) and bool((rows.variance().sqrt() <= 1e-6 * rows.mean.abs())[long].all()):
        raise LossPlusError(
            f"advantage_norm_scope='sequence': with advantage_estimator={spec.advantage_estimator!r} and gamma=1.0, and no reward by token, "
            "an advantage is constant over its sequence, so its mean is itself and every advantage would be 0. Set batch or group."
        )


def _all_group_ids(trainer: GRPOPlusTrainer, rows: int, device: torch.device) -> Tensor:
    """Of the rows of all processes, (N,): neighbours of the rollout are a group."""
    return torch.arange(rows * trainer.accelerator.num_processes, device=device) // trainer.group_size


def _everyone(trainer: GRPOPlusTrainer, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """
    Local tensors (B, T), (B, 1) or (B,), and `mask` (B, T) among them, of all processes: (N, T') or (N,) float32, in two collectives.

    T' is the longest T; what is added counts as masked.
    """
    gather, (rows, width) = trainer.accelerator.gather, tensors["mask"].shape
    device = tensors["mask"].device
    longest = int(gather(torch.tensor([width], device=device)).max())
    columns = [x.float().reshape(rows, -1).expand(rows, width) for x in tensors.values()]
    whole = gather(pad(torch.stack(columns), (0, longest - width)).transpose(0, 1).contiguous()).unbind(1)
    return {name: x if y.dim() == 2 else x[:, 0] for (name, y), x in zip(tensors.items(), whole, strict=True)}
