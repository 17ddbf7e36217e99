"""From configuration fields to the values of a LossSpec: what None means, and which settings contradict each other."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

from .estimators import ESTIMATOR_FIELDS
from .functional.errors import LossPlusError, unknown_name
from .functional.kl import canonical_kl
from .registry import ADVANTAGE_ESTIMATORS, POLICY_LOSSES
from .spec import CHOICES, LossSpec

if TYPE_CHECKING:
    from .config import GRPOPlusConfig

# Fields that only some objectives read, and those that only adaptive entropy control does.
OBJECTIVE_FIELDS = (
    "epsilon", "epsilon_high", "delta", "clip_ratio_c", "clip_objective", "cispo_ratio_min", "sapo_temperature_pos",
    "sapo_temperature_neg", "vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg", "is_ratio_min", "is_ratio_max",
    "is_mode", "dppo_ratio_max", "ipo_threshold", "ipo_kl_coef", "dro_beta", "clip_cov_ratio", "clip_cov_min", "clip_cov_max",
    "kl_cov_ratio", "kl_cov_coef", "cov_seed", "fipo_decay_rate", "fipo_clip_range", "fipo_clip_high_only", "fipo_safety_threshold",
    "real_tau", "ipo_by_sign", "rec_clip", "rec_ring_low", "rec_ring_high", "rec_weight", "rec_temperature", "m2_threshold",
)  # fmt: skip
# Of these, the ones that are handed to the spec as they are.
PLAIN_FIELDS = tuple(OBJECTIVE_FIELDS[OBJECTIVE_FIELDS.index("is_ratio_min") :])
ENTROPY_FIELDS = ("entropy_coef_min", "entropy_coef_max", "entropy_coef_delta", "entropy_target")
# TRL's loss_type: our objective and aggregation.
TRL_LOSS_TYPES = {
    "grpo": ("ppo_clip", "seq_mean_token_mean"),
    "bnpo": ("ppo_clip", "token_mean"),
    "dr_grpo": ("ppo_clip", "seq_mean_token_sum_norm"),
    "dapo": ("ppo_clip", "token_mean"),
    "cispo": ("cispo", "token_mean"),
    "sapo": ("sapo", "seq_mean_token_mean"),
    "luspo": ("ppo_clip", "seq_mean_token_sum"),
    "vespo": ("vespo", "token_mean"),
}


def _cov_seed(args: GRPOPlusConfig, policy_loss: str) -> int:
    """The seed of the draw among tokens: the run's, where the objective draws and none is given."""
    draws = "cov_seed" in POLICY_LOSSES.get(policy_loss).options
    return args.cov_seed if args.cov_seed is not None else args.seed if draws else 0


def resolve_policy(args: GRPOPlusConfig) -> dict[str, Any]:
    """Objective, clip range and aggregation. Raises LossPlusError for contradictions."""
    trl_loss, trl_aggregation = TRL_LOSS_TYPES[args.loss_type or "dapo"]
    chosen = args.loss_type
    if args.policy_loss is None:
        policy_loss, aggregation = trl_loss, trl_aggregation
    else:
        policy_loss, aggregation = args.policy_loss, POLICY_LOSSES.get(args.policy_loss).aggregation
        if chosen is not None:
            if trl_loss not in ("ppo_clip", policy_loss):
                raise LossPlusError(
                    f"loss_type={chosen!r} and policy_loss={policy_loss!r} name two objectives. Remove loss_type, and set "
                    "loss_aggregation if you want another aggregation."
                )
            aggregation = trl_aggregation
            if args.loss_aggregation is not None:
                raise LossPlusError(f"loss_type={chosen!r}: nothing reads it beside policy_loss and loss_aggregation. Remove it.")
    aggregation = aggregation if args.loss_aggregation is None else args.loss_aggregation
    epsilon_high = args.epsilon_high
    if args.policy_loss is None and policy_loss == "cispo" and epsilon_high is None:
        epsilon_high = args.epsilon  # TRL's meaning; explain warns of it
    if aggregation == "seq_mean_token_sum_norm" and args.max_completion_length is None:
        raise LossPlusError(
            "loss_aggregation='seq_mean_token_sum_norm' divides by max_completion_length, which is None: set it to a token count."
        )
    return {
        "policy_loss": policy_loss,
        "epsilon": args.epsilon,
        "epsilon_high": epsilon_high,
        "clip_objective": args.clip_objective,
        "delta": args.delta,
        "clip_ratio_c": args.clip_ratio_c,
        "cispo_ratio_min": args.cispo_ratio_min,
        **{name: getattr(args, name) for name in PLAIN_FIELDS if name != "cov_seed"},
        "cov_seed": _cov_seed(args, policy_loss),
        "rollout_rs": args.rollout_rs,
        "rollout_rs_threshold": None if args.rollout_rs_threshold is None else str(args.rollout_rs_threshold),
        "rollout_is_batch_normalize": args.rollout_is_batch_normalize,
        "loss_aggregation": aggregation,
        "norm_length": args.max_completion_length if aggregation == "seq_mean_token_sum_norm" else None,
    }


def _kl_placement(args: GRPOPlusConfig) -> str:
    """The placement, checked against the two coefficients."""
    beta, coef = args.beta, args.kl_reward_coef or 0.0
    placement = args.kl_placement
    if placement is None:
        if coef:
            where = "both" if beta else "reward"
            raise LossPlusError(f"kl_reward_coef={coef}: nothing reads it. Set kl_placement={where!r}.")
        return "loss" if beta else "none"
    if placement not in ("none", "reward", "loss", "both"):
        raise unknown_name("kl_placement", placement, ("none", "reward", "loss", "both"))
    if placement == "none" and (beta or coef):
        name, value = ("beta", beta) if beta else ("kl_reward_coef", coef)
        raise LossPlusError(f"{name}={value} with kl_placement='none': nothing reads it. Set it to 0, or place the KL.")
    for name, value, reader in (("beta", beta, "loss"), ("kl_reward_coef", coef, "reward")):
        reads = placement in (reader, "both")
        if value and not reads:
            raise LossPlusError(
                f"{name}={value} with kl_placement={placement!r}: only the KL in the {reader} reads it. Set kl_placement='both' "
                f"for a KL in two places, or {name} to 0."
            )
        if reads and not value:
            raise LossPlusError(f"kl_placement={placement!r} needs {name} > 0, the coefficient of the KL in the {reader}.")
    return placement


def _reward_level(args: GRPOPlusConfig) -> str:
    """Token by token where the estimator works so, else by completion."""
    name = args.default_estimator if args.advantage_estimator is None else args.advantage_estimator
    by_token = "token_level" in ADVANTAGE_ESTIMATORS.get(name).traits
    default = "token" if by_token else "sequence"
    return default if args.kl_reward_level is None else args.kl_reward_level


def resolve_kl(args: GRPOPlusConfig) -> dict[str, Any]:
    """Placement, estimator, coefficients and control. Raises LossPlusError for contradictions and for what nothing reads."""
    placement = _kl_placement(args)
    if args.kl_controller not in ("fixed", "adaptive"):
        raise unknown_name("kl_controller", args.kl_controller, ("fixed", "adaptive"))
    estimator = args.kl_estimator
    if estimator is not None:
        canonical_kl(estimator)
    unread = {
        "kl_estimator": placement == "none" and estimator is not None,
        "kl_controller": placement == "none" and args.kl_controller != "fixed",
        "kl_reward_level": placement not in ("reward", "both") and args.kl_reward_level is not None,
        "kl_target": args.kl_controller != "adaptive" and args.kl_target is not None,
        "kl_horizon": args.kl_controller != "adaptive" and args.kl_horizon is not None,
        "use_bias_correction_kl": placement not in ("loss", "both") and bool(args.use_bias_correction_kl),
    }
    for name, is_unread in unread.items():
        if is_unread:
            needs = "kl_controller='adaptive'" if name in ("kl_target", "kl_horizon") else "a KL that reads it (kl_placement)"
            raise LossPlusError(f"{name}={getattr(args, name)!r}: nothing reads it. It needs {needs}; remove it otherwise.")
    in_loss = placement in ("loss", "both")
    if placement == "reward" and estimator is not None and estimator.endswith("+"):
        raise LossPlusError(
            f"kl_estimator={estimator!r} with kl_placement='reward': a reward has no gradient, so the + does nothing. Set "
            f"kl_estimator={estimator[:-1]!r}."
        )
    name = estimator or ("k3" if in_loss else "k1")
    correctable = canonical_kl(name) in ("k1", "k3")
    corrects = args.use_bias_correction_kl
    return {
        "beta": args.beta,
        "kl_placement": placement,
        "kl_estimator": name,
        "use_bias_correction_kl": in_loss and (correctable if corrects is None else corrects),
        "kl_reward_coef": args.kl_reward_coef or 0.0,
        "kl_reward_level": _reward_level(args),
        "kl_controller": args.kl_controller,
        "kl_target": args.kl_target,
        "kl_horizon": 10000.0 if args.kl_horizon is None else args.kl_horizon,
    }


def _scale(args: GRPOPlusConfig) -> str | None:
    """scale_rewards in words: TRL also takes true (group) and false (none)."""
    words = {"True": "group", "true": "group", "False": "none", "false": "none"}
    return None if args.scale_rewards is None else words.get(str(args.scale_rewards), args.scale_rewards)


def unread_settings(args: GRPOPlusConfig, spec: LossSpec) -> dict[str, Any]:
    """Loss settings that differ from their defaults although the chosen objective does not read them: {field: value}."""
    entry = POLICY_LOSSES.get(spec.policy_loss)
    defaults = {item.name: item.default for item in fields(type(args))}
    changed = {name: getattr(args, name) for name in OBJECTIVE_FIELDS if getattr(args, name) != defaults[name]}
    reads = set(spec.policy_options)
    if args.policy_loss is None and entry.name == "cispo" and args.epsilon_high is None:
        reads.add("epsilon")
    knows = bool(entry.options) or "no_options" in entry.traits  # a user's function may read what it does not declare
    unread = {name: value for name, value in changed.items() if knows and name not in reads}
    if not args.use_adaptive_entropy:
        unread |= {name: getattr(args, name) for name in ENTROPY_FIELDS if getattr(args, name) != defaults[name]}
    return unread


def resolve_advantages(args: GRPOPlusConfig) -> dict[str, Any]:
    """Estimator, scaling and whitening. Raises LossPlusError for contradictions, among them normalizing twice."""
    by_column = args.multi_objective_aggregation == "normalize_then_sum"
    name = ("gdpo" if by_column else args.default_estimator) if args.advantage_estimator is None else args.advantage_estimator
    entry = ADVANTAGE_ESTIMATORS.get(name)
    if by_column and "reads_reward_columns" not in entry.traits:
        raise LossPlusError(
            f"multi_objective_aggregation='normalize_then_sum' with advantage_estimator={name!r}: it reads one summed reward. "
            "Set advantage_estimator='gdpo', or multi_objective_aggregation='sum_then_normalize'."
        )
    if args.advantage_normalization not in (None, *CHOICES["advantage_normalization"]):
        raise unknown_name("advantage_normalization", args.advantage_normalization, CHOICES["advantage_normalization"])
    normalization, scale = args.advantage_normalization, _scale(args)
    if scale is not None and scale not in ("group", "batch", "none"):
        raise unknown_name("scale_rewards", scale, ("group", "batch", "none"))
    scales = "scale_rewards" in entry.options
    if scale in ("group", "batch") and (normalization is not None or not scales):
        reason = f"advantage_normalization={normalization!r}" if normalization is not None else f"advantage_estimator={name!r}"
        clash = "the advantages would be normalized twice" if normalization in ("rollout", "learner") else "the two contradict"
        clash = clash if scales else "the estimator does not scale"
        raise LossPlusError(f"scale_rewards={scale!r} with {reason}: {clash}. Set scale_rewards to none, or remove it.")
    if "reads_reward_columns" in entry.traits and (normalization is not None or scale is not None):
        field, value = ("advantage_normalization", normalization) if normalization is not None else ("scale_rewards", scale)
        raise LossPlusError(
            f"{field}={value!r} with advantage_estimator={name!r}, which normalizes each reward in the group and the sum over the "
            f"batch: it would be normalized twice, or the setting ignored. Remove {field}."
        )
    level = _reward_level(args)
    in_reward = args.kl_placement in ("reward", "both")
    if in_reward and level == "sequence" and "reads_reward_columns" in entry.traits:
        raise LossPlusError(
            f"kl_placement={args.kl_placement!r} with advantage_estimator={name!r}, which normalizes each reward function alone: "
            "there is no summed reward to take the KL off. Set kl_reward_level='token', or kl_placement='loss'."
        )
    whitens = normalization if normalization is not None else ("rollout" if "whitened" in entry.traits else "none")
    _check_scope(args, whitens, constant="token_level" not in entry.traits)
    for field in ESTIMATOR_FIELDS:
        if getattr(args, field) != getattr(LossSpec(), field) and field not in entry.options:
            raise LossPlusError(
                f"{field}={getattr(args, field)!r}: nothing reads it with advantage_estimator {name!r}. Remove it."
            )
    return {
        **{field: getattr(args, field) for field in ESTIMATOR_FIELDS},
        "advantage_estimator": name,
        "scale_rewards": scale or ("group" if scales and normalization is None else "none"),
        "advantage_normalization": whitens,
        "advantage_norm_scope": "batch" if args.advantage_norm_scope is None else args.advantage_norm_scope,
    }


def _check_scope(args: GRPOPlusConfig, normalization: str, constant: bool) -> None:
    scope = args.advantage_norm_scope
    if scope is None:
        return
    if scope not in CHOICES["advantage_norm_scope"]:
        raise unknown_name("advantage_norm_scope", scope, CHOICES["advantage_norm_scope"])
    if normalization not in ("rollout", "learner"):
        raise LossPlusError(
            f"advantage_norm_scope={scope!r}: nothing reads it. Set advantage_normalization to rollout or learner."
        )
    if scope == "sequence" and constant:
        raise LossPlusError(
            "advantage_norm_scope='sequence': the advantage is constant over a sequence, so its mean is itself and every "
            "advantage would be 0. Set batch or group."
        )
