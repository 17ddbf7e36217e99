"""
One optimizer step on one flat group and one that is not; what each token's gradient is, row by row.

Imported by test_zero_spread.py, and run by it on two processes: python zero_spread_run.py TOY FOLDER.
"""

import json
import os
import sys
from pathlib import Path

import torch
from accelerate.state import AcceleratorState, GradientState
from datasets import Dataset

sys.path.insert(0, str(Path(__file__).parent))
from toyrun import trainer

MODES = ("keep", "no_kl", "drop", "resample")
AGGREGATIONS = ("token_mean", "seq_mean_token_mean", "prompt_mean")
# Prompt: the lengths of its two completions, and their rewards.
TASK = {"say apple": ((2, 2), (1.0, 0.0)), "say river": ((3, 1), (1.0, 1.0)), "say stone": ((1, 1), (1.0, 0.0))}
FIELDS = {
    "num_generations": 2, "max_steps": 1, "shuffle_dataset": False, "scale_rewards": "none", "beta": 0.1, "kl_estimator": "k1",
    "use_bias_correction_kl": False,
}  # fmt: skip


def dataset():
    """The rollout takes the first two; all others are the third."""
    return Dataset.from_list([{"prompt": prompt} for prompt in ("say apple", "say river", *["say stone"] * 30)])


def rollout(prompts, run):
    """Completions of the task's lengths; a row's number in its group is its first token, less 4."""
    number = [(run.accelerator.process_index * len(prompts) + i) % 2 for i in range(len(prompts))]
    return {
        "prompt_ids": [run.processing_class(prompt)["input_ids"] for prompt in prompts],
        "completion_ids": [[4 + n] * TASK[prompt][0][n] for prompt, n in zip(prompts, number, strict=True)],
        "logprobs": None,
    }


def reward(prompts, completion_ids, **kwargs):
    return [TASK[prompt][1][ids[0] - 4] for prompt, ids in zip(prompts, completion_ids, strict=True)]


def measure(toy, folder, mode, aggregation):
    """{"tokens", "rows": of the window; "gradient": {row: the loss's gradient by each of its log-probs}} of this process's rows."""
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    run = trainer(
        toy, folder, reward=reward, rollout=rollout, dataset=dataset(), zero_std_groups=mode, loss_aggregation=aggregation,
        per_device_train_batch_size=4 // processes, ddp_find_unused_parameters=False, **FIELDS,
    )  # fmt: skip
    found, rows, combine, micro_loss = {}, [], run.combine, run.micro_loss

    def see_rows(model, inputs):
        rows[:] = inputs["row"].tolist()
        return micro_loss(model, inputs)

    def see_gradient(batch, spec, window):
        output = combine(batch, spec, window)
        (gradient,) = torch.autograd.grad(output.loss, batch.logps, retain_graph=True)
        found.update(tokens=float(window.num_tokens), rows=float(window.num_rows))
        found["gradient"] = dict(zip(rows, gradient.tolist(), strict=True))
        return output

    run.micro_loss, run.combine = see_rows, see_gradient
    run.train()
    return found


def main():
    toy, folder = sys.argv[1], Path(sys.argv[2])
    results = {}
    for mode in MODES:
        for aggregation in AGGREGATIONS:
            AcceleratorState._reset_state()
            GradientState._reset_state()
            results[f"{mode} {aggregation}"] = measure(toy, folder / "out", mode, aggregation)
    (folder / f"rank{os.environ['RANK']}.json").write_text(json.dumps(results))
    torch.distributed.barrier()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads sometimes abort an orderly exit


if __name__ == "__main__":
    main()
