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
from . import layouts
from .critic import AdapterCritic, Critic, ModelCritic, SharedCritic, base_of, without_critic
from .failures import told_once
from .grpo import GRPOPlusTrainer
from .minibatch import PASSES, MicroBatch
from .rollout_pass import Chunk, placed
from .value_pass import at_tokens, checkpointed_layers


class PPOPlusTrainer(GRPOPlusTrainer):
    """
    PPO: everything that `GRPOPlusTrainer` has, and a critic.

    Takes what TRL's `GRPOTrainer` takes; `args` is a `PPOPlusConfig`. The critic is built after the policy and before the
    optimizer; checkpoints and the final model hold the policy as plain transformers or PEFT files, and the critic in `critic/`.

    Raises:
        LossPlusError: see `GRPOPlusTrainer`; also for a vision-language policy, and for a critic that cannot be built.
    """

    args: PPOPlusConfig

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
        self.critic_kind = self.critic.kind
        layouts.prepare_critic(self)
        self._seen_values: tuple[list[Tensor], list[Chunk] | None] | None = None
        if args.critic_gradient_checkpointing is False and args.gradient_checkpointing and not checkpointed_layers(self.model):
            raise LossPlusError(
                f"critic_gradient_checkpointing=False: the layers of a {type(base_of(self.model)).__name__} cannot be told apart from "
                "outside. Leave it unset."
            )
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
            return AdapterCritic(self.model, start, args.critic_gradient_checkpointing)
        if kind == "shared":
            return SharedCritic(self.model, start, detach=args.critic_detach)
        if path is None and not isinstance(model, str) and not self.model.config._name_or_path:
            raise LossPlusError(
                "critic='model' starts from the policy's path, and this policy is an instance that has none: set "
                "critic_model_name_or_path, or take critic='shared'."
            )
        name = path or (model if isinstance(model, str) else self.model.config._name_or_path)
        kwargs = args.model_init_kwargs if isinstance(args.model_init_kwargs, dict) else {}
        return ModelCritic(
            self.model, name, kwargs if path is None else {}, args.trust_remote_code, args.critic_gradient_checkpointing
        )

    # The rollout.

    def collect(self, examples: list[dict[str, Any]]) -> tuple[MicroBatch, Tensor]:
        """As GRPO; values that came with passes over other rows are forgotten."""
        self._seen_values = None
        return super().collect(examples)

    def make_rollout(self, out: MicroBatch, rewards: Tensor) -> MicroBatch:
        """Where the next loss reads the whole rollout under these very weights, its forward passes are taken now; then as GRPO."""
        if self.mode == "train" and self.args.one_pass:
            rows = out if self.packed is None else {**out, "packing": self.packed.pack(out)}
            with self.compute_loss_context_manager():
                out |= self.passes(self.model_wrapped, rows)
        return super().make_rollout(out, rewards)

    def reward_penalty(self, out: MicroBatch, penalty: Tensor | None) -> Tensor | None:
        """Also takes `missing_eos_penalty` off completions that did not end."""
        if not self.args.missing_eos_penalty:
            return penalty
        missing = (~self.ended(out)).float() * self.args.missing_eos_penalty
        return missing if penalty is None else penalty + missing

    def token_advantages(self, out: MicroBatch, rewards: Tensor, mask: Tensor, **options: Any) -> None:
        """GAE over the values of the critic as it is; after a completion that was cut off comes 0, or the critic's value there."""
        found = out if "values" in out else self._rollout_values(out)
        out["old_values"], out["next_values"] = found["values"].detach(), found["next_values"].detach()
        if self.args.truncated_completions == "bootstrap":
            options["bootstrap"] = select(out["next_values"], ~out["ended"])
        super().token_advantages(out, rewards, mask, **options)

    # Values.

    def around_logps(self, take: Callable[[], Any], parts: list[Chunk] | None = None) -> Any:
        """With a shared critic, values come with the policy's log-probs, and are kept for who asks next."""
        if not isinstance(self.critic, SharedCritic) or self.critic.watching:
            return take()
        result, values = self.critic.watch(take)
        self._seen_values = (values, parts) if values else self._seen_values
        return result

    def rollout_logps(self, rollout: MicroBatch) -> Tensor:
        """As GRPO; from the loss's own pass where it was taken at the rollout."""
        taken = "logps" in rollout and rollout.get("old_per_token_logps") is None
        return rollout["logps"].detach() if taken else super().rollout_logps(rollout)

    def passes(self, model: nn.Module, inputs: MicroBatch) -> MicroBatch:
        """Also values (B, T) of the states before the tokens, and next_values (B,) of those after the last."""
        taken = super().passes(model, inputs)
        seen = self._take_seen_values(inputs)
        if seen is None:
            seen = self.critic.values(model, inputs if self.packs_critic else {**inputs, "packing": None})
        return taken | self._by_token(seen, inputs)

    def _rollout_values(self, out: MicroBatch) -> MicroBatch:
        """The same without gradient: from the pass that took the rollout's log-probs, or from one of the critic's own."""
        seen = self._take_seen_values(out)
        if seen is not None:
            return self._by_token(seen, out)
        with self.for_rollout_pass():
            parts = self.rollout_chunks(out, self.rows_per_pass, self.packed if self.packs_critic else None)
            values = [self.critic.values(self.model, chunk) for _, chunk in parts]
            return self._by_token(self._placed(values, parts, out), out)

    def _take_seen_values(self, rows: MicroBatch) -> Tensor | None:
        """(B, T + 1) values that came with a pass over these rows; each is taken once."""
        seen, self._seen_values = self._seen_values, None
        if seen is None:
            return None
        values, parts = seen
        if parts is None:
            return at_tokens(torch.cat(values), rows)
        return self._placed([at_tokens(one, chunk) for one, (_, chunk) in zip(values, parts, strict=True)], parts, rows)

    @staticmethod
    def _placed(values: list[Tensor], parts: list[Chunk], rows: MicroBatch) -> Tensor:
        """(B, T + 1) values from those of each chunk (b, t + 1)."""
        return placed(parts, values, (len(rows["completion_ids"]), rows["completion_ids"].shape[1] + 1))

    @staticmethod
    def _by_token(values: Tensor, rows: MicroBatch) -> MicroBatch:
        after = values.gather(1, rows["completion_mask"].sum(1, keepdim=True)).squeeze(1)
        return {"values": values[:, :-1], "next_values": after}

    # The loss.

    def _forward(self, model: nn.Module, inputs: MicroBatch, spec: LossSpec) -> tuple[LossBatch, Tensor | None]:
        here = {name: inputs.pop(name) for name in (*PASSES, "values") if name in inputs}  # their graph serves one backward pass
        taken = here or self.passes(model, inputs)
        batch, aux_loss = super()._forward(model, inputs | taken, spec)
        return replace(batch, values=taken["values"], old_values=inputs["old_values"], returns=inputs["returns"]), aux_loss

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
        with told_once(self.accelerator.process_index):
            self.critic.load(Path(resume_from_checkpoint) / "critic")
        self.critic.ensure_trainable()

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """As transformers, but for the critic's weights: they lie in critic/ and are loaded next."""
        missing = [name for name in load_result.missing_keys if not self.critic.own(name)]
        super()._issue_warnings_after_load(load_result._replace(missing_keys=missing))
