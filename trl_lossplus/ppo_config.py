"""PPOPlusConfig: GRPOPlusConfig with a critic."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers.trainer_utils import SchedulerType

from .config import GRPOPlusConfig, option
from .fieldtypes import read_path
from .functional.errors import LossPlusError, unknown_name
from .registry import ADVANTAGE_ESTIMATORS
from .spec import LossSpec

CRITICS = ("adapter", "shared", "model")


@dataclass
class PPOPlusConfig(GRPOPlusConfig):
    """
    PPO: the choices of `GRPOPlusConfig`, generalized advantage estimation and a value loss.

    The advantage estimator is gae unless another that reads values is named; the KL in the reward acts token by token; advantages
    are whitened over the rollout unless `advantage_normalization` says otherwise; `num_generations` is 1 unless set.

    Raises:
        LossPlusError: see `GRPOPlusConfig`; also for a critic setting that nothing reads.
    """

    default_estimator = "gae"
    not_supplied = frozenset()

    num_generations: int | None = option("Completions a prompt, from 1.", 1)
    critic: str | None = option(
        "adapter: a second LoRA adapter and a scalar head on the policy's base model. shared: a head on the policy's own hidden "
        "states, no second forward pass. model: a model of its own. None: adapter with LoRA, model without."
    )
    critic_model_name_or_path: str | None = option(
        "Where the critic starts from: for model a causal or a sequence-classification (reward) model, None: the policy's path; "
        "for adapter and shared the critic/ folder of an earlier run, None: a new one."
    )
    critic_learning_rate: float | None = option("Learning rate of the critic's parameters. None: learning_rate.")
    critic_lr_scheduler_type: str | None = option("Scheduler of the critic's learning rate. None: lr_scheduler_type.")
    critic_warmup_steps: int = option("Optimizer steps at the start in which the critic alone is trained.", 0)
    critic_gradient_checkpointing: bool | None = option(
        "With gradient_checkpointing, of an adapter or model critic's own pass. False: it keeps its activations, which saves a forward "
        "pass and costs their memory. None: all layers are recomputed but the last, where that saves no memory. True: all."
    )
    critic_detach: bool = option("shared: keep the value loss's gradient out of the policy's trunk.", False)
    gae_lambda: float = option("Lambda of the advantages.", 0.95)
    gae_lambda_critic: float | None = option("Lambda of the critic's targets. None: gae_lambda.")
    vf_coef: float = option("Coefficient of the value loss. Must be > 0.", 0.1)
    value_loss: str = option("mse or huber.", "mse")
    huber_delta: float = option("Where the Huber loss turns from square to linear.", 1.0)
    cliprange_value: float | None = option(
        "How far a value may move from the rollout's before its gradient stops; 0: no clipping.", 0.2
    )
    whiten_rewards: bool = option(
        "Divide the token rewards by their standard deviation over the rollout (the mean stays).", False
    )
    truncated_completions: str = option(
        "A completion that was cut off: terminal (the value after it is 0) or bootstrap (the critic's value there).", "terminal"
    )
    missing_eos_penalty: float | None = option("Taken off the reward of a completion that does not end with an end token.")

    def __post_init__(self) -> None:
        self._read_types()
        if self.critic is not None and self.critic not in CRITICS:
            raise unknown_name("critic", self.critic, CRITICS)
        self.critic_model_name_or_path = read_path("critic_model_name_or_path", self.critic_model_name_or_path)
        if self.truncated_completions not in ("terminal", "bootstrap"):
            raise unknown_name("truncated_completions", self.truncated_completions, ("terminal", "bootstrap"))
        if not self.vf_coef > 0:
            raise LossPlusError(f"vf_coef={self.vf_coef}: PPO trains its critic, so it must be > 0.")
        for name in ("critic_warmup_steps", "critic_learning_rate", "missing_eos_penalty"):
            value = getattr(self, name)
            if value is not None and not value >= 0:
                raise LossPlusError(f"{name}={value} is out of range: it must be >= 0.")
        if self.critic_lr_scheduler_type is not None:
            names = [item.value for item in SchedulerType]
            if self.critic_lr_scheduler_type not in names:
                raise unknown_name("critic_lr_scheduler_type", self.critic_lr_scheduler_type, names)
        if self.critic_detach and self.critic != "shared":
            raise LossPlusError(f"critic_detach=True: only critic='shared' reads it; critic is {self.critic!r}.")
        if self.value_loss != "huber" and self.huber_delta != 1.0:
            raise LossPlusError(f"huber_delta={self.huber_delta}: nothing reads it. Set value_loss='huber'.")
        self._check_checkpointing()
        if self.ddp_find_unused_parameters is None:
            self.ddp_find_unused_parameters = False  # two forward passes before one backward pass: every parameter is used
        self._post_init_with_any_group_size()
        if self.num_generations == 1 and self.zero_std_groups != "keep":
            raise LossPlusError(f"zero_std_groups={self.zero_std_groups!r} with num_generations=1: every group would be flat.")

    def _check_checkpointing(self) -> None:
        asked = self.critic_gradient_checkpointing
        if asked is not None and self.critic == "shared":
            raise LossPlusError(
                f"critic_gradient_checkpointing={asked}: critic='shared' has no pass of its own. Allowed with adapter and model."
            )
        if asked and not self.gradient_checkpointing:
            raise LossPlusError("critic_gradient_checkpointing=True: it needs gradient_checkpointing=True.")

    @property
    def one_pass(self) -> bool:
        """Whether a rollout is one micro-batch that serves one update: its loss's forward passes are then those of the rollout too."""
        whole = self.max_tokens_per_microbatch is None and self.micro_batches_per_rollout == 1
        return self.is_on_policy and whole and self.num_iterations == 1

    def _post_init_with_any_group_size(self) -> None:
        """TRL refuses fewer than two generations a prompt, which only its group-relative advantages need."""
        if self.num_generations != 1:
            super().__post_init__()
            return
        accumulated = self.steps_per_generation or self.gradient_accumulation_steps
        stand_in = self.generation_batch_size or self.per_device_train_batch_size * accumulated
        if stand_in < 2:
            raise LossPlusError(
                "a rollout of one completion cannot be normalized: raise per_device_train_batch_size or accumulation."
            )
        eval_generations = self.num_generations_eval
        self.num_generations, self.num_generations_eval = stand_in, eval_generations or 1
        try:
            super().__post_init__()
        finally:
            self.num_generations, self.num_generations_eval = 1, eval_generations

    def critic_values(self) -> dict[str, Any]:
        """The spec's critic fields."""
        names = ("gae_lambda", "gae_lambda_critic", "vf_coef", "value_loss", "huber_delta", "whiten_rewards")
        return {**{name: getattr(self, name) for name in names}, "cliprange_value": self.cliprange_value or None}

    def _check_reads(self, spec: LossSpec) -> None:
        super()._check_reads(spec)
        entry = ADVANTAGE_ESTIMATORS.get(spec.advantage_estimator)
        unread = {
            "gae_lambda": self.gae_lambda != 0.95,
            "gae_lambda_critic": self.gae_lambda_critic is not None,
            "bootstrap": self.truncated_completions == "bootstrap",
        }
        for name, is_set in unread.items():
            if is_set and name not in entry.options:
                field = "truncated_completions" if name == "bootstrap" else name
                raise LossPlusError(
                    f"{field}={getattr(self, field)!r}: advantage_estimator {entry.name!r} does not read it ({name} is not among its "
                    "options). Remove it, or take gae."
                )
        if "old_values" not in entry.requires or "token_level" not in entry.traits:
            raise LossPlusError(
                f"advantage_estimator={spec.advantage_estimator!r} does not read values token by token, so the critic would be trained for "
                "nothing. Take gae, or GRPOPlusTrainer."
            )
