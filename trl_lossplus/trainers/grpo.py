"""GRPOPlusTrainer: TRL's GRPOTrainer with a chosen loss."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..batch import LossBatch
from ..config import GRPOPlusConfig
from ..diagnostics.probes import StepStatistics, mask_statistics
from ..functional.aggregation import Window
from ..functional.errors import LossPlusError
from ..loss import LossOutput, compute_loss
from ..registry import ADVANTAGE_ESTIMATORS, POLICY_LOSSES
from ..spec import LossSpec
from . import estimator_inputs, generation, layouts, minibatch, rollout
from .adapters import by_row
from .beside import Beside
from .callbacks import add_own, log_stop
from .checks import check_datasets, check_model_path, check_rewards, has_rotary_positions, warn_of_dropout
from .correct import checked_sampler, correct
from .exchange import Exchange
from .failures import told_once
from .kl_state import controller_for, starting_coef
from .loss_table import loss_table
from .minibatch import KEEP, MicroBatch
from .output import check_output, check_space
from .reference import ReferenceAdapter, check_trainable, lora_sync
from .resample import Resampler
from .resume import Resumes
from .step_guard import StepGuard, gradient_fault
from .step_pass import mark_steps, step_ids, take_step
from .step_snapshot import write_snapshot
from .token_rewards import last_token_rewards
from .token_weights import TokenWeightFunc, check_function

logger = logging.getLogger(__name__)

# TRL's arguments after eval_dataset, in its order.
POSITIONAL = (
    "processing_class", "reward_processing_classes", "callbacks", "optimizers", "quantization_config", "peft_config", "tools",
    "rollout_func", "environment_factory",
)  # fmt: skip


class GRPOPlusTrainer(Resumes):
    """
    GRPO with the loss that `args` (a `GRPOPlusConfig`) describes.

    Takes what TRL's `GRPOTrainer` takes, and `token_weight_func`: a function of prompts, completions, completion_ids and the dataset's
    columns that returns, for each completion, a weight a token (or spans of characters with weights) for the policy term. With TRL's fields alone it computes TRL's loss, gradient and metrics, except that an
    optimizer step is normalized by its own token count, whatever its split into micro-batches and processes.

    Raises:
        LossPlusError: a folder that cannot be written or has no room, a dataset without prompts, a model that cannot be found, a reward
            function that cannot be called; during training a reward that is infinite or of the wrong count.
    """

    args: GRPOPlusConfig

    def __init__(
        self,
        model: str | PreTrainedModel,
        reward_funcs: Any = None,
        args: GRPOPlusConfig | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        *others: Any,
        token_weight_func: TokenWeightFunc | None = None,
        **kwargs: Any,
    ):
        kwargs |= dict(zip(POSITIONAL, others, strict=False))
        args = GRPOPlusConfig() if args is None else args
        if not isinstance(args, GRPOPlusConfig):
            raise LossPlusError(f"args is a {type(args).__name__}; {type(self).__name__} needs a GRPOPlusConfig.")
        if args.should_save:
            check_output(args.output_dir)
        check_model_path(model, args.model_init_kwargs, args.trust_remote_code)
        if kwargs.get("environment_factory") is None:
            check_datasets(train_dataset, eval_dataset, args.prompts_per_rollout)
        self.spec: LossSpec = args.loss_spec()
        check_function(self.spec, token_weight_func)
        estimator_inputs.check_greedy(self.spec.advantage_estimator, kwargs)
        self.beside = Beside(token_weight_func)
        kwargs["rollout_func"] = checked_sampler(args, self.spec, kwargs.get("rollout_func"))
        needs_reference = self.spec.kl_in_loss or self.spec.kl_in_reward
        check_trainable(model)
        with lora_sync(args, model, kwargs.get("peft_config"), self.spec) as follows:
            super().__init__(
                model=model,
                reward_funcs=check_rewards(reward_funcs, args.reward_weights, self.beside.book),
                args=args,
                train_dataset=train_dataset,
                eval_dataset=eval_dataset,
                needs_reference=needs_reference,
                scale_rewards=self.spec.scale_rewards,
                **kwargs,
            )
        self.reference_adapter = ReferenceAdapter(self.model) if follows else None
        if self.reference_adapter is not None:
            self.add_callback(self.reference_adapter)
        resamples, environments = self.spec.zero_std_groups == "resample", kwargs.get("environment_factory") is not None
        self.resampler = Resampler(self, train_dataset, environments) if resamples else None
        self.kl_controller = controller_for(self.spec)
        self._exchange = Exchange(self.accelerator.gather, self.accelerator.num_processes, self.accelerator.device)
        self._statistics = {mode: StepStatistics(args.probes) for mode in ("train", "eval")}
        self.step_statistics = self._statistics["train"]
        self._values: dict[str, float] = {}  # of the optimizer step, over all processes
        folder = check_space(args, self.model)
        self.guard = StepGuard(args.nonfinite_policy, args.nonfinite_max_skips, folder, partial(log_stop, self))
        add_own(self)
        self.trims_left = has_rotary_positions(self.model) and by_row(self.model) is None
        layouts.prepare(self)
        self.around_generation = generation.prepare(self, kwargs.get("rollout_func"))
        self.used_spec, self._warned = self.spec, set[str]()
        warn_of_dropout(self.model, ratio_is_one=args.is_on_policy and not args.use_vllm)

    # The rollout.

    def collect(self, examples: list[dict[str, Any]]) -> tuple[MicroBatch, Tensor]:
        """As TRL; in training with zero_std_groups=resample flat groups are replaced by groups of further prompts."""
        resampler = self.resampler if self.mode == "train" else None
        return super().collect(examples) if resampler is None else resampler.collect(examples)

    def check_rewards(self, rewards: Tensor) -> None:
        """Refuses infinite rewards."""
        with told_once(self.accelerator.process_index):
            rollout.refuse_infinite(rewards, self.reward_func_names)

    def make_rollout(self, out: MicroBatch, rewards: Tensor) -> MicroBatch:
        """Advantages (before any whitening), group ids and flags of the local rows; KL in the reward happens here."""
        spec, num_generations = self.spec, self.group_size
        estimator = ADVANTAGE_ESTIMATORS.get(spec.advantage_estimator)
        mask = out["loss_mask"] = minibatch.token_mask(out)
        rows, process = len(mask), self.accelerator.process_index
        here = slice(process * rows, (process + 1) * rows)
        group_ids = torch.arange(len(rewards), device=rewards.device) // num_generations
        baselines = self.beside.fill(out, group_ids, here)
        logps = cache(lambda: self.rollout_logps(out))
        for name, value in correct(out, mask, self.args, spec, logps, self.accelerator.reduce).items():
            self.log_value(name, value)
        kl = self._rollout_kl(out, mask, logps)
        coef = spec.kl_reward_coef * self.kl_factor
        by_row = kl is not None and spec.kl_in_reward and spec.kl_reward_level == "sequence"
        penalty = self.reward_penalty(out, rollout.kl_penalty_rows(cast(Tensor, kl), mask, coef) if by_row else None)
        token_kl = kl if spec.kl_in_reward and not by_row else None
        weights, table, lengths = self.reward_weights.to(rewards), None, None
        if "token_level" in estimator.traits:
            score, given = last_token_rewards(rewards[here], weights, self.beside.rewards), self.beside.rewards
            table = rollout.token_reward_table(score if penalty is None else score - penalty, token_kl, coef, mask, given)
        if kl is not None or penalty is not None or spec.whiten_rewards or "lengths" in estimator.requires:
            shared = rollout.share_rows(kl, penalty, table if spec.whiten_rewards else None, mask, self.accelerator.gather)
            penalty, lengths = None if penalty is None else shared.penalty.to(rewards), shared.tokens.to(rewards)
            if kl is not None:
                self._control_kl(shared)
            if table is not None and spec.whiten_rewards:
                table = shared.whitened(table, mask, process)
        options = self.args.estimator_options | estimator_inputs.supply_rows(estimator.name, lengths, baselines)
        scored = rollout.score_rollout(spec, options, rewards, weights, num_generations, penalty)
        out["row"], out["rewards"] = torch.arange(len(rewards), device=rewards.device)[here], rewards[here]
        out["ended"] = self.ended(out)
        for name in ("group_ids", "scored", "flat"):
            out[name] = getattr(scored, name)[here]
        if table is not None:
            self.token_advantages(out, table, mask, **estimator_inputs.supply(self, out, mask))
        else:
            out["advantages"] = cast(Tensor, scored.advantages)[here]
            if token_kl is not None:
                out["advantages"] = rollout.token_kl_advantages(out["advantages"], token_kl, mask, coef)
        if logps.cache_info().currsize and POLICY_LOSSES.get(spec.policy_loss).over_step is not None:
            out["logps_at_rollout"] = logps()  # which spares the first optimizer step a pass
        rollout.log_groups(self, scored, num_generations)
        return out

    def warn_once(self, message: str) -> None:
        """Logs a warning the first time that it is said."""
        if message not in self._warned:
            self._warned.add(message)
            logger.warning(message)

    def reward_penalty(self, out: MicroBatch, penalty: Tensor | None) -> Tensor | None:
        """What is taken off the local rows' rewards (B,); `penalty` holds the KL in the reward, or None."""
        return penalty

    def token_advantages(self, out: MicroBatch, rewards: Tensor, mask: Tensor, **options: Any) -> None:
        """Advantages and returns (B, T) from token rewards (B, T), by an estimator that works token by token."""
        options = {**self.args.estimator_options, **options}
        out["advantages"], out["returns"] = estimator_inputs.token_advantages(self, out, rewards, mask, options)

    def _rollout_kl(self, out: MicroBatch, mask: Tensor, logps: Callable[[], Tensor]) -> Tensor | None:
        """Per-token KL of the local rows, None where nothing reads it; fixes the coefficient for this rollout."""
        if self.mode == "train":
            self.kl_factor = self.kl_controller.coef / starting_coef(self.spec)
        if not (self.spec.kl_in_reward or self.spec.kl_controller == "adaptive"):
            return None
        return rollout.rollout_kl(self.spec, logps(), out["ref_per_token_logps"], mask)

    def _control_kl(self, shared: rollout.SharedRows) -> None:
        """Logs the rollout's KL and moves the coefficient for the next one."""
        self.log_value("kl_rollout", shared.mean_kl)
        if self.mode == "train":
            self.log_value("kl_coef", self.kl_controller.coef)
            if shared.tokens.any():
                with told_once(self.accelerator.process_index):
                    self.kl_controller.update(shared.mean_kl, len(shared.kl))

    # Windows and micro-batches.

    def cut(self, micro_batches: list[MicroBatch]) -> list[MicroBatch]:
        """Windows with their normalizers, whitening, trimming; the shown advantages are those used."""
        train = self.mode == "train"
        exact = not train or self.args.windows_are_exact
        per_window = self.args.gradient_accumulation_steps if train and exact else len(micro_batches)
        normalization = self.spec.advantage_normalization
        table = minibatch.row_table(
            micro_batches,
            per_window=per_window,
            process=self.accelerator.process_index,
            gather=self.accelerator.gather,
            empty_rows=self.args.counts_empty_rows,
            normalization=normalization,
            drop_flat=self.spec.zero_std_groups == "drop",
            more=None if self.token_budget is None else layouts.told_beside(self),
        )
        estimator_inputs.refuse_constant_rows(self, table.advantages)
        minibatch.cut_windows(micro_batches, table, per_window=per_window, world_size=self.accelerator.num_processes)
        if not exact:
            minibatch.share_windows(micro_batches)
        used = minibatch.normalize(micro_batches, table, normalization=normalization, scope=self.spec.advantage_norm_scope)
        if self.log_completions:
            self.show_advantages(used.tolist())
        micro_batches = layouts.lay_out(self, micro_batches, table)
        mark_steps(micro_batches, per_window, self.accelerator.num_processes, self.spec, table.width)
        return micro_batches

    # The loss of one micro-batch.

    def micro_loss(self, model: nn.Module, inputs: MicroBatch) -> Tensor:
        """
        This micro-batch's share of the optimizer step's loss; its statistics join the step's.

        Where it is cut into parts, the backward pass of all but the last is taken here, and the loss has the gradient of the last.
        """
        train, parts = self.mode == "train", minibatch.parts_of(inputs)
        entropy_coef = self.entropy_coefficient() if self.entropy_bonus_enabled else 0.0
        spec = replace(self.spec, beta=self.spec.beta * self.kl_factor, entropy_coef=entropy_coef)
        self.used_spec = spec
        take_step(self, parts[0], spec)
        before: Any = 0.0
        for part in parts[:-1]:
            with self.without_sync(model):
                loss = self._part_loss(model, part, spec, len(parts))
                if train:
                    self.add_gradient(loss)
            before = before + loss.detach()
        loss = before + self._part_loss(model, parts[-1], spec, len(parts))
        if not train or self.accelerator.sync_gradients:
            self._share_step(train)
        if not train:
            self.end_step()
        return loss

    def _part_loss(self, model: nn.Module, inputs: MicroBatch, spec: LossSpec, parts: int) -> Tensor:
        """The loss of one of a micro-batch's `parts`."""
        train = self.mode == "train"
        micro_batches = self.current_gradient_accumulation_steps if train else 1
        window = inputs["window"]
        if train and not self.args.windows_are_exact:
            window = minibatch.scaled_window(window, micro_batches)
        batch, aux_loss = self._forward(model, inputs, spec)
        output = self.combine(batch, spec, window)
        if aux_loss is not None:
            output = output.with_term("aux", self.router_aux_loss_coef * aux_loss / micro_batches)
        statistics = self._statistics[self.mode]
        statistics.add(output.statistics)
        statistics.add_terms(output, micro_batches * parts)
        if train and self.args.skip_still_rows:
            statistics.add(layouts.computed_rows(inputs))
        if self.args.probes != "off":
            statistics.probe(output, spec.log_ratio_clamp if train and self.in_first_pass else None)
            own = inputs["loss_mask"] | ~inputs[KEEP] if KEEP in inputs else inputs["loss_mask"]
            statistics.add(mask_statistics(own, inputs["completion_mask"], inputs["ended"]))
        if train:
            self.guard.see(output, inputs)
        return output.loss

    def _share_step(self, train: bool) -> None:
        """The step's statistics over all processes, and whether all is finite: one collective, before the last backward pass."""
        statistics = self._statistics[self.mode]
        everyone = self._exchange((train and self.guard.found, statistics.take(self.accelerator.num_processes)))
        self._values = statistics.pooled([local for _, local in everyone])
        if train:
            found, step = any(bad for bad, _ in everyone), self.state.global_step + 1
            snapshot = partial(write_snapshot, self, "nonfinite")
            self.guard.decide(found, self.accelerator, step, self._exchange, self.decode, snapshot)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        """As transformers, just before the optimizer step; a norm that is not finite stops or drops it (a finite loss can have one)."""
        norm = super()._get_grad_norm(model, grad_norm=grad_norm)
        wrapped = getattr(self.accelerator, "deepspeed_engine_wrapped", None)
        fault = gradient_fault(None if norm is None else float(norm), wrapped and wrapped.engine, self.args.fp16)
        if fault is not None:
            self.guard.refuse_gradient(*fault, self.state.global_step + 1, self.accelerator.is_main_process)
            self.model.zero_grad(set_to_none=True)
        return norm

    @property
    def step_under_way(self) -> list[tuple[LossOutput, MicroBatch]]:
        """What the loss gave and read in this optimizer step so far, by micro-batch."""
        return self.guard.step

    @property
    def last_step(self) -> list[tuple[LossOutput, MicroBatch]]:
        """The same of the optimizer step that was taken last."""
        return self.guard.last

    def loss_table(self, rows: int = 5) -> list[dict[str, Any]]:
        """The rows of the last optimizer step with the largest and the smallest policy loss, prompt and completion beside them."""
        return loss_table(self.guard.last, self.decode, rows)

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """As TRL; after an optimizer step's last backward pass its statistics are logged."""
        loss = super().training_step(model, inputs, num_items_in_batch)
        if self.accelerator.sync_gradients:
            self.end_step()
        return loss

    def combine(self, batch: LossBatch, spec: LossSpec, window: Window) -> LossOutput:
        """The terms of the loss, put together."""
        return compute_loss(batch, spec, window)

    def passes(self, model: nn.Module, inputs: MicroBatch) -> MicroBatch:
        """What the loss reads of the forward passes: logps and entropies (B, T), aux_loss or None."""
        taken = self.policy_forward(model, inputs, compute_entropy=True, compute_aux_loss=self.aux_loss_enabled)
        return dict(zip(minibatch.PASSES, taken, strict=True))

    def _forward(self, model: nn.Module, inputs: MicroBatch, spec: LossSpec) -> tuple[LossBatch, Tensor | None]:
        """The policy's forward pass, and the batch that the loss reads."""
        taken = inputs if "logps" in inputs else self.passes(model, inputs)
        logps, entropies, aux_loss = (taken[name] for name in minibatch.PASSES)
        reads = POLICY_LOSSES.get(spec.policy_loss).requires
        entropies = minibatch.entropies_for(spec, reads, cast(Tensor, entropies))
        mask = inputs["loss_mask"]
        entropy_mask = None
        if spec.top_entropy_quantile < 1.0:
            entropy_mask = self.get_high_entropy_mask(entropies.detach(), mask, 1 - spec.top_entropy_quantile)
        batch = minibatch.loss_batch(inputs, spec, logps, entropies, entropy_mask)
        if "row_ids" in reads:
            batch = replace(batch, row_ids=step_ids(self, inputs["row"]))
        return batch, aux_loss

    def end_step(self) -> None:
        """Logs one value of each of the optimizer step's statistics; drops the step if so decided."""
        if self.mode == "train":
            write_snapshot(self, "step")
        values, self._values = {**self._values, **self._statistics[self.mode].close(self.accelerator.num_processes)}, {}
        train = self.mode == "train"
        values |= self.guard.counts if train else {}
        if train and self.guard.close():
            self.model.zero_grad(set_to_none=True)  # an optimizer leaves parameters without a gradient as they are
        if train and self.args.nonfinite_policy == "skip":
            values["skipped_steps"] = float(self.guard.skipped)
        if self.entropy_bonus_enabled and "loss/policy" in values:  # not while a critic alone is trained
            values["policy_loss"] = values["loss/policy"] + values.get("loss/kl", 0.0)  # TRL's name for the two together
            if train:
                if self.use_adaptive_entropy:
                    self.update_entropy_control(values.get("entropy_selected", values["entropy"]))
                values["entropy_coef"] = self.entropy_coef
        if "loss/aux" in values:
            values["aux_loss"] = values["loss/aux"] / self.router_aux_loss_coef
        for name, value in values.items():
            self.log_value(name, value)
