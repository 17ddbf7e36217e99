"""Objectives for data of an older policy (REC, sPPO, M2PO): adapters as in objectives.py."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from .functional import policy_stale as stale
from .functional.policy import PolicyTerm
from .objectives import FREE_RATIO, RATIO, importance_ratio
from .registry import register_policy_loss

if TYPE_CHECKING:
    from .batch import LossBatch
    from .spec import LossSpec


@register_policy_loss(
    "rec",
    requires=RATIO,
    options=FREE_RATIO
    | {"epsilon", "epsilon_high", "rec_clip", "rec_ring_low", "rec_ring_high", "rec_weight", "rec_temperature"},
    formula="-w A logp on the tokens that rec_clip keeps, w = 1, sg(r) or exp(A / rec_temperature) by rec_weight",
    source="REC and RED-Weight, arXiv 2509.24203",
)
def rec(batch: LossBatch, spec: LossSpec) -> PolicyTerm:
    """
    Group-relative REINFORCE with a clip as a mask, and importance weights only if asked for.

    At ratio 1 the gradient is -A; with rec_weight=advantage it is -A exp(A / rec_temperature).
    """
    ratio, a = importance_ratio(batch, spec).detach(), batch.advantages
    keep = stale.rec_keep(
        ratio,
        a,
        clip=spec.rec_clip,
        epsilon_low=spec.epsilon,
        epsilon_high=spec.clip_high,
        ring_low=spec.rec_ring_low,
        ring_high=spec.rec_ring_high,
    )
    return stale.rec(ratio, a, batch.logps, keep, weight=spec.rec_weight, temperature=spec.rec_temperature)


@register_policy_loss(
    "sppo",
    requires=RATIO,
    options={"epsilon", "epsilon_high", "log_ratio_clamp"},
    formula="-A log(clip(r, 1 / (1 + epsilon), 1 + epsilon_high))",
    source="sPPO, arXiv 2108.05828",
)
def sppo(batch: LossBatch, spec: LossSpec) -> PolicyTerm:
    """The log of the clipped ratio: no importance weight, and no gradient outside of the range on either side."""
    return stale.sppo(
        batch.log_ratio(spec.log_ratio_clamp), batch.advantages, epsilon_low=spec.epsilon, epsilon_high=spec.clip_high
    )


def _dropped(batch: LossBatch, spec: LossSpec) -> dict[str, Tensor]:
    d = batch.log_ratio(spec.log_ratio_clamp)
    return {"selected_tokens": stale.m2po_dropped(d, batch.advantages, batch.mask, threshold=spec.m2_threshold)}


@register_policy_loss(
    "m2po",
    requires=RATIO | {"selected_tokens"},
    options={"m2_threshold", "log_ratio_clamp"},
    traits={"ratio_alone"},
    over_step=_dropped,
    formula="-r A, 0 on the tokens moved furthest along A, until the mean of (log r)^2 over the others so moved is <= m2_threshold",
    source="M2PO, arXiv 2510.01161",
)
def m2po(batch: LossBatch, spec: LossSpec) -> PolicyTerm:
    """
    The unclipped ratio, and a bound on its second moment over the optimizer step in place of a bound on each token.

    Chosen over the rows of all micro-batches and processes; for stale data, of which a clip would drop too much. Costs one to two times
    ppo_clip: the log ratios of the step are sorted, once.
    """
    selected: Tensor = batch.selected_tokens  # type: ignore[assignment]
    return stale.m2po(batch.ratio(spec.log_ratio_clamp), batch.advantages, selected)
