"""The advantages of a snapshot made anew from its rewards, where a replay asks for another estimator or scale."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ..estimators import compute_advantages, options_of, weighted_sum
from ..functional.errors import LossPlusError
from ..registry import ADVANTAGE_ESTIMATORS
from ..spec import LossSpec
from .store import MicroSnapshot, Snapshot

REMADE = ("advantage_estimator", "scale_rewards")


def with_advantages_of(snapshot: Snapshot, spec: LossSpec) -> Snapshot:
    """
    The snapshot with the advantages that `spec` gives from its rewards; as it is where estimator and scale stay.

    Raises:
        LossPlusError: the estimator works token by token, is whitened, or reads more than rewards and groups; the step does not hold a whole rollout's
            rewards; or the snapshot's own advantages are not what its own estimator gives from them, so that something else acted too.
    """
    changed = [name for name in REMADE if getattr(spec, name) != getattr(snapshot.spec, name)]
    if not changed:
        return snapshot
    asked = f"{changed[0]}={getattr(spec, changed[0])!r}"
    for one in (snapshot.spec, spec):
        entry = ADVANTAGE_ESTIMATORS.get(one.advantage_estimator)
        if {"token_level", "whitened"} & entry.traits or entry.requires - {"group_ids"}:
            raise LossPlusError(
                f"{asked}: it acted at the rollout, and advantages of {one.advantage_estimator!r} are not made of rewards and groups alone."
            )
    rewards, groups = _whole_rollout(snapshot, asked)
    weights = torch.tensor(snapshot.facts["reward_weights"], dtype=torch.float32)
    parts = [part.batch.mask for part in snapshot.micro]
    sizes = [len(mask) for mask in parts]
    before, after = (_advantages(one, rewards, groups, weights).split(sizes) for one in (snapshot.spec, spec))
    for part, made in zip(snapshot.micro, before, strict=True):
        mask = part.batch.mask.cpu()
        given = part.batch.advantages.reshape(len(made), -1).float().cpu().expand(mask.shape)
        if not torch.isclose(given, made.expand(mask.shape), rtol=1e-4, atol=1e-5)[mask].all():
            raise LossPlusError(
                f"{asked}: it acted at the rollout, and so did more: the advantages of the snapshot are not what "
                f"{snapshot.spec.advantage_estimator} gives from its rewards (a normalization, KL or a penalty in the reward, code of your own)."
            )
    return replace(snapshot, micro=[_with(part, made) for part, made in zip(snapshot.micro, after, strict=True)])


def _advantages(spec: LossSpec, rewards: Tensor, groups: Tensor, weights: Tensor) -> Tensor:
    """(N, 1) from rewards (N, K), as at the rollout."""
    options = options_of(spec)
    by_column = "reads_reward_columns" in ADVANTAGE_ESTIMATORS.get(spec.advantage_estimator).traits
    if by_column:
        options["reward_weights"] = weights
    one = torch.ones(len(rewards), 1, dtype=torch.bool)
    return compute_advantages(
        spec.advantage_estimator, rewards if by_column else weighted_sum(rewards, weights), one, groups, **options
    ).advantages


def _with(part: MicroSnapshot, made: Tensor) -> MicroSnapshot:
    old = part.batch.advantages
    return replace(
        part,
        batch=replace(part.batch, advantages=made.to(old).expand(-1, old.shape[1]) if old.dim() == 2 else made[:, 0].to(old)),
    )


def _whole_rollout(snapshot: Snapshot, asked: str) -> tuple[Tensor, Tensor]:
    """Rewards (N, K) and group ids (N,) of all rows. Raises LossPlusError unless they are a rollout's."""
    rewards = [part.beside["rewards"] for part in snapshot.micro if "rewards" in part.beside]
    groups = [part.batch.group_ids for part in snapshot.micro if part.batch.group_ids is not None]
    if not len(rewards) == len(groups) == len(snapshot.micro) or "reward_weights" not in snapshot.facts:
        raise LossPlusError(f"{asked}: it acted at the rollout, and the snapshot does not hold the rewards.")
    rows = snapshot.facts.get("rollout_rows")
    if snapshot.rows != rows:
        raise LossPlusError(f"{asked}: it compares the rows of a rollout, and the snapshot holds {snapshot.rows} of its {rows}.")
    return torch.cat(rewards).float().cpu(), torch.cat(groups).cpu()
