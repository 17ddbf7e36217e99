"""Objectives that weight the log-prob, have a trust region, choose tokens or compare a group: adapters as in objectives.py."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from torch import Tensor

from .functional import policy_covariance as cov
from .functional import policy_credit as credit
from .functional import policy_importance as importance
from .functional import policy_trust_region as region
from .functional.correction import parse_rejection, rejection_keep
from .functional.masking import select
from .functional.policy import PolicyTerm, ppo_clip
from .objectives import CLIP, RATIO
from .registry import register_policy_loss

if TYPE_CHECKING:
    from .batch import LossBatch
    from .spec import LossSpec

BOUNDS = {"is_ratio_min", "is_ratio_max", "log_ratio_clamp"}
DPPO = {"epsilon", "epsilon_high", "dppo_ratio_max", "log_ratio_clamp"}
REJECTS = {"rollout_rs", "rollout_rs_threshold"}
SAMPLER = {"advantages", "rollout_logps"}
CHOICE = {"row_ids", "selected_tokens"}


@register_policy_loss(
    "reinforce",
    requires={"advantages"},
    traits={"no_options"},
    formula="-w A logp, w the rollout weights (1 without)",
    source="Williams, 1992",
)
def reinforce(batch: LossBatch, spec: LossSpec) -> PolicyTerm:
    """The plain policy gradient; importance weights against the sampler are multiplied in, as for every objective."""
    return importance.weighted_logp(batch.logps, batch.advantages)


@register_policy_loss(
    "gpg",
    requires={"advantages"},
    traits={"no_options"},
    formula="-A logp",
    source="GPG, arXiv 2504.02546",
)
def gpg(batch: LossBatch, spec: LossSpec) -> PolicyTerm:
    """Group policy gradient: reinforce by another name; its own part is advantage_estimator=gpg."""
    return importance.weighted_logp(batch.logps, batch.advantages)


def _weighted(batch: LossBatch, spec: LossSpec, mode: str) -> PolicyTerm:
    return importance.importance_weighted(
        batch.log_ratio(math.inf),
        batch.advantages,
        batch.logps,
        mode=mode,
        low=spec.is_ratio_min,
        high=spec.is_ratio_max,
        log_ratio_clamp=spec.log_ratio_clamp,
    )


@register_policy_loss(
    "tis",
    requires=RATIO,
    options=BOUNDS,
    formula="-sg(clip(r, is_ratio_min, is_ratio_max)) A logp",
    source="truncated importance sampling, IMPALA, arXiv 1802.01561",
)
def tis(batch: LossBatch, spec: LossSpec) -> PolicyTerm:
    """Truncated importance weights against the old policy: cispo with other bounds."""
    return _weighted(batch, spec, "truncate")


@register_policy_loss(
    "mis",
    requires=RATIO,
    options=BOUNDS,
    formula="-sg(r 1[is_ratio_min <= r <= is_ratio_max]) A logp",
    source="IcePop, Ling team (Ring-1T), 2025",
)
def mis(batch: LossBatch, spec: LossSpec) -> PolicyTerm:
    """Masked importance weights against the old policy: tokens whose ratio is outside of the bounds are dropped."""
    return _weighted(batch, spec, "mask")


@register_policy_loss(
    "topr",
    requires=RATIO,
    options={"log_ratio_clamp"},
    formula="-sg(w) A logp, w = 1 for A > 0, else min(r, 1)",
    source="TOPR, arXiv 2503.14286",
)
def topr(batch: LossBatch, spec: LossSpec) -> PolicyTerm:
    """Tapered off-policy REINFORCE."""
    return importance.topr(batch.ratio(spec.log_ratio_clamp), batch.advantages, batch.logps)


def _rejected(term: PolicyTerm, batch: LossBatch, spec: LossSpec) -> PolicyTerm:
    """The term without the tokens that rollout_rs rejects under the current policy; they stay in the normalizer."""
    if spec.rollout_rs is None:
        return term
    rules = parse_rejection(spec.rollout_rs, spec.rollout_rs_threshold)
    keep, _ = rejection_keep(batch.logps.detach(), batch.rollout_logps, batch.mask, rules)  # type: ignore[arg-type]
    return PolicyTerm(select(term.per_token, keep), {**term.stats, "rollout_rs/rejected": ~keep})


@register_policy_loss(
    "rollout_is",
    requires=SAMPLER,
    options=BOUNDS | REJECTS | {"is_mode", "importance_sampling_level"},
    traits={"reads_rollout_weights"},
    formula="-sg(w) A logp, w = pi / pi_sampler, truncated to or masked outside of [is_ratio_min, is_ratio_max]",
    source="verl's bypass mode (reinforce); SkyRL's rollout_is",
)
def rollout_is(batch: LossBatch, spec: LossSpec) -> PolicyTerm:
    """
    REINFORCE straight against the policy that sampled: no old log-probs. At sequence level the weight is the whole row's (a product).

    verl takes rejected tokens out of the normalizer where it counts the micro-batch's own; here the normalizer is the step's.
    """
    d = importance.sampler_log_ratio(batch.logps, batch.rollout_logps, batch.mask, level=spec.importance_sampling_level)  # type: ignore[arg-type]
    term = importance.importance_weighted(
        d,
        batch.advantages,
        batch.logps,
        mode=spec.is_mode,
        low=spec.is_ratio_min,
        high=spec.is_ratio_max,
        log_ratio_clamp=spec.log_ratio_clamp,
    )
    return _rejected(term, batch, spec)


@register_policy_loss(
    "rollout_ppo",
    requires=SAMPLER,
    options=(CLIP - {"importance_sampling_level"}) | REJECTS,
    traits={"reads_rollout_weights"},
    formula="-min(r A, clip(r, 1 - epsilon, 1 + epsilon_high) A), r = pi / pi_sampler",
    source="verl's bypass mode (ppo_clip); PPO, arXiv 1707.06347",
)
def rollout_ppo(batch: LossBatch, spec: LossSpec) -> PolicyTerm:
    """PPO's clipped objective straight against the policy that sampled: no old log-probs, no importance weights."""
    d = importance.sampler_log_ratio(batch.logps, batch.rollout_logps, batch.mask)  # type: ignore[arg-type]
    term = ppo_clip(
        d.clamp(-spec.log_ratio_clamp, spec.log_ratio_clamp).exp(),
        batch.advantages,
        epsilon_low=spec.epsilon,
        epsilon_high=spec.clip_high,
        clip_objective=spec.clip_objective,
        delta=spec.delta,
        clip_ratio_c=spec.clip_ratio_c,
    )
    return _rejected(term, batch, spec)


def _dppo_args(batch: LossBatch, spec: LossSpec) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return batch.log_ratio(spec.log_ratio_clamp), batch.advantages, batch.logps, batch.old_logps  # type: ignore[return-value]


@register_policy_loss(
    "dppo_tv",
    requires=RATIO,
    options=DPPO,
    formula="-sg(min(r, dppo_ratio_max)) A logp while p - p_old <= epsilon_high (A > 0), >= -epsilon (A < 0)",
    source="DPPO, arXiv 2602.04879",
)
def dppo_tv(batch: LossBatch, spec: LossSpec) -> PolicyTerm:
    """A trust region on the probability (total variation) in place of the clip; the clip range holds its thresholds."""
    return region.dppo_tv(
        *_dppo_args(batch, spec), threshold_low=spec.epsilon, threshold_high=spec.clip_high, ratio_max=spec.dppo_ratio_max
    )


@register_policy_loss(
    "dppo_kl",
    requires=RATIO,
    options=DPPO,
    formula="-sg(min(r, dppo_ratio_max)) A logp while the binary KL is <= epsilon_high (A > 0), <= epsilon (A < 0)",
    source="DPPO, arXiv 2602.04879",
)
def dppo_kl(batch: LossBatch, spec: LossSpec) -> PolicyTerm:
    """A trust region on the KL of "this token or another" in place of the clip; the clip range holds its thresholds in nats."""
    return region.dppo_kl(
        *_dppo_args(batch, spec), threshold_low=spec.epsilon, threshold_high=spec.clip_high, ratio_max=spec.dppo_ratio_max
    )


@register_policy_loss(
    "ipo",
    requires=RATIO,
    options={"ipo_threshold", "ipo_by_sign", "ipo_kl_coef", "log_ratio_clamp"},
    traits={"regularized"},
    formula="-r A 1[|p - p_old| <= ipo_threshold] + ipo_kl_coef (log r)^2",
    source="prime-rl's IPO (2026); DPPO, arXiv 2602.04879; Kimi K2.5, arXiv 2602.02276",
)
def ipo(batch: LossBatch, spec: LossSpec) -> PolicyTerm:
    """INTELLECT policy optimization: a two-sided trust region on the probability, and a quadratic pull back."""
    return region.ipo(*_dppo_args(batch, spec), threshold=spec.ipo_threshold, kl_coef=spec.ipo_kl_coef, by_sign=spec.ipo_by_sign)


@register_policy_loss(
    "dro",
    requires=RATIO,
    options={"dro_beta", "log_ratio_clamp"},
    traits={"regularized"},
    formula="-(A logp - dro_beta / 2 (log r)^2)",
    source="DRO, arXiv 2405.19107; Kimi k1.5, arXiv 2501.12599",
)
def dro(batch: LossBatch, spec: LossSpec) -> PolicyTerm:
    """Direct reward optimization, token by token: a quadratic penalty in place of ratio and clip."""
    return credit.dro(batch.log_ratio(spec.log_ratio_clamp), batch.advantages, batch.logps, beta=spec.dro_beta)


def _chosen_clip_cov(batch: LossBatch, spec: LossSpec) -> dict[str, Tensor]:
    ratio, a = batch.ratio(spec.log_ratio_clamp), batch.advantages
    clipped = ((a > 0) & (ratio > 1 + spec.clip_high)) | ((a < 0) & (ratio < 1 - spec.epsilon))
    bounds = {"ratio": spec.clip_cov_ratio, "low": spec.clip_cov_min, "high": spec.clip_cov_max, "seed": spec.cov_seed}
    chosen = cov.clip_cov_tokens(batch.logps, a, batch.mask, row_ids=batch.row_ids, exclude=clipped, **bounds)  # type: ignore[arg-type]
    return {"selected_tokens": chosen}


@register_policy_loss(
    "clip_cov",
    requires=RATIO | CHOICE,
    options={"epsilon", "epsilon_high", "clip_cov_ratio", "clip_cov_min", "clip_cov_max", "cov_seed", "log_ratio_clamp"},
    traits={"gradient_at_one"},
    over_step=_chosen_clip_cov,
    formula="-min(r A, clip(r) A), 0 on a drawn clip_cov_ratio of the tokens with clip_cov_min < Cov(A, logp) < clip_cov_max",
    source="Clip-Cov, arXiv 2505.22617",
)
def clip_cov(batch: LossBatch, spec: LossSpec) -> PolicyTerm:
    """
    PPO's clip, and a few tokens of high covariance lose their gradient (at ratio 1 too: 0 there, -A elsewhere).

    Drawn over the optimizer step's rows of all micro-batches and processes, from the tokens that the clip leaves alone.
    """
    ratio = batch.ratio(spec.log_ratio_clamp)
    selected: Tensor = batch.selected_tokens  # type: ignore[assignment]
    return cov.clip_cov(ratio, batch.advantages, selected, epsilon_low=spec.epsilon, epsilon_high=spec.clip_high)


def _chosen_kl_cov(batch: LossBatch, spec: LossSpec) -> dict[str, Tensor]:
    options = {"ratio": spec.kl_cov_ratio, "seed": spec.cov_seed, "row_ids": batch.row_ids}
    return {"selected_tokens": cov.kl_cov_tokens(batch.logps, batch.advantages, batch.mask, **options)}  # type: ignore[arg-type]


@register_policy_loss(
    "kl_cov",
    requires=RATIO | CHOICE,
    options={"kl_cov_ratio", "kl_cov_coef", "cov_seed", "log_ratio_clamp"},
    traits={"regularized"},
    over_step=_chosen_kl_cov,
    formula="-r A, plus kl_cov_coef |log r| on the kl_cov_ratio of the tokens with the highest Cov(A, logp)",
    source="KL-Cov, arXiv 2505.22617",
)
def kl_cov(batch: LossBatch, spec: LossSpec) -> PolicyTerm:
    """
    The unclipped ratio, and a few tokens of high covariance are held near the old policy.

    They are those of the optimizer step, of all its micro-batches and processes.
    """
    d = batch.log_ratio(spec.log_ratio_clamp)
    selected: Tensor = batch.selected_tokens  # type: ignore[assignment]
    return cov.kl_cov(d.exp(), d, batch.advantages, selected, coef=spec.kl_cov_coef)


@register_policy_loss(
    "fipo",
    requires=RATIO,
    options={
        "epsilon", "epsilon_high", "delta", "fipo_decay_rate", "fipo_clip_range", "fipo_clip_high_only", "fipo_safety_threshold",
        "log_ratio_clamp",
    },
    formula="f times the clipped loss, f = clip(exp(sum over s >= t of 2^(-(s - t) / fipo_decay_rate) log r_s)) detached",
    source="FIPO, arXiv 2603.19835",
)  # fmt: skip
def fipo(batch: LossBatch, spec: LossSpec) -> PolicyTerm:
    """A token counts more where the tokens after it are being reinforced (future KL)."""
    return credit.fipo(
        batch.log_ratio(spec.log_ratio_clamp),
        batch.advantages,
        batch.mask,
        epsilon_low=spec.epsilon,
        epsilon_high=spec.clip_high,
        delta=spec.delta,
        decay_rate=spec.fipo_decay_rate,
        clip_range=spec.fipo_clip_range,
        clip_high_only=spec.fipo_clip_high_only,
        safety_threshold=spec.fipo_safety_threshold,
    )


def _groups_of_real(batch: LossBatch, spec: LossSpec) -> dict[str, Tensor]:
    d = batch.log_ratio(spec.log_ratio_clamp)
    return {"row_terms": credit.real_terms(d, batch.advantages, batch.mask, batch.group_ids, tau=spec.real_tau)}  # type: ignore[arg-type]


@register_policy_loss(
    "real",
    requires=RATIO | {"group_ids", "row_terms"},
    options={"real_tau", "log_ratio_clamp"},
    traits={"whole_groups", "gradient_at_one", "ratio_alone"},
    over_step=_groups_of_real,
    aggregation="seq_mean_token_mean",
    formula="log(1 + sum over rows with A > 0 of e^(-s / tau)) + log(1 + sum over the others of e^(s / tau)), s = mean of log r",
    source="REAL, arXiv 2602.05630",
)
def real(batch: LossBatch, spec: LossSpec) -> PolicyTerm:
    """
    Rewards as labels: completions of a prompt are classified, good against bad, by how their probability moved.

    Every row has its group's loss, and the whole gradient by its own log-probs, so that a weight on a row acts on that row alone. At
    ratio 1 that is -+N / (tau (1 + n) length) a token, N the group's rows, n those on its side: the size of A plays no part.
    """
    d = batch.log_ratio(spec.log_ratio_clamp)
    return credit.real(d, batch.advantages, batch.mask, batch.row_terms, tau=spec.real_tau)  # type: ignore[arg-type]
