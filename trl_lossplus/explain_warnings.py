"""The warnings of `trl-lossplus explain`: what a configuration does that its writer may not mean, and what to do about it."""

from __future__ import annotations

import math
import re
from typing import Any

from .config import GRPOPlusConfig
from .functional.kl import canonical_kl
from .ppo_config import PPOPlusConfig
from .registry import ADVANTAGE_ESTIMATORS, POLICY_LOSSES
from .trainers.correct import reader_of_sampler

# Warning: its sentence. When it is given stands in `_given`; braces hold fields of the spec and the configuration.
WARNINGS = """
on_policy: On-policy: the ratio is exactly 1 (with vLLM up to rounding), so clipping cannot act and the clip fractions are 0. For
    clipping to act, raise num_iterations or steps_per_generation until one rollout serves more than one optimizer step.
idle_region: On-policy: the ratio is exactly 1 (with vLLM up to rounding), so {idle} cannot act and the gradient is -A a token. For
    it to act, raise num_iterations or steps_per_generation until one rollout serves more than one optimizer step.
loss_0: Loss 0 is expected (or near 0, where long rows weigh more): at ratio 1 the policy term is minus the mean advantage, and
    advantages are centred on 0. It does not tell whether the policy learns: watch the gradient and the reward.
policy_0: The policy term (loss/policy) is expected to be near 0: at ratio 1 it is minus the mean advantage, and advantages are
    centred on 0. It does not tell whether the policy learns: watch the gradient and the reward.
value_clip: On-policy the values are the rollout's (up to rounding), so cliprange_value cannot act and value/clip_ratio is 0.
no_sampler: {sampler_reader} reads the sampler's log-probs, which the trainer's own generation does not keep: set use_vllm=True, or give the
    trainer a rollout_func that returns them as logprobs.
windows: Optimizer steps and rollouts do not line up, so a step is normalized by the rollout's mean, not by its own tokens: set
    steps_per_generation ({steps_per_generation}) to a multiple of gradient_accumulation_steps ({gradient_accumulation_steps}).
idle_mask: On-policy the off-policy mask cannot act: raise num_iterations, or remove off_policy_mask_threshold.
clip_max: clip_objective=max removes the clip exactly where it should act, and is there to be compared: train with min.
cispo_unset: loss_type=cispo with epsilon_high unset bounds the ratio at epsilon, {epsilon:g}, as TRL does: set epsilon_high=5.
cispo_low: epsilon_high={epsilon_high} bounds CISPO's ratio itself, not its distance from 1: set epsilon_high=5.
wide: The mean ratio of a row moves little, so a range of {epsilon:g} hardly clips: GSPO has epsilon=3e-4, epsilon_high=4e-4.
delta: delta={delta} is below 1 + epsilon_high, so for A > 0 it clips before epsilon_high does: raise it above 1 + epsilon_high.
bnpo: loss_type=bnpo is normalized over the whole optimizer step here, unlike TRL's (each micro-batch), so it is dapo: write dapo.
luspo: loss_type=luspo with one ratio a token is not the paper's: set importance_sampling_level=sequence, or policy_loss=luspo.
by_length: One ratio a row with loss_aggregation={loss_aggregation} weighs each row by its length: set loss_aggregation to
    seq_mean_token_mean (as GSPO), or seq_mean_token_sum if that is meant (as LUSPO).
token_sum: loss_aggregation=token_sum is divided by nothing, so the gradient grows with the tokens of a step: lower learning_rate.
top_entropy: The threshold of top_entropy_quantile is taken over each micro-batch of all processes, so it depends on the split:
    keep per_device_train_batch_size fixed when you compare runs.
k1: {kl_estimator} in the loss without the ratio has an expected gradient of 0: set use_bias_correction_kl, or take k2 or k1+.
k3: {kl_estimator} in the loss without the ratio has the forward KL's gradient: set use_bias_correction_kl, or take k2 or k3+.
abs: The gradient of {kl_estimator} in the loss is no KL's, with or without the ratio: take k2, k3 or abs+.
kl_reward: {kl_estimator} in the reward has an expected gradient that is no KL's (docs/kl.md), and need not hold the policy near the
    reference at all: set kl_estimator=k1 there.
kl_by_row: One ratio a row times the KL of a token is only approximately unbiased: take k2 or k3+, which need no ratio.
both: The KL acts in the reward and in the loss, and the two pulls towards the reference add up: keep one if that is not meant.
adaptive_both: Adaptive control moves beta and kl_reward_coef by the same factor: choose their proportion in the configuration.
length_std: loss_aggregation=seq_mean_token_sum_norm is Dr. GRPO's, which does not divide by a spread: set scale_rewards=none.
row_scope: advantage_norm_scope=sequence takes off each row's mean advantage, and with it how much better than expected the
    completion was: set it to batch or group.
truncated: mask_truncated_completions leaves rows without tokens, which count as rows here (as TRL) and dilute the loss: set
    loss_aggregation={loss_aggregation} to count rows with tokens only.
cut_off: mask_truncated_completions leaves out the completions that truncated_completions and missing_eos_penalty are there for:
    remove one of them.
discount: gamma={gamma:g} is a discount a token: of a reward after max_completion_length={max_completion_length} tokens
    {discounted:.2g} of it reaches the first: set gamma=1 unless an early end is meant to count.
warmup: critic_warmup_steps={critic_warmup_steps} is not below max_steps={max_steps}, so the policy is never trained: lower it, or raise
    max_steps.
flat_critic: With a critic the completions of a group whose rewards are all equal have advantages too, and
    zero_std_groups={zero_std_groups} leaves them out: set it to keep.
"""
TEXTS = {name: " ".join(text.split()) for name, text in re.findall(r"^(\w+): (.+(?:\n    .+)*)", WARNINGS, re.MULTILINE)}

# With a clip range, and yet not -r A: at ratio 1 the term is not minus the advantage.
WEIGHTS_LOGP = {"dppo_tv", "dppo_kl", "rec", "sppo"}
# Objectives without a clip range that hold a token back by its ratio in another way, which at ratio 1 changes nothing: what it is.
IDLE_AT_ONE = {
    "m2po": "m2_threshold",
    "ipo": "the trust region (ipo_threshold, ipo_kl_coef)",
    "dro": "the penalty (dro_beta)",
    "kl_cov": "the penalty (kl_cov_coef)",
    "sapo": "the gate (sapo_temperature_pos, sapo_temperature_neg)",
    "vespo": "the weight phi (vespo_k_pos, vespo_lambda_pos, vespo_k_neg, vespo_lambda_neg)",
    "tis": "the bounds (is_ratio_min, is_ratio_max)",
    "mis": "the bounds (is_ratio_min, is_ratio_max)",
    "topr": "the taper of topr",
}
# Of these, the ones whose term is -r A, so that at ratio 1 it is minus the advantage as under a clip.
MINUS_ADVANTAGE = {"m2po", "ipo", "kl_cov"}


class Facts:
    """A configuration, its loss, and what several sections ask of them."""

    def __init__(self, config: GRPOPlusConfig):
        self.config, self.spec = config, config.loss_spec()
        self.ppo = config if isinstance(config, PPOPlusConfig) else None
        self.policy = POLICY_LOSSES.get(self.spec.policy_loss)
        self.options = self.spec.policy_options
        self.estimator = ADVANTAGE_ESTIMATORS.get(self.spec.advantage_estimator)
        self.by_column = "reads_reward_columns" in self.estimator.traits
        self.by_token = "token_level" in self.estimator.traits
        self.kl = canonical_kl(self.spec.kl_estimator)
        needless = "reads_rollout_weights" in self.policy.traits and "rollout_weights" not in self.policy.requires
        asked = config.use_vllm and config.vllm_importance_sampling_correction or config.rollout_is_correction
        self.weighted = asked and not needless
        self.correction = "vLLM correction" if config.use_vllm else "rollout_func correction"
        self.rejects = self.spec.rollout_rs is not None and "rollout_rs" not in self.policy.options
        self.bonus = config.use_adaptive_entropy or self.spec.entropy_coef != 0.0
        reads_level = "sequence_level" in self.policy.traits or "importance_sampling_level" in self.options
        self.by_row = self.spec.policy_loss == "gmpo" or reads_level and self.spec.sequence_level  # one ratio a row
        # (a ratio against the sampler is not 1 on-policy)
        self.clips = bool({"epsilon", "epsilon_high"} & self.options) and "rollout_logps" not in self.policy.requires
        bounds = [bound for bound in (self.spec.is_ratio_min, self.spec.is_ratio_max) if bound is not None]
        around_one = bool(bounds) and (self.spec.is_ratio_min or 0.0) <= 1 <= (self.spec.is_ratio_max or math.inf)
        acts = {"tis": not around_one, "mis": not around_one, "vespo": self.weighted}  # at ratio 1 too
        self.idles = self.policy.name in IDLE_AT_ONE and not acts.get(self.policy.name, False)
        self.sampler_reader = reader_of_sampler(config, self.spec)
        self.masks = self.spec.off_policy_mask_threshold is not None
        self.ratio_max = 5.0 if self.spec.epsilon_high is None else self.spec.epsilon_high  # CISPO's


def warnings(facts: Facts) -> list[str]:
    """The sentences that hold of a configuration, in the order of `TEXTS`."""
    spec, config = facts.spec, facts.config
    given = _given(facts) | _given_with_critic(facts)
    idle = IDLE_AT_ONE.get(facts.policy.name)
    fields = {
        **vars(config),
        **vars(spec),
        "idle": idle,
        "sampler_reader": facts.sampler_reader,
        "discounted": spec.gamma ** (config.max_completion_length or 0),
    }
    return [text.format_map(fields) for name, text in TEXTS.items() if given[name]]


def _given(facts: Facts) -> dict[str, bool]:
    """Whether each warning holds."""
    spec, config, options, kl = facts.spec, facts.config, facts.options, facts.kl
    on_policy, mode = config.is_on_policy, spec.loss_aggregation
    cispo, plain, corrected = spec.policy_loss == "cispo", config.policy_loss is None, spec.use_bias_correction_kl
    centred = (
        "group_ids" in facts.estimator.requires
        and "uncentred" not in facts.estimator.traits
        or spec.advantage_normalization != "none"
    )
    minus_advantage = "epsilon" in options and facts.policy.name not in WEIGHTS_LOGP or facts.policy.name in MINUS_ADVANTAGE
    term_0 = on_policy and minus_advantage and centred
    return {
        "on_policy": on_policy and facts.clips and not (cispo and facts.ratio_max < 1),
        "idle_region": on_policy and facts.idles,
        "loss_0": term_0 and facts.ppo is None,
        "policy_0": term_0 and facts.ppo is not None,
        "no_sampler": facts.sampler_reader is not None and not config.use_vllm,
        "windows": not config.windows_are_exact,
        "idle_mask": facts.masks and on_policy and not config.use_vllm,
        "clip_max": spec.clip_objective == "max",
        "cispo_unset": cispo and plain and config.epsilon_high is None,
        "cispo_low": cispo and config.epsilon_high is not None and config.epsilon_high <= 1,
        "wide": (facts.by_row or spec.policy_loss == "gspo_token") and "clip_objective" in options and spec.epsilon > 0.01,
        "delta": spec.delta is not None and spec.delta < 1 + spec.clip_high,
        "bnpo": config.loss_type == "bnpo",
        "luspo": config.loss_type == "luspo" and plain and not spec.sequence_level,
        "by_length": facts.by_row and mode not in ("seq_mean_token_mean", "seq_mean_token_sum"),
        "token_sum": mode == "token_sum",
        "top_entropy": spec.top_entropy_quantile < 1.0,
        "k1": spec.kl_in_loss and kl == "k1" and not corrected,
        "k3": spec.kl_in_loss and kl == "k3" and not corrected,
        "abs": spec.kl_in_loss and kl == "abs",
        "kl_reward": spec.kl_placement in ("reward", "both") and kl.removesuffix("+") != "k1",
        "kl_by_row": spec.kl_in_loss and corrected and spec.sequence_level,
        "both": spec.kl_placement == "both",
        "adaptive_both": spec.kl_placement == "both" and spec.kl_controller == "adaptive",
        "length_std": mode == "seq_mean_token_sum_norm" and spec.scale_rewards != "none",
        "row_scope": spec.advantage_normalization != "none" and spec.advantage_norm_scope == "sequence",
        "discount": spec.gamma < 1 and config.max_completion_length is not None,
        "truncated": config.mask_truncated_completions and config.counts_empty_rows and mode.startswith("seq"),
    }


def _given_with_critic(facts: Facts) -> dict[str, bool]:
    """The same for the warnings that only PPO has."""
    spec, ppo = facts.spec, facts.ppo
    if ppo is None:
        return dict.fromkeys(("value_clip", "cut_off", "flat_critic", "warmup"), False)
    for_cut_off: Any = ppo.truncated_completions == "bootstrap" or ppo.missing_eos_penalty
    return {
        "value_clip": spec.cliprange_value is not None and ppo.is_on_policy,
        "cut_off": ppo.mask_truncated_completions and bool(for_cut_off),
        "warmup": 0 < ppo.max_steps <= ppo.critic_warmup_steps,
        "flat_critic": spec.zero_std_groups in ("drop", "resample"),
    }
