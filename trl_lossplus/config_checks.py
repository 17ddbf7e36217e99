"""What a configuration's settings need of each other beside the loss: optimizer steps that are known, whole groups, a sampler."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from .functional.errors import LossPlusError
from .registry import POLICY_LOSSES
from .spec import LossSpec
from .still_rows import what_moves_still_rows

if TYPE_CHECKING:
    from .config import GRPOPlusConfig

# Settings of generation that choose another loop than that of compact_generation or another cache, or that go by the rows it began with;
# and with which value they do nothing.
OTHER_WAYS = {
    "num_beams": 1, "num_return_sequences": 1, "use_cache": True, "cache_implementation": "hybrid", "penalty_alpha": 0.0,
    "guidance_scale": 1.0, "dola_layers": None, "prompt_lookup_num_tokens": None, "return_dict_in_generate": False, "constraints": None,
    "force_words_ids": None, "prefill_chunk_size": None, "encoder_repetition_penalty": 1.0, "encoder_no_repeat_ngram_size": 0,
    "watermarking_config": None,
}  # fmt: skip


def check_correction(args: GRPOPlusConfig, spec: LossSpec) -> None:
    """Importance weights against the sampler that nothing would read, or that are asked for twice. Raises LossPlusError."""
    asked = next((name for name in ("rollout_is_correction", "rollout_is_batch_normalize") if getattr(args, name)), None)
    if asked is None:
        return
    entry = POLICY_LOSSES.get(spec.policy_loss)
    if "reads_rollout_weights" in entry.traits and "rollout_weights" not in entry.requires:
        raise LossPlusError(
            f"{asked}=True: nothing reads it with policy_loss {spec.policy_loss!r}, which is computed against the sampler itself."
        )
    if args.use_vllm and not args.vllm_importance_sampling_correction:
        raise LossPlusError(f"{asked}=True with vllm_importance_sampling_correction=False: the two contradict. Remove one.")
    if not args.use_vllm and not args.rollout_is_correction:
        raise LossPlusError(
            "rollout_is_batch_normalize=True: nothing reads it. Set rollout_is_correction=True for a rollout_func's log-probs, or "
            "use_vllm=True."
        )


def check_steps(args: GRPOPlusConfig, spec: LossSpec) -> None:
    """What an objective needs of its optimizer steps: that they are known when they begin, and whole groups. Raises LossPlusError."""
    entry = POLICY_LOSSES.get(spec.policy_loss)
    if entry.over_step is not None and not args.windows_are_exact:
        raise LossPlusError(
            f"policy_loss={spec.policy_loss!r} looks at a whole optimizer step, so steps_per_generation "
            f"({args.steps_per_generation}) must be a multiple of gradient_accumulation_steps ({args.gradient_accumulation_steps})."
        )
    if "whole_groups" not in entry.traits:
        return
    if args.num_generations == 1:
        raise LossPlusError(
            f"policy_loss={spec.policy_loss!r} compares the completions of a prompt: num_generations=1 is one each."
        )
    if args.steps_per_generation != args.gradient_accumulation_steps:
        raise LossPlusError(
            f"policy_loss={spec.policy_loss!r} compares the completions of a prompt, and a rollout's rows are shuffled before it is cut: "
            f"an optimizer step must be the whole rollout, steps_per_generation ({args.steps_per_generation}) = "
            f"gradient_accumulation_steps ({args.gradient_accumulation_steps}). For several updates a rollout raise num_iterations."
        )
    if entry.over_step is None and (args.gradient_accumulation_steps > 1 or args.world_size > 1):
        raise LossPlusError(
            f"policy_loss={spec.policy_loss!r} compares the completions of a prompt, and is handed one micro-batch at a time: register "
            f"it with over_step=, or set gradient_accumulation_steps (now {args.gradient_accumulation_steps}) to 1 and use one process "
            f"(now {args.world_size})."
        )


def check_windows(args: GRPOPlusConfig, spec: LossSpec) -> None:
    """What only whole optimizer-step windows can do. Raises LossPlusError."""
    if args.windows_are_exact:
        return
    for name, value, asked in (
        ("advantage_normalization", "learner", spec.advantage_normalization == "learner"),
        ("loss_aggregation", "prompt_mean", spec.loss_aggregation == "prompt_mean"),
    ):
        if asked:
            raise LossPlusError(
                f"{name}={value!r} needs steps_per_generation ({args.steps_per_generation}) to be a multiple of "
                f"gradient_accumulation_steps ({args.gradient_accumulation_steps}), so that each optimizer step is "
                "known when the rollout is cut."
            )


def check_still_rows(args: GRPOPlusConfig, spec: LossSpec, *, auxiliary: bool = False) -> None:
    """Rows left out that move the weights; `auxiliary`: whether a router's loss is part of it. Raises LossPlusError."""
    if not args.skip_still_rows:
        return
    everywhere = "the auxiliary loss of the router" if auxiliary else "the entropy bonus"
    if auxiliary or args.use_adaptive_entropy or spec.entropy_coef != 0.0:
        reason: str | None = f"{everywhere} acts on every row"
    else:
        reason = what_moves_still_rows(spec)
    if reason is not None:
        raise LossPlusError(f"skip_still_rows=True would change the gradient: {reason}. Set it to False.")


def check_generation(args: GRPOPlusConfig) -> None:
    """compact_generation, merged_generation where completions do not come from transformers' own loop. Raises LossPlusError."""
    if args.merged_generation and args.use_vllm:
        raise LossPlusError(
            "merged_generation=True: completions come from vLLM, to which TRL sends merged weights. Set it to False."
        )
    if not args.compact_generation:
        return
    ways = [name for name in OTHER_WAYS if name in (args.generation_kwargs or {})]
    reasons = (
        (args.use_vllm, "completions come from vLLM, which does the same by itself"),
        (args.use_transformers_continuous_batching, "use_transformers_continuous_batching schedules rows itself"),
        (args.cache_implementation is not None, f"cache_implementation={args.cache_implementation!r} is not chosen from by row"),
        (bool(ways), f"generation_kwargs has {', '.join(ways)}, which it does not take"),
    )
    reason = next((reason for holds, reason in reasons if holds), None)
    if reason is not None:
        raise LossPlusError(f"compact_generation=True: {reason}. Set it to False.")


def check_reference(args: GRPOPlusConfig, spec: LossSpec) -> None:
    """A reference that is to follow the policy where there is none. Raises LossPlusError."""
    if args.sync_ref_model and not (spec.kl_in_loss or spec.kl_in_reward):
        raise LossPlusError("sync_ref_model=True: there is no KL, so no reference. Set beta > 0, or a kl_placement.")


def uneven_groups(args: GRPOPlusConfig) -> LossPlusError | None:
    """The error for completions a prompt that do not divide a rollout's, None where they do."""
    group, total = args.num_generations, args.generation_batch_size
    if not group or not total or total % group == 0:
        return None
    fits = [str(n) for n in range(2, total + 1) if total % n == 0]
    return LossPlusError(
        f"num_generations={group} does not divide the {total} completions of a rollout (per_device_train_batch_size "
        f"{args.per_device_train_batch_size} x steps_per_generation {args.steps_per_generation} x processes {args.world_size}). "
        f"Allowed with these: {', '.join(fits) or 'none'}."
    )


def field_of_ppo(names: Iterable[str], given: Mapping[str, Any], kind: str) -> LossPlusError | None:
    """The error for a setting of PPO's that a configuration without a critic is given; `names`: that it has."""
    from .ppo_config import PPOPlusConfig

    theirs = {item.name for item in fields(PPOPlusConfig)} - set(names)
    name = next((name for name in given if name in theirs), None)
    if name is None:
        return None
    return LossPlusError(f"{name}={given[name]!r}: {kind} has no critic. Take PPOPlusConfig and PPOPlusTrainer.")
