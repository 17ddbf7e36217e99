"""The toy's completions: told by the prompt and a number alone, ragged, with holes, rewards that differ and some that do not."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..toy import KEYWORDS, keyword_reward
from .plain_terms import log_prob


@dataclass
class Completion:
    """
    One row as it was sampled: token ids, which of them are the policy's own, the sampler's log-probs (None: not scored), its prompt.
    """

    text: str
    ids: list[int]
    own: list[bool]
    logprobs: list[float | None] | None = None
    prompt: str = ""


class Sampler:
    """
    A rollout function for TRL. Every call's completions stay in `calls`.

    Where the trainer asks for greedy completions it gives one more a prompt, which is not kept. Lengths go from 1 to max_completion_length; shorter ones end with the end token. About two in five hold their keyword, and one
    prompt in six never does (a flat group). Some tokens are not the policy's own (as a tool's output), in a few rows none is.

    Args:
        scores: also give log-probs, as a sampler whose numbers are a little off would.
    """

    supports_greedy = True

    def __init__(self, scores: bool):
        self.scores = scores
        self.calls: list[list[Completion]] = []

    def __call__(self, prompts: Sequence[str], trainer: Any) -> dict[str, Any]:
        tokenizer, size, call = trainer.processing_class, trainer.num_generations, len(self.calls)
        prompt_ids = [tokenizer(prompt)["input_ids"] for prompt in prompts]
        rows = [
            completion(prompt, -call if trainer.greedy else i % size, call, tokenizer, trainer.args.max_completion_length)
            for i, prompt in enumerate(prompts)
        ]
        if self.scores:
            for before, row in zip(prompt_ids, rows, strict=True):
                row.logprobs = scored(trainer, before, row.ids)
        if not trainer.greedy:
            self.calls.append(rows)
        return {
            "prompt_ids": prompt_ids,
            "completion_ids": [row.ids for row in rows],
            "logprobs": [row.logprobs for row in rows] if self.scores else None,
            "env_mask": [[int(x) for x in row.own] for row in rows],
        }


def completion(prompt: str, number: int, call: int, tokenizer: Any, longest: int) -> Completion:
    """The completion of this number to a prompt, from a hash of the three."""
    digest = hashlib.sha256(f"{prompt} {number} {call}".encode()).digest() * (1 + longest // 8)
    keyword = next((word for word in prompt.split() if word in KEYWORDS), KEYWORDS[0])
    length = 1 + digest[0] % longest
    ids = [4 + byte % (len(tokenizer) - 4) for byte in digest[1 : 1 + length]]
    keyword_id = tokenizer.convert_tokens_to_ids(keyword)
    never = hashlib.sha256(prompt.encode()).digest()[0] % 6 == 0
    ids = [token if token != keyword_id else 4 + (token - 3) % (len(tokenizer) - 4) for token in ids]
    if not never and digest[1] % 5 < 2:
        ids[digest[2] % length] = keyword_id
    if length < longest:
        ids.append(tokenizer.eos_token_id)
    own = [byte % 6 != 0 for byte in digest[-len(ids) :]]
    if digest[3] % 12 == 0:
        own = [False] * len(ids)
    return Completion(tokenizer.decode(ids), ids, own, prompt=prompt)


def scored(trainer: Any, before: list[int], ids: list[int]) -> list[float | None]:
    """What a sampler would say of the tokens: the policy's log-probs, a little off; every ninth is not scored."""
    with torch.no_grad():
        logits = trainer.model(input_ids=torch.tensor([[*before, *ids]])).logits[0, len(before) - 1 : -1].tolist()
    exact = [log_prob(row, token, trainer.temperature) for row, token in zip(logits, ids, strict=True)]
    return [None if (i + len(before)) % 9 == 0 else x + 0.2 * math.sin(7 * x + i) for i, x in enumerate(exact)]


def brevity_reward(completions: list[str], **kwargs: Any) -> list[float]:
    """1 / (number of words + 1)."""
    return [1 / (len(text.split()) + 1) for text in completions]


def letters_reward(completions: list[str], **kwargs: Any) -> list[float]:
    """The number of letters, over 10."""
    return [len(text) / 10 for text in completions]


def rewards(number: int) -> list[Any]:
    """So many reward functions; the keyword's first."""
    known = [keyword_reward, brevity_reward, letters_reward]
    return [known[i % 3] for i in range(number)]
