"""A configuration in words: the loss, where each term acts, who makes and reads which tensor, the schedule, the warnings."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

from .config import GRPOPlusConfig
from .explain_policy import interval, policy_numbers
from .explain_warnings import Facts, warnings
from .functional.aggregation import AGGREGATIONS
from .functional.kl import BUILT_IN, KL_FORMULAS
from .ppo_config import PPOPlusConfig
from .registry import STEP_TENSORS, TENSORS

CRITICS = {
    "adapter": "a second LoRA adapter and a scalar head on the policy's base model",
    "shared": "a scalar head on the policy's hidden states, without a forward pass of its own",
    "model": "a model of its own with a scalar head",
    None: "adapter (a second LoRA adapter and a scalar head) with LoRA, else model (a model of its own)",
}
SCOPES = {"batch": "all tokens together", "group": "each prompt's completions together", "sequence": "each row alone"}


def explain(config: GRPOPlusConfig) -> str:
    """The loss of a configuration as plain text. Raises LossPlusError where fields were changed into a contradiction."""
    words = _Explanation(config)
    sections = {
        "The loss": [*words.loss(), *words.kl_in_loss(), *words.value(), *words.others()],
        "The advantages": [*words.advantages(), *words.kl_in_reward()],
        **({"The critic": words.critic()} if words.ppo else {}),
        "Where each term acts": words.terms(),
        "Tensors": words.tensors(),
        "Schedule": words.schedule(),
        "Warnings": [f"- {text}" for text in warnings(words)] or ["none"],
    }
    return "\n\n".join("\n".join([title, *(f"  {line}" for line in lines)]) for title, lines in sections.items()) + "\n"


def _table(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


class _Explanation(Facts):
    """The sections, each as lines of text."""

    def loss(self) -> Iterator[str]:
        spec, config = self.spec, self.config
        kl, entropy = f" + {spec.beta:g} KL" if spec.kl_in_loss else "", f" - {spec.entropy_coef:g} entropy" if self.bonus else ""
        value = f" + {spec.vf_coef:g} value" if self.ppo else ""
        yield f"loss = policy{kl}{entropy}{value}"
        yield f"r = pi / pi_old with |log r| <= {spec.log_ratio_clamp:g}, A = advantage, sg = stop gradient"
        yield f"Policy: {spec.policy_loss} = {' '.join(self.policy.formula.split()) or 'not given'}"
        yield f"  {(self.policy.func.__doc__ or 'described nowhere').strip().splitlines()[0]}"
        yield "  " + "; ".join([*policy_numbers(self), f"source: {self.policy.source or 'not given'}"])
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
        elif self.kl.isidentifier() and self.kl not in BUILT_IN:
            gradient = "its own"
        elif self.kl in ("k1", "k3") and not corrected:
            gradient = "0 in expectation" if self.kl == "k1" else "the forward KL's"
        times = "times the ratio" if corrected else "not times the ratio"
        yield f"KL in the loss: beta {spec.beta:g}, {self._estimate()}, d = logp - ref_logp, {times}; gradient: {gradient}"
        groups = ", without groups whose rewards are all equal" if spec.zero_std_groups == "no_kl" else ""
        yield f"  aggregated as the policy term{groups}"

    def value(self) -> Iterator[str]:
        """The value loss with its numbers."""
        spec, clip, delta = self.spec, self.spec.cliprange_value, self.spec.huber_delta
        if not self.ppo:
            return
        huber = spec.value_loss == "huber"
        plain, clipped = ("h({} - R)" if huber else "({} - R)^2").format, f"clip(v, V - {clip or 0:g}, V + {clip or 0:g})"
        form = f"0.5 {plain('v')}" if clip is None else f"0.5 max({plain('v')}, {plain(clipped)})"
        old = "no clipping" if clip is None else "V = old value"
        yield f"Value loss: vf_coef {spec.vf_coef:g}, {spec.value_loss} = {form}, v = value, R = return, {old}"
        if huber:
            yield f"  h(x) = x^2 for |x| <= {delta:g}, else {2 * delta:g} |x| - {delta**2:g} (huber_delta {delta:g})"
        yield "  aggregated as the policy term, over the same tokens"

    def others(self) -> Iterator[str]:
        spec, config, coef = self.spec, self.config, self.config.router_aux_loss_coef
        if self.bonus:
            tokens = "all valid tokens" if spec.top_entropy_quantile == 1.0 else "the high-entropy tokens"
            yield f"Entropy bonus: {spec.entropy_coef:g} times the mean entropy of {tokens}, whatever the aggregation"
        if config.use_adaptive_entropy:
            within = interval(config.entropy_coef_min, config.entropy_coef_max)
            yield f"  adaptive: +-{config.entropy_coef_delta:g} a step within {within}, towards {config.entropy_target:g} nats"
        if spec.top_entropy_quantile < 1.0:
            yield f"High-entropy selection: the policy term keeps the top {spec.top_entropy_quantile:g} of the tokens by entropy"
        if self.masks:
            rows = f"rows with A < 0 and a mean drift from their sampler above {spec.off_policy_mask_threshold:g} nats a token"
            yield f"Off-policy mask: the policy term leaves out {rows}"
        if self.weighted:
            where = "are part of w" if "reads_rollout_weights" in self.policy.traits else "multiply the policy term"
            bounds = interval(config.vllm_importance_sampling_clip_min, config.vllm_importance_sampling_clip_max)
            mode = config.vllm_importance_sampling_mode
            mean = "divided by their mean over the rollout, " if spec.rollout_is_batch_normalize else ""
            yield f"{self.correction}: weights pi_old / pi_sampler, {mode} within {bounds}, {mean}{where}"
        if spec.top_entropy_quantile < 1.0 or self.masks or self.weighted:
            yield "  what is left out or weighted here still counts in the aggregation's normalizer"
        if spec.rollout_rs is not None:
            yield f"Rejection: what differs from the sampler by {spec.rollout_rs} beyond {spec.rollout_rs_threshold} is left out"
            at_rollout = "at the rollout, by old_logps: out of every term and of the aggregation's normalizer"
            in_loss = "in the loss, by logps; it still counts in the aggregation's normalizer"
            yield f"  {in_loss if 'rollout_rs' in self.policy.options else at_rollout}"
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
        numbers = self.config.estimator_options.items()
        options = [f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}" for name, value in numbers]
        options = ["gae_lambda_critic as gae_lambda" if item == "gae_lambda_critic None" else item for item in options]
        options = ["scale_rewards none: not divided"] if "scale_rewards none" in options else options
        yield f"Estimator: {self.spec.advantage_estimator} = {' '.join(self.estimator.formula.split()) or 'not given'}"
        yield "  " + "; ".join([*options, f"source: {self.estimator.source or 'not given'}"])
        yield f"  s = weighted sum of a completion's rewards, reward_weights {self.config.reward_weights or '1 each'}"
        if self.ppo:
            yield from self._token_rewards(self.ppo)
        yield f"Normalization, in exactly one place: {self._normalization()}"
        if self.config.num_generations != 1:
            yield from self._flat_groups()

    def _flat_groups(self) -> Iterator[str]:
        """What becomes of groups whose rewards are all equal."""
        config, mode = self.config, self.spec.zero_std_groups
        flat = {
            "keep": "kept, as TRL",
            "no_kl": "out of the KL in the loss",
            "drop": "out of the loss and its normalizer",
            "resample": "replaced by groups of further prompts, before log-probs are taken; evaluation keeps them",
        }
        yield f"Groups whose rewards are all equal: {flat[mode]}"
        if mode == "resample":
            rest = "an error" if config.resample_exhausted == "raise" else "kept, with a warning"
            tries = f"at most {config.resample_max_tries} further draws a rollout (resample_max_tries)"
            yield f"  {tries}; flat groups that are left: {rest} (resample_exhausted {config.resample_exhausted})"
            yield "  reward and group_reward/* are of the kept completions, resample/* of all draws, completions/* of the first draw"

    def _token_rewards(self, ppo: PPOPlusConfig) -> Iterator[str]:
        """What stands between a completion's reward and the advantages of its tokens."""
        yield "  token rewards: s at a completion's last token, 0 elsewhere; returns R = advantage + old value"
        after = {"terminal": "the value after them is 0", "bootstrap": "the value after them is the critic's"}
        yield f"Completions that were cut off: {ppo.truncated_completions}: {after[ppo.truncated_completions]}"
        if ppo.missing_eos_penalty:
            yield f"  and {ppo.missing_eos_penalty:g} is taken off s (missing_eos_penalty)"
        over = "divided by their standard deviation over the rollout on all processes; the mean stays"
        yield f"Reward whitening: {f'token rewards, less any KL, {over}' if ppo.whiten_rewards else 'none'}"

    def critic(self) -> Iterator[str]:
        """What the critic is, where it starts, and how it is trained."""
        ppo = self.ppo
        assert ppo is not None
        shared, path = ppo.critic == "shared", ppo.critic_model_name_or_path
        yield f"Kind: {ppo.critic or 'not set'}: {CRITICS[ppo.critic]}"
        new = "a new head" if shared else "the policy, with a new head"
        yield f"  starts from: {path or new}"
        if shared:
            detached = "stops at the head (critic_detach)" if ppo.critic_detach else "reaches the policy's trunk as well"
            yield f"  the value loss's gradient {detached}"
        for what, own, policy, field in (
            ("Learning rate", ppo.critic_learning_rate, ppo.learning_rate, "critic_learning_rate"),
            ("Scheduler", ppo.critic_lr_scheduler_type, ppo.lr_scheduler_type, "critic_lr_scheduler_type"),
        ):
            shown = f"{policy:g}" if isinstance(policy, float) else str(getattr(policy, "value", policy))
            mine = f"{own:g}" if isinstance(own, float) else own
            yield f"{what}: {f'{shown}, as the policy' if own is None else f'{mine} ({field}); the policy: {shown}'}"
        steps = ppo.critic_warmup_steps
        alone = f"the first {steps} optimizer steps train the critic alone; the policy's learning rate is 0 in them"
        yield f"Warm-up: {alone if steps else 'none (critic_warmup_steps 0)'}"
        yield from self._critic_passes(ppo)

    def _critic_passes(self, ppo: PPOPlusConfig) -> Iterator[str]:
        """Where old values come from, and what of the critic's own pass is computed twice."""
        own = "a pass without gradient"
        if ppo.critic == "shared":
            own = f"the pass that takes old_logps; without one, {own}"
        yield f"Old values: {'the forward pass of the loss, taken at the rollout' if ppo.one_pass else own}"
        if ppo.microbatch_layout != "padded":
            alone = "" if ppo.critic in ("shared", "adapter") else "; a model of its own that does not allow it: padded"
            yield f"Rows: laid out as the policy's{alone}"
        if ppo.gradient_checkpointing and ppo.critic != "shared":
            kept = {
                None: "all layers but the last are recomputed",
                True: "all layers are recomputed",
                False: "none is recomputed",
            }
            yield f"The critic's activations: {kept[ppo.critic_gradient_checkpointing]} (critic_gradient_checkpointing)"

    def kl_in_reward(self) -> Iterator[str]:
        spec = self.spec
        adaptive = spec.kl_controller == "adaptive"
        if spec.kl_in_reward:
            yield f"KL in the reward: kl_reward_coef {spec.kl_reward_coef:g}, {self._estimate()}, d = old_logp - ref_logp"
            token = (
                "token: each token's reward loses its KL, before any advantage"
                if self.by_token
                else ("token: each token's advantage loses the KL from there to the end; no group comparison sees it")
            )
            sequence = "sequence: a completion's summed KL is taken off its reward s, before any advantage"
            yield f"  level {token if spec.kl_reward_level == 'token' else sequence}"
        if adaptive:
            change = f"clip(KL / {spec.kl_target:g} - 1, -0.2, 0.2) * {self.config.generation_batch_size} / {spec.kl_horizon:g}"
            yield f"Adaptive KL control: coefficient *= 1 + {change} once a rollout; KL: mean a token, all processes"
        if (spec.kl_in_reward or adaptive) and self.config.is_on_policy and not self.weighted:
            taken = self.ppo is not None and self.ppo.one_pass
            cost = "those of the loss's own forward pass, taken at the rollout" if taken else "one more forward pass a rollout"
            yield f"  the rollout's KL needs old_logps, which nothing else does here: {cost}"

    def terms(self) -> list[str]:
        spec, penalty = self.spec, f"-{self.spec.kl_reward_coef:g} KL"
        level = spec.kl_reward_level if spec.kl_in_reward else None
        by_row, by_token = level == "sequence" or level == "token" and self.by_token, level == "token" and not self.by_token
        missing = self.ppo.missing_eos_penalty if self.ppo else None
        rows = [
            (f"policy ({spec.policy_loss})", "", "", "yes"),
            ("value loss", "", "", f"+{spec.vf_coef:g} value" * (self.ppo is not None)),
            ("KL", penalty * by_row, penalty * by_token, f"+{spec.beta:g} KL" * spec.kl_in_loss),
            ("missing end token", f"-{missing:g}" if missing else "", "", ""),
            ("reward whitening", "yes" * spec.whiten_rewards, "", ""),
            ("normalization", "", "yes" * (self._normalization() != "nowhere"), ""),
            ("entropy bonus", "", "", f"-{spec.entropy_coef:g} entropy" * self.bonus),
            ("high-entropy selection", "", "", "policy term" * (spec.top_entropy_quantile < 1.0)),
            ("off-policy mask", "", "", "policy term" * self.masks),
            (self.correction, "", "", "policy term" * self.weighted),
            ("rejection", "", "", "yes" * (spec.rollout_rs is not None)),
        ]
        acting = [(name, *(cell or "-" for cell in cells)) for name, *cells in rows if any(cells)]
        return _table([("term", "reward", "advantage", "loss"), *acting])

    def tensors(self) -> list[str]:
        spec, config, readers = self.spec, self.config, self.spec.readers()
        by_group = ("group_ids",) if spec.advantage_norm_scope == "group" else ()
        more: list[tuple[bool, str, tuple[str, ...]]] = [
            (True, f"estimator ({spec.advantage_estimator})", ("rewards", *self.estimator.requires)),
            (self.by_token, f"estimator ({spec.advantage_estimator})", ("mask",)),
            (spec.whiten_rewards, "reward whitening", ("rewards", "mask")),
            (spec.advantage_normalization != "none", "normalization", ("advantages", "mask", *by_group)),
            (True, f"aggregation ({spec.loss_aggregation})", ("mask",)),
            (spec.kl_in_loss, "KL in the loss", ("logps",)),
            (spec.kl_in_reward, "KL in the reward", ("old_logps", "ref_logps", "mask")),
            (spec.kl_controller == "adaptive", "KL control", ("old_logps", "ref_logps", "mask")),
            (self.bonus, "entropy bonus", ("entropies",)),
            (self.masks and config.use_vllm, "off-policy mask", ("rollout_logps",)),
            (self.weighted, self.correction, ("old_logps", "rollout_logps", "mask")),
            (self.rejects, "rejection", ("old_logps", "rollout_logps", "mask")),
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
        if self.policy.over_step is not None and steps * config.world_size > 1:
            made = " and ".join(name for name in STEP_TENSORS if name in self.policy.requires)
            yield f"At the start of a step: {made}, over the rows of all its micro-batches and processes"
            yield "  by a forward pass without gradient more, where the log-probs are not those of the rollout"
        still = "; rows whose advantage is 0 are not computed" if config.skip_still_rows else ""
        budget = config.max_tokens_per_microbatch
        parts = "" if budget is None else f"; each micro-batch in parts of at most {budget} tokens, as many on every process"
        yield f"Layout: {config.microbatch_layout}{parts}{still}"
        if config.compact_generation:
            yield "Generation: a group's prompt once, without the rows that have ended"
        if config.merged_generation:
            yield "Generation: by a copy of the weights with the adapters in it"
        exact = "exact: each optimizer step is normalized by its own tokens and rows"
        yield f"Windows: {exact if config.windows_are_exact else 'not exact: the mean of the rollout is taken instead, as TRL'}"
