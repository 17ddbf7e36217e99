"""
Breaks the toy's training on purpose, one way at a time, and asks the doctor what is wrong. Then trains it well in several ways.

    python recipes/break_it.py                                  # everything: the doctor must name each fault first, and no other run
    python recipes/break_it.py --only kl_sign dropout --keep    # some; the output folders stay in runs/break_it
    python recipes/break_it.py --list

CPU, a few seconds a run. Exit status 0 when the doctor was right about every run, 1 otherwise.
"""

from __future__ import annotations

import argparse
import copy
import logging
import shutil
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # the repository's root, not this folder, is where imports start
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import torch
from peft import LoraConfig
from torch import Tensor
from transformers import PrinterCallback, ProgressCallback
from transformers.utils.logging import disable_progress_bar

from trl_lossplus import GRPOPlusConfig, GRPOPlusTrainer, PPOPlusConfig, PPOPlusTrainer, register_policy_loss
from trl_lossplus.diagnostics.doctor import diagnose, line
from trl_lossplus.diagnostics.guards import NonFiniteError
from trl_lossplus.diagnostics.rules import Finding
from trl_lossplus.diagnostics.runlog import read_run
from trl_lossplus.functional.policy import PolicyTerm
from trl_lossplus.loss import LossOutput
from trl_lossplus.toy import FILLERS, TOY_LORA, TOY_TRAINING, keyword_reward, save_toy, toy_dataset

STEPS = 60


# The faults.


class PromptInMask(GRPOPlusTrainer):
    """The mask begins one token too early: the prompt's last token counts as generated."""

    def micro_loss(self, model: Any, inputs: Any) -> Tensor:
        """Moves the prompt's last column into the completion, and into the loss's mask."""

        def moved(prompt: Tensor, completion: Tensor, first: Tensor) -> tuple[Tensor, Tensor]:
            return prompt[:, :-1], torch.cat([first, completion], 1)

        last = inputs["prompt_ids"][:, -1:]
        shifted = dict(inputs)
        shifted["prompt_ids"], shifted["completion_ids"] = moved(inputs["prompt_ids"], inputs["completion_ids"], last)
        one = inputs["prompt_mask"][:, -1:]
        shifted["prompt_mask"], shifted["completion_mask"] = moved(inputs["prompt_mask"], inputs["completion_mask"], one * 0)
        shifted["loss_mask"] = torch.cat([one.bool(), inputs["loss_mask"]], 1)
        return super().micro_loss(model, shifted)

    def policy_forward(self, model: Any, inputs: Any, **options: Any) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """The model still sees the whole prompt."""
        seen = inputs["completion_mask"].clone()
        seen[:, 0] = 1
        return super().policy_forward(model, {**inputs, "completion_mask": seen}, **options)


class StaleOldLogps(GRPOPlusTrainer):
    """Old log-probs come from a copy of the policy that is renewed every eighth rollout only."""

    frozen: Any = None
    rollouts = 0

    def make_rollout(self, out: Any, rewards: Tensor) -> Any:
        """Takes the old log-probs from the copy."""
        if self.rollouts % 8 == 0:
            self.frozen = copy.deepcopy(self.model).eval()
        self.rollouts += 1
        with torch.no_grad():
            out["old_per_token_logps"] = self.policy_forward(self.frozen, out)[0]
        return super().make_rollout(out, rewards)


class RatioOverflows(GRPOPlusTrainer):
    """From the tenth step on one row's old log-probs are those of other tokens, and nothing bounds the log ratio."""

    def make_rollout(self, out: Any, rewards: Tensor) -> Any:
        """Breaks the first row."""
        if self.state.global_step >= 10:
            out["old_per_token_logps"][0] = -200.0
        return super().make_rollout(out, rewards)


class FlatGroupDivides(GRPOPlusTrainer):
    """Advantages are divided by the group's spread, with nothing added to it."""

    def make_rollout(self, out: Any, rewards: Tensor) -> Any:
        """(reward - mean) / std of the group: 0 / 0 where all rewards are equal."""
        out = super().make_rollout(out, rewards)
        groups = rewards.sum(1).view(-1, self.num_generations)
        out["advantages"] = ((groups - groups.mean(1, keepdim=True)) / groups.std(1, keepdim=True)).view(-1)
        return out


class KLFlipped(GRPOPlusTrainer):
    """The KL is taken off the loss instead of added."""

    def combine(self, *args: Any) -> LossOutput:
        """Turns the sign of the KL term."""
        output = super().combine(*args)
        terms = {**output.terms, "kl": -output.terms["kl"]}
        return replace(output, loss=torch.stack(list(terms.values())).sum(), terms=terms)


class MinMaxSwapped(GRPOPlusTrainer):
    """max in place of min in the clipped objective, as in a hand-written loss: the settings do not show it."""

    def combine(self, batch: Any, spec: Any, window: Any) -> LossOutput:
        """The loss of clip_objective=max."""
        return super().combine(batch, replace(spec, clip_objective="max"), window)


@register_policy_loss(
    "mean_twice", requires={"old_logps", "advantages"}, formula="-r A / tokens", source="a common mistake", replace=True
)
def mean_twice(batch: Any, spec: Any) -> PolicyTerm:
    """Takes its own mean over the tokens; loss_aggregation then takes it again."""
    return PolicyTerm(per_token=-batch.ratio(spec.log_ratio_clamp) * batch.advantages / batch.mask.sum())


def polite(completions: list[str], **columns: Any) -> list[float]:
    """What a careless reward pays for: the share of small words, whatever the prompt asks for."""
    small = set(FILLERS.split())
    return [sum(word in small for word in text.split()) / 4 for text in completions]


# The runs.

REUSED = {"num_iterations": 2, "steps_per_generation": 2, "per_device_train_batch_size": 32}
KL = {"beta": 0.04, "kl_estimator": "k3"}


@dataclass(frozen=True)
class Run:
    """
    One training run.

    Attributes:
        what: in words. rule: which the doctor must name first; None: the run is healthy.
        settings: of the configuration. trainer, config: classes. rewards: functions. lora: of the LoRA configuration.
        taught: start from a model that has learned the task.
    """

    what: str
    rule: str | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    trainer: type[GRPOPlusTrainer] = GRPOPlusTrainer
    config: type[GRPOPlusConfig] = GRPOPlusConfig
    rewards: tuple[Callable[..., Any], ...] = (keyword_reward,)
    lora: dict[str, Any] | None = None
    taught: bool = False


SKIP = {"nonfinite_policy": "skip"}
HACK = {
    "kl_controller": "adaptive", "kl_target": 5.0, "kl_horizon": 300, "reward_weights": [1.0, 0.0], "learning_rate": 1e-3, "max_steps": 90,
    **KL,
}  # fmt: skip
PPO = {
    "num_generations": 1, "num_iterations": 4, "learning_rate": 5e-4, "critic_learning_rate": 2e-3, "vf_coef": 0.5,
    "per_device_train_batch_size": 48, "max_steps": 240,
}  # fmt: skip
RUNS = {
    "reward_hacking": Run(
        "a reward for small words, and a KL coefficient that adapts to a lax target", "reward_hacking", HACK,
        rewards=(polite, keyword_reward), taught=True,
    ),
    "nan_ratio": Run(
        "old log-probs of other tokens, log ratio unbounded", "nonfinite_ratio", {**REUSED, **SKIP, "log_ratio_clamp": 1e4}, RatioOverflows
    ),
    "nan_flat_group": Run("division by a flat group's spread", "nonfinite_advantages", SKIP, FlatGroupDivides),
    "double_normalization": Run(
        "a loss that takes its own mean, averaged again", "policy_vanishes", {**KL, "policy_loss": "mean_twice"}
    ),
    "prompt_in_mask": Run("a mask that begins one token early", "mask_outside", {}, PromptInMask),
    "dropout": Run("LoRA dropout 0.5, two passes a rollout", "ratio_first_pass", REUSED, lora={"lora_dropout": 0.5}),
    "stale_old_logps": Run("old log-probs from up to eight rollouts ago", "stale_old_logps", {}, StaleOldLogps),
    "homogeneous": Run("greedy sampling: all completions of a prompt are alike", "no_signal", {"top_k": 1}),
    "min_max_swapped": Run(
        "max in place of min in a hand-written clip", "clip_wrong_side", {**REUSED, "num_iterations": 4, "epsilon": 0.1}, MinMaxSwapped
    ),
    "min_max_setting": Run("clip_objective: max", "clip_wrong_side", {**REUSED, "clip_objective": "max"}),
    "kl_flipped": Run("the KL taken off the loss", "kl_sign", KL, KLFlipped),
    "healthy_on_policy": Run("TRL's defaults"),
    "healthy_kl": Run("two passes, KL in the loss", None, {**REUSED, **KL, "probes": "full", "max_steps": 150}),
    "healthy_gspo": Run(
        "GSPO, two steps a rollout", None,
        {"policy_loss": "gspo", "epsilon": 0.003, "epsilon_high": 0.004, "steps_per_generation": 2, "per_device_train_batch_size": 32,
         "max_steps": 120},
    ),
    "healthy_dr_grpo": Run(
        "Dr. GRPO with an adaptive KL in the reward", None,
        {"loss_aggregation": "seq_mean_token_sum_norm", "scale_rewards": "none", "kl_placement": "reward", "kl_reward_coef": 0.01,
         "kl_controller": "adaptive", "kl_target": 0.5, "max_steps": 120},
    ),
    "healthy_lora": Run("LoRA, CISPO, entropy bonus", None, {"policy_loss": "cispo", "entropy_coef": 0.001, **REUSED, "max_steps": 120}, lora={}),
    "healthy_ppo": Run("PPO with a critic of its own", None, PPO, PPOPlusTrainer, PPOPlusConfig),
}  # fmt: skip


def taught_model(folder: Path) -> str:
    """A toy that has learned the task, made on first use."""
    path = folder / "taught"
    if not (path / "model.safetensors").exists():
        trainer = build(Run("the task itself", settings={"max_steps": 50}), folder / "teaching", str(save_toy(folder / "toy")))
        trainer.train()
        trainer.save_model(str(path))
    return str(path)


def build(run: Run, output: Path, model: str) -> GRPOPlusTrainer:
    """The run's trainer."""
    settings = {**TOY_TRAINING, "max_steps": STEPS, "disable_tqdm": True, **run.settings, "output_dir": str(output)}
    trainer = run.trainer(
        model=model,
        reward_funcs=list(run.rewards),
        args=run.config(**settings),
        train_dataset=toy_dataset(),
        peft_config=None if run.lora is None else LoraConfig(**{**TOY_LORA, **run.lora}),
    )
    for printer in (PrinterCallback, ProgressCallback):
        trainer.remove_callback(printer)
    return trainer


def execute(run: Run, output: Path) -> Path:
    """Trains, whatever comes of it, and writes trainer_state.json; returns the output folder."""
    shutil.rmtree(output, ignore_errors=True)
    model = taught_model(output.parent) if run.taught else save_toy(output.parent / "toy")
    trainer = build(run, output, model)
    try:
        trainer.train()
    except NonFiniteError as error:
        print(f"    stopped by the guard: {str(error)[:160]}...")
    trainer.state.save_to_json(str(output / "trainer_state.json"))
    return output


def verdict(run: Run, findings: Sequence[Finding]) -> bool:
    """Whether the doctor named the fault first, or, of a healthy run, nothing."""
    if run.rule is None:
        return all(finding.severity == "info" for finding in findings)
    return bool(findings) and findings[0].rule.id == run.rule


def main(argv: Sequence[str] | None = None) -> int:
    """Runs what was asked for. Returns 0 when the doctor was right about all of it, else 1."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument(
        "--only", nargs="+", choices=sorted(RUNS), default=list(RUNS), metavar="NAME", help="these runs (see --list)"
    )
    parser.add_argument("--output_dir", type=Path, default=Path("runs/break_it"))
    parser.add_argument("--seed", type=int, default=0, help="of sampling and data order")
    parser.add_argument("--keep", action="store_true", help="keep the output folders")
    parser.add_argument("--list", action="store_true", help="list the runs")
    args = parser.parse_args(argv)
    if args.list:
        print("\n".join(f"{name:22} {run.what}; first finding: {run.rule or 'none'}" for name, run in RUNS.items()))
        return 0
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore", FutureWarning)  # of libraries about each other
    disable_progress_bar()
    wrong = []
    for name in args.only:
        run, started = RUNS[name], time.time()
        print(f"{name}: {run.what}", flush=True)
        folder = execute(replace(run, settings={**run.settings, "seed": args.seed}), args.output_dir / name)
        findings = diagnose(read_run(folder))
        right = verdict(run, findings)
        wrong += [] if right else [name]
        expected = run.rule or "nothing but notes"
        print(f"    {'right' if right else 'WRONG'} (expected {expected}), {time.time() - started:.0f} s")
        for finding in findings if not right else findings[:1]:
            print(f"    {line(finding)}")
        if not args.keep:
            shutil.rmtree(folder)
    print(f"{len(args.only) - len(wrong)} of {len(args.only)} right" + (f"; wrong: {', '.join(wrong)}" if wrong else ""))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
