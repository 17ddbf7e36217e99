"""The settings of single objectives and estimators, as configuration fields: what nothing chosen reads is an error."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


def option(help: str, default: Any = None) -> Any:
    """A dataclass field with its help text."""
    return field(default=default, metadata={"help": help})


@dataclass
class ObjectiveFields:
    """Fields of `GRPOPlusConfig` that one objective or advantage estimator reads, or a few."""

    is_ratio_min: float | None = option("Lower bound of the importance weight of tis, mis and rollout_is. None: no lower bound.")
    is_ratio_max: float | None = option("Upper bound of the importance weight of tis, mis and rollout_is. None: no bound.", 2.0)
    is_mode: str = option("rollout_is: truncate (weights move to the bound) or mask (weights outside become 0).", "truncate")
    dppo_ratio_max: float = option("dppo_tv, dppo_kl: bound of the detached importance ratio.", 20.0)
    ipo_threshold: float = option("ipo: how far a token's probability may move before it leaves the loss, in [0, 1].", 0.3)
    ipo_by_sign: bool = option("ipo: only a move along the advantage's sign leaves the loss (DPPO's trust region).", False)
    ipo_kl_coef: float = option("ipo: coefficient of the squared log ratio.", 1e-3)
    dro_beta: float = option("dro: coefficient of half the squared log ratio. Must be > 0.", 0.1)
    clip_cov_ratio: float = option("clip_cov: share of the optimizer step's tokens that lose their gradient.", 2e-4)
    clip_cov_min: float = option("clip_cov: only tokens with a covariance above this are drawn.", 1.0)
    clip_cov_max: float = option("clip_cov: only tokens with a covariance below this are drawn.", 5.0)
    kl_cov_ratio: float = option("kl_cov: share of the optimizer step's tokens, those of the highest covariance.", 2e-4)
    kl_cov_coef: float = option("kl_cov: coefficient of |log ratio| on those tokens.", 0.1)
    cov_seed: int | None = option("clip_cov, kl_cov: seed of the draw among tokens. None: seed.")
    fipo_decay_rate: float = option("fipo: tokens after which a later token counts half.", 32.0)
    fipo_clip_range: float | None = option("fipo: how far a token's weight may be from 1. None: no bound.", 0.2)
    fipo_clip_high_only: bool = option("fipo: weights are never below 1.", True)
    fipo_safety_threshold: float | None = option(
        "fipo: above this ratio a token with a negative advantage gets a weight of at most 1. None: off.", 4.0
    )
    real_tau: float = option("real: temperature of the classification.", 0.5)
    rec_clip: str = option(
        "rec: which tokens are trained on. one_side (as PPO's clip), two_side, ring (two_side, and those that moved far against the "
        "advantage) or none (all).",
        "one_side",
    )
    rec_ring_low: float = option(
        "rec, rec_clip=ring: tokens with A > 0 and a ratio of at most 1 - this stay; above epsilon, at most 1.", 0.6
    )
    rec_ring_high: float = option(
        "rec, rec_clip=ring: tokens with A < 0 and a ratio of at least 1 + this stay; above epsilon_high.", 2.0
    )
    rec_weight: str = option(
        "rec: weight of a token. none (1), importance (the ratio) or advantage (exp(A / rec_temperature)).", "none"
    )
    rec_temperature: float = option("rec, rec_weight=advantage: temperature of the weight.", 1.0)
    m2_threshold: float = option("m2po: bound of the mean squared log ratio, in nats squared.", 0.04)
    f_norm: float = option("advantage_estimator gpg: constant divisor.", 1.0)
    alpha_from: str = option(
        "advantage_estimator gpg: which rows carry a gradient, and so count in alpha: spread (those of groups with two different "
        "rewards) or nonzero (those with a reward other than 0).",
        "spread",
    )
    opmd_tau: float = option(
        "advantage_estimator opmd: temperature of the baseline; large: the group's mean, small: its best.", 1.0
    )
    asymre_shift: float = option("advantage_estimator asymre: added to the baseline, usually negative.", -0.1)
    gamma: float = option("Discount a token, of the estimators that add up rewards token by token.", 1.0)
    handle_zero_tail: bool = option(
        "advantage_estimator optimal_token_baseline: no baseline where the longest completion of a group goes on alone.", False
    )
