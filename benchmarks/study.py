"""
Which loss learns the toy in how many optimizer steps, and where a KL ends: the tables of docs/choosing.md.

    python benchmarks/study.py [--seeds 1 2 3] [--steps 200] [--only losses|kl]

Losses: a rollout of 64 completions (8 prompts x 8) serves two optimizer steps of 32, so that ratios differ from 1 and ranges act. Counted
are the optimizer steps taken when the mean reward of the last five rollouts reaches 0.8. Everything else is the toy's own
(trl_lossplus/toy.py): the learning rate above all, for which no loss was tuned.

KL: one optimizer step a rollout, rewards not divided by a spread (so that a coefficient means the same in the reward and in the loss).
The KL at the end is no estimate from log-probs of the sampled tokens: at each token of 384 completions of the final policy it is the sum over
the whole vocabulary of pi (log pi - log pi_ref), in nats a token.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

if __name__ == "__main__":  # the repository's root, not this folder, is where imports start
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import torch
from torch import Tensor
from transformers import PrinterCallback
from transformers.utils.logging import disable_progress_bar

from trl_lossplus import GRPOPlusConfig, GRPOPlusTrainer
from trl_lossplus.toy import TOY_TRAINING, keyword_reward, save_toy, toy_dataset, toy_model, toy_tokenizer

GOAL, LAST = 0.8, 5
LOSSES: dict[str, dict[str, Any]] = {
    "ppo_clip": {"policy_loss": "ppo_clip", "epsilon": 0.2},
    "gspo": {"policy_loss": "gspo", "epsilon": 3e-4, "epsilon_high": 4e-4},
    "cispo": {"policy_loss": "cispo", "epsilon_high": 5.0},
    "dr_grpo": {"policy_loss": "ppo_clip", "loss_aggregation": "seq_mean_token_sum_norm", "scale_rewards": "none"},
}
TWO_STEPS = {"per_device_train_batch_size": 32, "steps_per_generation": 2}
COEF = 0.1
PLACES: dict[str, dict[str, Any]] = {
    "none": {},
    "k1 in the reward": {"kl_placement": "reward", "kl_reward_coef": COEF, "kl_estimator": "k1"},
    "k3 in the loss": {"beta": COEF, "kl_estimator": "k3", "use_bias_correction_kl": False},
    "k3+ in the loss": {"beta": COEF, "kl_estimator": "k3+"},
}


class Run(NamedTuple):
    """The mean reward of each rollout, the optimizer steps taken before it, and the trained model."""

    rewards: list[float]
    steps: list[int]
    model: torch.nn.Module


def train(folder: Path, steps: int, seed: int, fields: dict[str, Any]) -> Run:
    """One run on the toy; the model starts from the same weights for every seed."""
    rewards: list[float] = []
    taken: list[int] = []

    def reward(completions: list[str], keyword: list[str], trainer_state: Any, **columns: Any) -> list[float]:
        scores = keyword_reward(completions, keyword)
        rewards.append(statistics.fmean(scores))
        taken.append(trainer_state.global_step)
        return scores

    settings = {**TOY_TRAINING, "max_steps": steps, "disable_tqdm": True, "logging_strategy": "no", **fields, "seed": seed}
    trainer = GRPOPlusTrainer(
        model=save_toy(folder / "toy"),
        reward_funcs=reward,
        args=GRPOPlusConfig(output_dir=str(folder / "run"), **settings),
        train_dataset=toy_dataset(),
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return Run(rewards, taken, trainer.accelerator.unwrap_model(trainer.model))


def steps_to_goal(run: Run, goal: float = GOAL) -> int | None:
    """Optimizer steps taken when the mean of the last rollouts' rewards reaches the goal; None: it never does."""
    for i in range(LAST, len(run.rewards) + 1):
        if statistics.fmean(run.rewards[i - LAST : i]) >= goal:
            return run.steps[i - 1]
    return None


def vocabulary_kl(logits: Tensor, ref_logits: Tensor) -> Tensor:
    """KL(pi || pi_ref) of each position, summed over the vocabulary: (B, T, V) twice to (B, T) nats."""
    logp, ref = torch.log_softmax(logits.float(), -1), torch.log_softmax(ref_logits.float(), -1)
    return (logp.exp() * (logp - ref)).sum(-1)


@torch.no_grad()
def exact_kl(model: torch.nn.Module, seed: int, each: int = 8) -> float:
    """Mean over the tokens of `each` completions a prompt, sampled from the model, of the KL to the toy's first weights: nats a token."""
    tokenizer, reference = toy_tokenizer(), toy_model()
    texts = [prompt for prompt in toy_dataset()["prompt"] for _ in range(each)]
    prompts = tokenizer(texts, return_tensors="pt", padding=True, padding_side="left")
    width = prompts["input_ids"].shape[1]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        options = {"do_sample": True, "top_k": 0, "max_new_tokens": TOY_TRAINING["max_completion_length"]}
        ids = model.eval().generate(**prompts, **options, pad_token_id=tokenizer.pad_token_id)  # type: ignore[operator]
    done = ids[:, width:]
    ended = (done == tokenizer.eos_token_id).cumsum(1)
    valid = (ended == 0) | ((ended == 1) & (done == tokenizer.eos_token_id))
    mask = torch.cat([prompts["attention_mask"], valid.long()], 1)
    logits = [net(input_ids=ids, attention_mask=mask).logits[:, width - 1 : -1] for net in (model, reference)]
    return vocabulary_kl(*logits)[valid].mean().item()


def spread(values: Sequence[float], form: str) -> str:
    """Mean and range as text."""
    return f"{statistics.fmean(values):{form}} ({min(values):{form}} to {max(values):{form}})"


def row_of_losses(runs: list[Run]) -> list[str]:
    """Optimizer steps to the goal, and the mean reward of the last rollouts."""
    found = [steps_to_goal(run) for run in runs]
    reached = [n for n in found if n is not None]
    steps = spread(reached, ".0f") if reached else "never"
    never = f", {len(found) - len(reached)} of {len(found)} never" if reached and len(reached) < len(found) else ""
    return [steps + never, spread([statistics.fmean(run.rewards[-LAST:]) for run in runs], ".2f")]


def row_of_kl(runs: list[Run], seeds: Sequence[int]) -> list[str]:
    """The exact KL at the end, and the mean reward of the last rollouts."""
    values = [exact_kl(run.model, seed) for run, seed in zip(runs, seeds, strict=True)]
    return [spread(values, ".2f"), spread([statistics.fmean(run.rewards[-LAST:]) for run in runs], ".2f")]


def table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A title and a table in Markdown."""
    lines = [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)]
    return "\n".join([title, "", *lines])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--only", choices=("losses", "kl"))
    args = parser.parse_args()
    disable_progress_bar()
    over = f"mean (least to largest) of seeds {', '.join(map(str, args.seeds))}, {args.steps} optimizer steps"
    with tempfile.TemporaryDirectory() as path:
        folder = Path(path)
        if args.only != "kl":
            runs = {
                name: [train(folder, args.steps, seed, {**TWO_STEPS, **own}) for seed in args.seeds]
                for name, own in LOSSES.items()
            }
            rows = [[name, *row_of_losses(of)] for name, of in runs.items()]
            print(table(f"Losses: {over}", ["loss", f"optimizer steps to reward {GOAL}", "reward at the end"], rows), flush=True)
        if args.only != "losses":
            runs = {
                name: [train(folder, args.steps, seed, {"scale_rewards": "none", **own}) for seed in args.seeds]
                for name, own in PLACES.items()
            }
            rows = [[name, *row_of_kl(of, args.seeds)] for name, of in runs.items()]
            print(
                table(
                    f"\nKL with coefficient {COEF}: {over}",
                    ["KL", "exact KL at the end, nats a token", "reward at the end"],
                    rows,
                )
            )


if __name__ == "__main__":
    main()
