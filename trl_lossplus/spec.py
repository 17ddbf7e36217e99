"""LossSpec: a frozen description of one loss. Knows nothing of trainers; YAML <-> LossSpec."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

import yaml

from .functional.aggregation import AGGREGATIONS
from .functional.correction import parse_rejection
from .functional.errors import LossPlusError, unknown_name
from .functional.kl import canonical_kl
from .functional.value import VALUE_LOSSES
from .registry import ADVANTAGE_ESTIMATORS, POLICY_LOSSES

CHOICES: dict[str, tuple[str, ...]] = {
    "clip_objective": ("min", "max"),
    "importance_sampling_level": ("token", "sequence"),
    "is_mode": ("truncate", "mask"),
    "alpha_from": ("spread", "nonzero"),
    "rec_clip": ("none", "one_side", "two_side", "ring"),
    "rec_weight": ("none", "importance", "advantage"),
    "loss_aggregation": tuple(AGGREGATIONS),
    "kl_placement": ("none", "reward", "loss", "both"),
    "kl_reward_level": ("token", "sequence"),
    "kl_controller": ("fixed", "adaptive"),
    "scale_rewards": ("group", "batch", "none"),
    "advantage_normalization": ("none", "rollout", "learner"),
    "advantage_norm_scope": ("batch", "group", "sequence"),
    "zero_std_groups": ("keep", "no_kl", "drop", "resample"),
    "value_loss": VALUE_LOSSES,
}

# Numbers and their ranges, ends included; None is always allowed where a field may be None.
RANGES: dict[str, tuple[float, float, str]] = {
    "epsilon": (0.0, float("inf"), ">= 0"),
    "epsilon_high": (0.0, float("inf"), ">= 0"),
    "beta": (0.0, float("inf"), ">= 0"),
    "kl_reward_coef": (0.0, float("inf"), ">= 0"),
    "top_entropy_quantile": (0.0, 1.0, "in [0, 1]"),
    "gamma": (0.0, 1.0, "in [0, 1]"),
    "gae_lambda": (0.0, 1.0, "in [0, 1]"),
    "gae_lambda_critic": (0.0, 1.0, "in [0, 1]"),
    "vf_coef": (0.0, float("inf"), ">= 0"),
    "is_ratio_min": (0.0, float("inf"), ">= 0"),
    "ipo_threshold": (0.0, 1.0, "in [0, 1]"),
    "ipo_kl_coef": (0.0, float("inf"), ">= 0"),
    "kl_cov_coef": (0.0, float("inf"), ">= 0"),
    "fipo_clip_range": (0.0, 1.0, "in [0, 1]"),
    "rec_ring_low": (0.0, 1.0, "in [0, 1]"),
    "rec_ring_high": (0.0, float("inf"), ">= 0"),
    "m2_threshold": (0.0, float("inf"), ">= 0"),
    "asymre_shift": (-1e38, float("inf"), "finite"),
    "rec_temperature": (1e-6, float("inf"), ">= 1e-06"),
    "opmd_tau": (1e-6, float("inf"), ">= 1e-06"),
}
POSITIVE = (
    "sapo_temperature_pos", "sapo_temperature_neg", "log_ratio_clamp", "kl_horizon", "kl_target", "norm_length", "delta",
    "huber_delta", "cliprange_value", "is_ratio_max", "dppo_ratio_max", "dro_beta", "clip_cov_ratio", "kl_cov_ratio",
    "fipo_decay_rate", "fipo_safety_threshold", "real_tau", "f_norm",
)  # fmt: skip

REC_CLIPS = ("one_side", "two_side", "ring")
# Options of rec that it reads under some of its settings only: {option: {setting: its values under which it does}}; one is enough.
REC_READS: dict[str, dict[str, tuple[str, ...]]] = {
    "rec_ring_low": {"rec_clip": ("ring",)},
    "rec_ring_high": {"rec_clip": ("ring",)},
    "rec_temperature": {"rec_weight": ("advantage",)},
    "epsilon": {"rec_clip": REC_CLIPS},
    "epsilon_high": {"rec_clip": REC_CLIPS},
    "importance_sampling_level": {"rec_clip": REC_CLIPS, "rec_weight": ("importance",)},
    "log_ratio_clamp": {"rec_clip": REC_CLIPS, "rec_weight": ("importance",)},
}


@dataclass(frozen=True)
class LossSpec:
    """
    One loss, by the names of the configuration fields (see `GRPOPlusConfig` for the meaning of each).

    Policy: policy_loss, clip range `epsilon` below and `epsilon_high` above 1 (None: the same; for cispo the bound of the ratio
    itself), clip_objective, delta, clip_ratio_c (> 1), importance_sampling_level, log_ratio_clamp (nats).
    Of single objectives: is_ratio_min, is_ratio_max, is_mode (tis, mis, rollout_is), dppo_ratio_max, ipo_threshold, ipo_kl_coef,
    dro_beta, clip_cov_ratio, clip_cov_min, clip_cov_max, kl_cov_ratio, kl_cov_coef, cov_seed, fipo_decay_rate, fipo_clip_range (None:
    no bound), fipo_clip_high_only, fipo_safety_threshold (None: off), real_tau, ipo_by_sign, rec_clip, rec_ring_low, rec_ring_high, rec_weight,
    rec_temperature, m2_threshold.
    Sampler: rollout_rs, rollout_rs_threshold (rejection, see `functional.correction`), rollout_is_batch_normalize.
    Aggregation: loss_aggregation, norm_length (tokens; None: the padded length).
    KL: beta (coefficient in the loss), kl_estimator, kl_placement, use_bias_correction_kl (estimate times ratio),
    kl_reward_coef, kl_reward_level, kl_controller, kl_target (nats a token), kl_horizon (rows).
    Advantages: advantage_estimator, scale_rewards, advantage_normalization, advantage_norm_scope, zero_std_groups; of single
    estimators f_norm, alpha_from (gpg), opmd_tau, asymre_shift, handle_zero_tail (optimal_token_baseline).
    Entropy: entropy_coef, top_entropy_quantile. Off-policy rows: off_policy_mask_threshold (nats).
    Critic: vf_coef (0: no value term), value_loss, huber_delta, cliprange_value (None: no clipping), gamma, gae_lambda,
    gae_lambda_critic (None: the same).

    Raises:
        LossPlusError: an unknown name (lists the allowed ones and the nearest) or a number out of its range.
    """

    policy_loss: str = "ppo_clip"
    epsilon: float = 0.2
    epsilon_high: float | None = None
    clip_objective: str = "min"
    delta: float | None = None
    clip_ratio_c: float | None = None
    importance_sampling_level: str = "token"
    log_ratio_clamp: float = 20.0
    cispo_ratio_min: float | None = None
    sapo_temperature_pos: float = 1.0
    sapo_temperature_neg: float = 1.05
    vespo_k_pos: float = 2.0
    vespo_lambda_pos: float = 3.0
    vespo_k_neg: float = 3.0
    vespo_lambda_neg: float = 2.0
    is_ratio_min: float | None = None
    is_ratio_max: float | None = 2.0
    is_mode: str = "truncate"
    dppo_ratio_max: float = 20.0
    ipo_threshold: float = 0.3
    ipo_kl_coef: float = 1e-3
    dro_beta: float = 0.1
    clip_cov_ratio: float = 2e-4
    clip_cov_min: float = 1.0
    clip_cov_max: float = 5.0
    kl_cov_ratio: float = 2e-4
    kl_cov_coef: float = 0.1
    cov_seed: int = 0
    fipo_decay_rate: float = 32.0
    fipo_clip_range: float | None = 0.2
    fipo_clip_high_only: bool = True
    fipo_safety_threshold: float | None = 4.0
    real_tau: float = 0.5
    ipo_by_sign: bool = False
    rec_clip: str = "one_side"
    rec_ring_low: float = 0.6
    rec_ring_high: float = 2.0
    rec_weight: str = "none"
    rec_temperature: float = 1.0
    m2_threshold: float = 0.04
    f_norm: float = 1.0
    alpha_from: str = "spread"
    opmd_tau: float = 1.0
    asymre_shift: float = -0.1
    handle_zero_tail: bool = False
    rollout_rs: str | None = None
    rollout_rs_threshold: str | None = None
    rollout_is_batch_normalize: bool = False
    loss_aggregation: str = "token_mean"
    norm_length: float | None = None
    beta: float = 0.0
    kl_estimator: str = "k3"
    kl_placement: str = "loss"
    use_bias_correction_kl: bool = False
    kl_reward_coef: float = 0.0
    kl_reward_level: str = "sequence"
    kl_controller: str = "fixed"
    kl_target: float | None = None
    kl_horizon: float = 10000.0
    advantage_estimator: str = "grpo"
    scale_rewards: str = "group"
    advantage_normalization: str = "none"
    advantage_norm_scope: str = "batch"
    zero_std_groups: str = "keep"
    entropy_coef: float = 0.0
    top_entropy_quantile: float = 1.0
    off_policy_mask_threshold: float | None = None
    whiten_rewards: bool = False
    gamma: float = 1.0
    gae_lambda: float = 0.95
    gae_lambda_critic: float | None = None
    vf_coef: float = 0.0
    value_loss: str = "mse"
    huber_delta: float = 1.0
    cliprange_value: float | None = 0.2

    def __post_init__(self) -> None:
        for name, allowed in CHOICES.items():
            if getattr(self, name) not in allowed:
                raise unknown_name(name, getattr(self, name), allowed)
        POLICY_LOSSES.get(self.policy_loss)
        ADVANTAGE_ESTIMATORS.get(self.advantage_estimator)
        estimator = canonical_kl(self.kl_estimator)
        self._read_numbers()
        self._check_ranges()
        self._check_more()
        if self.use_bias_correction_kl and self.kl_in_loss and (estimator == "k2" or estimator.endswith("+")):
            raise LossPlusError(
                f"use_bias_correction_kl=True with kl_estimator={self.kl_estimator!r}: the gradient of k2 is the reverse KL's "
                "already, and times the ratio it is wrong. Set use_bias_correction_kl to false, or kl_estimator to k1, k3 or abs."
            )

    def _read_numbers(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if "float" not in str(item.type) or (value is None and "None" in str(item.type)):
                continue
            try:  # YAML reads `1e-3`, without a point, as text
                number = float(value) if isinstance(value, str) else value
            except ValueError:
                number = None
            if not isinstance(number, int | float):
                raise LossPlusError(f"{item.name}={value!r} is not a number.")
            object.__setattr__(self, item.name, number)

    def _check_ranges(self) -> None:
        for name, (low, high, words) in RANGES.items():
            value = getattr(self, name)
            if value is not None and not (low <= value <= high and value < float("inf")):
                raise LossPlusError(f"{name}={value} is out of range: it must be {words}.")
        for name in POSITIVE:
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise LossPlusError(f"{name}={value} is out of range: it must be > 0.")
        if self.clip_ratio_c is not None and not self.clip_ratio_c > 1:
            raise LossPlusError(
                f"clip_ratio_c={self.clip_ratio_c} is out of range: the dual clip must be > 1 (3 is usual); at 1 or below it "
                "would cut every token with a negative advantage."
            )
        for item in fields(self):
            if (value := getattr(self, item.name)) != value:
                raise LossPlusError(f"{item.name}={value} is out of range: it must be a number.")
        upper = 5.0 if self.epsilon_high is None else self.epsilon_high
        if self.policy_loss == "cispo" and self.cispo_ratio_min is not None and self.cispo_ratio_min > upper:
            raise LossPlusError(f"cispo_ratio_min={self.cispo_ratio_min} is out of range: it must be <= epsilon_high, {upper}.")
        for name, places in (("beta", ("loss", "both")), ("kl_reward_coef", ("reward", "both"))):
            if getattr(self, name) and self.kl_placement not in places:
                raise LossPlusError(f"{name}={getattr(self, name)} with kl_placement={self.kl_placement!r}: nothing reads it.")
        if self.kl_controller == "adaptive" and not (self.kl_in_loss or self.kl_in_reward):
            raise LossPlusError("kl_controller='adaptive' needs a coefficient to start from: beta or kl_reward_coef is 0.")
        if self.kl_controller == "adaptive" and self.kl_target is None:
            raise LossPlusError("kl_controller='adaptive' needs kl_target, in nats a token (for instance 0.1); it is not set.")

    def _check_more(self) -> None:
        """Bounds that belong together, and the rejection's rules."""
        for name in ("clip_cov_ratio", "kl_cov_ratio"):
            if getattr(self, name) > 1:
                raise LossPlusError(f"{name}={getattr(self, name)} is out of range: it is a share of the tokens, at most 1.")
        for low, high in (("is_ratio_min", "is_ratio_max"), ("clip_cov_min", "clip_cov_max")):
            least, most = getattr(self, low), getattr(self, high)
            if least is not None and most is not None and not least < most:
                raise LossPlusError(f"{low}={least} is out of range: it must be < {high}, {most}.")
        self._check_rec()
        if self.rollout_rs is not None:
            parse_rejection(self.rollout_rs, self.rollout_rs_threshold)
        elif self.rollout_rs_threshold is not None:
            raise LossPlusError(f"rollout_rs_threshold={self.rollout_rs_threshold!r}: nothing reads it. Set rollout_rs.")

    def _check_rec(self) -> None:
        """Options of rec that its own settings leave unread, and a ring that leaves no gap to the clip range."""
        if POLICY_LOSSES.get(self.policy_loss).name != "rec":
            return
        for name in (name for name in REC_READS if name.startswith("rec_")):
            if getattr(self, name) != type(self).__dataclass_fields__[name].default and name not in self.policy_options:
                raise self.unread(name)
        for name, edge, value in (
            ("rec_ring_low", "epsilon", self.epsilon),
            ("rec_ring_high", "epsilon" if self.epsilon_high is None else "epsilon_high", self.clip_high),
        ):
            if self.rec_clip == "ring" and not getattr(self, name) > value:
                raise LossPlusError(
                    f"{name}={getattr(self, name)} with {edge}={value} and rec_clip='ring': it must be > {edge}, or the ring overlaps the "
                    "clip range and no token between them leaves the loss, as with rec_clip='one_side'."
                )

    def unread(self, name: str) -> LossPlusError:
        """The error for an option of the objective that it does not read under its other settings (see `policy_options`)."""
        ways = REC_READS[name].items()
        has = " and ".join(f"{setting}={getattr(self, setting)!r}" for setting, _ in ways)
        needs = [
            f"{setting}={values[0]!r}" if len(values) == 1 else f"{setting} to one of {', '.join(values)}"
            for setting, values in ways
        ]
        return LossPlusError(
            f"{name}={getattr(self, name)!r} with {has}: nothing reads it. Set {' or '.join(needs)}, or remove it."
        )

    @property
    def policy_options(self) -> frozenset[str]:
        """The options of the objective that it reads under its other settings."""
        entry = POLICY_LOSSES.get(self.policy_loss)
        ways = REC_READS if entry.name == "rec" else {}
        return frozenset(
            name
            for name in entry.options
            if name not in ways or any(getattr(self, setting) in values for setting, values in ways[name].items())
        )

    @property
    def clip_high(self) -> float:
        """The clip range above 1: `epsilon_high`, or `epsilon` where that is None."""
        return self.epsilon if self.epsilon_high is None else self.epsilon_high

    @property
    def sequence_level(self) -> bool:
        """Whether the importance ratio is one a row."""
        return self.importance_sampling_level == "sequence" or "sequence_level" in POLICY_LOSSES.get(self.policy_loss).traits

    @property
    def kl_in_loss(self) -> bool:
        """Whether a KL term is part of the loss."""
        return self.kl_placement in ("loss", "both") and self.beta != 0.0

    @property
    def kl_in_reward(self) -> bool:
        """Whether the KL is taken off the rewards."""
        return self.kl_placement in ("reward", "both") and self.kl_reward_coef != 0.0

    def readers(self) -> dict[str, set[str]]:
        """Which part of the loss reads which tensor: {tensor: {reader, ...}}."""
        readers: dict[str, set[str]] = {}

        def reads(reader: str, *tensors: str) -> None:
            for tensor in tensors:
                readers.setdefault(tensor, set()).add(reader)

        reads(f"policy ({self.policy_loss})", "logps", "mask", *POLICY_LOSSES.get(self.policy_loss).requires)
        if self.kl_in_loss:
            reads("KL in the loss", "ref_logps", *(("old_logps",) if self.use_bias_correction_kl else ()))
        if self.entropy_coef != 0.0:
            reads("entropy bonus", "entropies")
        if self.top_entropy_quantile < 1.0:
            reads("high-entropy selection", "entropies")
        if self.off_policy_mask_threshold is not None:
            reads("off-policy mask", "advantages", "old_logps")
        if self.vf_coef != 0.0:
            reads("value loss", "values", "returns", *(() if self.cliprange_value is None else ("old_values",)))
        if self.loss_aggregation == "prompt_mean":
            reads("aggregation (prompt_mean)", "group_ids")
        return readers

    def required(self) -> set[str]:
        """The tensors that `compute_loss` reads under this spec."""
        return set(self.readers())

    def to_yaml(self) -> str:
        """Every field as YAML, readable by `from_yaml`."""
        return yaml.safe_dump(asdict(self), sort_keys=False)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> LossSpec:
        """A spec from field names and values. Raises LossPlusError for a name that is no field."""
        known = {item.name for item in fields(cls)}
        for name in values:
            if name not in known:
                raise unknown_name("LossSpec field", name, known)
        return cls(**values)

    @classmethod
    def from_yaml(cls, text: str) -> LossSpec:
        """A spec from YAML text. Raises LossPlusError for unknown fields and values."""
        return cls.from_dict(yaml.safe_load(text) or {})
