"""A configuration in words: the loss, where each term acts, who makes and reads which tensor, the schedule, the warnings."""

from __future__ import annotations

import re
from collections.abc import Iterator
from fractions import Fraction

from .config import GRPOPlusConfig
from .functional.aggregation import AGGREGATIONS
from .functional.kl import canonical_kl
from .registry import ADVANTAGE_ESTIMATORS, POLICY_LOSSES, TENSORS

KL_FORMULAS = {"k1": "d", "k2": "d^2 / 2", "k3": "exp(-d) + d - 1", "abs": "|d|"}
SCOPES = {"batch": "all tokens together", "group": "each prompt's completions together", "sequence": "each row alone"}
# Warning: its sentence. When it is given stands in `_Explanation.warnings`; braces hold fields of the spec and the configuration.
WARNINGS = """
on_policy: On-policy: the ratio is exactly 1 (with vLLM up to rounding), so clipping cannot act and the clip fractions are 0. For
    clipping to act, raise num_iterations or steps_per_generation until one rollout serves more than one optimizer step.
loss_0: Loss 0 is expected (or near 0, where long rows weigh more): at ratio 1 the policy term is minus the mean advantage, and
    advantages are centred on 0. It does not tell whether the policy learns: watch the gradient and the reward.
windows: Optimizer steps and rollouts do not line up, so a step is normalized by the rollout's mean, not by its own tokens: set
    steps_per_generation ({steps_per_generation}) to a multiple of gradient_accumulation_steps ({gradient_accumulation_steps}).
idle_mask: On-policy the off-policy mask cannot act: raise num_iterations, or remove off_policy_mask_threshold.
clip_max: clip_objective=max removes the clip exactly where it should act, and is there to be compared: train with min.
cispo_unset: loss_type=cispo with epsilon_high unset bounds the ratio at epsilon, {epsilon:g}, as TRL does: set epsilon_high=5.
cispo_low: epsilon_high={epsilon_high} bounds CISPO's ratio itself, not its distance from 1: set epsilon_high=5.
wide: The mean ratio of a row moves little, so a range of {epsilon:g} hardly clips: GSPO has epsilon=3e-4, epsilon_high=4e-4.
delta: delta={delta} is below 1 + epsilon_high, so for A > 0 it clips before epsilon_high does: raise it above 1 + epsilon_high.
unread: Nothing reads {unread} here: remove it, or choose what reads it.
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
kl_by_row: One ratio a row times the KL of a token is only approximately unbiased: take k2 or k3+, which need no ratio.
both: The KL acts in the reward and in the loss, and the two pulls towards the reference add up: keep one if that is not meant.
adaptive_both: Adaptive control moves beta and kl_reward_coef by the same factor: choose their proportion in the configuration.
flat_kl: zero_std_groups={zero_std_groups} looks at rewards less their KL, which are hardly ever equal: set kl_reward_level=token.
length_std: loss_aggregation=seq_mean_token_sum_norm is Dr. GRPO's, which does not divide by a spread: set scale_rewards=none.
row_scope: advantage_norm_scope=sequence takes off each row's mean, and with it the reward: set it to batch or group.
truncated: mask_truncated_completions leaves rows without tokens, which count as rows here (as TRL) and dilute the loss: set
    loss_aggregation={loss_aggregation} to count rows with tokens only.
"""
TEXTS = {name: " ".join(text.split()) for name, text in re.findall(r"^(\w+): (.+(?:\n    .+)*)", WARNINGS, re.MULTILINE)}


def explain(config: GRPOPlusConfig) -> str:
    """The loss of a configuration as plain text. Raises LossPlusError where fields were changed into a contradiction."""
    words = _Explanation(config)
    sections = {
        "The loss": [*words.loss(), *words.kl_in_loss(), *words.others()],
        "The advantages": [*words.advantages(), *words.kl_in_reward()],
        "Where each term acts": words.terms(),
        "Tensors": words.tensors(),
        "Schedule": words.schedule(),
        "Warnings": [f"- {text}" for text in words.warnings()] or ["none"],
    }
    return "\n\n".join("\n".join([title, *(f"  {line}" for line in lines)]) for title, lines in sections.items()) + "\n"


def _table(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _bounds(low: float | None, high: float | None) -> str:
    return f"[{'none' if low is None else f'{low:g}'}, {'none' if high is None else f'{high:g}'}]"


class _Explanation:
    """The sections, each as lines of text."""

    def __init__(self, config: GRPOPlusConfig):
        self.config, self.spec = config, config.loss_spec()
        self.policy = POLICY_LOSSES.get(self.spec.policy_loss)
        self.estimator = ADVANTAGE_ESTIMATORS.get(self.spec.advantage_estimator)
        self.by_column = "reads_reward_columns" in self.estimator.traits
        self.kl = canonical_kl(self.spec.kl_estimator)
        self.weighted = config.use_vllm and config.vllm_importance_sampling_correction
        self.bonus = config.use_adaptive_entropy or self.spec.entropy_coef != 0.0
        reads_level = "sequence_level" in self.policy.traits or "importance_sampling_level" in self.policy.options
        self.by_row = self.spec.policy_loss == "gmpo" or reads_level and self.spec.sequence_level  # one ratio a row
        self.masks = self.spec.off_policy_mask_threshold is not None
        self.ratio_max = 5.0 if self.spec.epsilon_high is None else self.spec.epsilon_high  # CISPO's

    def loss(self) -> Iterator[str]:
        spec, config = self.spec, self.config
        kl, entropy = f" + {spec.beta:g} KL" if spec.kl_in_loss else "", f" - {spec.entropy_coef:g} entropy" if self.bonus else ""
        yield f"loss = policy{kl}{entropy}"
        yield f"r = pi / pi_old with |log r| <= {spec.log_ratio_clamp:g}, A = advantage, sg = stop gradient"
        yield f"Policy: {spec.policy_loss} = {' '.join(self.policy.formula.split()) or 'not given'}"
        yield f"  {(self.policy.func.__doc__ or 'described nowhere').strip().splitlines()[0]}"
        yield "  " + "; ".join([*self._numbers(), f"source: {self.policy.source or 'not given'}"])
        yield f"Aggregation: {spec.loss_aggregation} = {AGGREGATIONS[spec.loss_aggregation]}"
        of = "of the optimizer step, over its micro-batches and all processes"
        if not config.windows_are_exact:
            of = "of the rollout over all processes, as a mean a micro-batch, times the step's micro-batches (as TRL)"
        if spec.loss_aggregation.startswith("seq"):
            empty = "count too (as TRL)" if config.counts_empty_rows else "do not count"
            yield f"  rows: those {of}; rows without valid tokens {empty}"
        elif spec.loss_aggregation != "token_sum":
            yield f"  {'tokens' if spec.loss_aggregation == 'token_mean' else 'prompts'}: the valid ones {of}"
        if spec.norm_length is not None:
            yield f"  norm_length: max_completion_length, {spec.norm_length:g} tokens"

    def _numbers(self) -> Iterator[str]:
        """What the policy objective does with the options that it reads."""
        spec, options = self.spec, self.policy.options
        if self.by_row:
            yield "one ratio a row, exp of its mean log ratio"
        elif "importance_sampling_level" in options:
            yield "one ratio a token"
        if spec.policy_loss == "cispo":
            yield f"ratio clipped to {_bounds(spec.cispo_ratio_min or 0.0, self.ratio_max)}"
        elif spec.policy_loss == "gmpo":
            yield f"log ratio clipped to {_bounds(-spec.epsilon, spec.clip_high)}, one-sided by the sign of A"
        elif "epsilon" in options:
            yield f"ratio clipped to {_bounds(1 - spec.epsilon, 1 + spec.clip_high)}, clip_objective {spec.clip_objective}"
        if spec.delta is not None:
            yield f"unclipped ratio at most {spec.delta:g} (delta)"
        if spec.clip_ratio_c is not None:
            yield f"for A < 0 at most {spec.clip_ratio_c:g} |A| (dual clip)"
        yield from (f"{name} {getattr(spec, name):g}" for name in sorted(options) if name.startswith(("sapo_", "vespo_")))

    def _estimate(self) -> str:
        straight = " with the gradient of d^2 / 2" if self.kl.endswith("+") else ""
        return f"{self.spec.kl_controller}; {self.spec.kl_estimator} = {KL_FORMULAS[self.kl.rstrip('+')]}{straight}"

    def kl_in_loss(self) -> Iterator[str]:
        spec, corrected = self.spec, self.spec.use_bias_correction_kl
        if not spec.kl_in_loss:
            return
        gradient = "the reverse KL's" + (", approximately" if corrected and spec.sequence_level else "")
        if self.kl == "abs":
            gradient = "no KL's"
        elif self.kl in ("k1", "k3") and not corrected:
            gradient = "0 in expectation" if self.kl == "k1" else "the forward KL's"
        times = "times the ratio" if corrected else "not times the ratio"
        yield f"KL in the loss: beta {spec.beta:g}, {self._estimate()}, d = logp - ref_logp, {times}; gradient: {gradient}"
        groups = ", without groups whose rewards are all equal" if spec.zero_std_groups == "no_kl" else ""
        yield f"  aggregated as the policy term{groups}"

    def others(self) -> Iterator[str]:
        spec, config, coef = self.spec, self.config, self.config.router_aux_loss_coef
        if self.bonus:
            tokens = "all valid tokens" if spec.top_entropy_quantile == 1.0 else "the high-entropy tokens"
            yield f"Entropy bonus: {spec.entropy_coef:g} times the mean entropy of {tokens}, whatever the aggregation"
        if config.use_adaptive_entropy:
            within = _bounds(config.entropy_coef_min, config.entropy_coef_max)
            yield f"  adaptive: +-{config.entropy_coef_delta:g} a step within {within}, towards {config.entropy_target:g} nats"
        if spec.top_entropy_quantile < 1.0:
            yield f"High-entropy selection: the policy term keeps the top {spec.top_entropy_quantile:g} of the tokens by entropy"
        if self.masks:
            rows = f"rows with A < 0 and a mean drift from their sampler above {spec.off_policy_mask_threshold:g} nats a token"
            yield f"Off-policy mask: the policy term leaves out {rows}"
        if self.weighted:
            where = "are part of w" if "reads_rollout_weights" in self.policy.traits else "multiply the policy term"
            bounds = _bounds(config.vllm_importance_sampling_clip_min, config.vllm_importance_sampling_clip_max)
            mode = config.vllm_importance_sampling_mode
            yield f"vLLM correction: weights pi_old / pi_sampler, {mode} within {bounds}, {where}"
        if spec.top_entropy_quantile < 1.0 or self.masks or self.weighted:
            yield "  what is left out or weighted here still counts in the aggregation's normalizer"
        value = "the coefficient in its configuration" if coef is None else f"router_aux_loss_coef {coef:g}"
        yield f"Auxiliary loss of a mixture of experts: stays TRL's, with {value}; none for other models"

    def _normalization(self) -> str:
        """The one place where advantages are scaled."""
        side, scope = self.spec.advantage_normalization, SCOPES[self.spec.advantage_norm_scope]
        if side != "none":
            what = "the rollout's tokens" if side == "rollout" else "each optimizer step's tokens"
            return f"{side}-side: whitened over {what} on all processes, {scope}"
        if self.by_column:
            return "in the estimator, over the rollout on all processes"
        whose = {"group": "each group's rewards", "batch": "the rollout's rewards on all processes"}.get(self.spec.scale_rewards)
        return f"in the estimator, by the standard deviation of {whose}" if whose else "nowhere"

    def advantages(self) -> Iterator[str]:
        options = [f"{name} {value}" for name, value in self.config.estimator_options.items()]
        options = ["scale_rewards none: not divided"] if "scale_rewards none" in options else options
        yield f"Estimator: {self.spec.advantage_estimator} = {' '.join(self.estimator.formula.split()) or 'not given'}"
        yield "  " + "; ".join([*options, f"source: {self.estimator.source or 'not given'}"])
        yield f"  s = weighted sum of a completion's rewards, reward_weights {self.config.reward_weights or '1 each'}"
        yield f"Normalization, in exactly one place: {self._normalization()}"
        flat = {"keep": "kept, as TRL", "no_kl": "out of the KL in the loss", "drop": "out of the loss and its normalizer"}
        yield f"Groups whose rewards are all equal: {flat[self.spec.zero_std_groups]}"

    def kl_in_reward(self) -> Iterator[str]:
        spec = self.spec
        adaptive = spec.kl_controller == "adaptive"
        if spec.kl_in_reward:
            yield f"KL in the reward: kl_reward_coef {spec.kl_reward_coef:g}, {self._estimate()}, d = old_logp - ref_logp"
            token = "token: each token's advantage loses the KL from there to the end; no group comparison sees it"
            sequence = "sequence: a completion's summed KL is taken off its reward s, before any advantage"
            yield f"  level {token if spec.kl_reward_level == 'token' else sequence}"
        if adaptive:
            change = f"clip(KL / {spec.kl_target:g} - 1, -0.2, 0.2) * {self.config.generation_batch_size} / {spec.kl_horizon:g}"
            yield f"Adaptive KL control: coefficient *= 1 + {change} once a rollout; KL: mean a token, all processes"
        if (spec.kl_in_reward or adaptive) and self.config.is_on_policy and not self.weighted:
            yield "  the rollout's KL needs old_logps, which nothing else does here: one more forward pass a rollout"

    def terms(self) -> list[str]:
        spec, penalty = self.spec, f"-{self.spec.kl_reward_coef:g} KL"
        level = spec.kl_reward_level if spec.kl_in_reward else None
        rows = [
            (f"policy ({spec.policy_loss})", "", "", "yes"),
            ("KL", penalty * (level == "sequence"), penalty * (level == "token"), f"+{spec.beta:g} KL" * spec.kl_in_loss),
            ("normalization", "", "yes" * (self._normalization() != "nowhere"), ""),
            ("entropy bonus", "", "", f"-{spec.entropy_coef:g} entropy" * self.bonus),
            ("high-entropy selection", "", "", "policy term" * (spec.top_entropy_quantile < 1.0)),
            ("off-policy mask", "", "", "policy term" * self.masks),
            ("vLLM correction", "", "", "policy term" * self.weighted),
        ]
        acting = [(name, *(cell or "-" for cell in cells)) for name, *cells in rows if any(cells)]
        return _table([("term", "reward", "advantage", "loss"), *acting])

    def tensors(self) -> list[str]:
        spec, config, readers = self.spec, self.config, self.spec.readers()
        own = self.estimator.requires if self.estimator.name in ADVANTAGE_ESTIMATORS.entries else ()
        by_group = ("group_ids",) if spec.advantage_norm_scope == "group" else ()
        more: list[tuple[bool, str, tuple[str, ...]]] = [
            (True, f"estimator ({spec.advantage_estimator})", ("rewards", *own)),
            (spec.advantage_normalization != "none", "normalization", ("advantages", "mask", *by_group)),
            (True, f"aggregation ({spec.loss_aggregation})", ("mask",)),
            (spec.kl_in_loss, "KL in the loss", ("logps",)),
            (spec.kl_in_reward, "KL in the reward", ("old_logps", "ref_logps", "mask")),
            (spec.kl_controller == "adaptive", "KL control", ("old_logps", "ref_logps", "mask")),
            (self.bonus, "entropy bonus", ("entropies",)),
            (self.masks and config.use_vllm, "off-policy mask", ("rollout_logps",)),
            (self.weighted, "vLLM correction", ("old_logps", "rollout_logps", "mask")),
            (self.weighted, f"policy ({spec.policy_loss})", ("rollout_weights",)),
        ]
        for applies, reader, tensors in more:
            for tensor in tensors if applies else ():
                readers.setdefault(tensor, set()).add(reader)
        if not self.weighted:
            readers.pop("rollout_weights", None)  # vespo reads them where there are any
        made = {"rewards": ("(N, K)", "the reward functions, for the completions of all processes"), **TENSORS}
        rows = [(name, *made[name], ", ".join(sorted(readers[name]))) for name in made if name in readers]
        return _table([("tensor", "shape", "made by", "read by"), *rows])

    def schedule(self) -> Iterator[str]:
        config, micro, steps = self.config, self.config.micro_batches_per_rollout, self.config.gradient_accumulation_steps
        uses, group, rows = micro * config.num_iterations, config.num_generations or 1, config.per_device_train_batch_size
        total = rows * micro * config.world_size
        yield f"Rollout: {total} completions = prompts {total // group} x num_generations {group}; processes {config.world_size}"
        yield f"  micro-batches a process {micro}, rows in each {rows}, uses of each {config.num_iterations} (num_iterations)"
        yield f"Optimizer step: micro-batches a process {steps}, completions {steps * rows * config.world_size}"
        yield f"Optimizer steps that one rollout serves: {Fraction(uses, steps)}"
        changes = max((start + uses - 1) // steps - start // steps for start in range(0, uses * steps, uses))
        off = f"Off-policy: changes of the weights between the first and the last use of a rollout: at most {changes}"
        yield "On-policy: each step uses completions of the very weights that it changes" if config.is_on_policy else off
        exact = "exact: each optimizer step is normalized by its own tokens and rows"
        yield f"Windows: {exact if config.windows_are_exact else 'not exact: the mean of the rollout is taken instead, as TRL'}"

    def warnings(self) -> list[str]:
        spec, config, options = self.spec, self.config, self.policy.options
        on_policy, mode, sequence = config.is_on_policy, spec.loss_aggregation, spec.kl_reward_level == "sequence"
        cispo, plain, corrected = spec.policy_loss == "cispo", config.policy_loss is None, spec.use_bias_correction_kl
        centred = "group_ids" in self.estimator.requires or spec.advantage_normalization != "none"
        read = {*options, *(["epsilon"] if cispo and plain else [])}
        adaptive = () if config.use_adaptive_entropy else ("entropy_coef_", "entropy_target")
        begin = (*adaptive, *(("epsilon", "sapo_", "vespo_") if options else ()))
        moved = [name for name, value in vars(config).items() if value != getattr(GRPOPlusConfig, name, value)]
        unread = [f"{name}={vars(config)[name]}" for name in moved if name.startswith(begin) and name not in read]
        given = {
            "on_policy": on_policy and bool({"epsilon", "epsilon_high"} & options) and not (cispo and self.ratio_max < 1),
            "loss_0": on_policy and "epsilon" in options and centred,
            "windows": not config.windows_are_exact,
            "idle_mask": self.masks and on_policy and not config.use_vllm,
            "clip_max": spec.clip_objective == "max",
            "cispo_unset": cispo and plain and config.epsilon_high is None,
            "cispo_low": cispo and config.epsilon_high is not None and config.epsilon_high <= 1,
            "wide": (self.by_row or spec.policy_loss == "gspo_token") and "clip_objective" in options and spec.epsilon > 0.01,
            "delta": spec.delta is not None and spec.delta < 1 + spec.clip_high,
            "unread": bool(unread),
            "bnpo": config.loss_type == "bnpo",
            "luspo": config.loss_type == "luspo" and plain and not spec.sequence_level,
            "by_length": self.by_row and mode not in ("seq_mean_token_mean", "seq_mean_token_sum"),
            "token_sum": mode == "token_sum",
            "top_entropy": spec.top_entropy_quantile < 1.0,
            "k1": spec.kl_in_loss and self.kl == "k1" and not corrected,
            "k3": spec.kl_in_loss and self.kl == "k3" and not corrected,
            "abs": spec.kl_in_loss and self.kl == "abs",
            "kl_by_row": spec.kl_in_loss and corrected and spec.sequence_level,
            "both": spec.kl_placement == "both",
            "adaptive_both": spec.kl_placement == "both" and spec.kl_controller == "adaptive",
            "flat_kl": spec.kl_in_reward and sequence and spec.zero_std_groups != "keep",
            "length_std": mode == "seq_mean_token_sum_norm" and spec.scale_rewards != "none",
            "row_scope": spec.advantage_normalization != "none" and spec.advantage_norm_scope == "sequence",
            "truncated": config.mask_truncated_completions and config.counts_empty_rows and mode.startswith("seq"),
        }
        fields = {**vars(config), **vars(spec), "unread": ", ".join(unread)}
        return [TEXTS[name].format_map(fields) for name, applies in given.items() if applies]
