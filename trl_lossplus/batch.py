"""LossBatch: the tensors that one loss computation reads, and the contract that checks them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from .functional.errors import LossPlusError
from .functional.fused import bounded_exp
from .functional.masking import nonempty, select
from .functional.policy import log_ratio
from .registry import ALWAYS, STEP_TENSORS, TENSORS

ROW_BROADCAST = {"advantages", "rollout_weights"}  # may be (B, 1)
OPTIONAL = {"old_logps", "rollout_weights", "token_weights", "row_ids", *STEP_TENSORS}  # None has a meaning of its own
IDS = {"group_ids", "row_ids"}  # (B,) integers


@dataclass(frozen=True, eq=False)
class LossBatch:
    """
    One micro-batch for the loss. All tensors are (B, T) over completion tokens.

    Args:
        logps: log-probs in nats of the sampled tokens under the policy, with gradient.
        old_logps: the same under the policy at the rollout; None: the policy has not changed since (logps, detached).
        advantages: (B, T), (B, 1) or (B,).
        mask: bool, True for tokens that count. What stands at other positions (NaN too) changes nothing.
        ref_logps: under the reference model. entropies: of the policy's distributions, in nats.
        values, old_values, returns: the critic's.
        token_weights: weights of the policy term. rollout_weights: (B, T) or (B, 1) importance weights pi_old / pi_sampler.
        rollout_logps: under the sampler; NaN where it could not score a token.
        group_ids: (B,) integers, one id a prompt.
        kl_mask: (B, 1) or (B, T) bool, where the KL term acts; None: everywhere.
        entropy_mask: (B, T) bool, the high-entropy tokens, when they were selected over more than this batch.
        selected_tokens: (B, T) bool, the tokens that clip_cov or kl_cov treat apart; row_terms: (B, K), what real needs of a row's
            group. Both are made over the whole optimizer step by the objective's `over_step` (see `registry.Entry`); None: this batch
            is the whole step.
        row_ids: (B,) integers, one id a completion, by which a draw among tokens tells them apart; None: by their log-probs.
    """

    logps: Tensor
    old_logps: Tensor | None
    advantages: Tensor
    mask: Tensor
    ref_logps: Tensor | None = None
    entropies: Tensor | None = None
    values: Tensor | None = None
    old_values: Tensor | None = None
    returns: Tensor | None = None
    token_weights: Tensor | None = None
    rollout_weights: Tensor | None = None
    rollout_logps: Tensor | None = None
    group_ids: Tensor | None = None
    kl_mask: Tensor | None = None
    entropy_mask: Tensor | None = None
    selected_tokens: Tensor | None = None
    row_terms: Tensor | None = None
    row_ids: Tensor | None = None

    def validate(self, required: Iterable[str] = ()) -> None:
        """
        Checks presence, shapes and the mask's type. Waits for no device.

        Raises:
            LossPlusError: names the tensor, its shape and what is allowed.
        """
        if self.mask.dtype != torch.bool:
            raise LossPlusError(f"mask has dtype {self.mask.dtype}; it must be torch.bool (mask.bool()).")
        if self.logps.dim() != 2:
            raise LossPlusError(f"logps has shape {tuple(self.logps.shape)}; it must be (B, T).")
        rows, length = self.logps.shape
        for name in sorted(required):
            if getattr(self, name) is None and name not in OPTIONAL:
                raise LossPlusError(f"the loss reads {name} {TENSORS[name][0]}, made by {TENSORS[name][1]}; it is None.")
        for item in fields(self):
            tensor = getattr(self, item.name)
            if tensor is None:
                continue
            allowed: list[tuple[int, ...]] = [(rows,)] if item.name in IDS else [(rows, length)]
            if item.name == "row_terms":
                allowed = [(rows, tensor.shape[-1])]
            if item.name in ROW_BROADCAST or item.name == "kl_mask":
                allowed.append((rows, 1))
            if item.name == "advantages":
                allowed.append((rows,))
            if tuple(tensor.shape) not in allowed:
                shapes = " or ".join(map(str, allowed))
                raise LossPlusError(
                    f"{item.name} has shape {tuple(tensor.shape)}; with logps {(rows, length)} it must be {shapes}."
                )

    def clean(self) -> LossBatch:
        """
        The same batch in float32, with every masked position selected away (0, and a gradient of exactly 0).

        `old_logps=None` becomes `logps` without gradient; advantages become (B, 1) or (B, T); a NaN sampler log-prob stays, for
        it means "not scored".
        """
        filled: dict[str, Any] = {}
        row = nonempty(self.mask, keepdim=True)
        for item in fields(self):
            tensor = getattr(self, item.name)
            if tensor is None or tensor.dtype == torch.bool or item.name in IDS:
                continue
            tensor = tensor.unsqueeze(-1) if tensor.dim() == 1 else tensor
            valid = self.mask if tensor.shape == self.mask.shape and item.name != "row_terms" else row
            filled[item.name] = select(tensor.float(), valid)
        if self.rollout_weights is not None:
            weights = self.rollout_weights.float()
            valid = self.mask if weights.shape == self.mask.shape else row
            filled["rollout_weights"] = torch.where(valid, weights, torch.ones_like(weights))
        if self.old_logps is None:
            filled["old_logps"] = filled["logps"].detach()
        return replace(self, **filled)

    def detached(self) -> LossBatch:
        """The same tensors without gradient; nothing is copied."""
        given: dict[str, Any] = {item.name: getattr(self, item.name) for item in fields(self)}
        return replace(self, **{name: tensor.detach() for name, tensor in given.items() if tensor is not None})

    def log_ratio(self, clamp: float = 20.0) -> Tensor:
        """log pi / pi_old of each token, bounded to [-clamp, clamp]: (B, T), connected to `logps`."""
        old = self.logps.detach() if self.old_logps is None else self.old_logps
        return log_ratio(self.logps, old, clamp)

    def ratio(self, clamp: float = 20.0) -> Tensor:
        """pi / pi_old of each token: (B, T), finite for any log ratio."""
        return bounded_exp(self.log_ratio(math.inf), clamp)


class DeclaredView:
    """A batch that lets one function read the tensors that it declared, and no other."""

    def __init__(self, batch: LossBatch, owner: str, requires: frozenset[str]):
        self._batch, self._owner, self._requires = batch, owner, requires | ALWAYS
        self._difference: Tensor | None = None
        self._ratios: dict[float, Tensor] = {}

    def __getattr__(self, name: str) -> Any:
        if name not in TENSORS:
            raise AttributeError(f"a policy loss sees the batch's tensors, log_ratio() and ratio(), not {name!r}")
        if name not in self._requires:
            raise LossPlusError(
                f"policy_loss {self._owner!r} reads {name}, which it did not declare: add it to requires= where it is "
                f"registered. Declared: {', '.join(sorted(self._requires))}."
            )
        return getattr(self._batch, name)

    def log_ratio(self, clamp: float = 20.0) -> Tensor:
        """See `LossBatch.log_ratio`; needs `old_logps` to be declared."""
        if self._difference is None:
            self._difference = log_ratio(self.logps, self.old_logps, math.inf)
        return self._difference if clamp == math.inf else self._difference.clamp(-clamp, clamp)

    def ratio(self, clamp: float = 20.0) -> Tensor:
        """See `LossBatch.ratio`; needs `old_logps` to be declared; computed once."""
        if clamp not in self._ratios:
            self._ratios[clamp] = bounded_exp(self.log_ratio(math.inf), clamp)
        return self._ratios[clamp]
