"""PPOPlusTrainer: GRPOPlusTrainer with a critic."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from peft import PeftModel
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import PreTrainedModel, get_scheduler

from ..batch import LossBatch
from ..functional.aggregation import Window
from ..functional.errors import LossPlusError
from ..functional.masking import select
from ..loss import LossOutput, compute_loss
from ..ppo_config import PPOPlusConfig
from ..spec import LossSpec
from .critic import AdapterCritic, Critic, ModelCritic, SharedCritic, values_at_tokens, without_critic
from .grpo import GRPOPlusTrainer
from .minibatch import MicroBatch


class PPOPlusTrainer(GRPOPlusTrainer):
    """
    PPO: everything that `GRPOPlusTrainer` has, and a critic.

    Takes what TRL's `GRPOTrainer` takes; `args` is a `PPOPlusConfig`. The critic is built after the policy and before the
    optimizer; checkpoints and the final model hold the policy as plain transformers or PEFT files, and the critic in `critic/`.

    Raises:
        LossPlusError: see `GRPOPlusTrainer`; also for a vision-language policy, and for a critic that cannot be built.
    """

    args: PPOPlusConfig
    packs_no_rows = "the critic reads padded rows"

    def __init__(
        self,
        model: str | PreTrainedModel,
        reward_funcs: Any = None,
        args: PPOPlusConfig | None = None,
        *others: Any,
        **kwargs: Any,
    ):
        args = PPOPlusConfig() if args is None else args
        if not isinstance(args, PPOPlusConfig):
            raise LossPlusError(f"args is a {type(args).__name__}; {type(self).__name__} needs a PPOPlusConfig.")
        super().__init__(model, reward_funcs, args, *others, **kwargs)
        self._refuse_vision()
        self.critic = self._build_critic(model)
        if args.disable_dropout:
            for module in self.model.modules():
                if isinstance(module, nn.Dropout):
                    module.p = 0.0
        if self.use_vllm:
            self.hide_from_vllm(self.critic.own)

    def _refuse_vision(self) -> None:
        if self._is_vlm:
            raise LossPlusError(
                "PPO on a vision-language model is not supported: the critic reads tokens only. Take GRPOPlusTrainer."
            )

    def _build_critic(self, model: str | PreTrainedModel) -> Critic:
        args = self.args
        kind = args.critic or ("adapter" if isinstance(self.model, PeftModel) else "model")
        path = args.critic_model_name_or_path
        start = None if path is None else Path(path)
        if kind == "adapter":
            return AdapterCritic(self.model, start)
        if kind == "shared":
            return SharedCritic(self.model, start, detach=args.critic_detach)
        if path is None and not isinstance(model, str) and not self.model.config._name_or_path:
            raise LossPlusError(
                "critic='model' starts from the policy's path, and this policy is an instance that has none: set "
                "critic_model_name_or_path, or take critic='shared'."
            )
        name = path or (model if isinstance(model, str) else self.model.config._name_or_path)
        kwargs = args.model_init_kwargs if isinstance(args.model_init_kwargs, dict) else {}
        return ModelCritic(self.model, name, kwargs if path is None else {}, args.trust_remote_code)

    # The rollout.

    def make_rollout(self, out: MicroBatch, rewards: Tensor) -> MicroBatch:
        """Old values come from the critic that the rollout was made under; then as GRPO."""
        rows = self.rows_per_pass
        ids = torch.cat([out["prompt_ids"], out["completion_ids"]], 1)
        mask = torch.cat([out["prompt_mask"], out["completion_mask"]], 1)
        with self.for_rollout_pass():
            parts = [self.critic.values(self.model, a, b) for a, b in zip(ids.split(rows), mask.split(rows), strict=True)]
        values = values_at_tokens(torch.cat(parts), out["prompt_ids"].shape[1])
        out["old_values"] = values[:, :-1]
        out["next_values"] = values.gather(1, out["completion_mask"].sum(1, keepdim=True)).squeeze(1)
        return super().make_rollout(out, rewards)

    def reward_penalty(self, out: MicroBatch, penalty: Tensor | None) -> Tensor | None:
        """Also takes `missing_eos_penalty` off completions that did not end."""
        if not self.args.missing_eos_penalty:
            return penalty
        missing = (~self.ended(out)).float() * self.args.missing_eos_penalty
        return missing if penalty is None else penalty + missing

    def token_advantages(self, out: MicroBatch, rewards: Tensor, mask: Tensor, **options: Any) -> None:
        """GAE; what follows a completion that was cut off is 0, or the critic's value there."""
        if self.args.truncated_completions == "bootstrap":
            options["bootstrap"] = select(out["next_values"], ~out["ended"])
        super().token_advantages(out, rewards, mask, **options)

    # The loss.

    def _forward(self, model: nn.Module, inputs: MicroBatch, spec: LossSpec) -> tuple[LossBatch, Tensor | None]:
        if isinstance(self.critic, SharedCritic):
            policy: Callable[[], Any] = lambda: super(PPOPlusTrainer, self)._forward(model, inputs, spec)  # noqa: E731
            (batch, aux_loss), values = self.critic.with_policy(policy)
        else:
            batch, aux_loss = super()._forward(model, inputs, spec)
            ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
            mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
            values = self.critic.values(model, ids, mask)
        values = values_at_tokens(values, inputs["prompt_ids"].shape[1])[:, :-1]
        return replace(batch, values=values, old_values=inputs["old_values"], returns=inputs["returns"]), aux_loss

    @property
    def in_critic_warmup(self) -> bool:
        """Whether this optimizer step trains the critic alone."""
        return self.state.global_step < self.args.critic_warmup_steps

    def combine(self, batch: LossBatch, spec: LossSpec, window: Window) -> LossOutput:
        """All terms, or during critic warm-up the value term alone (the policy's log-probs stay connected, with gradient 0)."""
        output = compute_loss(batch, spec, window)
        if not self.in_critic_warmup:
            return output
        nothing = select(batch.logps, torch.zeros_like(batch.mask)).sum()
        value = output.terms["value"]
        return replace(output, loss=value + nothing, terms={"value": value}, sources={})

    # Optimizer and scheduler.

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """As transformers', with parameter groups of their own for the critic (`role`: "critic", its learning rate)."""
        self.critic.ensure_trainable()
        fresh = self.optimizer is None
        optimizer = super().create_optimizer(model)
        if not fresh:
            return optimizer
        source = self.model if model is None else model
        critic = {id(p) for name, p in source.named_parameters() if self.critic.own(name)}
        groups = []
        for group in optimizer.param_groups:
            for role, mine in (("policy", False), ("critic", True)):
                params = [p for p in group["params"] if (id(p) in critic) == mine]
                rate = self.args.critic_learning_rate if mine and self.args.critic_learning_rate is not None else group["lr"]
                if params:
                    groups.append({**group, "params": params, "lr": rate, "role": role})
        optimizer.param_groups = groups
        return optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """As transformers'; the policy's rate is 0 during critic warm-up, and the critic may follow a schedule of its own."""
        args, fresh = self.args, self.lr_scheduler is None
        scheduler = super().create_scheduler(num_training_steps, optimizer)
        if not fresh or (args.critic_lr_scheduler_type is None and not args.critic_warmup_steps):
            return scheduler
        if not isinstance(scheduler, LambdaLR):
            raise LossPlusError(
                f"lr_scheduler_type={args.lr_scheduler_type!r} cannot be combined with critic_warmup_steps or "
                "critic_lr_scheduler_type: take one that is a function of the step (constant, linear, cosine, ...)."
            )
        of_policy = scheduler.lr_lambdas[0]
        of_critic = of_policy
        if args.critic_lr_scheduler_type is not None:
            warmup = args.get_warmup_steps(num_training_steps)
            other = get_scheduler(args.critic_lr_scheduler_type, scheduler.optimizer, warmup, num_training_steps)
            of_critic = cast(LambdaLR, other).lr_lambdas[0]

        def delayed(step: int) -> float:
            return 0.0 if step < args.critic_warmup_steps else of_policy(step)

        roles = [group.get("role") for group in scheduler.optimizer.param_groups]
        self.lr_scheduler = LambdaLR(scheduler.optimizer, [of_critic if role == "critic" else delayed for role in roles])
        return self.lr_scheduler

    # Saving and loading.

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Tensor] | None = None) -> None:
        policy_state = state_dict
        if not isinstance(self.model, PeftModel):
            policy_state = without_critic(self.model.state_dict() if state_dict is None else state_dict)
        super()._save(output_dir, policy_state)
        if self.args.should_save:
            folder = output_dir or self.args.output_dir
            self.critic.save(Path(str(folder)) / "critic", state_dict)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        self.critic.load(Path(resume_from_checkpoint) / "critic")
        self.critic.ensure_trainable()
