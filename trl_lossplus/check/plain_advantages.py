"""
Advantages by hand: from rewards to one advantage a completion or a token, and their whitening.

Rewards are lists with one number a completion, None where it could not be scored; groups are lists of prompt ids. Token by token a
row is a list over its own tokens (masked ones are left out). `options`: the estimator's settings.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from .plain import mean

Rewards = Sequence[float | None]
Options = dict[str, Any]


def summed(rows: Sequence[Rewards], weights: Sequence[float]) -> list[float | None]:
    """The weighted sum over reward functions; one that gave nothing counts 0, and a row that none scored stays None."""
    sums: list[float | None] = []
    for row in rows:
        scored = [w * x for w, x in zip(weights, row, strict=True) if x is not None]
        sums.append(sum(scored) if scored else None)
    return sums


def deviation(values: Sequence[float], ddof: int = 1) -> float:
    """The standard deviation; 0 of equal values and of too few."""
    if len(values) <= ddof or min(values) == max(values):
        return 0.0
    centre = mean(list(values))
    return math.sqrt(sum((x - centre) ** 2 for x in values) / (len(values) - ddof))


def of_group(rewards: Rewards, groups: Sequence[int], i: int) -> list[float]:
    """The scored rewards of row i's group."""
    return [x for x, g in zip(rewards, groups, strict=True) if g == groups[i] and x is not None]


def flat_groups(rewards: Rewards, groups: Sequence[int]) -> list[bool]:
    """Of each row, whether its group has fewer than two different rewards."""
    return [len(set(of_group(rewards, groups, i))) < 2 for i in range(len(rewards))]


def scale(rewards: Rewards, groups: Sequence[int], i: int, options: Options) -> float:
    """What the group-relative estimators divide by: 1, or the group's or the batch's deviation plus eps."""
    if options["scale_rewards"] == "none":
        return 1.0
    own = options["scale_rewards"] == "group"
    values = of_group(rewards, groups, i) if own else [x for x in rewards if x is not None]
    return deviation(values, options.get("ddof", 1)) + options.get("eps", 1e-6)


def grpo(rewards: Rewards, groups: Sequence[int], options: Options) -> list[float]:
    """(s - mean of the group) / (std + eps)."""
    out = []
    for i, s in enumerate(rewards):
        others = of_group(rewards, groups, i)
        equal = len(set(others)) < 2
        out.append(0.0 if s is None or equal else (s - mean(others)) / scale(rewards, groups, i, options))
    return out


def grpo_passk(rewards: Rewards, groups: Sequence[int], options: Options) -> list[float]:
    """(best - second best) / (std + eps) for the best of the group, if it is alone at the top; 0 for the others."""
    out = []
    for i, s in enumerate(rewards):
        ordered = sorted(of_group(rewards, groups, i), reverse=True)
        alone = len(ordered) > 1 and ordered[0] > ordered[1]
        out.append((s - ordered[1]) / scale(rewards, groups, i, options) if s is not None and alone and s == ordered[0] else 0.0)
    return out


def rloo(rewards: Rewards, groups: Sequence[int], options: Options) -> list[float]:
    """s - mean of the group's other rewards."""
    out = []
    for i, s in enumerate(rewards):
        own = of_group(rewards, groups, i)
        out.append(0.0 if s is None or len(own) < 2 else s - (sum(own) - s) / (len(own) - 1))
    return out


def maxrl(rewards: Rewards, groups: Sequence[int], options: Options) -> list[float]:
    """(s - mean) / (|mean| + eps)."""
    out = []
    for i, s in enumerate(rewards):
        own = of_group(rewards, groups, i)
        out.append(0.0 if s is None or len(set(own)) < 2 else (s - mean(own)) / (abs(mean(own)) + options.get("eps", 1e-6)))
    return out


def centred(rewards: Rewards, groups: Sequence[int], options: Options) -> list[float]:
    """s - mean of the group (REINFORCE++ with baseline, before it is whitened)."""
    return grpo(rewards, groups, {"scale_rewards": "none"})


def gdpo(columns: Sequence[Rewards], groups: Sequence[int], options: Options) -> list[float]:
    """Each reward function normalized in the group, weighted, summed; the sum normalized over the batch."""
    each = {**options, "scale_rewards": "group"}
    rewards = list(zip(*columns, strict=True))  # one list a function
    parts = [grpo(column, groups, each) for column in rewards]
    totals = [sum(w * x for w, x in zip(options["reward_weights"], row, strict=True)) for row in zip(*parts, strict=True)]
    scored = [any(x is not None for x in row) for row in columns]
    valid = [x for x, here in zip(totals, scored, strict=True) if here]
    centre, std = mean(valid), deviation(valid, options.get("ddof", 1))
    return [(x - centre) / (std + options.get("eps", 1e-6)) if here else 0.0 for x, here in zip(totals, scored, strict=True)]


def opo(rewards: Rewards, groups: Sequence[int], options: Options) -> list[float]:
    """s - (sum of length s) / (sum of lengths) of the group."""
    out, lengths = [], options["lengths"]
    for i, s in enumerate(rewards):
        own = [(x, n) for x, n, g in zip(rewards, lengths, groups, strict=True) if g == groups[i] and x is not None and n]
        usable = s is not None and lengths[i] > 0 and len({x for x, _ in own}) > 1
        out.append(s - sum(x * n for x, n in own) / sum(n for _, n in own) if usable and s is not None else 0.0)
    return out


def gpg(rewards: Rewards, groups: Sequence[int], options: Options) -> list[float]:
    """alpha (s - mean of the group) / f_norm, alpha = rows / rows of groups with spread (or rows with a reward other than 0)."""
    by_spread = options.get("alpha_from", "spread") == "spread"
    flat = flat_groups(rewards, groups)
    scored = [i for i, s in enumerate(rewards) if s is not None]
    carrying = [i for i in scored if (not flat[i] if by_spread else rewards[i] != 0)]
    alpha = len(scored) / max(len(carrying), 1)
    return [alpha * x / options.get("f_norm", 1.0) for x in centred(rewards, groups, options)]


# Token by token.


def reward_to_go(rewards: list[float], gamma: float) -> list[float]:
    """G_t = r_t + gamma G_{t+1}."""
    out: list[float] = []
    after = 0.0
    for r in reversed(rewards):
        after = r + gamma * after
        out.insert(0, after)
    return out


def generalized(rewards: list[float], values: list[float], gamma: float, lam: float, after: float) -> list[float]:
    """A_t = delta_t + gamma lambda A_{t+1}, delta_t = r_t + gamma V_{t+1} - V_t; `after`: the value behind the last token."""
    out: list[float] = []
    carry, following = 0.0, after
    for r, v in zip(reversed(rewards), reversed(values), strict=True):
        carry = r + gamma * following - v + gamma * lam * carry
        following = v
        out.insert(0, carry)
    return out


def gae(row: dict[str, Any], options: Options) -> tuple[list[float], list[float]]:
    """Advantages under gae_lambda, and returns: advantages under the critic's lambda, plus values."""
    gamma, lam = options.get("gamma", 1.0), options.get("gae_lambda", 0.95)
    critic = options.get("gae_lambda_critic")
    after = row.get("next_value", 0.0)
    advantages = generalized(row["rewards"], row["values"], gamma, lam, after)
    target = generalized(row["rewards"], row["values"], gamma, lam if critic is None else critic, after)
    return advantages, [a + v for a, v in zip(target, row["values"], strict=True)]


def reinforce_plus_plus(row: dict[str, Any], options: Options) -> tuple[list[float], list[float]]:
    """The reward to go (before it is whitened)."""
    returns = reward_to_go(row["rewards"], options.get("gamma", 1.0))
    return returns, returns


def remax(row: dict[str, Any], options: Options) -> tuple[list[float], list[float]]:
    """The reward to go, less the reward of the prompt's greedy completion; 0 where that could not be scored."""
    returns, base = reward_to_go(row["rewards"], options.get("gamma", 1.0)), row["reward_baseline"]
    return [0.0 if base is None else g - base for g in returns], returns


def score_norm(row: dict[str, Any], i: int) -> float:
    """1 - 2 pi + sum of pi^2 of a token, at least 0, times its squared rollout weight."""
    norm = max(1 - 2 * math.exp(row["old_logps"][i]) + row["sum_pi_squared"][i], 0.0)
    return norm * (1.0 if row.get("rollout_weights") is None else row["rollout_weights"][i] ** 2)


def token_baseline(rows: list[dict[str, Any]], groups: Sequence[int], options: Options) -> list[tuple[list[float], list[float]]]:
    """G_t - (sum of W G) / (sum of W) of the group at the same place, W_t = sum over j <= t of the score norms."""
    returns = [reward_to_go(row["rewards"], 1.0) for row in rows]
    places = [dict(zip(row["places"], range(len(row["places"])), strict=True)) for row in rows]
    sums = [[sum(score_norm(row, j) for j in range(i + 1)) for i in range(len(row["rewards"]))] for row in rows]
    out = []
    for i, row in enumerate(rows):
        group = [j for j, g in enumerate(groups) if g == groups[i] and rows[j]["scored"] and rows[j]["places"]]
        advantages = []
        for k, place in enumerate(row["places"]):
            there = [(sums[j][places[j][place]], returns[j][places[j][place]]) for j in group if place in places[j]]
            base = sum(w * g for w, g in there) / (sum(w for w, _ in there) + options.get("eps", 1e-8))
            alive = sum(1 for j in group if rows[j]["places"][-1] >= place)
            alone = options.get("handle_zero_tail", False) and alive < 2
            usable = row["scored"] and len(group) > 1
            advantages.append((returns[i][k] - (0.0 if alone else base)) if usable else 0.0)
        out.append((advantages, returns[i]))
    return out


def numbered_baseline(
    rows: list[dict[str, Any]], groups: Sequence[int], options: Options
) -> list[tuple[list[float], list[float]]]:
    """The same with a token's place its number among the row's own tokens."""
    return token_baseline([{**row, "places": list(range(len(row["places"])))} for row in rows], groups, options)


# Around the estimators.


def token_rewards(score: float | None, kl: list[float] | None, coef: float, tokens: int) -> list[float]:
    """The score on the last token, less coef * KL on every token."""
    rewards = [0.0] * tokens
    if tokens and score is not None:
        rewards[-1] = score
    return rewards if kl is None else [r - coef * x for r, x in zip(rewards, kl, strict=True)]


def less_kl_to_go(advantages: list[float], kl: list[float], coef: float) -> list[float]:
    """A_t - coef * sum over s >= t of KL_s."""
    return [a - coef * x for a, x in zip(advantages, reward_to_go(kl, 1.0), strict=True)]


def whitened(rows: list[list[float]], keys: Sequence[Any], keep_mean: bool = False) -> list[list[float]]:
    """(x - mean) / sqrt(variance + 1e-8) over the tokens of all rows with the same key; a row with key None becomes 0."""
    out = []
    for row, key in zip(rows, keys, strict=True):
        together = [x for other, k in zip(rows, keys, strict=True) if k == key for x in other]
        centre, spread = mean(together), math.sqrt(deviation(together) ** 2 + 1e-8)
        out.append([0.0 if key is None else (x - centre) / spread + (centre if keep_mean else 0.0) for x in row])
    return out


def opmd(rewards: Rewards, groups: Sequence[int], options: Options) -> list[float]:
    """s - tau log(mean of the group of exp(s / tau))."""
    tau, out = options.get("opmd_tau", 1.0), []
    for i, s in enumerate(rewards):
        others = of_group(rewards, groups, i)
        top = max(others, default=0.0)
        base = 0.0 if s is None else top + tau * math.log(mean([math.exp((x - top) / tau) for x in others]))
        out.append(0.0 if s is None else s - base)
    return out


def asymre(rewards: Rewards, groups: Sequence[int], options: Options) -> list[float]:
    """s - (mean of the group + shift), for a group of two or more."""
    out = []
    for i, s in enumerate(rewards):
        others = of_group(rewards, groups, i)
        out.append(0.0 if s is None or len(others) < 2 else s - mean(others) - options.get("asymre_shift", -0.1))
    return out


SEQUENCE_ESTIMATORS: dict[str, Callable[[Any, Sequence[int], Options], list[float]]] = {
    "grpo": grpo, "grpo_passk": grpo_passk, "rloo": rloo, "maxrl": maxrl, "gdpo": gdpo, "opo": opo, "gpg": gpg,
    "opmd": opmd, "asymre": asymre,
    "reinforce_plus_plus_baseline": centred,
}  # fmt: skip
TOKEN_ESTIMATORS: dict[str, Callable[[dict[str, Any], Options], tuple[list[float], list[float]]]] = {
    "gae": gae,
    "reinforce_plus_plus": reinforce_plus_plus,
    "remax": remax,
}
GROUP_TOKEN_ESTIMATORS: dict[str, Callable[..., list[tuple[list[float], list[float]]]]] = {
    "optimal_token_baseline": token_baseline,
    "tir_optimal_token_baseline": numbered_baseline,
}
