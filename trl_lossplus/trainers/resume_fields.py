"""
What a changed field does to a run that is resumed: refused, not used, or when it acts, and the sentences that say so.

Between two rollouts every field of the loss acts from the next step on, and nothing is said of it. Inside a rollout some of what the
fields decide is stored already.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from peft import PeftModel

from ..estimators import ESTIMATOR_FIELDS
from ..functional.errors import LossPlusError
from ..registry import POLICY_LOSSES
from .adapters import base_of
from .checks import active_dropout
from .kl_state import start_not_used

if TYPE_CHECKING:
    from .resume import Resumes

FILES = "lossplus_state_*.pt"
ANEW = f"delete {FILES} there to have the rollout made anew"
STEP = "from the next step on"
ROLLOUT = "from the next rollout on"
BOTH = "on the loss from the next step on, on what a rollout stores from the next rollout on"

# What decides how a rollout is cut; in which form its parts lie in memory, and of which temperature its log-probs are; and which
# prompts come when.
SHAPE = (
    "per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation", "num_iterations", "num_generations",
)  # fmt: skip
FORM = ("skip_still_rows", "temperature")
ORDER = ("seed", "shuffle_dataset")
# Fields of the loss that act where a rollout is scored and cut; all others act in every step, but for those that `acts` names.
AT_ROLLOUT = frozenset(
    {
        *ESTIMATOR_FIELDS, "gae_lambda", "gae_lambda_critic", "advantage_estimator", "scale_rewards", "advantage_normalization",
        "advantage_norm_scope", "whiten_rewards", "kl_reward_coef", "kl_reward_level", "kl_controller", "kl_target", "kl_horizon",
        "rollout_is_batch_normalize",
    }
)  # fmt: skip
# And fields that are not the loss's, which act where a rollout is made.
MAKES_ROLLOUT = (
    "reward_weights", "missing_eos_penalty", "truncated_completions", "max_completion_length", "mask_truncated_completions", "top_p",
    "top_k", "min_p", "repetition_penalty", "generation_kwargs", "chat_template_kwargs", "compact_generation", "merged_generation", "use_vllm",
    "rollout_is_correction", "vllm_importance_sampling_correction", "vllm_importance_sampling_mode",
    "vllm_importance_sampling_clip_min", "vllm_importance_sampling_clip_max", "resample_max_tries", "resample_exhausted",
    "max_tokens_per_microbatch",
)  # fmt: skip
# What the checkpoint's optimizer and scheduler hold for themselves.
OF_OPTIMIZER = (
    "learning_rate", "critic_learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "optim_args",
)  # fmt: skip

# By kind and name, the line that tells a difference.
Changes = dict[str, dict[str, str]]


def made_under(trainer: Resumes) -> dict[str, dict[str, Any]]:
    """What the state in memory depends on: fields of the configuration and facts of the run, by kind and name, as plain values."""
    args, packed = trainer.args, trainer.packed
    layout = "padded" if packed is None else "shared_prefix" if packed.share_prefix else "packed"

    def fields(names: tuple[str, ...]) -> dict[str, Any]:
        return {name: getattr(args, name, None) for name in names}

    found = {
        "shape": fields(SHAPE) | {"processes": trainer.accelerator.num_processes},
        "form": fields(FORM) | {"microbatch_layout": layout, "policy_loss": trainer.spec.policy_loss},
        "policy": _adapter(trainer.model),
        "arithmetic": _arithmetic(trainer),
        "order": fields(ORDER) | {"rows of train_dataset": trainer.rows_of_prompts},
        "loss": asdict(trainer.spec),
        "rollout": fields(MAKES_ROLLOUT) | {"reward functions": list(trainer.reward_func_names)},
        "optimizer": fields(OF_OPTIMIZER),
    }
    return json.loads(json.dumps(found, default=str))


def _adapter(model: Any) -> dict[str, Any]:
    """By what a LoRA adapter's product is multiplied: another policy, though the weights are the same."""
    config = model.peft_config.get("default") if isinstance(model, PeftModel) else None
    return {name: getattr(config, name, None) for name in ("lora_alpha", "use_rslora")}


def _arithmetic(trainer: Resumes) -> dict[str, Any]:
    """What log-probs of the same weights depend on beside the temperature."""
    model: Any = base_of(trainer.model)
    return {
        "dtype": str(trainer.compute_dtype),
        "attn_implementation": getattr(model.config, "_attn_implementation", None),
        "cast_lm_head_to_fp32": getattr(trainer.args, "cast_lm_head_to_fp32", None),
        "modules with dropout": len(active_dropout(trainer.model)),
    }


def changes(was: dict[str, Any], now: dict[str, dict[str, Any]]) -> Changes:
    """What differs, by kind and name. An older version's file lacks some names, and others stand under another kind: those it has count."""
    known = {(kind, name): value for kind, part in was.items() if isinstance(part, dict) for name, value in part.items()}
    known |= {("rollout", name): value for name, value in was.get("form", {}).items() if name in MAKES_ROLLOUT}
    return {
        kind: {
            name: f"{name} was {known[kind, name]!r} and is {value!r}"
            for name, value in part.items()
            if (kind, name) in known and known[kind, name] != value
        }
        for kind, part in now.items()
    }


def acts(name: str, was: dict[str, Any], now: dict[str, Any]) -> str:
    """
    When a field of the loss that was changed inside a rollout acts: `STEP`, `ROLLOUT` or `BOTH`.

    Args:
        was, now: the fields of the loss, before and now.
    """

    def either(*names: str) -> bool:
        return any(part.get(one) for part in (was, now) for one in names)

    adaptive = "adaptive" in (was.get("kl_controller"), now["kl_controller"])
    if name in ("beta", "kl_estimator", "kl_placement", "use_bias_correction_kl"):
        if not (was.get("beta") or was.get("kl_reward_coef")):
            return ROLLOUT  # which then stores the reference's log-probs
        if name == "beta":  # an adaptive coefficient stays what it is until then
            return ROLLOUT if adaptive and now["beta"] else STEP
        stored = name != "use_bias_correction_kl" and (either("kl_reward_coef") or adaptive)
        return (BOTH if either("beta") else ROLLOUT) if stored else STEP
    if name == "zero_std_groups":
        values = {was.get(name), now[name]}
        return ROLLOUT if "no_kl" not in values else STEP if "keep" in values else BOTH
    if name in ("rollout_rs", "rollout_rs_threshold"):
        return STEP if "rollout_rs" in POLICY_LOSSES.get(now["policy_loss"]).options else ROLLOUT
    if name == "log_ratio_clamp":
        return BOTH
    return ROLLOUT if name in AT_ROLLOUT else STEP


def refuse(checkpoint: str, changed: Changes, missing: str | None) -> None:
    """
    Whether what is left of a rollout can be used.

    Args:
        missing: what stands for the files that some processes lack, None where all have theirs.

    Raises:
        LossPlusError: it cannot; names what differs.
    """
    other = [line for kind in ("shape", "form", "policy") for line in changed[kind].values()]
    if missing is not None and not other:
        other = [missing]
    if other:
        raise LossPlusError(
            f"{checkpoint} was taken inside a rollout, and what is left of it cannot be used: {'; '.join(other)}. Set that as it "
            f"was, take a checkpoint between two rollouts, or {ANEW}."
        )


def told(
    checkpoint: str, was: dict[str, Any], now: dict[str, dict[str, Any]], changed: Changes, *, goes_on: bool, adapts_entropy: bool
) -> Iterator[str]:
    """
    The sentences on what was changed, where nothing was refused.

    Args:
        was: what the state was made under, and whether "inside" a rollout. goes_on: the state in memory is put back.
        adapts_entropy: the entropy bonus has a coefficient that is controlled.
    """
    loss = dict(changed["loss"])
    start = "beta" if now["loss"]["beta"] else "kl_reward_coef"
    if goes_on and was["loss"].get("kl_controller") == now["loss"]["kl_controller"] == "adaptive" and start in loss:
        yield start_not_used(checkpoint, loss.pop(start))
        if now["loss"]["kl_placement"] == "both":
            ratio = now["loss"]["kl_reward_coef"] / now["loss"]["beta"]
            yield f"The coefficient of the KL in the reward stays {ratio:g} times that, kl_reward_coef over beta as they are now."
    if adapts_entropy and goes_on and "entropy_coef" in loss:
        yield f"{loss.pop('entropy_coef')} is not used: adaptive entropy control goes on with the coefficient of {checkpoint}."
    if changed["optimizer"]:
        yield (
            f"{_list(changed['optimizer'])}: not used, since {checkpoint} holds the optimizer and its rates. Begin a new run from "
            "the model there to change that."
        )
    if was["inside"] and goes_on:
        yield from _inside(checkpoint, was, now, loss, changed)
    elif changed["policy"]:
        yield f"The policy is another than that of {checkpoint}: {_list(changed['policy'])}."


def _inside(
    checkpoint: str, was: dict[str, Any], now: dict[str, dict[str, Any]], loss: dict[str, str], changed: Changes
) -> Iterator[str]:
    when = {name: acts(name, was["loss"], now["loss"]) for name in loss} | dict.fromkeys(changed["rollout"], ROLLOUT)
    lines = loss | changed["rollout"]
    parts = [
        f"acts {at}: {_list({name: lines[name] for name in when if when[name] == at})}"
        for at in (STEP, ROLLOUT, BOTH)
        if at in when.values()
    ]
    if parts:
        yield (
            f"{checkpoint} was taken inside a rollout, which stays as it was made: rewards, advantages, returns, log-probs, parts. "
            f"What was changed {'; '.join(parts)}."
        )
    if changed["arithmetic"]:
        yield (
            f"{checkpoint} was taken inside a rollout, whose log-probs were computed otherwise: {_list(changed['arithmetic'])}. Until the "
            "next rollout ratios differ from 1 by that too."
        )


def _list(lines: dict[str, str]) -> str:
    return "; ".join(lines.values())
