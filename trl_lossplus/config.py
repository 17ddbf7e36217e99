"""GRPOPlusConfig: TrainingArguments fields -> LossSpec, every check at construction."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, cast

from trl import GRPOConfig

from .config_checks import (
    check_correction,
    check_generation,
    check_reference,
    check_steps,
    check_still_rows,
    check_windows,
    field_of_ppo,
    uneven_groups,
)
from .estimators import options_of
from .fieldtypes import INHERITED, own_kinds, read, read_path, step_numbers, words
from .functional.correction import CORRECTION_MODES
from .functional.errors import LossPlusError, unknown_name
from .layout_rules import check_budget, check_layout, has_router_loss
from .objective_fields import ObjectiveFields, option
from .registry import ADVANTAGE_ESTIMATORS, FOR_ESTIMATORS, FOR_LOSSES, POLICY_LOSSES, TENSORS
from .resolve import TRL_LOSS_TYPES, resolve_advantages, resolve_kl, resolve_policy, unread_settings
from .spec import CHOICES, LossSpec

GRPO_FIELDS = frozenset(item.name for item in fields(GRPOConfig)) - {"use_bias_correction_kl"}
TRL_CHOICES = {
    "multi_objective_aggregation": ("sum_then_normalize", "normalize_then_sum"),
    "vllm_importance_sampling_mode": CORRECTION_MODES,
}
OUR_CHOICES = {
    "microbatch_layout": ("padded", "packed", "shared_prefix", "auto"),
    "probes": ("off", "summary", "full"),
    "nonfinite_policy": ("raise", "skip"),
    "resample_exhausted": ("keep", "raise"),
}


@dataclass
class GRPOPlusConfig(ObjectiveFields, GRPOConfig):
    """
    TRL's GRPOConfig with the choice of the loss. Fields left at None mean what TRL's own fields say.

    Raises:
        LossPlusError: at construction, for an unknown name, a number out of range, two settings that contradict each other, or a
            setting that nothing reads.
    """

    loss_type: str | None = option(  # type: ignore[assignment]
        "TRL's name for an objective with its aggregation: grpo, bnpo, dr_grpo, dapo, cispo, sapo, luspo, vespo. None: dapo, or "
        "with policy_loss set what the objective's source prescribes."
    )
    scale_rewards: str | None = option(  # type: ignore[assignment]
        "Whose standard deviation divides the rewards in the group-relative estimators: group, batch or none. None: group, or "
        "none where advantage_normalization is set or the estimator does not scale."
    )
    use_bias_correction_kl: bool | None = option(  # type: ignore[assignment]
        "Multiply the KL in the loss by the importance ratio, which makes its gradient the reverse KL's. None: yes for k1 "
        "and k3 (as TRL), no for the others (k2 and the + forms have the right gradient without it, abs with neither)."
    )
    policy_loss: str | None = option(
        "Policy objective by name (`trl-lossplus list policy` has them) or package.module:function. None: from loss_type."
    )
    clip_objective: str = option(
        "min: PPO's pessimistic bound. max: the form that some articles print; it removes the clip exactly where it should act "
        "and is there to be compared.",
        "min",
    )
    clip_ratio_c: float | None = option("Dual clip: for a negative advantage the loss is at most this times |A|. Must be > 1.")
    log_ratio_clamp: float = option("Bound in nats on |log ratio| before it is exponentiated.", 20.0)
    cispo_ratio_min: float | None = option("Lower bound of CISPO's importance ratio. None: no lower bound.")
    rollout_rs: str | None = option(
        "Rejection of tokens on which sampler and policy differ: they leave the loss and its normalizer. One statistic or several with commas: token_k1, token_k2, token_k3, "
        "seq_sum_k1, seq_sum_k2, seq_sum_k3, seq_mean_k1, seq_mean_k2, seq_mean_k3, seq_max_k2, seq_max_k3. None: no rejection."
    )
    rollout_rs_threshold: str | None = option(
        "A threshold for each statistic of rollout_rs, or one for all, with commas: the largest value kept; for k1 the bounds of the "
        "ratio pi_old / pi_sampler as low_high (in quotes in YAML), or one number u for 1/u to u."
    )
    rollout_is_correction: bool = option(
        "Importance weights pi_old / pi_sampler also against the log-probs that a rollout_func returns; vllm_importance_sampling_mode, _clip_min "
        "and _clip_max say how, and with use_vllm vllm_importance_sampling_correction whether.",
        False,
    )
    rollout_is_batch_normalize: bool = option(
        "Divide the rollout importance weights by their mean over the rollout's tokens (rows) on all processes.", False
    )
    loss_aggregation: str | None = option(
        f"From per-token losses to one number: {', '.join(CHOICES['loss_aggregation'])}. None: from loss_type or the objective."
    )
    advantage_estimator: str | None = option(
        "Advantage estimator by name or package.module:function. None: grpo, or gdpo for "
        "multi_objective_aggregation=normalize_then_sum."
    )
    advantage_normalization: str | None = option(
        "Whitening of the advantages: none, rollout (over the rollout's tokens on all processes) or learner (over each optimizer "
        "step's tokens). None: what scale_rewards says."
    )
    advantage_norm_scope: str | None = option("What is whitened together: batch, group or sequence. None: batch.")
    kl_estimator: str | None = option(
        "KL estimator: k1, k2, k3, abs, or with + for the straight-through k2 gradient (aliases kl, kl_div, mse, biased_kl, "
        "low_var_kl). None: k3 in the loss, k1 in the reward."
    )
    kl_placement: str | None = option(
        "Where the KL acts: none, reward, loss or both. None: in the loss where beta > 0, else nowhere."
    )
    kl_reward_coef: float | None = option(
        "Coefficient of the KL that is taken off the rewards; needs kl_placement reward or both."
    )
    kl_reward_level: str | None = option(
        "sequence: the completion's summed KL is taken off its reward before the group comparison. token: each token's advantage "
        "loses the KL from there to the end. None: token for estimators that work token by token (gae and the like), else sequence."
    )
    kl_controller: str = option("fixed, or adaptive: the coefficient follows kl_target.", "fixed")
    kl_target: float | None = option("Target of adaptive control: KL in nats a token.")
    kl_horizon: float | None = option("Horizon of adaptive control in completions. None: 10000.")
    zero_std_groups: str = option(
        "Groups whose rewards are all equal: keep (as TRL), no_kl (they do not pull towards the reference), drop (out of the "
        "loss and of its normalizer), resample (replaced by groups of further prompts before anything is trained on: DAPO's dynamic "
        "sampling).",
        "keep",
    )
    resample_max_tries: int = option(
        "zero_std_groups=resample: how many further draws of prompts a rollout may take, each at most as large as the rollout.", 8
    )
    resample_exhausted: str = option(
        "zero_std_groups=resample, where flat groups are left after these draws: keep (they stay, with a warning; after three "
        "rollouts in a row in which no group at all had spread training ends) or raise (an error).",
        "keep",
    )

    microbatch_layout: str = option(
        "How a micro-batch is laid out for the model: padded (to its longest row), packed (rows one after the other, no padding), "
        "shared_prefix (packed, and a group's prompt computed once) or auto (shared_prefix where the model allows, packed with flash attention, "
        "else padded, and says which). None changes a gradient.",
        "padded",
    )
    max_tokens_per_microbatch: int | None = option(
        "Run each micro-batch in parts of at most so many tokens, as the layout counts them (padded: with the padding; shared_prefix: a "
        "prompt once a part); the passes without gradient too. Memory then does not follow per_device_train_batch_size. None: whole."
    )
    skip_still_rows: bool = option(
        "Do not compute rows whose advantage is 0 on every token, where nothing else of the loss acts on them. The gradient stays; "
        "metrics of the loss are over the rows that were computed.",
        False,
    )

    compact_generation: bool = option(
        "Where transformers' generate makes the completions: compute a group's prompt once and leave out rows that have ended. The same "
        "distribution, another random stream.",
        False,
    )
    merged_generation: bool = option(
        "Where transformers' generate makes the completions under LoRA: add the adapters to a copy of the weights for that time, so that a "
        "token takes no product with them. Needs the memory of that copy.",
        False,
    )

    probes: str = option(
        "What is measured of each optimizer step beside the terms and clip fractions: off, summary (extremes and medians of log "
        "ratio, ratio, advantage, policy term, KL and value; shares of loss and gradient), full (seven quantiles, of the entropy too).",
        "summary",
    )
    nonfinite_policy: str = option(
        "A NaN or infinity in what the loss reads or gives: raise (stop before the optimizer step, naming it), or skip (drop the "
        "step on every process, and stop after nonfinite_max_skips in a row).",
        "raise",
    )
    nonfinite_max_skips: int = option("nonfinite_policy=skip: how many steps in a row may be dropped.", 3)

    loss_table_rows: int = option(
        "So many rows with the largest policy loss and as many with the smallest are written to loss_table.jsonl in output_dir at each "
        "logged step, with prompt, completion and terms. 0: none.",
        0,
    )
    snapshot_steps: list[int] | None = option("Optimizer steps, counted from 0, of which a snapshot is written.")
    snapshot_on: list[str] | None = option(
        "What else a snapshot is written of, one or both: nonfinite (a step in which something is not finite), finding (the step at which "
        "LossDoctorCallback, there without being asked for, finds something new; once a finding, 8 a run). None: nothing."
    )
    snapshot_dir: str | None = option("Where snapshots are written. None: snapshots/ in output_dir.")
    snapshot_rows: int = option("Rows of a step that a snapshot keeps a process; the rest is left out, and counted in it.", 512)

    default_estimator = "grpo"
    not_supplied = frozenset({"values", "old_values", "returns"})

    def __new__(cls, *args: Any, **kwargs: Any) -> GRPOPlusConfig:
        """Refuses fields of PPO's by name: dataclasses would only say that they are not known."""
        error = field_of_ppo(cls.__dataclass_fields__, kwargs, cls.__name__)
        if error is not None:
            raise error
        return super().__new__(cls)

    def _read_types(self) -> None:
        """Numbers and booleans as such, whatever form they came in. Raises LossPlusError for what is none."""
        own = {name: kind for name, kind in own_kinds(type(self)).items() if name not in GRPO_FIELDS}
        for name, (kind, optional, least) in {**own, **INHERITED}.items():
            setattr(self, name, read(name, getattr(self, name), kind, optional, least))

    def _check_skip(self) -> None:
        """Skipping a step is refused where the backward pass takes it, also when a launcher's file brings DeepSpeed in."""
        steps_alone = self.deepspeed or getattr(self, "deepspeed_plugin", None) is not None or self.fp16
        if self.nonfinite_policy == "skip" and steps_alone:
            raise LossPlusError(
                "nonfinite_policy='skip': DeepSpeed and fp16 take or drop their optimizer steps themselves. Set it to raise, or train "
                "with bf16 and DDP or FSDP."
            )

    def __post_init__(self) -> None:
        self._read_types()
        if self.loss_type is not None and self.loss_type not in tuple(TRL_LOSS_TYPES):
            raise unknown_name("loss_type", self.loss_type, TRL_LOSS_TYPES)
        choices: dict[str, tuple[Any, ...]] = {**TRL_CHOICES, **OUR_CHOICES}
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise unknown_name(name, getattr(self, name), allowed)
        for name, least in {"nonfinite_max_skips": 1, "snapshot_rows": 1, "resample_max_tries": 1, "loss_table_rows": 0}.items():
            if getattr(self, name) < least:
                raise LossPlusError(f"{name}={getattr(self, name)} is out of range: it must be >= {least}.")
        self.snapshot_steps = step_numbers("snapshot_steps", self.snapshot_steps)
        self.snapshot_on = words("snapshot_on", self.snapshot_on, ("nonfinite", "finding"))
        self.snapshot_dir = read_path("snapshot_dir", self.snapshot_dir)
        self._check_skip()
        check_generation(self)
        spec = self.loss_spec()
        check_still_rows(self, spec, auxiliary=has_router_loss(self))
        check_reference(self, spec)
        try:
            super().__post_init__()
        except ValueError as error:
            raise uneven_groups(self) or error from None
        self._check_skip()
        check_windows(self, spec)
        check_budget(self, auxiliary=has_router_loss(self))
        check_layout(self)
        check_steps(self, spec)
        if spec.kl_controller == "adaptive" and 0.2 * cast(int, self.generation_batch_size) >= spec.kl_horizon:
            raise LossPlusError(
                f"kl_horizon={spec.kl_horizon:g} is too short for rollouts of {self.generation_batch_size} completions: the coefficient "
                "could reach 0 in one update. 10000 is usual."
            )

    def loss_spec(self) -> LossSpec:
        """
        The loss that these fields describe.

        Raises:
            LossPlusError: see the class.
        """
        values = {**resolve_policy(self), **resolve_kl(self), **resolve_advantages(self)}
        spec = LossSpec(
            **values,
            importance_sampling_level=self.importance_sampling_level,
            log_ratio_clamp=self.log_ratio_clamp,
            sapo_temperature_pos=self.sapo_temperature_pos,
            sapo_temperature_neg=self.sapo_temperature_neg,
            vespo_k_pos=self.vespo_k_pos,
            vespo_lambda_pos=self.vespo_lambda_pos,
            vespo_k_neg=self.vespo_k_neg,
            vespo_lambda_neg=self.vespo_lambda_neg,
            entropy_coef=self.entropy_coef,
            top_entropy_quantile=self.top_entropy_quantile,
            off_policy_mask_threshold=self.off_policy_mask_threshold,
            zero_std_groups=self.zero_std_groups,
            **self.critic_values(),
        )
        self._check_reads(spec)
        check_correction(self, spec)
        self._check_supply(spec)
        return spec

    def _check_reads(self, spec: LossSpec) -> None:
        """Settings that the chosen objective or estimator does not read."""
        entry = POLICY_LOSSES.get(spec.policy_loss)
        unread = unread_settings(self, spec)
        if unread:
            name, value = next(iter(unread.items()))
            if name in entry.options:
                raise spec.unread(name)
            raise LossPlusError(
                f"{name}={value!r}: nothing reads it with policy_loss {spec.policy_loss!r}. Remove it, or take an objective that does. "
                f"Read: {', '.join(sorted(entry.options)) or 'nothing'}."
            )
        levels = not entry.options or "importance_sampling_level" in spec.policy_options or "sequence_level" in entry.traits
        if spec.importance_sampling_level == "sequence" and not levels and not (spec.kl_in_loss and spec.use_bias_correction_kl):
            if "importance_sampling_level" in entry.options:
                raise spec.unread("importance_sampling_level")
            raise LossPlusError(
                f"importance_sampling_level='sequence': policy_loss {spec.policy_loss!r} does not read it. Remove it, or take ppo_clip, "
                "cispo or sapo, which have a sequence-level ratio."
            )
        if self.zero_std_groups == "no_kl" and not spec.kl_in_loss:
            raise LossPlusError(
                "zero_std_groups='no_kl': there is no KL in the loss that flat groups could be left out of. Set beta > 0, or "
                "zero_std_groups to keep or drop."
            )
        for name, default in (("resample_max_tries", 8), ("resample_exhausted", "keep")):
            if self.zero_std_groups != "resample" and getattr(self, name) != default:
                raise LossPlusError(
                    f"{name}={getattr(self, name)!r}: nothing reads it. Set zero_std_groups='resample', or remove it."
                )

    def critic_values(self) -> dict[str, Any]:
        """Values of the spec's critic fields: none without a critic."""
        return {}

    def _check_supply(self, spec: LossSpec) -> None:
        """Tensors that the loss or the estimator reads and nothing here can make."""
        estimator = ADVANTAGE_ESTIMATORS.get(spec.advantage_estimator)
        readers = {tensor: names for tensor, names in spec.readers().items() if tensor in self.not_supplied | FOR_ESTIMATORS}
        for tensor in (estimator.requires & self.not_supplied) | (estimator.requires & FOR_LOSSES):
            readers.setdefault(tensor, set()).add(f"advantage_estimator ({estimator.name})")
        for tensor in sorted(readers):
            shape, maker = TENSORS[tensor]
            critic = tensor in self.not_supplied
            remedy = (
                "Take PPOPlusConfig and PPOPlusTrainer for a critic." if critic else "Its trainer does not hand it over there."
            )
            raise LossPlusError(
                f"{', '.join(sorted(readers[tensor]))} reads {tensor} {shape}, made by {maker}; a {type(self).__name__} has "
                f"no such thing. {remedy}"
            )
        by_token = [name for name in sorted(estimator.requires) if not TENSORS[name][0].startswith("(B,)")]
        if by_token and "token_level" not in estimator.traits:
            raise LossPlusError(
                f"advantage_estimator={estimator.name!r} reads {by_token[0]} {TENSORS[by_token[0]][0]}, and works by completion: register it "
                "with traits={'token_level'}."
            )

    @property
    def micro_batches_per_rollout(self) -> int:
        """Micro-batches into which a process cuts one rollout (TRL's steps_per_generation)."""
        assert self.steps_per_generation is not None  # TRL's __post_init__ sets it
        return self.steps_per_generation

    @property
    def prompts_per_rollout(self) -> int:
        """Prompts of one rollout, over all processes."""
        assert self.generation_batch_size is not None  # TRL's __post_init__ sets both
        assert self.num_generations is not None
        return self.generation_batch_size // self.num_generations

    @property
    def windows_are_exact(self) -> bool:
        """Whether every optimizer step lies within one rollout, so that its normalizer is its own token count."""
        return self.micro_batches_per_rollout % self.gradient_accumulation_steps == 0

    @property
    def counts_empty_rows(self) -> bool:
        """Whether rows without valid tokens count in a mean over rows: as TRL, where its loss_type decides; else no."""
        return self.policy_loss is None and self.loss_aggregation is None

    @property
    def optimizer_steps_per_rollout(self) -> float:
        """How many optimizer steps one rollout serves."""
        return self.micro_batches_per_rollout * self.num_iterations / self.gradient_accumulation_steps

    @property
    def is_on_policy(self) -> bool:
        """Whether every update uses completions of the very weights that it changes, so that the ratio is exactly 1."""
        return self.gradient_accumulation_steps % (self.micro_batches_per_rollout * self.num_iterations) == 0

    @property
    def estimator_options(self) -> dict[str, Any]:
        """Options of the advantage estimator that the fields set."""
        return options_of(self.loss_spec())
