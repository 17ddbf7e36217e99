"""
Trainers without models: TRL's and ours fed the same log-probs, so that loss, gradient and metrics can be compared.

Both objects are made without `__init__` and get the attributes that the loss path reads; the forward pass is replaced by one that
returns given log-probs (a leaf with gradient) and entropies.
"""

from collections import defaultdict
from types import SimpleNamespace

import torch
from trl import GRPOConfig, GRPOTrainer

from trl_lossplus import GRPOPlusConfig, GRPOPlusTrainer
from trl_lossplus.diagnostics.probes import StepStatistics
from trl_lossplus.kl_control import FixedKLController
from trl_lossplus.trainers.exchange import Exchange
from trl_lossplus.trainers.step_guard import StepGuard

BASE = {"use_cpu": True, "bf16": False, "report_to": "none", "max_completion_length": 16, "num_generations": 4}
B, T = 8, 6


class OneProcess:
    """What the loss path asks of an Accelerator, on one process."""

    num_processes, process_index, sync_gradients = 1, 0, True

    def gather(self, x):
        return x

    gather_for_metrics = pad_across = gather

    def reduce(self, x, reduction="sum"):
        return x

    def pad_across_processes(self, x, dim=0, pad_index=0):
        return x


def attributes(args, mode):
    """What TRL's `__init__` takes from the arguments, as far as the loss reads it."""
    return {
        "args": args,
        "accelerator": OneProcess(),
        "model": SimpleNamespace(training=mode == "train"),
        "_metrics": {"train": defaultdict(list), "eval": defaultdict(list)},
        "loss_type": args.loss_type,
        "beta": args.beta,
        "epsilon_low": args.epsilon,
        "epsilon_high": args.epsilon if args.epsilon_high is None else args.epsilon_high,
        "importance_sampling_level": args.importance_sampling_level,
        "off_policy_mask_threshold": args.off_policy_mask_threshold,
        "top_entropy_quantile": args.top_entropy_quantile,
        "use_vllm": args.use_vllm,
        "vllm_importance_sampling_correction": args.vllm_importance_sampling_correction,
        "max_completion_length": args.max_completion_length,
        "current_gradient_accumulation_steps": args.gradient_accumulation_steps,
        "aux_loss_enabled": False,
        "entropy_coef": args.entropy_coef,
        "use_adaptive_entropy": args.use_adaptive_entropy,
        "_entropy_bonus_enabled": args.entropy_coef != 0.0 or args.use_adaptive_entropy,
        "_last_world_entropy": 0.05 if args.use_adaptive_entropy else float("inf"),
        "_entropy_window_stats": None,
        "num_generations": args.num_generations,
        "num_generations_eval": args.num_generations,
        "log_completions": False,
        "pad_to_multiple_of": None,
    }


def forward_from(micro_batches):
    """A stand-in for the forward pass: each call gives the next micro-batch's log-probs and entropies."""
    queue = list(micro_batches)

    def forward(model, input_ids, attention_mask, logits_to_keep, **kwargs):
        logps, entropies = queue.pop(0)
        return logps[:, :logits_to_keep], entropies[:, :logits_to_keep], None

    return forward


def trl_loss(fields, micro_batches, mode="train"):
    """(losses of the micro-batches, metrics) by the installed TRL. A micro-batch is (logps, entropies, inputs)."""
    trainer = object.__new__(GRPOTrainer)
    trainer.__dict__.update(attributes(GRPOConfig(**{**BASE, **fields}), mode))
    trainer._get_per_token_logps_and_entropies = forward_from([(a, b) for a, b, _ in micro_batches])
    losses = []
    for i, (_, _, inputs) in enumerate(micro_batches):
        trainer.accelerator.sync_gradients = i == len(micro_batches) - 1
        losses.append(trainer._compute_loss(None, dict(inputs)))
    return losses, trainer._metrics[mode]


def plus_trainer(fields, mode="train", accelerator=None):
    """Our trainer with the attributes that the loss path reads."""
    args = GRPOPlusConfig(**{**BASE, **fields})
    trainer = object.__new__(GRPOPlusTrainer)
    trainer.__dict__.update(attributes(args, mode))
    trainer.spec = args.loss_spec()
    trainer.kl_controller = FixedKLController(trainer.spec.beta)
    trainer.kl_factor = 1.0
    trainer._statistics = {mode: StepStatistics(args.probes) for mode in ("train", "eval")}
    trainer.guard = StepGuard("raise", 1)
    trainer._exchange = Exchange(trainer.accelerator.gather, 1, torch.device("cpu"))
    trainer.state = SimpleNamespace(global_step=0)
    trainer._step = 0
    trainer.num_iterations = args.num_iterations
    trainer.trims_left = True
    if accelerator is not None:
        trainer.accelerator = accelerator
    return trainer


def plus_loss(fields, micro_batches, mode="train"):
    """(losses of the micro-batches, metrics) by ours, the rollout cut into windows first."""
    trainer = plus_trainer(fields, mode)
    trainer._get_per_token_logps_and_entropies = forward_from([(a, b) for a, b, _ in micro_batches])
    cut = trainer.cut([dict(inputs) for _, _, inputs in micro_batches])
    losses = []
    for i, inputs in enumerate(cut):
        trainer.accelerator.sync_gradients = (i + 1) % trainer.args.gradient_accumulation_steps == 0
        losses.append(trainer.micro_loss(None, inputs))
        if mode == "train" and trainer.accelerator.sync_gradients:
            trainer.end_step()
    return losses, trainer._metrics[mode]


def rollout(seed=0, rows=B, width=T, lengths=None, old=True, ref=True, tool=False, wide=False, vllm=None):
    """Log-probs, entropies and inputs of one micro-batch with ragged rows; row 1 is fully masked unless lengths are given."""
    g = torch.Generator().manual_seed(seed)
    logps = (-torch.rand(rows, width, generator=g) * 2).requires_grad_()
    old_logps = logps.detach() + 0.4 * torch.randn(rows, width, generator=g)
    ref_logps = logps.detach() + 0.5 * torch.randn(rows, width, generator=g)
    lengths = lengths or [width, 0, 3, 1, width, 4, 2, 5][:rows]
    mask = (torch.arange(width) < torch.tensor(lengths).unsqueeze(1)).long()
    advantages = torch.randn(rows, width, generator=g) if wide else torch.randn(rows, generator=g)
    inputs = {
        "prompt_ids": torch.ones(rows, 3, dtype=torch.long),
        "prompt_mask": torch.ones(rows, 3, dtype=torch.long),
        "completion_ids": torch.ones(rows, width, dtype=torch.long),
        "completion_mask": mask,
        "advantages": advantages,
        "group_ids": torch.arange(rows) // 4,
        "row": torch.arange(rows),
        "flat": torch.zeros(rows, dtype=torch.bool),
        "scored": torch.ones(rows, dtype=torch.bool),
        "ended": torch.zeros(rows, dtype=torch.bool),
        "num_items_in_batch": mask.sum(),
    }
    if old:
        inputs["old_per_token_logps"] = old_logps
    if ref:
        inputs["ref_per_token_logps"] = ref_logps
    if tool:
        inputs["tool_mask"] = (torch.rand(rows, width, generator=g) > 0.3).long()
        inputs["num_items_in_batch"] = (mask * inputs["tool_mask"]).sum()
    if vllm is not None:
        inputs["sampling_per_token_logps"] = old_logps + 0.1 * torch.randn(rows, width, generator=g)
        by_row = vllm.startswith("sequence")
        weights = 0.5 + torch.rand((rows, 1) if by_row else (rows, width), generator=g)
        valid = mask.any(1, keepdim=True) if by_row else mask.bool()
        inputs["importance_sampling_ratio"] = torch.where(valid, weights, torch.ones(()))  # as TRL: no difference, weight 1
    entropies = torch.rand(rows, width, generator=g) * 2
    return logps, entropies.requires_grad_(), inputs
