"""Ten-line losses as a user writes them: one that is right, and some with a slip. And plain versions."""

import math

import torch

from trl_lossplus import PolicyTerm


def right(batch, spec):
    ratio = batch.ratio(spec.log_ratio_clamp)
    clipped = ratio.clamp(1 - spec.epsilon, 1 + spec.epsilon)
    return PolicyTerm(-torch.minimum(ratio * batch.advantages, clipped * batch.advantages))


def swapped(batch, spec):
    ratio = batch.ratio(spec.log_ratio_clamp)
    clipped = ratio.clamp(1 - spec.epsilon, 1 + spec.epsilon)
    return PolicyTerm(-torch.maximum(ratio * batch.advantages, clipped * batch.advantages))


def wider(batch, spec):
    ratio = batch.ratio(spec.log_ratio_clamp)
    clipped = ratio.clamp(1 - spec.epsilon, 1 + 1.1 * spec.epsilon)
    return PolicyTerm(-torch.minimum(ratio * batch.advantages, clipped * batch.advantages))


def unmasked(batch, spec):
    """A sequence ratio whose mean runs over the padding too."""
    ratio = (batch.logps - batch.old_logps).mean(-1, keepdim=True).exp()
    clipped = ratio.clamp(1 - spec.epsilon, 1 + spec.epsilon)
    return PolicyTerm(-torch.minimum(ratio * batch.advantages, clipped * batch.advantages))


def reads_the_reference(batch, spec):
    return PolicyTerm(-(batch.logps - batch.ref_logps).exp() * batch.advantages)


def plain_clip(row, spec):
    """PPO's clipped loss of one completion."""
    losses = []
    for new, old, a in zip(row["logps"], row["old_logps"], row["advantages"], strict=True):
        r = math.exp(new - old)
        losses.append(-min(r * a, min(max(r, 1 - spec["epsilon"]), 1 + spec["epsilon"]) * a))
    return losses


def plain_ratio(row, spec):
    """-r A."""
    return [-math.exp(new - old) * a for new, old, a in zip(row["logps"], row["old_logps"], row["advantages"], strict=True)]


def median_advantage(rewards, group_ids):
    """An estimator of a user's own: the reward less the group's median."""
    out = torch.zeros_like(rewards)
    for g in group_ids.unique():
        out[group_ids == g] = rewards[group_ids == g] - rewards[group_ids == g].median()
    return out


def plain_median(rewards, groups, options):
    out = []
    for r, g in zip(rewards, groups, strict=True):
        own = sorted(x for x, h in zip(rewards, groups, strict=True) if h == g)
        out.append(r - own[(len(own) - 1) // 2])
    return out


def too_short(row, spec):
    return [0.0]
