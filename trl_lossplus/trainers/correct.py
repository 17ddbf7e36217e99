"""A sampler whose log-probs differ from the trainer's: importance weights and rejection at the rollout, and what they did."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from ..config import GRPOPlusConfig
from ..functional.correction import (
    correction_statistics,
    normalize_weights,
    parse_rejection,
    rejection_keep,
    rollout_importance_weights,
    weight_totals,
)
from ..functional.errors import LossPlusError
from ..registry import POLICY_LOSSES
from ..spec import LossSpec
from .minibatch import KEEP


def rejects_at_rollout(spec: LossSpec) -> bool:
    """Whether rollout_rs acts at the rollout, by the old log-probs; some objectives apply it themselves, in every step."""
    return spec.rollout_rs is not None and "rollout_rs" not in POLICY_LOSSES.get(spec.policy_loss).options


def reader_of_sampler(args: GRPOPlusConfig, spec: LossSpec) -> str | None:
    """The setting that reads the sampler's log-probs, None where there is none."""
    readers = {
        f"policy_loss={spec.policy_loss!r}": "rollout_logps" in spec.required(),
        f"rollout_rs={spec.rollout_rs!r}": spec.rollout_rs is not None,
        f"rollout_is_correction={args.rollout_is_correction}": args.rollout_is_correction,
        "vllm_importance_sampling_correction=True": args.use_vllm and args.vllm_importance_sampling_correction,
    }
    return next((reader for reader, reads in readers.items() if reads), None)


def checked_sampler(args: GRPOPlusConfig, spec: LossSpec, rollout_func: Any) -> Any:
    """
    The user's rollout_func, checked (see `checked_rollout`), or None.

    Raises:
        LossPlusError: something reads the sampler's log-probs and nothing gives them, neither vLLM nor a rollout_func.
    """
    reader = reader_of_sampler(args, spec)
    if rollout_func is not None:
        return checked_rollout(rollout_func, reader)
    if reader is not None and not args.use_vllm:
        raise LossPlusError(
            f"{reader} reads the sampler's log-probs, and there are none: set use_vllm=True, or pass a rollout_func that returns them as "
            "logprobs. The trainer's own generation keeps none."
        )
    return None


def checked_rollout(func: Callable[..., Any], reader: str | None) -> Callable[..., Any]:
    """
    A user's rollout_func whose lists are checked: a row a prompt, and a log-prob a completion token (None or NaN: not scored).

    `reader`: the setting that reads the log-probs; None: there need not be any.
    """

    def fault(text: str) -> LossPlusError:
        return LossPlusError(f"rollout_func {getattr(func, '__name__', type(func).__name__)!r} {text}")

    @wraps(func, updated=())
    def checked(prompts: Any, *args: Any, **kwargs: Any) -> Any:
        output = func(prompts, *args, **kwargs)
        if not isinstance(output, dict):
            raise fault(f"returned a {type(output).__name__}, not a dictionary of prompt_ids, completion_ids and logprobs.")
        if reader is not None and output.get("logprobs") is None:
            raise fault(f"returned no logprobs, which {reader} reads: a list for each completion, one number a token.")
        for name in ("prompt_ids", "completion_ids", "logprobs", "env_mask"):
            rows = output.get(name)
            if rows is None:
                continue
            if len(rows) != len(prompts):
                raise fault(f"returned {len(rows)} rows of {name} for {len(prompts)} prompts; it must return one a prompt.")
            for i, (row, ids) in enumerate(zip(rows, output.get("completion_ids", []), strict=False)):
                if name != "prompt_ids" and len(row) != len(ids):
                    raise fault(
                        f"returned {len(row)} {name} for the {len(ids)} tokens of completion {i}; it must return one a token."
                    )
        return output

    return checked


def correct(
    out: dict[str, Any],
    mask: Tensor,
    args: GRPOPlusConfig,
    spec: LossSpec,
    old_logps: Callable[[], Tensor],
    reduce: Callable[..., Any],
) -> dict[str, float]:
    """
    Puts importance weights and what is rejected into the rollout, where the configuration asks for them (one collective).

    Args:
        out: the local rows; TRL has put weights in where it corrects for vLLM, which are made anew. mask: (B, T) bool.
        old_logps: gives the policy's log-probs (B, T). reduce: sums a tensor over processes (accelerate's).

    Returns:
        Metrics over all processes; {} where there is no correction.
    """
    weighted = out.get("importance_sampling_ratio") is not None or args.rollout_is_correction
    rejects = rejects_at_rollout(spec)
    if not weighted and not rejects:
        return {}
    sampler = out["sampling_per_token_logps"]
    old, clamp = old_logps(), spec.log_ratio_clamp
    totals = _mismatch(old, sampler, mask, clamp)
    if weighted:
        bounds = {"clip_min": args.vllm_importance_sampling_clip_min, "clip_max": args.vllm_importance_sampling_clip_max}
        mode = args.vllm_importance_sampling_mode
        weights = rollout_importance_weights(old, sampler, mask, mode=mode, log_ratio_clamp=clamp, **bounds)
        count = weight_totals(torch.ones_like(weights), mask)[1]
        totals["rollout_corr/is_mean"] = weight_totals(weights, mask)
        totals["rollout_corr/is_zero"] = weight_totals((weights == 0).float(), mask)
        totals["rollout_corr/is_square"] = torch.stack([weight_totals(weights**2, mask)[0], count])
        out["importance_sampling_ratio"] = weights
    if rejects:
        rules = parse_rejection(spec.rollout_rs or "", spec.rollout_rs_threshold)
        keep, shares = rejection_keep(old, sampler, mask, rules, log_ratio_clamp=clamp)
        out[KEEP], rows = keep, mask.any(-1)
        totals |= {name: _pair(share * mask.sum(), mask.sum()) for name, share in shares.items()}
        totals["rollout_rs/rejected"] = _pair((mask & ~keep).sum(), mask.sum())
        totals["rollout_rs/rejected_rows"] = _pair((rows & ~(mask & keep).any(-1)).sum(), rows.sum())
    pooled = dict(zip(totals, reduce(torch.stack(list(totals.values())), reduction="sum"), strict=True))
    if weighted and spec.rollout_is_batch_normalize:
        out["importance_sampling_ratio"] = normalize_weights(weights, pooled["rollout_corr/is_mean"])
    return _metrics({name: total / max(count, 1.0) for name, (total, count) in zip(pooled, _listed(pooled), strict=True)})


def _pair(total: Tensor, count: Tensor) -> Tensor:
    return torch.stack([total.float(), count.float()])


def _listed(pooled: dict[str, Tensor]) -> list[list[float]]:
    return torch.stack(list(pooled.values())).tolist()


def _mismatch(old: Tensor, sampler: Tensor, mask: Tensor, clamp: float) -> dict[str, Tensor]:
    """[sum, count] of how far sampler and policy are apart, see `correction_statistics`."""
    tokens, rows = mask.sum(), mask.any(-1).sum()
    statistics = correction_statistics(old, sampler, mask, log_ratio_clamp=clamp)
    counts = {name: rows if name.endswith(("chi2_seq", "ppl_ratio")) else tokens for name in statistics}
    return {name: _pair(value * counts[name], counts[name]) for name, value in statistics.items()}


def _metrics(means: dict[str, float]) -> dict[str, float]:
    """The mean of the squared weights becomes the effective sample size over the number: mean(w)^2 / mean(w^2)."""
    square = means.pop("rollout_corr/is_square", None)
    if square is not None:
        means["rollout_corr/is_eff_sample_size"] = means["rollout_corr/is_mean"] ** 2 / square if square > 0 else 0.0
    return means
