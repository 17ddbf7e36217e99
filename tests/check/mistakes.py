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


def own_kl(batch, spec):
    """A loss with a KL of its own inside: -r A + .1 (e^-d + d - 1), d = logp - ref_logp."""
    d = batch.logps - batch.ref_logps
    return PolicyTerm(-batch.ratio(spec.log_ratio_clamp) * batch.advantages + 0.1 * (torch.exp(-d) + d - 1))


def own_kl_sign(batch, spec):
    """The same with d the wrong way round."""
    d = batch.ref_logps - batch.logps
    return PolicyTerm(-batch.ratio(spec.log_ratio_clamp) * batch.advantages + 0.1 * (torch.exp(-d) + d - 1))


def row_mean(batch, spec):
    """-r A, the mean over each row's own tokens."""
    losses = torch.where(batch.mask, -batch.ratio(spec.log_ratio_clamp) * batch.advantages, 0.0)
    return PolicyTerm((losses.sum(-1, keepdim=True) / batch.mask.sum(-1, keepdim=True).clamp(min=1)).expand(batch.mask.shape))


def mean_before_mask(batch, spec):
    """The same, but the mean is taken before the mask, over padding too."""
    losses = -batch.ratio(spec.log_ratio_clamp) * batch.advantages
    return PolicyTerm(losses.mean(-1, keepdim=True).expand(batch.mask.shape))


def plain_own_kl(row, spec):
    """Of `own_kl`."""
    losses = []
    for new, old, ref, a in zip(row["logps"], row["old_logps"], row["ref_logps"], row["advantages"], strict=True):
        losses.append(-math.exp(new - old) * a + 0.1 * (math.exp(ref - new) + new - ref - 1))
    return losses


def plain_row_mean(row, spec):
    """Of `row_mean`."""
    losses = plain_ratio(row, spec)
    return [sum(losses) / len(losses)] * len(losses)


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
