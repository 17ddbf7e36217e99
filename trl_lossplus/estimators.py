"""Our advantage estimators under their names, and the one entry to all of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .functional import advantages as adv
from .functional import advantages_baseline as base
from .functional.advantages import Advantages
from .functional.errors import LossPlusError, unknown_name
from .functional.masking import row_sums, select
from .registry import ADVANTAGE_ESTIMATORS, TENSORS, Entry, register_advantage_estimator

if TYPE_CHECKING:
    from .spec import LossSpec

ESTIMATOR_FIELDS = (
    "gamma",
    "f_norm",
    "alpha_from",
    "opmd_tau",
    "asymre_shift",
    "handle_zero_tail",
)  # fields that are options of estimators and nothing else

SEQUENCE = {"constant_over_sequence"}

register_advantage_estimator(
    "grpo",
    requires={"group_ids"},
    options={"scale_rewards", "eps", "ddof"},
    traits=SEQUENCE,
    formula="(s - mean of the group) / (std + eps)",
    source="DeepSeekMath, arXiv 2402.03300",
)(adv.grpo)
register_advantage_estimator(
    "rloo",
    requires={"group_ids"},
    traits=SEQUENCE,
    formula="s - mean of the group's other rewards",
    source="RLOO, arXiv 2402.14740",
)(adv.rloo)
register_advantage_estimator(
    "maxrl",
    requires={"group_ids"},
    options={"eps"},
    traits=SEQUENCE,
    formula="(s - mean of the group) / (|mean of the group| + eps)",
    source="MaxRL, arXiv 2602.02710",
)(adv.maxrl)
register_advantage_estimator(
    "gdpo",
    requires={"group_ids"},
    options={"reward_weights", "eps", "ddof"},
    traits=SEQUENCE | {"reads_reward_columns"},
    formula="batch-normalized sum of the reward functions' group-normalized rewards",
    source="GDPO, arXiv 2601.05242",
)(adv.gdpo)

register_advantage_estimator(
    "gae",
    requires={"old_values"},
    options={"gamma", "gae_lambda", "gae_lambda_critic", "bootstrap"},
    traits={"token_level", "whitened"},
    formula="A_t = delta_t + gamma lambda A_{t+1}, delta_t = r_t + gamma V_{t+1} - V_t",
    source="GAE, arXiv 1506.02438",
)(adv.gae)

register_advantage_estimator(
    "grpo_passk",
    requires={"group_ids"},
    options={"scale_rewards", "eps", "ddof"},
    traits=SEQUENCE | {"uncentred"},
    formula="(s - second best of the group) / (std + eps) for the best of the group, 0 for the others",
    source="arXiv 2503.19595",
)(base.grpo_passk)
register_advantage_estimator(
    "reinforce_plus_plus",
    options={"gamma"},
    traits={"token_level", "reward_to_go", "whitened"},
    formula="sum over s >= t of gamma^(s - t) r_s, whitened over the rollout's tokens",
    source="REINFORCE++, arXiv 2501.03262",
)(base.reinforce_plus_plus)
register_advantage_estimator(
    "reinforce_plus_plus_baseline",
    requires={"group_ids"},
    traits=SEQUENCE | {"whitened"},
    formula="s - mean of the group, whitened over the rollout's tokens",
    source="REINFORCE++ with baseline, arXiv 2501.03262",
)(base.reinforce_plus_plus_baseline)
register_advantage_estimator(
    "remax",
    requires={"reward_baselines"},
    options={"gamma"},
    traits={"token_level", "reward_to_go"},
    formula="sum over s >= t of gamma^(s - t) r_s, less the reward of the prompt's greedy completion",
    source="ReMax, arXiv 2310.10505",
)(base.remax)
register_advantage_estimator(
    "opo",
    requires={"group_ids", "lengths"},
    traits=SEQUENCE | {"uncentred"},
    formula="s - (sum of length * s) / (sum of lengths) of the group",
    source="OPO, arXiv 2505.23585",
)(base.opo)
register_advantage_estimator(
    "gpg",
    requires={"group_ids"},
    options={"f_norm", "alpha_from"},
    traits=SEQUENCE,
    formula="alpha (s - mean of the group) / f_norm, alpha = rows / rows of groups with spread",
    source="GPG, arXiv 2504.02546",
)(base.gpg)
register_advantage_estimator(
    "opmd",
    requires={"group_ids"},
    options={"opmd_tau"},
    traits=SEQUENCE | {"uncentred"},
    formula="s - opmd_tau log(mean of the group of exp(s / opmd_tau))",
    source="OPMD, Kimi k1.5, arXiv 2501.12599; Trinity-RFT",
)(base.opmd)
register_advantage_estimator(
    "asymre",
    requires={"group_ids"},
    options={"asymre_shift"},
    traits=SEQUENCE | {"uncentred"},
    formula="s - (mean of the group + asymre_shift)",
    source="AsymRE, arXiv 2506.20520",
)(base.asymre)
for _name, _func, _where in (
    ("optimal_token_baseline", base.optimal_token_baseline, "at the same position"),
    ("tir_optimal_token_baseline", base.tir_optimal_token_baseline, "at the same number among a row's own tokens"),
):
    register_advantage_estimator(
        _name,
        requires={"group_ids", "old_logps", "sum_pi_squared"},
        optional={"rollout_weights"},
        options={"handle_zero_tail", "eps"},
        traits={"token_level", "uncentred"},
        formula=f"G_t - (sum of W G) / (sum of W) of the group {_where}, W_t = sum over j <= t of 1 - 2 pi_j + sum pi^2",
        source="The Optimal Token Baseline, Li et al., 2026; verl 0.9",
    )(_func)


def options_of(spec: LossSpec) -> dict[str, Any]:
    """Options of a spec's advantage estimator that its fields set; eps as in TRL."""
    reads = ADVANTAGE_ESTIMATORS.get(spec.advantage_estimator).options
    options: dict[str, Any] = {"scale_rewards": spec.scale_rewards}
    options |= {"eps": 1e-4} if spec.advantage_estimator in ("grpo", "gdpo") else {}
    options |= {name: getattr(spec, name) for name in (*ESTIMATOR_FIELDS, "gae_lambda", "gae_lambda_critic")}
    return {name: value for name, value in options.items() if name in reads}


def weighted_sum(rewards: Tensor, reward_weights: Tensor | None) -> Tensor:
    """(B, K) rewards to (B,): NaN counts as 0 beside a scored one; a row that no function scored stays NaN."""
    weights = torch.ones(rewards.shape[1]) if reward_weights is None else torch.as_tensor(reward_weights)
    total = (rewards * weights.to(rewards)).nansum(1)
    return torch.where(torch.isnan(rewards).all(1), torch.full_like(total, float("nan")), total)


def compute_advantages(
    name: str,
    rewards: Tensor,
    mask: Tensor,
    group_ids: Tensor,
    values: Tensor | None = None,
    **options: Any,
) -> Advantages:
    """
    Advantages and returns of one rollout by a named estimator.

    Args:
        name: a registered estimator, or `package.module:function`.
        rewards: (B,) one a completion; or (B, T) one a token, summed over the mask by estimators that compare whole
            completions; or (B, K) one a reward function, together with `reward_weights=` (K,). NaN: not scored.
        mask: (B, T) bool, the completion tokens.
        group_ids: (B,) integers, one id a prompt; their order plays no part.
        values: (B, T) old values, for estimators with a critic.
        options: the estimator's own (`trl-lossplus explain` lists them), and by the same way the tensors that it reads beside these:
            lengths (B,) (None: counted from the mask), reward_baselines (B,), old_logps, sum_pi_squared, rollout_weights (B, T).

    Returns:
        `Advantages` of (B, T) float32 tensors, 0 on masked positions and in rows that are not scored.

    Raises:
        LossPlusError: unknown estimator or option, a tensor that is missing or not read, or a shape that does not fit.
    """
    entry = ADVANTAGE_ESTIMATORS.get(name)
    _check_shapes(name, entry, rewards, mask, group_ids, values)
    reward_weights = options.pop("reward_weights", None)
    if reward_weights is not None:
        reward_weights = torch.as_tensor(reward_weights, dtype=torch.float32)
        if rewards.dim() != 2 or reward_weights.shape != rewards.shape[1:]:
            raise LossPlusError(
                f"reward_weights has shape {tuple(reward_weights.shape)}; with rewards of shape {tuple(rewards.shape)} it must hold "
                "one weight a column of (B, K) rewards."
            )
    tensors = _tensors(name, entry, {key: options.pop(key) for key in list(options) if key in TENSORS}, mask)
    rewards = _reward_form(entry, rewards.detach().float(), mask, reward_weights)
    if "reads_reward_columns" in entry.traits:
        options["reward_weights"] = reward_weights
    for option in sorted(options.keys() - entry.options):
        if entry.options:
            raise unknown_name(f"advantage_estimator {name!r}: option", option, entry.options)
        raise LossPlusError(f"advantage_estimator {name!r} has no option {option!r}: it has none.")
    if "token_level" not in entry.traits:
        return _checked(name, entry.func(rewards, group_ids, **tensors, **options), mask)
    if "group_ids" in entry.requires:  # compares rows itself, so it must see which are not scored
        result = _checked(name, entry.func(rewards, mask, group_ids=group_ids, **tensors, **options), mask)
    else:
        clean = rewards.nan_to_num(nan=0.0)
        given = (clean, mask) if values is None else (clean, values, mask)
        result = _checked(name, entry.func(*given, **tensors, **options), mask)
    scored = ~(torch.isnan(rewards) & mask).any(-1, keepdim=True)
    returns = result.returns if values is None else torch.where(scored, result.returns, select(values.detach().float(), mask))
    return Advantages(select(result.advantages, scored), returns)


def _tensors(name: str, entry: Entry, given: dict[str, Any], mask: Tensor) -> dict[str, Tensor]:
    """The tensors that the estimator reads beside rewards, values, mask and group ids. Raises LossPlusError, see there."""
    needs = entry.requires - {"group_ids", "old_values"}
    if "lengths" in needs and given.get("lengths") is None:
        given = {**given, "lengths": mask.sum(-1)}
    given = {key: value for key, value in given.items() if value is not None}
    for tensor in sorted(given.keys() - needs - entry.optional):
        raise LossPlusError(f"advantage_estimator {name!r}: {tensor} was given, and it does not read it.")
    for tensor in sorted(needs - given.keys()):
        shape, maker = TENSORS[tensor]
        raise LossPlusError(f"advantage_estimator {name!r} reads {tensor} {shape}, made by {maker}; it is None.")
    rows, length = mask.shape
    for tensor, value in given.items():
        by_row = TENSORS[tensor][0].startswith("(B,)")
        allowed = [(rows,)] if by_row else [(rows, length), (rows, 1)] if tensor == "rollout_weights" else [(rows, length)]
        if tuple(value.shape) not in allowed:
            raise LossPlusError(
                f"{tensor} has shape {tuple(value.shape)}; with mask {tuple(mask.shape)} it must be {' or '.join(map(str, allowed))}."
            )
    return {key: value.detach() for key, value in given.items()}


def _check_shapes(name: str, entry: Entry, rewards: Tensor, mask: Tensor, group_ids: Tensor, values: Tensor | None) -> None:
    rows = mask.shape[0]
    if mask.dtype != torch.bool:
        raise LossPlusError(f"mask has dtype {mask.dtype}; it must be torch.bool.")
    if rewards.shape[:1] != (rows,) or rewards.dim() > 2:
        raise LossPlusError(f"rewards has shape {tuple(rewards.shape)}; for {rows} rows it must be (B,), (B, T) or (B, K).")
    if group_ids.shape != (rows,):
        raise LossPlusError(f"group_ids has shape {tuple(group_ids.shape)}; it must be ({rows},).")
    if (values is not None) != ("old_values" in entry.requires):
        given = "values were given, and it does not read any" if values is not None else "it needs values (B, T); they are None"
        raise LossPlusError(f"advantage_estimator {name!r}: {given}.")


def _reward_form(entry: Entry, rewards: Tensor, mask: Tensor, reward_weights: Tensor | None) -> Tensor:
    """The rewards as the estimator reads them: by column, by token, or one a completion."""
    if "reads_reward_columns" in entry.traits:
        return rewards if rewards.dim() == 2 else rewards.unsqueeze(1)
    if reward_weights is not None:
        rewards = weighted_sum(rewards, reward_weights)
    if rewards.dim() == 1:
        return adv.token_rewards(rewards, mask) if "token_level" in entry.traits else rewards
    if rewards.shape != mask.shape:
        raise LossPlusError(
            f"rewards has shape {tuple(rewards.shape)} and mask {tuple(mask.shape)}: token rewards must fit the mask, and (B, K) "
            "rewards of several functions need reward_weights=."
        )
    return rewards if "token_level" in entry.traits else row_sums(rewards, mask)


def _checked(name: str, result: Any, mask: Tensor) -> Advantages:
    """What an estimator returned as `Advantages`. Raises LossPlusError where it is of another form."""
    if isinstance(result, Advantages):
        parts = result
    elif isinstance(result, Tensor) and result.shape in (mask.shape, mask.shape[:1]):
        tokens = result.float().unsqueeze(-1).expand(mask.shape) if result.dim() == 1 else result.float()
        parts = Advantages(tokens, tokens)
    else:
        what = f"a tensor of shape {tuple(result.shape)}" if isinstance(result, Tensor) else f"a {type(result).__name__}"
        raise LossPlusError(
            f"advantage_estimator {name!r} returned {what}; it must be a tensor (B,) or (B, T), or Advantages, for mask {tuple(mask.shape)}."
        )
    return Advantages(select(parts.advantages.float(), mask), select(parts.returns.float(), mask))
