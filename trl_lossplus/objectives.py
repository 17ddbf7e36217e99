"""Our policy objectives under their names: each hands the batch's tensors and the spec's options to one pure function."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from torch import Tensor

from .functional import policy
from .functional.policy import PolicyTerm
from .registry import register_policy_loss

if TYPE_CHECKING:
    from .batch import LossBatch
    from .spec import LossSpec

RATIO = {"old_logps", "advantages"}
CLIP_RANGE = {"epsilon", "epsilon_high", "importance_sampling_level", "log_ratio_clamp"}
CLIP = CLIP_RANGE | {"clip_objective", "delta", "clip_ratio_c"}
FREE_RATIO = {"importance_sampling_level", "log_ratio_clamp"}


def importance_ratio(batch: LossBatch, spec: LossSpec) -> Tensor:
    """pi / pi_old at the spec's importance level: (B, T) for token, (B, 1) for sequence. Connected to the log-probs."""
    if not spec.sequence_level:
        return batch.ratio(spec.log_ratio_clamp)
    mean = policy.sequence_log_ratio(batch.log_ratio(math.inf), batch.mask)  # the mean is bounded, not its tokens
    return mean.clamp(-spec.log_ratio_clamp, spec.log_ratio_clamp).exp()


def _clip(ratio: Tensor, batch: LossBatch, spec: LossSpec) -> PolicyTerm:
    return policy.ppo_clip(
        ratio,
        batch.advantages,
        epsilon_low=spec.epsilon,
        epsilon_high=spec.clip_high,
        clip_objective=spec.clip_objective,
        delta=spec.delta,
        clip_ratio_c=spec.clip_ratio_c,
    )


@register_policy_loss(
    "ppo_clip",
    requires=RATIO,
    options=CLIP,
    formula="-min(r A, clip(r, 1 - epsilon, 1 + epsilon_high) A)",
    source="PPO, arXiv 1707.06347",
)
def ppo_clip(batch: LossBatch, spec: LossSpec) -> PolicyTerm:
    """PPO's clipped objective on the token ratio, or on the row's mean ratio with importance_sampling_level=sequence."""
    return _clip(importance_ratio(batch, spec), batch, spec)


@register_policy_loss(
    "gspo",
    requires=RATIO,
    options=CLIP - {"importance_sampling_level"},
    traits={"sequence_level"},
    aggregation="seq_mean_token_mean",
    formula="-min(s A, clip(s, 1 - epsilon, 1 + epsilon_high) A), s = exp(mean over the row of log r)",
    source="GSPO, arXiv 2507.18071",
)
def gspo(batch: LossBatch, spec: LossSpec) -> PolicyTerm:
    """The clipped objective on one ratio a row; the gradient goes through the row's mean."""
    return _clip(importance_ratio(batch, spec), batch, spec)


@register_policy_loss(
    "gspo_token",
    requires=RATIO,
    options=CLIP - {"importance_sampling_level"},
    aggregation="seq_mean_token_mean",
    formula="-min(s A, clip(s, 1 - epsilon, 1 + epsilon_high) A), s = sg(row's mean ratio) r / sg(r)",
    source="GSPO-token, arXiv 2507.18071 section 4.3",
)
def gspo_token(batch: LossBatch, spec: LossSpec) -> PolicyTerm:
    """GSPO's ratio with a gradient of its own for each token: differs from gspo where advantages vary along a row."""
    d = policy.sequence_token_log_ratio(batch.log_ratio(math.inf), batch.mask)
    return _clip(d.clamp(-spec.log_ratio_clamp, spec.log_ratio_clamp).exp(), batch, spec)


@register_policy_loss(
    "luspo",
    requires=RATIO,
    options=CLIP - {"importance_sampling_level"},
    traits={"sequence_level"},
    aggregation="seq_mean_token_sum",
    formula="-min(s A, clip(s, 1 - epsilon, 1 + epsilon_high) A), each row weighted by its length",
    source="LUSPO, arXiv 2602.05261",
)
def luspo(batch: LossBatch, spec: LossSpec) -> PolicyTerm:
    """GSPO's objective to be summed over the row's tokens (loss_aggregation seq_mean_token_sum), so length does not dilute it."""
    return _clip(importance_ratio(batch, spec), batch, spec)


@register_policy_loss(
    "cispo",
    requires=RATIO,
    options=FREE_RATIO | {"epsilon_high", "cispo_ratio_min"},
    formula="-sg(clip(r, cispo_ratio_min, epsilon_high)) A logp",
    source="MiniMax-M1, arXiv 2506.13585",
)
def cispo(batch: LossBatch, spec: LossSpec) -> PolicyTerm:
    """Clipped and detached importance weights. `epsilon_high` bounds the ratio itself (TRL's meaning); 5 if not set."""
    ratio_max = 5.0 if spec.epsilon_high is None else spec.epsilon_high
    return policy.cispo(
        importance_ratio(batch, spec), batch.advantages, batch.logps, ratio_max=ratio_max, ratio_min=spec.cispo_ratio_min
    )


@register_policy_loss(
    "sapo",
    requires=RATIO,
    options=FREE_RATIO | {"sapo_temperature_pos", "sapo_temperature_neg"},
    aggregation="seq_mean_token_mean",
    formula="-(4 / tau) sigmoid(tau (r - 1)) A, tau by the sign of A",
    source="SAPO, arXiv 2511.20347",
)
def sapo(batch: LossBatch, spec: LossSpec) -> PolicyTerm:
    """A smooth gate in place of the clip."""
    return policy.sapo(
        importance_ratio(batch, spec),
        batch.advantages,
        temperature_pos=spec.sapo_temperature_pos,
        temperature_neg=spec.sapo_temperature_neg,
    )


@register_policy_loss(
    "gmpo",
    requires=RATIO,
    options={"epsilon", "epsilon_high", "log_ratio_clamp"},
    aggregation="seq_mean_token_mean",
    formula="-mean(A) exp(mean over the row of one-sidedly clipped log r)",
    source="GMPO, arXiv 2507.20673",
)
def gmpo(batch: LossBatch, spec: LossSpec) -> PolicyTerm:
    """Geometric mean of clipped ratios; the range is in log space."""
    return policy.gmpo(
        batch.log_ratio(math.inf),
        batch.advantages,
        batch.mask,
        epsilon_low=spec.epsilon,
        epsilon_high=spec.clip_high,
        log_ratio_clamp=spec.log_ratio_clamp,
    )


@register_policy_loss(
    "vespo",
    requires=RATIO | {"rollout_weights"},
    options={"vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg", "log_ratio_clamp"},
    traits={"reads_rollout_weights"},
    formula="-phi(w) A logp, phi(w) = w^k exp(lambda (1 - w)) detached, w the row's product of ratios",
    source="VESPO, arXiv 2602.10693",
)
def vespo(batch: LossBatch, spec: LossSpec) -> PolicyTerm:
    """Gamma-weighted sequence objective; rollout weights, where there are any, are part of w."""
    return policy.vespo(
        batch.log_ratio(spec.log_ratio_clamp),
        batch.advantages,
        batch.logps,
        batch.mask,
        rollout_weights=batch.rollout_weights,
        k_pos=spec.vespo_k_pos,
        lambda_pos=spec.vespo_lambda_pos,
        k_neg=spec.vespo_k_neg,
        lambda_neg=spec.vespo_lambda_neg,
    )
