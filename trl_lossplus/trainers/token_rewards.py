"""Where token rewards go: from what the reward functions said to a table beside the completion tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..estimators import weighted_sum
from .reward_functions import Parts, wrong
from .token_weights import token_at

Decode = Callable[[list[int]], str]


class TokenRewards(NamedTuple):
    """
    Token rewards of B completions by K functions.

    tokens: (B, up to T), the weighted sum over the functions. by_token: (B, K) bool, which rewards are in `tokens`; the others are numbers
    for the whole completion.
    """

    tokens: Tensor
    by_token: Tensor


def turns(own: Sequence[int]) -> list[int]:
    """The last token of each turn, a stretch of the model's own tokens (1 in `own`)."""
    return [t for t, here in enumerate(own) if here and (t + 1 == len(own) or not own[t + 1])]


def credited(own: Sequence[int]) -> list[int]:
    """
    The token that gets what is given to each: itself if it is the model's own, else the last own one before it, or the first.

    What is given for a tool's output is earned by the tokens that called it. Without own tokens each is left where it is.
    """
    if not any(own):
        return list(range(len(own)))
    last, found = next(t for t, here in enumerate(own) if here), []
    for t, here in enumerate(own):
        last = t if here else last
        found.append(last)
    return found


def spread(name: str, row: int, parts: Parts, ids: Sequence[int], own: Sequence[int], decode: Decode) -> list[float]:
    """
    One completion's token rewards by one function: as many numbers as tokens, none on a tool's tokens.

    Args:
        name, row: for errors. ids: of the completion's tokens. own: 1 for the model's own tokens, 0 for others.
        decode: token ids to text, special tokens left out.

    Raises:
        LossPlusError: a list of the wrong length, an index out of range; names function, completion and value.
    """
    out, to = [0.0] * len(ids), credited(own)
    if isinstance(parts, list):
        if len(parts) != len(ids):
            raise wrong(name, row, f"{len(parts)} rewards for a completion of {len(ids)} tokens.")
        for t, reward in enumerate(parts):
            out[to[t]] += reward
        return out
    ends = turns(own)
    characters = len(decode(list(ids))) if "char" in parts else 0
    sizes = {"token": len(ids), "char": characters, "turn": len(ends)}
    for place, rewards in parts.items():
        for index, reward in rewards.items():
            size = sizes[place]
            if not -size <= index < size:
                raise wrong(
                    name, row, f"{place} {index} is out of range: the completion has {size} {place}s (reward {reward:g})."
                )
            at = index % size
            t = ends[at] if place == "turn" else token_at(at, ids, decode) if place == "char" else at
            out[to[t]] += reward
    return out


def table(
    given: Sequence[dict[int, Parts]],
    ids: Sequence[Sequence[int]],
    own: Sequence[Sequence[int]] | None,
    decode: Decode,
    names: Sequence[str],
    weights: Tensor,
) -> TokenRewards | None:
    """
    The token rewards of a rollout's local rows, in generation order.

    Args:
        given: {column: parts} of each row. ids, own: of each row, see `spread`; own None: all are. names: of the K functions.
        weights: (K,) reward weights.

    Returns:
        None where no function spoke of tokens.

    Raises:
        LossPlusError: see `spread`.
    """
    if not any(given):
        return None
    tokens, by_token = torch.zeros(len(given), max(map(len, ids))), torch.zeros(len(given), len(names), dtype=torch.bool)
    for i, columns in enumerate(given):
        for k, parts in columns.items():
            rewards = spread(names[k], i, parts, ids[i], [1] * len(ids[i]) if own is None else own[i], decode)
            tokens[i, : len(rewards)] += weights[k].item() * torch.tensor(rewards)
            by_token[i, k] = True
    return TokenRewards(tokens, by_token)


def last_token_rewards(rewards: Tensor, weights: Tensor, token_rewards: TokenRewards | None) -> Tensor:
    """
    What of each row's reward belongs to its last token: the numbers for the whole completion. (B,), NaN where not scored.

    Args:
        rewards: (B, K) by function. weights: (K,).
    """
    if token_rewards is not None:
        rewards = rewards.masked_fill(token_rewards.by_token.to(rewards.device), 0.0)
    return weighted_sum(rewards, weights)
